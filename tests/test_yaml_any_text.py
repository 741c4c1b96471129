"""Property tests: any text is a value or one clear line, and what is dumped is read back (case 03)."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from pe_study.errors import RecipeError
from pe_study.settings import yaml_strict

quick = settings(derandomize=True, database=None, deadline=None, max_examples=100)

NASTY = [
    "on",
    "no",
    "1e4",
    "5e-5",
    "01",
    "1:30",
    "0o7",
    "2024-01-01",
    "~",
    "null",
    "",
    " ",
    "é",
    "a: b",
    "# c",
]
NASTY += [
    "- x",
    "true",
    "<<",
    "=",
    "line\nbreak",
    "\t",
    "'",
    '"',
    "%",
    "@",
    "&a",
    "*a",
    "!t",
    "日本",
    "\x85",
    "\u2028",
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63) + 1, 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(NASTY),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(NASTY), inner, max_size=4)
    ),
    max_leaves=12,
)


@quick
@given(VALUES)
def test_dump_is_read_back_equal_and_of_the_same_types(value: object) -> None:
    again = yaml_strict.parse(yaml_strict.dump(value), "x").value
    assert again == value
    assert repr(again) == repr(value)


PIECES = [
    *NASTY,
    "a",
    "b",
    ":",
    ": ",
    "\n",
    "  ",
    "- ",
    "[",
    "]",
    "{",
    "}",
    ",",
    "? ",
    "|",
    ">",
    "...",
    "---",
    "&x ",
]
PIECES += [
    "*x",
    "!!int ",
    "!!set ",
    "!!python/name:os.x ",
    "<<: ",
    "1",
    ".nan",
    ".inf",
    "\\",
    '"\\x',
    "%YAML 1.1\n",
]
PIECES += ["%TAG ! x\n", "\0", "\ufeff", "!<%ff> ", "9" * 30, "0", "-", "+", "e", ".", "\r", "\t"]


@quick
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_text_gives_a_value_or_one_clear_line(text: str) -> None:
    try:
        value = yaml_strict.parse(text, "f.yaml").value
    except RecipeError as error:
        assert str(error).startswith("f.yaml")
        assert "\n" not in str(error).strip("\n")
    else:
        assert all(math.isfinite(number) for number in _numbers(value))


@quick
@given(st.binary(max_size=40))
def test_any_bytes_give_a_mapping_or_one_clear_line(tmp_path_factory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(data)
    try:
        assert isinstance(yaml_strict.read_mapping(path).value, dict)
    except RecipeError as error:
        assert str(error).startswith(str(path))


def _numbers(value: object) -> list[float]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in _numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in _numbers(item)]
    return [value] if isinstance(value, int | float) else []
