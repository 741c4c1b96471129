"""Corpora: what a name means, which documents are held out, and what each mistake says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pe_study.errors import DataError
from pe_study.sections import DataSpec
from pe_study.text import sources
from pe_study.text.corpora import load_corpus, open_corpus, read_corpus
from pe_study.text.sources import Source

TEXTS = [f"Document {number}: naïve “東京” 🦙\n" * (number + 1) for number in range(40)]


@pytest.fixture(autouse=True)
def _own_datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def in_memory(texts):
    return Source("memory", lambda: iter([(str(number), text) for number, text in enumerate(texts)]))


def texts_of(corpus, split="all"):
    return [document.text for document in corpus.documents(split)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_stdlib_is_the_library_that_runs():
    corpus = load_corpus(DataSpec())
    documents = list(corpus.documents("all"))
    names = [document.name for document in documents]
    assert names == sorted(names) and "json/decoder.py" in names
    assert not any("site-packages" in name or "/test" in name for name in names)
    source = next(document for document in documents if document.name == "json/decoder.py")
    assert source.text == Path(json.decoder.__file__).read_text(encoding="utf-8")
    share = corpus.is_validation.mean()
    assert 0.02 < share < 0.09
    assert corpus.hash == load_corpus(DataSpec()).hash


def test_stdlib_reads_what_pep_263_declares(tmp_path):
    (tmp_path / "latin.py").write_bytes("# -*- coding: latin-1 -*-\n# é\n".encode("latin-1"))
    (tmp_path / "broken.py").write_bytes(b"# \xff\n")
    (tmp_path / "unknown.py").write_bytes(b"# coding: no-such-codec\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_a.py").write_text("assert True\n")
    assert list(sources._library_texts(tmp_path)) == [("latin.py", "# -*- coding: latin-1 -*-\n# é\n")]


@pytest.mark.parametrize("suffix", [".txt", ".md", ".tex", ".py"])
def test_text_file_is_one_document(tmp_path, suffix):
    (tmp_path / f"a{suffix}").write_bytes("\ufeffé\r\n".encode())
    assert texts_of(open_corpus(str(tmp_path / f"a{suffix}"))) == ["é\r\n"], (
        "the mark is dropped, breaks stay"
    )


def test_jsonl_parquet_and_folders_hold_the_same_documents(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"body": text, "n": 1} for text in [*TEXTS, "", None]])
    pq.write_table(pa.table({"body": [*TEXTS, "", None], "n": [1] * 42}), tmp_path / "a.parquet")
    datasets.Dataset.from_dict({"body": [*TEXTS, "", None]}).save_to_disk(tmp_path / "saved")
    folder = tmp_path / "folder" / "deep"
    folder.mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    (folder / "image.png").write_bytes(b"\x89PNG\xff")
    (folder / ".hidden.txt").write_text("hidden")
    found = [
        open_corpus(str(tmp_path / name), text_field="body")
        for name in ("a.jsonl", "a.parquet", "saved", "folder")
    ]
    assert {corpus.hash for corpus in found} == {found[0].hash}
    assert texts_of(found[0]) == TEXTS
    assert [corpus.num_empty for corpus in found] == [2, 2, 2, 0]
    assert next(found[3].documents("all")).name == "deep/00.txt"


def test_data_set_folders(tmp_path):
    """A saved dictionary of splits, and a folder laid out as on the hub, read by `load_dataset`."""
    train, test = datasets.Dataset.from_dict({"text": TEXTS}), datasets.Dataset.from_dict({"text": ["tést"]})
    datasets.DatasetDict({"train": train, "validation": test}).save_to_disk(tmp_path / "saved")
    hub_folder = tmp_path / "hub"
    for split, rows in (("train", TEXTS), ("validation", ["tést"])):
        (hub_folder / "plain").mkdir(parents=True, exist_ok=True)
        write_jsonl(hub_folder / "plain" / f"{split}.jsonl", [{"text": text} for text in rows])
    card = {"train": "plain/train.jsonl", "validation": "plain/validation.jsonl"}
    entries = "".join(f"  - split: {split}\n    path: {path}\n" for split, path in card.items())
    (hub_folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: plain\n  data_files:\n{entries}---\n"
    )
    for spec in (
        DataSpec(corpus=str(tmp_path / "saved"), validation_split="validation"),
        DataSpec(corpus=str(hub_folder), validation_split="validation"),
        DataSpec(corpus=str(hub_folder), config="plain", validation_split="validation"),
    ):
        corpus = load_corpus(spec)
        assert texts_of(corpus, "train") == TEXTS
        assert texts_of(corpus, "validation") == ["tést"]


def test_split_depends_on_the_text_alone():
    one = read_corpus(in_memory(TEXTS), 0.25)
    other = read_corpus(in_memory(["new", *reversed(TEXTS), TEXTS[3]]), 0.25)
    held_out = set(texts_of(one, "validation"))
    assert 0 < len(held_out) < len(TEXTS)
    assert set(texts_of(other, "validation")) - {"new"} == held_out
    assert set(texts_of(one, "train")) == set(TEXTS) - held_out
    assert one.hash != other.hash


@given(texts=st.lists(st.text(min_size=1), min_size=2, unique=True), fraction=st.floats(0.001, 0.999))
def test_neither_side_is_empty(texts, fraction):
    texts = [f"{text}." for text in texts]
    corpus = read_corpus(in_memory(texts), fraction)
    train, validation = texts_of(corpus, "train"), texts_of(corpus, "validation")
    assert train and validation
    assert sorted(train + validation) == sorted(texts)


def test_one_document_is_cut_at_a_line(tmp_path):
    text = "".join(f"línea {number}\n" for number in range(100))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    corpus = load_corpus(DataSpec(corpus=str(tmp_path / "a.txt"), validation_fraction=0.1))
    (train,), (validation,) = texts_of(corpus, "train"), texts_of(corpus, "validation")
    assert train + validation == text and train.endswith("\n")
    assert 0.08 < len(validation) / len(text) < 0.13


def test_changed_text_changes_the_hash():
    assert read_corpus(in_memory(["ab", "c"]), 0).hash != read_corpus(in_memory(["a", "bc"]), 0).hash


def test_rows_are_read_a_few_at_a_time(tmp_path):
    """A large file is never held whole: the first document needs the first rows alone."""
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "not json"]), encoding="utf-8")
    texts = sources.files(tmp_path / "a.jsonl", "text").texts()
    assert next(texts) == ("a.jsonl:1", TEXTS[0])
    with pytest.raises(DataError, match=r"a\.jsonl:41: not a line of JSON"):
        list(texts)


LOCALE_PROGRAM = """
import sys
from pe_study.text.corpora import load_corpus
from pe_study.text.tokenization import load_tokenizer
from pe_study.text.tokenized import tokenize
from pe_study.sections import DataSpec
spec = DataSpec(corpus=sys.argv[1], tokenizer=sys.argv[2])
corpus = load_corpus(spec)
split = tokenize(corpus, "train", load_tokenizer(spec, corpus))
print(corpus.hash, split.num_tokens, split.num_bytes, ascii(split.names[0]))
"""


def test_locale_does_not_matter(tmp_path):
    """case 62: hash, tokens and bytes are the same under LC_ALL=C and PYTHONUTF8=0."""
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"é{number}.txt").write_text(text, encoding="utf-8")
    printed = []
    for number, setting in enumerate([{"PYTHONUTF8": "1"}, {"PYTHONUTF8": "0", "LC_ALL": "C"}]):
        env = {**os.environ, "PYTHONCOERCECLOCALE": "0", "PE_STUDY_CACHE": str(tmp_path / f"cache{number}")}
        command = [sys.executable, "-c", LOCALE_PROGRAM, str(tmp_path / "texts"), "bpe:300"]
        done = subprocess.run(command, env=env | setting, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    assert int(printed[0].split()[2]) > 1000


def test_same_text_throughout_cannot_be_split():
    with pytest.raises(DataError, match="all 3 documents are the same text"):
        read_corpus(in_memory(["a", "a", "a"]), 0.1)
    with pytest.raises(DataError, match="one document, too short"):
        read_corpus(in_memory(["a"]), 0.5)


def test_corpus_that_changes_while_it_is_read():
    texts = ["a", "b"]
    corpus = read_corpus(Source("memory", lambda: iter([(text, text) for text in texts])), 0.0)
    texts[1] = "c"
    with pytest.raises(DataError, match="changed while it was read"):
        list(corpus.documents("all"))
    texts.append("d")
    with pytest.raises(DataError, match="changed while it was read"):
        list(corpus.documents("all"))


def test_hashes_are_the_documents_sha256():
    import hashlib

    corpus = read_corpus(in_memory(["é", " ", "b"]), 0.0)
    expected = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") for text in ("é", "b")]
    assert corpus.document_hashes.tolist() == expected
    assert corpus.document_hashes.dtype == np.uint64
    assert [document.hash for document in corpus.documents("all")] == expected
