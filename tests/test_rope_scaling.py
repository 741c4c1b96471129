"""Every rescale against its formula in float64 and against published values."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from pe_study import rope_scaling
from pe_study.errors import RescaleError
from pe_study.rope_scaling import frequencies, pair_counts, parse

KINDS = tuple(kind for kind in rope_scaling.KINDS if kind not in ("none", "longrope", "logn"))


def build(spec: str, *, dim: int = 64, base: float = 1e4, original: int = 2048, length: int = 8192):
    return frequencies(spec, rotary_dim=dim, base=base, original_length=original, length=length)


def theta(dim: int = 64, base: float = 1e4) -> torch.Tensor:
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=0)


def test_none_is_the_formula() -> None:
    """case 44: the whole table, not only its first entry."""
    found, factor = build("none")
    close(found, theta())
    assert found[0] == 1.0
    assert factor == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_factor_of_one_changes_nothing_bit_for_bit(kind: str) -> None:
    plain, _ = build("none")
    for spec, length in ((f"{kind}:1", 2048), (f"{kind}:auto", 2048), (f"{kind}:auto", 512)):
        scaled, factor = build(spec, length=length)
        assert torch.equal(scaled, plain), spec
        assert factor == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_auto_is_declared_over_original_length(kind: str) -> None:
    auto, fixed = build(f"{kind}:auto", length=8192), build(f"{kind}:4", length=8192)
    assert torch.equal(auto[0], fixed[0])
    assert auto[1] == fixed[1]
    assert rope_scaling.depends_on_length(f"{kind}:auto")
    assert rope_scaling.depends_on_length(f"{kind}:4") == (kind == "dynamic")


def test_linear_divides_every_frequency() -> None:
    """case 01, of our kind: base / 4."""
    close(build("linear:4")[0], theta() / 4)


def test_ntk_keeps_the_highest_and_divides_the_lowest() -> None:
    found, _ = build("ntk:4")
    close(found, theta(base=1e4 * 4 ** (64 / 62)))
    assert found[0] == 1.0
    assert found[-1].item() == pytest.approx(theta()[-1].item() / 4, rel=1e-5)


@pytest.mark.parametrize(("length", "base"), [(1, 1e4), (2048, 1e4), (4096, 31082.2), (8192, 74534.8)])
def test_dynamic_has_a_base_of_the_declared_length(length: int, base: float) -> None:
    """case 19: b' = b (s max(L, L0) / L0 - s + 1)^(d / (d - 2))."""
    found, factor = build("dynamic:2", length=length)
    stretch = 2 * max(length, 2048) / 2048 - 1
    exact = 1e4 * stretch ** (64 / 62)
    assert exact == pytest.approx(base, rel=1e-5)
    close(found, theta(base=exact))
    assert factor == 1.0


def test_the_order_of_lengths_never_changes_a_number() -> None:
    """case 17: 64, 128, 64 gives the first again."""
    for kind in KINDS:
        first, _ = build(f"{kind}:auto", original=64, length=64)
        build(f"{kind}:auto", original=64, length=128)
        again, _ = build(f"{kind}:auto", original=64, length=64)
        assert torch.equal(first, again)


def yarn(dim: int, base: float, original: int, s: float, fast: float = 32, slow: float = 1) -> torch.Tensor:
    """Peng et al. as its reference code has it: a ramp over dimensions between two whole ones."""

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return theta(dim, base) / s * ramp + theta(dim, base) * (1 - ramp)


@pytest.mark.parametrize("s", [1.3, 2.0, 4.0, 16.0])
def test_yarn(s: float) -> None:
    """case 24: the factor that was asked for is used, also where it is no ratio of whole lengths."""
    found, factor = build(f"yarn:{s}")
    close(found, yarn(64, 1e4, 2048, s))
    assert factor == pytest.approx(1 + 0.1 * math.log(s))


def test_yarn_of_a_checkpoint_that_says_more_than_it_asks() -> None:
    """case 24: maximum 8192, factor 2: 1.069315 and a last frequency of 6.66761e-5, not those of 4."""
    found, factor = build("yarn:2", length=8192)
    assert factor == pytest.approx(1.069315, abs=1e-6)
    assert found[-1].item() == pytest.approx(6.66761e-5, rel=1e-5)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("yarn:4", 1.138629),
        ("yarn:16:mscale=1:mscale_all_dim=1", 1.0),
        ("yarn:64:attention_factor=1.0", 1.0),
        ("yarn:4:mscale=0.707", 1.138629),
        ("yarn:4:mscale=1:mscale_all_dim=0", 1.138629),
        ("yarn:4:mscale=2:mscale_all_dim=1", (1 + 0.2 * math.log(4)) / (1 + 0.1 * math.log(4))),
    ],
)
def test_yarn_attention_factor(spec: str, expected: float) -> None:
    """case 23: an explicit value wins; else g(mscale) / g(mscale_all_dim) where both are given; else g(1)."""
    assert build(spec)[1] == pytest.approx(expected, abs=1e-6)


