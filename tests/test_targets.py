"""Several studies and bench files on one page: each apart, and what does not compare is said."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import synthetic_studies as synthetic

from pe_study import report, tables
from pe_study.errors import DataError
from pe_study.reporting import bench_figures, bench_files, likeness, targets

SMALL = {
    "encodings": ["nope", "rope"],
    "lengths": (64, 128),
    "num_documents": 3,
    "protocols": ("nonoverlapping",),
    "rescales": ("none",),
}
SPREAD = {"median": 1.25, "low": 1.0, "high": 1.5}


def small(**options: object) -> pd.DataFrame:
    return synthetic.rows(**{**SMALL, **options})


def built(tmp_path: Path, paths: list[Path]) -> tuple[str, dict]:
    page = report.build(paths, tmp_path / "out", formats=("latex",))
    summary = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    return page.read_text(encoding="utf-8"), summary


def column(tmp_path: Path, name: str, **where: object) -> pd.Series:
    data = pd.read_csv(tmp_path / "out" / "tables" / f"{name}.csv")
    for key, value in where.items():
        data = data[data[key] == value]
    return data["nll"]


@pytest.mark.usefixtures("undrawn")
def test_studies_of_one_name_are_never_added_up(tmp_path: Path) -> None:
    a = synthetic.write_study(tmp_path / "a", small())
    b = synthetic.write_study(tmp_path / "b", small(level={"rope": 3.0}))
    _, summary = built(tmp_path, [a, b, a])
    assert [study["name"] for study in summary["studies"]] == [f"synthetic ({path})" for path in (a, b)]
    losses = column(tmp_path, "main-nonoverlapping-nll", label="rope", length=128)
    alone = (
        report.build([a], tmp_path / "alone", formats=()).parent / "tables" / "main-nonoverlapping-nll.csv"
    )
    data = pd.read_csv(alone)
    expected = data[(data["label"] == "rope") & (data["length"] == 128)]["nll"].iloc[0]
    assert sorted(losses) == pytest.approx([expected, expected + 3.0 - synthetic.LEVEL["rope"]], abs=0.05)
    assert losses.iloc[0] == pytest.approx(expected)


@pytest.mark.usefixtures("undrawn")
def test_other_texts_are_flagged_and_nothing_is_called_best(tmp_path: Path) -> None:
    a = synthetic.write_study(tmp_path, small())
    b = synthetic.write_study(tmp_path, small(study="other").assign(corpus="wiki", corpus_hash="d" * 64))
    text, summary = built(tmp_path, [a, b])
    assert any("2 different corpora; they are not like for like" in said for said in summary["warnings"])
    assert "Not like for like: 2 different corpora" in text
    assert 'class="best"' not in text
    assert sum("At the training length of" in said for said in summary["findings"]) == 2
    assert not any("At the training length, lowest first" in said for said in summary["findings"])


def test_tokenizers_compare_in_bytes_alone() -> None:
    one = tables.length_curves(synthetic.plain_rows(**SMALL))
    both = pd.concat([one, one.assign(study="b", tokenizer_hash="8" * 64)])
    assert likeness.unlike(both, "perplexity") == "2 different tokenizers"
    assert likeness.unlike(both, "bits_per_byte") == "lengths in tokens of 2 tokenizers"
    assert likeness.unlike(both.assign(length_bytes=both["length"] * 4), "bits_per_byte") is None
    assert likeness.unlike(one, "nll") is None


def test_lengths_and_protocols_that_are_not_shared_are_named() -> None:
    one = synthetic.plain_rows(**{**SMALL, "protocols": ("nonoverlapping", "exact-context")})
    other = synthetic.plain_rows(**{**SMALL, "lengths": (64, 256), "study": "b"})
    said = likeness.cautions(pd.concat([one, other]))
    assert (
        "nonoverlapping: the studies have different lengths (b at 64, 256; synthetic at 64, 128); compare "
        "shared ones only."
    ) in said
    assert "exact-context was not run for b: nothing there compares with the others." in said
    assert likeness.cautions(one) == []


def test_one_study_on_two_texts_is_two() -> None:
    one = synthetic.plain_rows(**SMALL)
    wiki = one.assign(corpus="wiki", corpus_hash="d" * 64)
    assert set(likeness.apart(pd.concat([one, wiki]))["study"]) == {"synthetic (stdlib)", "synthetic (wiki)"}
    later = one.assign(corpus_hash="e" * 64)
    names = set(likeness.apart(pd.concat([one, later]))["study"])
    assert names == {"synthetic (text cccccccc)", "synthetic (text eeeeeeee)"}
    assert likeness.apart(one) is one
    streamed = one.assign(unit="stream", protocol="sliding")
    assert set(likeness.apart(pd.concat([one, streamed]))["study"]) == {"synthetic"}


def test_two_texts_make_a_page(tmp_path: Path) -> None:
    one = small()
    rows = pd.concat([one, one.assign(corpus="wiki", corpus_hash="d" * 64)])
    text, _ = built(tmp_path, [synthetic.write_study(tmp_path, rows)])
    assert "rope (synthetic (wiki))" in text


# --- bench files -----------------------------------------------------------------------------------------


def bench(folder: Path, lengths: tuple[int, ...] = (128, 512), **changed: object) -> Path:
    """A folder as `pe-study bench --output` writes it."""
    fixed = {"kernel": "auto", "dtype": "float32", "device": "cpu", "num_tokens": 4096, "rounds": 5}
    fixed |= {"num_layers": 4, "d_model": 128, "num_heads": 4, "matmul_share": 0.5}
    fixed |= {"ratio_to_LlamaForCausalLM": SPREAD, "peak_memory_bytes": 2**28, **changed}
    rows = [
        {"encoding": name, "peer": name[0].isupper(), "phase": phase, "length": length}
        | {"tokens_per_second": 1000.0 + length, **fixed}
        for phase in ("train", "eval")
        for length in lengths
        for name in ("nope", "rope", "LlamaForCausalLM")
    ]
    folder.mkdir(parents=True)
    machine = {"device": "x86_64", "threads": 2, "torch": "2.13.0"}
    text = json.dumps({"machine": machine, "matmul_ceiling_flops": 1e11, "rows": rows})
    (folder / "bench.json").write_text(text, encoding="utf-8")
    return folder


def test_a_bench_file_is_a_section_of_the_page(tmp_path: Path) -> None:
    study = synthetic.write_study(tmp_path / "runs", small())
    text, summary = built(tmp_path, [study, bench(tmp_path / "speed")])
    assert summary["benches"] == ["speed"]
    assert {"bench-speed", "bench-ratio-speed"} <= set(summary["figures"])
    assert '<section id="cost"' in text
    assert "CUDA is unmeasured: no bench file of a CUDA device was given." in text
    assert "rope 1.25 (1.00\u20131.50)" in text
    assert (
        "Speed of training at length 512 over that of LlamaForCausalLM (median of turns, lowest to highest): "
        "nope 1.25" in text
    )
    data = pd.read_csv(tmp_path / "out" / "tables" / "bench-speed-table.csv")
    assert set(data["peak_memory_MiB"]) == {256}
    assert (data["to_LlamaForCausalLM_low"] == 1.0).all()


def test_bench_files_alone_are_a_page(tmp_path: Path) -> None:
    cuda = bench(tmp_path / "gpu", (64,), device="cuda", peak_memory_bytes=None)
    text, summary = built(tmp_path, [bench(tmp_path / "a"), cuda / "bench.json"])
    assert summary["benches"] == ["a", "gpu"]
    where = [said for said in summary["findings"] if "Measured on" in said]
    assert where[0].startswith("a: Measured on")
    assert "CUDA is unmeasured" in where[0]
    assert where[1].startswith("gpu: Measured on")
    assert "CUDA is unmeasured" not in where[1]
    assert all(said.startswith(("a: ", "gpu: ")) for said in summary["findings"])
    assert "not known" not in text
    assert "perplexity" not in text  # nothing to choose a unit for


def test_bench_files_of_one_name_keep_apart(tmp_path: Path) -> None:
    paths = [bench(tmp_path / "a" / "speed"), bench(tmp_path / "b" / "speed")]
    found = targets.read_targets(paths)
    assert [name for name, _ in found.benches] == [f"speed ({path / 'bench.json'})" for path in paths]


def test_compiled_rows_have_a_name_and_a_look_of_their_own(tmp_path: Path) -> None:
    folder = bench(tmp_path / "x")
    content = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    rows = [{**row, "compiled": compiled} for compiled in (False, True) for row in content["rows"]]
    for row in rows:
        if row["compiled"]:
            del row["peak_memory_bytes"]
    (folder / "bench.json").write_text(json.dumps({**content, "rows": rows}), encoding="utf-8")
    read = bench_files.read_bench(folder / "bench.json")
    looks = bench_figures.looks_of(read)
    peer = "LlamaForCausalLM"
    assert list(looks) == ["nope", "nope, compiled", "rope", "rope, compiled", peer, f"{peer}, compiled"]
    assert len({(look.light, str(look.dash), look.marker) for look in looks.values()}) == len(looks)
    assert "rope, compiled 1.25" in " ".join(bench_files.sentences(read))
    assert f"{peer}, compiled 1.25" in " ".join(bench_files.sentences(read))
    figure = bench_figures.ratio_figure(read, "x")
    assert figure is not None
    assert f"{peer}, compiled 1.25" in figure.alt


def test_a_page_without_peers_or_memory_says_nothing_of_them(tmp_path: Path) -> None:
    folder = bench(tmp_path / "x")
    content = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    for row in content["rows"]:
        del row["ratio_to_LlamaForCausalLM"], row["peak_memory_bytes"]
    (folder / "bench.json").write_text(json.dumps(content), encoding="utf-8")
    read = bench_files.read_bench(folder / "bench.json")
    assert bench_figures.ratio_figure(read, "x") is None
    assert [column.text for column in bench_figures.bench_table(read, "x").columns] == [
        "model", "phase", "length", "tokens a second", "% of matmul", "kernel",
    ]  # fmt: skip
    assert len(bench_files.sentences(read)) == 1


@pytest.mark.parametrize("text", ["[]", "{", '{"rows": [{"encoding": "rope"}]}', '{"rows": 3}'])
def test_what_is_no_bench_file_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "bench.json").write_text(text, encoding="utf-8")
    with pytest.raises(
        DataError, match=r"bench\.json: (not a bench file \(no .*length|cannot be read)"
    ) as error:
        targets.read_targets([tmp_path])
    assert "\n" not in str(error.value)


def test_several_kernels_are_told_apart(tmp_path: Path) -> None:
    folder = bench(tmp_path / "x", (64,))
    content = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    content["rows"] += [row | {"kernel": "flex"} for row in content["rows"] if row["encoding"] == "rope"]
    (folder / "bench.json").write_text(json.dumps(content), encoding="utf-8")
    names = set(bench_files.read_bench(folder / "bench.json").rows["name"])
    assert names == {"nope", "rope, auto", "rope, flex", "LlamaForCausalLM"}
