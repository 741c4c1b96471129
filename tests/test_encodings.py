"""The registry of encodings, their options, and what each one's file promises."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pe_study import cli, encodings
from pe_study.encodings import alibi, shaw, sinusoidal, t5
from pe_study.encodings.base import At, Encoding
from pe_study.encodings.learned import Learned
from pe_study.encodings.rope import RoPE
from pe_study.errors import RecipeError, RescaleError

NAMES = ("alibi", "learned", "nope", "rope", "shaw", "sinusoidal", "t5")


def build(name: str, **changes: object) -> Encoding:
    sizes = {"d_model": 32, "num_heads": 4, "head_dim": 8, "max_positions": 64, "train_length": 16}
    return encodings.build(name, **{**sizes, **changes})  # type: ignore[arg-type]


def at(positions: torch.Tensor, length: int) -> At:
    return At(0, positions, positions, length)


def test_every_file_is_an_encoding() -> None:
    assert encodings.available() == NAMES
    for name in NAMES:
        assert issubclass(encodings.find(name), Encoding)


@pytest.mark.parametrize("name", NAMES)
def test_an_encoding_is_the_identity_where_it_says_nothing(name: str) -> None:
    """Each encoding acts through one hook; the others leave what they get alone."""
    encoding, position = build(name), at(torch.arange(8)[None], 16)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_()
        x, q, k = torch.randn(1, 8, 32), torch.randn(1, 4, 8, 8), torch.randn(1, 2, 8, 8)
        embeds = not torch.equal(encoding.embed(x, position), x)
        turns = not torch.equal(encoding.rotate(q, k, position)[0], q)
    biases = encoding.has_distance_bias or encoding.has_query_bias
    assert embeds + turns + biases == (name != "nope")


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("rope", {"bas": 5.0}, r'train\.rope\.bas: rope has no such option; did you mean "base"'),
        ("t5", {"num_buckets": "many"}, r"train\.rope\.num_buckets"),
        ("t5", {"max_distance": "long"}, r"train\.rope\.max_distance"),
        ("learned", {"beyond": "wrap"}, r"train\.rope\.beyond"),
        ("nope", {"base": 1.0}, "nope has no such option"),
        ("rope2", {}, 'did you mean "rope"'),
    ],
)
def test_options_are_checked(name: str, given: dict[str, object], message: str) -> None:
    """case 45: an option that no encoding reads is refused before a model is built."""
    with pytest.raises(RecipeError, match=message):
        encodings.validate_options(name, given, where="train.rope")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("rope", {"base": 500000.0}),
        ("rope", {"fraction": 0.5}),
        ("t5", {"num_buckets": 8}),
        ("t5", {"max_distance": 12, "num_buckets": 8}),
        ("shaw", {"clip": 2}),
        ("shaw", {"values": True}),
        ("learned", {"beyond": "clamp"}),
    ],
)
def test_every_option_changes_the_encoding(name: str, given: dict[str, object]) -> None:
    """case 45: no option is parsed and dropped."""
    ours, default = build(name, **given), build(name)
    for key, value in given.items():
        assert getattr(ours, key) is not None
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            assert getattr(ours, key) == value
            assert getattr(default, key) != value


def test_a_rescale_needs_rotary_positions() -> None:
    with pytest.raises(RescaleError, match="needs rotary positions"):
        build("alibi", rescale="yarn:4")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("rope", {"head_dim": 7}),
        ("rope", {"fraction": 1.5}),
        ("rope", {"base": 0.5}),
        ("t5", {"num_buckets": 1}),
        ("t5", {"num_buckets": 32, "max_distance": 16}),
        ("shaw", {"clip": 0}),
        ("learned", {"max_positions": 8}),
        ("sinusoidal", {"d_model": 33}),
    ],
)
def test_impossible_sizes_are_refused_with_the_numbers(name: str, changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"found .*\d"):
        build(name, **changes)


def test_alibi_slopes_of_powers_of_two() -> None:
    """case 27: n = 8 starts at 1/2; case 61: heads 4-7 of 8 have slopes 2^-5 .. 2^-8, whoever holds them."""
    assert alibi.slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi.slopes(8)[4:].tolist() == [2.0**-5, 2.0**-6, 2.0**-7, 2.0**-8]
    assert alibi.slopes(1).tolist() == [2.0**-8]


def test_alibi_slopes_of_other_head_counts_are_in_the_papers_order() -> None:
    """case 27: unsorted; the power of two below first, then every second slope of the one above."""
    assert alibi.slopes(6).tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    last = [0.707107, 0.353553, 0.176777, 0.088388]
    assert alibi.slopes(12)[-4:].tolist() == pytest.approx(last, abs=1e-6)


def test_alibi_looks_the_same_in_both_directions() -> None:
    """case 52: without a causal mask the bias is -slope * |i - j|."""
    distance = torch.arange(4)[:, None] - torch.arange(4)[None, :]
    bias = build("alibi").distance_bias(distance)
    assert bias is not None
    assert torch.equal(bias, bias.mT)
    assert bool((bias <= 0).all())


@pytest.mark.parametrize(
    ("distance", "expected"),
    [(15, 15), (16, 16), (18, 16), (19, 17), (46, 24), (77, 28), (99, 30), (113, 31), (10**6, 31)],
)
def test_t5_buckets(distance: int, expected: int) -> None:
    """case 29: without the upper clamp the index leaves the table when extrapolating."""
    assert t5.bucket(torch.tensor(distance), 32, 128).item() == expected


def test_t5_needs_two_buckets_a_side() -> None:
    for options in ({"num_buckets": 1}, {"num_buckets": 3, "bidirectional": True}):
        with pytest.raises(ValueError, match="expected at least"):
            t5.bucket(torch.arange(3), max_distance=8, **options)


def test_t5_buckets_of_the_future() -> None:
    """Causal: all of it in bucket 0. Bidirectional: the upper half of the table, mirrored."""
    distance = torch.arange(-200, 201)
    assert bool((t5.bucket(distance)[distance <= 0] == 0).all())
    both = t5.bucket(distance, bidirectional=True)
    assert torch.equal(both[distance > 0], both[distance < 0].flip(0) - 16)
    assert int(both.max()) == 31


def test_t5_max_distance_follows_the_training_length() -> None:
    """auto = min(128, L / 2), but never within the exact half."""
    chosen = [build("t5", train_length=n, max_positions=n).max_distance for n in (16, 64, 128, 512)]
    assert chosen == [17, 32, 64, 128]


def test_shaw_clip_follows_the_training_length() -> None:
    """auto = min(16, L / 4)."""
    assert [build("shaw", train_length=n, max_positions=n).clip for n in (2, 16, 64, 512)] == [1, 4, 16, 16]
    assert shaw.clipped_index(torch.tensor([-9, 0, 9]), 3).tolist() == [6, 3, 0]


def test_sinusoidal_pairs_share_a_frequency() -> None:
    """case 50: PE(p) · PE(p + k) does not depend on p; a table concatenated is a permutation of this one."""
    expected = torch.tensor([0.841471, 0.540302, 0.0099998, 0.99995])
    torch.testing.assert_close(sinusoidal.table(2, 4)[1], expected, atol=1e-6, rtol=0)
    table = sinusoidal.table(300, 32).double()
    for k in (1, 7, 100):
        products = (table[:-k] * table[k:]).sum(-1)
        torch.testing.assert_close(products, products[:1].expand_as(products), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["sinusoidal", "learned"])
def test_absolute_encodings_start_at_the_scale_of_the_embedding(name: str) -> None:
    """RMS of what is added at step 0 = RMS of the token embedding = initializer_range."""
    encoding = build(name, d_model=256, max_positions=512, initializer_range=0.03)
    if isinstance(encoding, Learned):
        torch.nn.init.normal_(encoding.weight, std=0.03)
    added = encoding.embed(torch.zeros(1, 512, 256), at(torch.arange(512)[None], 512))
    assert added.square().mean().sqrt().item() == pytest.approx(0.03, rel=0.02)


def test_rope_half_split_is_consistent() -> None:
    """case 49: both positions moved by 1000 change scores by < 1e-3; a rotation keeps norms."""
    encoding = build("rope")
    q, k = torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    here, there = at(torch.arange(8)[None], 16), at(torch.arange(1000, 1008)[None], 16)
    q0, k0 = encoding.rotate(q, k, here)
    q1, k1 = encoding.rotate(q, k, there)
    assert (q0 @ k0.mT - q1 @ k1.mT).abs().max() < 1e-3
    torch.testing.assert_close(q0.norm(dim=-1), q.norm(dim=-1))
    assert (q0 - q1).abs().max() > 0.1


def test_rope_leaves_the_rest_of_a_head_alone() -> None:
    encoding = build("rope", fraction=0.5)
    q = torch.randn(1, 4, 8, 8)
    turned, _ = encoding.rotate(q, q, at(torch.arange(8)[None], 16))
    assert torch.equal(turned[..., 4:], q[..., 4:])
    assert not torch.equal(turned[..., :4], q[..., :4])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rope_angles_survive_a_cast(dtype: torch.dtype) -> None:
    """case 21: after any cast the angles are within .006 of float64 up to position 131072."""
    encoding = build("rope", head_dim=32, d_model=128)
    assert isinstance(encoding, RoPE)
    encoding = encoding.to(dtype)
    assert encoding.inv_freq.dtype == torch.float32
    positions = torch.tensor([[1, 100, 4097, 65535, 131071]])
    x = torch.zeros(1, 1, 5, 32)
    x[..., :16] = 1.0
    turned, _ = encoding.rotate(x, x, at(positions, 131072))
    theta = 10000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    angle = positions[0, :, None].double() * theta
    assert (turned[0, 0, :, :16].double() - angle.cos()).abs().max() < 0.006
    assert (turned[0, 0, :, 16:].double() - angle.sin()).abs().max() < 0.006


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sinusoidal_angles_survive_a_cast(dtype: torch.dtype) -> None:
    """case 21: the angle is float32 under autocast and in a cast model; only the sum is rounded."""
    encoding = build("sinusoidal").to(dtype)
    position = at(torch.tensor([[131071]]), 131072)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        added = encoding.embed(torch.zeros(1, 1, 32, dtype=dtype), position)
    theta = 10000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    exact = torch.stack(((131071 * theta).sin(), (131071 * theta).cos()), -1).flatten() * 0.02 * math.sqrt(2)
    assert (added[0, 0].double() - exact).abs().max() < torch.finfo(dtype).eps * 0.02 * 2 + 2e-4


def test_learned_beyond_the_trained_rows() -> None:
    """Each choice, at the declared length of twice the training length."""

    def rows(beyond: str, positions: list[int]) -> torch.Tensor:
        encoding = build("learned", beyond=beyond, length=32)
        with torch.no_grad():
            encoding.weight.copy_(torch.arange(64.0)[:, None].expand(64, 32))
            return encoding.embed(torch.zeros(1, len(positions), 32), at(torch.tensor([positions]), 32))[
                0, :, 0
            ]

    places = [0, 1, 15, 16, 31]
    assert rows("untrained", places).tolist() == [0, 1, 15, 16, 31]
    assert rows("clamp", places).tolist() == [0, 1, 15, 15, 15]
    assert rows("interpolate", places).tolist() == [0, 0.5, 7.5, 8, 15]
    assert build("learned", beyond="error").max_length == 16
    assert build("learned").max_length == 64


def test_untrained_rows_are_counted() -> None:
    """Rows of a table that a length uses and training never reached."""
    assert [build("learned").untrained_rows(n) for n in (16, 20, 64, 100)] == [0, 4, 48, 48]
    assert build("learned", beyond="clamp").untrained_rows(64) == 0
    assert [build("t5", max_distance=128).untrained_rows(n) for n in (16, 17, 64, 1000)] == [0, 1, 11, 16]
    assert build("shaw", clip=20).untrained_rows(64) == 5
    assert build("shaw", clip=20, values=True).untrained_rows(64) == 10
    assert build("shaw", clip=4).untrained_rows(64) == 0
    assert build("rope").untrained_rows(10**6) == 0


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, "auto"), (32, 20), (8, "auto"), (32, 128)])
@pytest.mark.parametrize("length", [16, 17, 18, 34, 64])
def test_untrained_t5_rows_are_those_that_a_distance_reaches(
    num_buckets: int, max_distance: int | str, length: int
) -> None:
    """Buckets that start at one edge leave all but one of them empty: nothing ever reads those."""
    encoding = build("t5", num_buckets=num_buckets, max_distance=max_distance)
    reached = t5.bucket(torch.arange(length), num_buckets, encoding.max_distance).unique()
    trained = t5.bucket(torch.arange(16), num_buckets, encoding.max_distance).unique()
    assert encoding.untrained_rows(length) == len(set(reached.tolist()) - set(trained.tolist()))


def test_t5_scalars_learn_faster_where_the_learning_rate_is_small() -> None:
    """clamp(15 / sum of lr, 1, 30)."""
    assert [build("t5").auto_lr_mult(total) for total in (0.1, 1.0, 100.0)] == [30.0, 15.0, 1.0]
    assert build("rope").auto_lr_mult(0.1) == 1.0


HEAD = "from pe_study.encodings.base import Dimensions, Encoding\n"
CLASS = "class {0}({1}):\n    pass\n"
INIT = "    def __init__(self, dims: Dimensions, *, {0}) -> None:\n        super().__init__(dims)\n"
OPTION = HEAD + "class Mine(Encoding):\n" + INIT
TEXT_TYPES = "from __future__ import annotations\nimport torch\n"
MISTAKES = {
    "syntax": (
        HEAD + "x = (1,\n",
        r":2: SyntaxError: '\(' was never closed; mend the file",
    ),
    "characters": (b"x = '\xff'\n", r"SyntaxError: .*utf-8.*; mend the file"),
    "module": (
        "import no_such_thing\n",
        r":1: ModuleNotFoundError: .*'no_such_thing'; install it or do without",
    ),
    "our module": ("import pe_study.encodings.bas\n", r":1: ModuleNotFoundError: .*\.bas'; mend the file"),
    "name": (HEAD + "\nclass Mine(Other):\n    pass\n", r":3: NameError: name 'Other' is not defined; mend"),
    "below": ("import math\ndef f(x):\n    math.sqrt(x)\n\nf(-1)\n", r":3: ValueError: .*; mend the file"),
    "empty": (
        "",
        r"\.py: found no encoding; accepted: one class derived from pe_study\.encodings\.base\.Encoding",
    ),
    "imported": (
        "from pe_study.encodings.rope import RoPE\n",
        r"\.py: found no encoding; accepted: one class",
    ),
    "exit": ("raise SystemExit(0)\n", r":1: SystemExit: 0; mend the file"),
    "two": (
        HEAD + CLASS.format("Mine", "Encoding") + CLASS.format("Yours", "Encoding"),
        r"\.py: found the encodings Mine and Yours; accepted: one a file",
    ),
    "no type": (OPTION.format("rate=3"), r"\.py: option rate of Mine has no type; .* `rate: int = 3`"),
    "tensor": (
        "from torch import Tensor\n" + OPTION.format("rate: Tensor | None = None"),
        r"\.py: option rate of Mine has the type .*Tensor.* no recipe can give; .*`rate: float = 2\.0`",
    ),
    "text type": (
        TEXT_TYPES + OPTION.format("rate: torch.Tenser = 2.0"),
        r"\.py: option rate of Mine has the type torch\.Tenser, .* be read \(AttributeError: .*\); give",
    ),
    "no default": (
        OPTION.format("rate: float"),
        r"\.rate: mine needs it; give it here, or a default in .*/mine\.py$",
    ),
}

RECIPE = """\
name: tiny
seeds: [0]
encodings: [{0}]
model: {{num_layers: 1, d_model: 16, num_heads: 2, num_kv_heads: 1, d_ff: 32, max_positions: 64}}
train: {{length: 16, batch_tokens: 64, steps: 2, lr: 1e-3, warmup_steps: 1}}
eval: {{name: short, lengths: [1x, 2x], num_documents: 2}}
"""


@pytest.fixture
def drop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | bytes], Path]]:
    """Writes `mine.py` to a folder that the package also looks into; gone afterwards."""
    folder = tmp_path / "encodings"
    folder.mkdir()
    monkeypatch.setattr(encodings, "__path__", [*encodings.__path__, str(folder)])

    def write(text: str | bytes) -> Path:
        file = folder / "mine.py"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    yield write
    sys.modules.pop(f"{encodings.__name__}.mine", None)
    vars(encodings).pop("mine", None)


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_in_a_file_is_told_of_it_where_it_is_used(
    kind: str, drop: Callable[[str | bytes], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and one line: place in the recipe, file, what is wrong, the remedy; others go on."""
    text, said = MISTAKES[kind]
    file, recipe = drop(text), tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE.format("nope, mine"), encoding="utf-8")
    assert cli.main(["validate", str(recipe)]) == 2
    refused = capsys.readouterr().err
    assert refused.startswith(f"pe-study: {recipe}:3: encodings.1")
    assert refused.count("\n") == 1
    assert str(file) in refused
    with pytest.raises(RecipeError, match=said):
        encodings.validate_options("mine", {})
    recipe.write_text(RECIPE.format("nope, rope"), encoding="utf-8")
    assert cli.main(["validate", str(recipe)]) == 0
    assert cli.main(["ls", "encodings"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in NAMES)
    assert "\n  mine" in listed
    unreadable = kind in ("syntax", "characters")
    assert ("cannot be used" in listed and str(file) in listed) == unreadable


def test_a_parent_beside_its_encoding_is_none_itself(drop: Callable[[str | bytes], Path]) -> None:
    """Nor is another name of the same class; `Dimensions` for the type checker alone does no harm."""
    lazy = "from __future__ import annotations\nfrom typing import TYPE_CHECKING\n"
    lazy += "from pe_study.encodings.base import Encoding\nif TYPE_CHECKING:\n    "
    lazy += "from pe_study.encodings.base import Dimensions\n"
    child = "class Mine(Parent):\n" + INIT.format("rate: float = 2.0")
    drop(lazy + CLASS.format("Parent", "Encoding") + child + "Same = Mine\n")
    assert encodings.find("mine").__name__ == "Mine"
    assert encodings.options("mine") == {"rate": (float, 2.0)}
    assert isinstance(build("mine", rate=3), Encoding)