def test_yarn_options_change_the_ramp() -> None:
    """case 45: each option does something."""
    plain = build("yarn:4")[0]
    for option in ("beta_fast=8", "beta_slow=2", "truncate=false"):
        assert not torch.equal(build(f"yarn:4:{option}")[0], plain), option
    close(build("yarn:4:beta_fast=8:beta_slow=2")[0], yarn(64, 1e4, 2048, 4, fast=8, slow=2))


def test_ntk_by_parts() -> None:
    """YaRN, equations 18 and 19: a ramp in the turns that a pair makes over the original length."""
    found, factor = build("ntk-by-parts:4")
    turns = 2048 * theta() / (2 * math.pi)
    gamma = ((turns - 1) / 31).clamp(0, 1)
    close(found, (1 - gamma) * theta() / 4 + gamma * theta())
    assert factor == 1.0
    counts = pair_counts("ntk-by-parts:4", rotary_dim=64, base=1e4, original_length=2048, length=8192)
    assert counts == {
        "kept": int((turns >= 32).sum()),
        "blended": int(((turns > 1) & (turns < 32)).sum()),
        "interpolated": int((turns <= 1).sum()),
    }
    with pytest.raises(RescaleError, match="beta_fast > beta_slow"):
        build("ntk-by-parts:4:beta_fast=1:beta_slow=2")


def test_llama3() -> None:
    """case 41: pairs 0-14 kept, three between, the rest / 32."""
    found, _ = build("llama3:32", base=5e5, original=8192, length=131072)
    ratio = found.double() / theta(base=5e5)
    torch.testing.assert_close(ratio[:15], torch.ones(15, dtype=torch.float64), rtol=1e-6, atol=0)
    assert ratio[15:18].tolist() == pytest.approx([0.60557, 0.30374, 0.10345], abs=1e-5)
    assert ratio[18:].tolist() == pytest.approx([0.03125] * 14, rel=1e-5)
    counts = pair_counts("llama3:32", rotary_dim=64, base=5e5, original_length=8192, length=131072)
    assert counts == {"kept": 15, "blended": 3, "interpolated": 14}


def test_llama3_options() -> None:
    plain = build("llama3:8", original=8192)[0]
    assert not torch.equal(build("llama3:8:low_freq_factor=2", original=8192)[0], plain)
    assert not torch.equal(build("llama3:8:high_freq_factor=8", original=8192)[0], plain)


def longrope(folder: Path, **content: object) -> str:
    lists = {"short_factor": [1.0, 1.1], "long_factor": [1.0, 4.0]}
    path = folder / f"factors{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps({**lists, **content}), encoding="utf-8")
    return f"longrope:{path}"


def test_longrope_chooses_by_the_declared_length(tmp_path: Path) -> None:
    """case 43: short while length <= L0, long past it; the attention factor of s = 32, L0 = 4096."""
    spec = longrope(tmp_path, factor=32)
    plain = theta(4)
    for length, factors in ((1, [1, 1.1]), (4096, [1, 1.1]), (4097, [1, 4]), (131072, [1, 4])):
        found, factor = build(spec, dim=4, original=4096, length=length)
        close(found, plain / torch.tensor(factors, dtype=torch.float64))
        assert factor == pytest.approx(1.190238, abs=1e-6)
    assert build(spec + ":attention_factor=1.5", dim=4, original=4096)[1] == 1.5


NUMBERS = ("factor", "attention_factor", "original_max_position_embeddings")


@pytest.mark.parametrize("name", NUMBERS)
def test_null_in_a_longrope_file_is_as_if_it_were_not_there(name: str, tmp_path: Path) -> None:
    """As a Hugging Face config may hold it."""
    plain = build(longrope(tmp_path, short_factor=[1.0, 2.0], long_factor=[2.0, 3.0]), dim=4)
    spec = longrope(tmp_path, short_factor=[1.0, 2.0], long_factor=[2.0, 3.0], **{name: None})
    found = build(spec, dim=4)
    assert torch.equal(found[0], plain[0]) and found[1] == plain[1] > 1


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["four", "4k", 0, -3, True, [4], {}, float("nan"), float("inf")])
def test_other_numbers_of_a_longrope_file_are_named(name: str, value: object, tmp_path: Path) -> None:
    spec = longrope(tmp_path, short_factor=[1.0, 2.0], long_factor=[2.0, 3.0], **{name: value})
    with pytest.raises(RescaleError, match=rf"factors\d+\.json: {name} must be .* found ") as refusal:
        build(spec, dim=4)
    assert refusal.value.exit_code == 2 and "\n" not in str(refusal.value)


