"""YAML means what people mean, and every text gives a value or one clear error (cases 03, 45, 62)."""

import os
import subprocess
import sys

import pytest

from pe_study.errors import PlanError, RecipeError
from pe_study.settings import yaml_strict


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-5", 0.00005),
        ("1e4", 10000.0),
        ("1.0e4", 10000.0),
        ("1.0e-4", 0.0001),
        ("1E4", 10000.0),
        ("-2.5E+3", -2500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("0", 0),
        ("-12", -12),
        ("+3", 3),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'5e-5'", "5e-5"),
    ],
)
def test_a_scalar_that_is_a_number_a_boolean_or_nothing(text: str, value: object) -> None:
    """Case 03: an exponent without a dot or a sign makes a number all the same."""
    found = yaml_strict.parse(text, "x").value
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        *("on", "off", "yes", "no", "y", "N", "On", "YES"),
        *(
            "01",
            "007",
            "0o7",
            "0x1f",
            "0b11",
            "1_000",
            "1:30",
            "190:20:30.15",
            "1e",
            "e5",
            "1.2.3",
            "-a",
            "--1",
            "+",
        ),
        *("2024-01-01", "2024-01-01T00:00:00Z", "12:00", "nan", "inf", "NaN", "Infinity", "=", "0.5x", "2k"),
    ],
)
def test_what_yaml_1_1_takes_for_something_else_stays_text(text: str) -> None:
    assert yaml_strict.parse(text, "x").value == text


@pytest.mark.parametrize("text", [".nan", ".inf", "-.Inf", "1e999", "-1e999", str(2**63), "9" * 5000])
def test_numbers_are_finite_and_fit_64_bits(text: str) -> None:
    with pytest.raises(RecipeError, match=r"^f\.yaml:2: a\.b: found .*; accepted: finite numbers"):
        yaml_strict.parse(f"a:\n  b: {text}", "f.yaml")


def test_every_value_knows_its_line() -> None:
    document = yaml_strict.parse("a:\n  b:\n    - 1\n    - {c: 2,\n       d: 3}\n", "f.yaml")
    assert str(document.place(("a",))) == "f.yaml:1"
    assert str(document.place(("a", "b", 0))) == "f.yaml:3"
    assert str(document.place(("a", "b", 1, "d"))) == "f.yaml:5"
    assert str(document.place(("a", "b", 1, "d", "unwritten"))) == "f.yaml:5"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "f.yaml:3: a: found twice; first on line 1"),
        ("x:\n  a: 1\n  'a': 3", "f.yaml:3: x.a: found twice; first on line 2"),
        ("x: {a: 1, a: 3}", "f.yaml:1: x.a: found twice"),
        ("<<: {a: 1}\n<<: {b: 1}", "f.yaml:2: <<: found twice"),
        ("true: 1", "f.yaml:1: found a key that is neither text nor a whole number"),
        ("? [a]\n: 1", "f.yaml:1: found a key that is neither"),
        ("a: !!python/object:os.system x", "f.yaml:1: a: found tag:yaml.org,2002:python/object:os.system"),
        ("a: !mine {b: 1}", "f.yaml:1: a: found the tag !mine"),
        ("a: !!int '01'", "f.yaml:1: a: found tag:yaml.org,2002:int '01'"),
        ("a: !!binary aGk=", "f.yaml:1: a: found tag:yaml.org,2002:binary"),
        ("a: &x [*x]", "f.yaml:1: a.0: found an anchor that contains itself"),
        ("<<: 3", "f.yaml:1: <<: accepted: a mapping, or a list of mappings"),
        ("a: *nobody", "f.yaml:1: not valid YAML: found undefined alias"),
        ("\n\na: [1,\n", "f.yaml:4: not valid YAML"),
        ("a: b: c", "f.yaml:1: not valid YAML: mapping values are not allowed here"),
        ("a: 1\n\tb: 2", "f.yaml:2: not valid YAML"),
        ("--- 1\n--- 2", "f.yaml:2: not valid YAML: but found another document"),
        ("a: 1\n\x07", "f.yaml:2: not valid YAML: a character that text cannot hold"),
        ('a: "\\0"', "f.yaml:1: a: found a character that text cannot hold"),
        ('a: "\\ud800"', "f.yaml:1: a: found a character that text cannot hold"),
        ('a: "\\UFFFFFFFF"', "f.yaml: not valid YAML"),
        ("[" * 20_000, "f.yaml: nested too deeply"),
    ],
)
def test_bad_text_is_one_line_with_its_place(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        yaml_strict.parse(text, "f.yaml")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_merge_keys_give_way_to_what_is_written() -> None:
    text = "base: &b {x: 1, y: {z: 2}}\nmore: &m {x: 9, w: 4}\nuse:\n  y: 5\n  <<: [*b, *m]\n"
    assert yaml_strict.parse(text, "f").value["use"] == {"x": 1, "y": 5, "w": 4}


def test_anchors_are_copies_and_an_alias_bomb_is_refused() -> None:
    document = yaml_strict.parse("a: &x [1]\nb: *x", "f.yaml")
    assert document.value == {"a": [1], "b": [1]}
    assert document.value["a"] is not document.value["b"]
    bomb = "a0: &a0 [0]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
    )
    with pytest.raises(RecipeError, match="aliases expand to more than"):
        yaml_strict.parse(bomb, "f.yaml")


def test_a_file_that_cannot_be_read_is_one_line(tmp_path, monkeypatch) -> None:
    (tmp_path / "demo.yaml").write_text("a: 1")
    (tmp_path / "latin.yaml").write_bytes("ok: 1\nname: é\n".encode("latin-1"))
    (tmp_path / "utf16.yaml").write_bytes("a: 1".encode("utf-16"))
    (tmp_path / "list.yaml").write_text("- 1")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    (tmp_path / "blank.yaml").write_bytes(b"")
    expected = {
        "dmo.yaml": 'no such file; did you mean "demo.yaml"?',
        "latin.yaml": "latin.yaml:2: found byte 0xe9, which is not UTF-8",
        "utf16.yaml": "utf16.yaml:1: found byte 0xff, which is not UTF-8",
        "list.yaml": "list.yaml:1: found a list; accepted: a mapping",
        "empty.yaml": "the file is empty",
        "blank.yaml": "the file is empty",
        "demo.yaml/x": "cannot be read: Not a directory",
        "": "found a folder; accepted: a YAML file",
        "a\0b": "is not a file name",
    }
    for name, message in expected.items():
        with pytest.raises(PlanError) as error:
            yaml_strict.read_mapping(tmp_path / name, PlanError)
        assert message in str(error.value)
        assert "\n" not in str(error.value)

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(RecipeError, match=r"demo\.yaml: cannot be read: Permission denied"):
        yaml_strict.read_mapping(tmp_path / "demo.yaml")


def test_utf8_is_read_in_any_locale(tmp_path) -> None:
    """Case 62: `PYTHONUTF8=0 LC_ALL=C` changes nothing, nor does a byte order mark."""
    (tmp_path / "é.yaml").write_bytes("\ufeffname: é\n".encode())
    code = (
        "import pathlib, sys; from pe_study.settings import yaml_strict;"
        "print(ascii(yaml_strict.read_mapping(next(pathlib.Path(sys.argv[1]).glob('*.yaml'))).value))"
    )
    environment = os.environ | {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == r"{'name': '\xe9'}"
