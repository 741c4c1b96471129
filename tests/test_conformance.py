"""The conformance suite: every check on every registered encoding, so that a new file is covered unasked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conformance import CHECKS
from variants import Variant, all_rescaled, all_variants

Check = Callable[[Variant, Path], None]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("variant", all_variants(), ids=str)
def test_encoding(check: Check, variant: Variant, tmp_path: Path) -> None:
    check(variant, tmp_path)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("variant", all_rescaled(), ids=str)
def test_rescaled(check: Check, variant: Variant, tmp_path: Path) -> None:
    check(variant, tmp_path)
