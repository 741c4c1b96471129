"""What a corpus name means, and what each mistake says: a line or two, before any work."""

from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pe_study.errors import DataError
from pe_study.sections import DataSpec
from pe_study.text.corpora import load_corpus, open_corpus

TEXTS = ["one", "two"]


def bad_cases(folder):
    """name -> (what is asked for, what the error must say)."""
    (folder / "empty").mkdir()
    (folder / "empty.txt").touch()
    (folder / "blank.txt").write_text(" \n\n")
    (folder / "blank.jsonl").write_text('{"text": " "}\n{"text": null}\n')
    (folder / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (folder / "table.csv").write_text("text\nhello\n")
    (folder / "broken.parquet").write_bytes(b"PAR1 this is no table")
    (folder / "list.jsonl").write_text("[1]\n")
    (folder / "number.jsonl").write_text('{"text": 3}\n')
    (folder / "half.jsonl").write_text('{"text": "\\ud800"}\n')
    (folder / "wrong.jsonl").write_text('{"txt": "a"}\n')
    (folder / "folder.txt").mkdir()
    pq.write_table(pa.table({"txet": ["a"]}), folder / "wrong.parquet")
    pq.write_table(pa.table({"text": [1]}), folder / "number.parquet")
    datasets.DatasetDict({"trian": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(
        folder / "saved"
    )
    return {
        "missing.txt": "no such file or folder",
        "missing/a/b": "no such file or folder",
        "empty": r"no file to read in this folder \(accepted: \.txt",
        "folder.txt": "no file to read in this folder",
        "empty.txt": r"empty\.txt\": no text$",
        "blank.txt": "no text",
        "blank.jsonl": "no text in 2 documents",
        "latin.txt": "not UTF-8: byte 0xe9 at offset 3\nconvert it first, for example: iconv",
        "table.csv": r'"\.csv" is not read \(accepted: \.txt',
        "broken.parquet": "not a readable Parquet file",
        "list.jsonl": r'list\.jsonl:1: expected an object with "text"',
        "number.jsonl": r'number\.jsonl:1: field "text" is int, not text',
        "half.jsonl": "half a surrogate pair",
        "wrong.jsonl": r'no field "text" \(data\.text_field\): did you mean "txt"\?',
        "wrong.parquet": r'no field "text" \(data\.text_field\): did you mean "txet"\?',
        "number.parquet": r"number\.parquet row 0: field \"text\" is int",
        "saved": r'no split "train": did you mean "trian"\?',
    }


def test_each_mistake_has_its_line(tmp_path):
    for name, message in bad_cases(tmp_path).items():
        with pytest.raises(DataError, match=message) as caught:
            open_corpus(str(tmp_path / name))
        assert name.split("/")[0] in str(caught.value)
        assert len(str(caught.value).splitlines()) <= 2


def test_unreadable_file(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"a\.txt: cannot be read: Permission denied"):
        open_corpus(str(tmp_path / "a.txt"))


def test_unknown_names():
    with pytest.raises(DataError, match='"stdlb": did you mean "stdlib"'):
        open_corpus("stdlb")
    with pytest.raises(DataError, match=r'data\.corpus "data\.csv": no such file or folder'):
        open_corpus("data.csv")


def test_hub_id_without_network_is_one_error():
    """Offline, a hub id fails at once and in a line, with no retries and no traceback of the library."""
    with pytest.raises(
        DataError, match=r'"no-one/nothing": .*the Hugging Face Hub cannot be reached'
    ) as caught:
        open_corpus("no-one/nothing:plain:test")
    assert len(str(caught.value).splitlines()) <= 2


def test_hub_options_reach_load_dataset(monkeypatch):
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return datasets.Dataset.from_dict({"text": TEXTS})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    load_corpus(DataSpec(corpus="a/b", config="c", split="d", validation_split="e", revision="f"))
    open_corpus("a/b")
    open_corpus("a/b:test")
    open_corpus("a/b:c:test[:10]")
    open_corpus("a/b:test[10:]")
    assert [(*args, *options.values()) for args, options in asked] == [
        ("a/b", "c", "d", "f"),
        ("a/b", "c", "e", "f"),
        ("a/b", None, "train", None),
        ("a/b", None, "test", None),
        ("a/b", "c", "test[:10]", None),
        ("a/b", None, "test[10:]", None),
    ]


@pytest.mark.parametrize(
    ("corpus", "option", "message"),
    [
        ("stdlib", {"split": "test"}, 'the standard library has no split "test"'),
        (
            "files",
            {"validation_split": "validation"},
            'plain files have no split "validation"; data.validation_f',
        ),
        ("files/a.txt", {"revision": "main"}, 'plain files have no revision "main"'),
        ("saved", {"config": "plain"}, 'a saved data set has no config "plain"'),
        ("saved", {"split": "test"}, 'a saved data set of one part has no split "test"'),
        ("saved", {"validation_split": "train"}, 'data.validation_split "train" is the training split'),
        ("files", {"config": "plain"}, "data.corpus"),
    ],
)
def test_options_that_would_do_nothing_are_refused(tmp_path, corpus, option, message):
    """case 45: each key changes what is read, or is rejected."""
    (tmp_path / "files").mkdir()
    for name in "ab":
        (tmp_path / "files" / f"{name}.txt").write_text(name)
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    name = corpus if corpus == "stdlib" else str(tmp_path / corpus)
    with pytest.raises(DataError, match=message):
        load_corpus(DataSpec(corpus=name, **option))