@pytest.mark.parametrize(("name", "value"), [("factor", 0.5), (NUMBERS[2], 1), (NUMBERS[2], 64.5)])
def test_numbers_that_no_formula_takes_are_refused(name: str, value: float, tmp_path: Path) -> None:
    spec = longrope(tmp_path, short_factor=[1.0, 2.0], long_factor=[2.0, 3.0], **{name: value})
    with pytest.raises(RescaleError, match=f"{name} must be a"):
        build(spec, dim=4)


def test_longrope_files_are_checked(tmp_path: Path) -> None:
    with pytest.raises(RescaleError, match="2 factors, this model rotates 32 pairs"):
        build(longrope(tmp_path))
    for content in ({"long_factor": [1, "x"]}, {"short_factor": 3}, {"short_factor": [0.0, 1.0]}):
        with pytest.raises(RescaleError, match=r"factors\d\.json: (long|short)_factor must be"):
            build(longrope(tmp_path, **content), dim=4)
    with pytest.raises(RescaleError, match="cannot read"):
        build(f"longrope:{tmp_path / 'nothing.json'}", dim=4)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("yrn:4", 'did you mean "yarn"'),
        ("yarn", "yarn:S"),
        ("yarn:four", "finite number"),
        ("yarn:nan", "finite number"),
        ("yarn:inf", "finite number"),
        ("yarn:0.5", ">= 1"),
        ("yarn:-2", ">= 1"),
        ("yarn:4:8", "yarn:S"),
        ("yarn:beta_fast=3:4", "factor comes first"),
        ("yarn:4:beta=3", 'did you mean "beta_'),
        ("yarn:4:beta_fast=fast", "finite number"),
        ("yarn:4:beta_fast=-1", "positive"),
        ("yarn:4:truncate=maybe", "true or false"),
        ("yarn:4:beta_fast=3:beta_fast=4", "twice"),
        ("linear:4:beta_fast=3", "takes no options"),
        ("yarn:4:beta_fast=0.5", "beta_fast > beta_slow, found 0.5 and 1"),
        ("ntk-by-parts:4:beta_slow=32", "beta_fast > beta_slow, found 32 and 32"),
        ("llama3:4:low_freq_factor=4", "high_freq_factor > low_freq_factor, found 4 and 4"),
        ("none:2", "no factor"),
        ("longrope", "one JSON file"),
        ("", "unknown kind"),
    ],
)
def test_what_cannot_be_parsed_is_named(spec: str, message: str) -> None:
    """case 45: before any model is loaded."""
    with pytest.raises(RescaleError, match=message) as caught:
        parse(spec)
    assert str(caught.value).startswith(f"rescale {spec!r}")
    assert "\n" not in str(caught.value)


def test_specs_spell_themselves() -> None:
    for spec in ("none", "linear:4", "yarn:1.2345678901", "ntk:auto", "dynamic:2", "longrope:a/b.json"):
        assert parse(parse(spec).label) == parse(spec)
    options = parse("yarn:4:beta_fast=16:truncate=false")
    assert dict(options.options) == {"beta_fast": 16.0, "truncate": False}
    assert parse(options.label) == options
    assert parse("dynamic").factor == 1.0


@pytest.mark.parametrize("spec", ["ntk:2", "dynamic:2"])
def test_two_dimensions_are_too_few_for_another_base(spec: str) -> None:
    with pytest.raises(RescaleError, match="rotary width above 2"):
        build(spec, dim=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [4, 8, 128])
def test_frequencies_are_positive_and_never_grow(kind: str, dim: int) -> None:
    for factor in ("1.5", "4", "32", "auto"):
        found, attention_factor = build(f"{kind}:{factor}", dim=dim, length=32768)
        assert bool((found > 0).all())
        assert bool((found <= theta(dim).float() * (1 + 1e-6)).all())
        assert bool((found.diff() < 0).all())
        assert attention_factor >= 1.0


def test_torch_is_not_needed_to_parse() -> None:
    """Plans and reports read specs without it."""
    import subprocess
    import sys

    code = "import sys, pe_study.rope_scaling as r; r.parse('yarn:4'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
