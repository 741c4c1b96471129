"""The conformance suite: every check on every registered encoding, so that a new file is covered unasked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conformance import (
    CHECKS,
    OF_A_RESCALE,
    OF_AN_OPTION,
    check_cached_equals_full,
    check_compiled,
    check_kernels_agree,
)
from variants import Variant, all_rescaled, all_variants

from pe_study import encodings

Check = Callable[[Variant, Path], None]

OF_A_TOY = [
    pytest.param(check, marks=pytest.mark.slow if check is check_compiled else ()) for check in CHECKS
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", encodings.available())
def test_encoding(check: Check, name: str, tmp_path: Path) -> None:
    check(Variant(name), tmp_path)


@pytest.mark.parametrize("check", OF_AN_OPTION, ids=lambda check: check.__name__)
@pytest.mark.parametrize("variant", [v for v in all_variants() if v.options], ids=str)
def test_option(check: Check, variant: Variant, tmp_path: Path) -> None:
    check(variant, tmp_path)


@pytest.mark.parametrize("check", OF_A_RESCALE, ids=lambda check: check.__name__)
@pytest.mark.parametrize("variant", all_rescaled(), ids=str)
def test_rescaled(check: Check, variant: Variant, tmp_path: Path) -> None:
    check(variant, tmp_path)


LOG_BIAS = '''"""A learned bias -r_h log(1 + d), as in KERPLE (arXiv:2205.09921); never constant."""

import torch
from torch import Tensor, nn

from pe_study.encodings.base import Dimensions, Encoding


class LogBias(Encoding):
    is_relative = True

    def __init__(self, dims: Dimensions, *, start: float = 1.0) -> None:
        super().__init__(dims)
        self.rate = nn.Parameter(torch.full((dims.num_heads, 1), start))

    def distance_bias(self, distance: Tensor) -> Tensor:
        rate = self.rate.float().view(-1, *[1] * distance.ndim)
        return -rate * torch.log1p(distance.clamp(min=0).float())
'''
QUERY_BIAS = '''"""A slope that each layer's queries choose: score - softplus(q . w) * log(1 + d)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pe_study.encodings.base import At, Dimensions, Encoding, ScoreMod, position_at


class QueryBias(Encoding):
    is_relative = True
    per_layer = True

    def __init__(self, dims: Dimensions) -> None:
        super().__init__(dims)
        self.weight = nn.Parameter(torch.empty(dims.num_heads, dims.head_dim))

    def score_mod(self, q_BHTK: Tensor, at: At) -> ScoreMod:
        rate_BHT = F.softplus((q_BHTK.float() * self.weight.float()[None, :, None]).sum(-1))
        q_positions_BT, k_positions_BS = at.q_positions_BT, at.k_positions_BS

        def add_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            distance = position_at(q_positions_BT, b, q) - position_at(k_positions_BS, b, k)
            return score - rate_BHT[b, h, q] * torch.log1p(distance.clamp(min=0).float())

        return add_bias
'''


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two new files in a folder that the package also looks into; gone afterwards."""
    folder = tmp_path / "encodings"
    folder.mkdir()
    (folder / "log_bias.py").write_text(LOG_BIAS, encoding="utf-8")
    (folder / "query_bias.py").write_text(QUERY_BIAS, encoding="utf-8")
    monkeypatch.setattr(encodings, "__path__", [*encodings.__path__, str(folder)])
    yield
    for name in ("log_bias", "query_bias"):
        sys.modules.pop(f"{encodings.__name__}.{name}", None)
        if hasattr(encodings, name):
            delattr(encodings, name)


@pytest.mark.parametrize("check", OF_A_TOY, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ["log_bias", "query_bias"])
@pytest.mark.usefixtures("toys")
def test_a_file_dropped_in_place_is_an_encoding(check: Check, name: str, tmp_path: Path) -> None:
    """No other file is touched: recipes know its options, every kernel runs it, the suite covers it."""
    assert name in encodings.available()
    assert name in {variant.name for variant in all_variants()}
    check(Variant(name), tmp_path / "saved")


@pytest.mark.usefixtures("toys")
def test_a_dropped_file_brings_its_options_and_parameters() -> None:
    assert encodings.validate_options("log_bias", {"start": 2}) == {"start": 2.0}
    model = Variant("log_bias").model()
    assert [(name, p.numel()) for name, p in model.position_parameters()] == [("encoding.rate", 4)]
    groups = {group["name"] for group in model.parameter_groups(weight_decay=0.1, lr_total=1.0)}
    assert groups == {"decay", "no_decay", "position"}


def test_the_suite_would_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes of the kinds that the cases tell of are caught by the checks named after them."""
    from pe_study.encodings.alibi import ALiBi
    from pe_study.encodings.rope import RoPE

    right = RoPE.rotate
    with monkeypatch.context() as patch:  # case 30: positions restart behind a cache
        restarted = lambda self, q, k, at: right(  # noqa: E731
            self, q, k, replace(at, q_positions_BT=torch.arange(q.shape[2])[None])
        )
        patch.setattr(RoPE, "rotate", restarted)
        with pytest.raises(AssertionError):
            check_cached_equals_full(Variant("rope"), tmp_path)
    with monkeypatch.context() as patch:  # one kernel's bias is not the other's
        patch.setattr(ALiBi, "distance_bias", lambda self, d: -d.float().square().expand(4, *d.shape) / 100)
        with pytest.raises(AssertionError):
            check_kernels_agree(Variant("alibi"), tmp_path)
