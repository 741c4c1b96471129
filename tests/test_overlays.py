"""Includes and overrides: what wins, and which file or override is blamed."""

from pathlib import Path

import pytest

from pe_study.errors import RecipeError
from pe_study.settings import overlays
from pe_study.settings.yaml_strict import Document, Place


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


def test_includes_nest_and_later_ones_win(tmp_path) -> None:
    (tmp_path / "sub").mkdir()
    write(
        tmp_path / "sub", low="a: 1\nb: {x: 1, y: 1}\nl: [1, 2]\n", mid="include: low.yaml\nb: {y: 2}\nc: 2\n"
    )
    write(tmp_path, side="c: 3\nd: 3\n", top="include: [sub/mid.yaml, side.yaml]\nl: [9]\nb: {z: 4}\n")
    document = overlays.read(tmp_path / "top.yaml", RecipeError)
    assert document.value == {"a": 1, "b": {"x": 1, "y": 2, "z": 4}, "l": [9], "c": 3, "d": 3}
    origins = {
        key: document.place(path) for key, path in [("x", ("b", "x")), ("y", ("b", "y")), ("z", ("b", "z"))]
    }
    assert {key: (Path(place.file).name, place.line) for key, place in origins.items()} == {
        "x": ("low.yaml", 2),
        "y": ("mid.yaml", 2),
        "z": ("top.yaml", 3),
    }
    assert Path(document.place(("l", 0)).file).name == "top.yaml"


def test_a_file_may_be_included_twice_but_not_by_itself(tmp_path) -> None:
    write(tmp_path, base="a: 1", one="include: base.yaml\nb: 1", two="include: base.yaml\nc: 1")
    write(
        tmp_path, both="include: [one.yaml, two.yaml]", ping="include: pong.yaml", pong="include: ping.yaml"
    )
    assert overlays.read(tmp_path / "both.yaml", RecipeError).value == {"a": 1, "b": 1, "c": 1}
    with pytest.raises(RecipeError, match=r"pong\.yaml:1: include: .*ping\.yaml is being read already"):
        overlays.read(tmp_path / "ping.yaml", RecipeError)


def test_includes_are_found_beside_above_and_in_the_working_folder(tmp_path, monkeypatch) -> None:
    for folder in ("here", "above/inner"):
        (tmp_path / folder).mkdir(parents=True)
    write(tmp_path / "above", shared="a: above")
    write(tmp_path / "here", shared="a: here", mine="a: here")
    write(
        tmp_path / "above/inner",
        one="include: shared.yaml",
        two="include: mine.yaml",
        three="include: no.yaml",
    )
    monkeypatch.chdir(tmp_path / "here")
    read = lambda name: overlays.read(tmp_path / "above/inner" / name, RecipeError).value  # noqa: E731
    assert read("one.yaml") == {"a": "above"}
    assert read("two.yaml") == {"a": "here"}
    with pytest.raises(RecipeError, match=r"three\.yaml:1: include: .*no\.yaml: no such file"):
        read("three.yaml")


@pytest.mark.parametrize("value", ["3", "[1]", "{a: b}", "['']", "true"])
def test_include_takes_file_names_alone(tmp_path, value: str) -> None:
    write(tmp_path, top=f"a: 1\ninclude: {value}")
    with pytest.raises(RecipeError, match=r"top\.yaml:2: include: found .*; accepted: a file name"):
        overlays.read(tmp_path / "top.yaml", RecipeError)


START = {
    "a": {"b": 1, "c": 2},
    "list": ["rope", {"name": "t5"}, {"name": "rope", "label": "rope-1m"}],
    "nothing": None,
}


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("a.b=3e-4", ("a", "b"), 0.0003),
        ("a.b=no", ("a", "b"), "no"),
        ("a.b=", ("a", "b"), None),
        ("a={c: 5}", ("a",), {"b": 1, "c": 5}),
        ("a.new.deep=[1, x]", ("a", "new"), {"deep": [1, "x"]}),
        ("nothing.x=1", ("nothing",), {"x": 1}),
        ("list=[alibi]", ("list",), ["alibi"]),
        ("list.0=nope", ("list", 0), "nope"),
        ("list.0.base=1e6", ("list", 0), {"name": "rope", "base": 1e6}),
        ("list.rope.base=1e6", ("list", 0), {"name": "rope", "base": 1e6}),
        ("list.rope-1m.base=1e6", ("list", 2), {"name": "rope", "label": "rope-1m", "base": 1e6}),
        ("list.t5.num_buckets=8", ("list", 1), {"name": "t5", "num_buckets": 8}),
    ],
)
def test_an_override_sets_one_key_and_keeps_the_rest(text: str, path: tuple, value: object) -> None:
    before = Document(START, {(): Place("f.yaml", 1), ("a", "c"): Place("f.yaml", 2)})
    after = overlays.override(before, text, RecipeError)
    found = after.value
    for part in path:
        found = found[part]
    assert found == value
    assert str(after.place((*path, "x"))).startswith("override") or path == ("a",)
    assert before.value == START


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.b", 'override "a.b": accepted: key=value, such as train.lr=3e-4'),
        ("=1", "accepted: key=value"),
        ("a..b=1", "accepted: key=value"),
        ("a.b.c=1", 'override "a.b.c=1": a.b: found 1, which has no keys'),
        ("list.7=1", 'override "list.7=1": list: found entry 7; accepted: 0 to 2'),
        ("list.alib=1", 'list: found "alib" 0 times; (available: rope, t5, rope-1m)'),
        ("a.b=[1", 'override "a.b=[1": not valid YAML'),
        ("a.b=.nan", 'override "a.b=.nan": a.b: found .nan; accepted: finite numbers'),
        ("a.b={x: 1, x: 2}", "a.b.x: found twice"),
    ],
)
def test_a_bad_override_is_one_line(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        overlays.override(Document(START, {(): Place("f.yaml", 1)}), text, RecipeError)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
