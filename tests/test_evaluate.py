"""A plan over a trained study and over checkpoints: rows, what is kept, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_recipe
from transformers import AutoModelForCausalLM, FalconConfig, GPT2Config, LlamaConfig

from pe_study import attention, cli, rows, tables
from pe_study.commands import listing
from pe_study.errors import CheckpointError, DataError, PlanError, RescaleError, UsageError
from pe_study.evaluators import evaluation
from pe_study.evaluators.study import default_folder, default_plan, evaluate
from pe_study.evaluators.windows import LATE
from pe_study.plan import Plan, load_plan
from pe_study.reporting import comparisons
from pe_study.text.tokenization import byte_tokenizer
from pe_study.train import train_study

PLAN = {
    "name": "test",
    "lengths": ["1x", "2x", "4x"],
    "protocols": ["nonoverlapping", "prefix"],
    "rescales": ["none", "yarn:auto"],
    "num_documents": 3,
    "truncation": False,
}
SIZES = (("a", 16), ("b", 32))


def plan_of(**changes) -> Plan:
    return load_plan({**PLAN, **changes})


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """A rope and a learned run, the second with positions for 48 tokens only."""
    folder = tmp_path_factory.mktemp("study")
    recipe = tiny_recipe(folder, "model.max_positions=48", "train.steps=2", encodings=("rope", "learned"))
    train_study(recipe, folder / "runs")
    return folder / "runs"


@pytest.fixture(scope="module")
def results(study):
    folder = evaluate("tiny", plan_of(), runs_root=study)
    assert folder == study / "tiny" / "eval" / "test"
    return rows.read_rows(folder)


def test_every_cell_has_rows_with_its_own_columns(results):
    ok = results[results["status"] == "ok"]
    assert set(ok[ok["label"] == "rope"]["rescale"]) == {"none", "yarn:auto"}
    assert set(ok[ok["label"] == "learned"]["rescale"]) == {"none"}
    assert set(results["length"]) == {16, 32, 64}
    assert set(results["train_length"]) == {16}
    assert not results["bos"].any()
    assert results[["corpus_hash", "tokenizer_hash", "dtype", "mask_kind", "unit"]].notna().all().all()
    yarn = ok[(ok["rescale"] == "yarn:auto") & (ok["length"] == 64)]
    assert set(yarn["factor"]) == {4.0}


def test_the_same_documents_and_targets_at_every_length(results):
    """Case 11: every length scores the same tokens of the same documents, and their bytes add up."""
    whole = results[(results["protocol"] == "nonoverlapping") & (results["label"] == "rope")]
    sums = whole.groupby(["rescale", "length", "document"])[["num_tokens", "num_bytes"]].sum()
    for document in range(3):
        counts = sums.xs(document, level="document")["num_tokens"]
        assert counts.nunique() == 1
        assert counts.iloc[0] % 64 == 0
    assert (sums["num_tokens"] == sums["num_bytes"]).all()


def test_a_length_past_the_table_is_unsupported_and_untrained_rows_are_counted(results):
    """Case 33, design: rows past training are counted in every result."""
    learned = results[results["label"] == "learned"]
    assert set(learned[learned["length"] == 64]["status"]) == {"unsupported"}
    assert set(learned[learned["length"] == 32]["untrained_rows"]) == {16}
    assert set(learned[learned["length"] == 16]["untrained_rows"]) == {0}


def test_summary_is_strict_json_in_lm_eval_s_shape(results, study):
    text = (study / "tiny" / "eval" / "test" / "results.json").read_text(encoding="utf-8")
    summary = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    cell = summary["results"]["rope-s0/yarn:auto/prefix"]
    sums = results[
        (results["run"] == "rope-s0")
        & (results["rescale"] == "yarn:auto")
        & (results["protocol"] == "prefix")
        & (results["length"] == 32)
    ][["nll_sum", "num_tokens"]].sum()
    assert cell["32,none"] == pytest.approx(np.exp(sums["nll_sum"] / sums["num_tokens"]))
    assert summary["results"]["learned-s0/none/prefix"]["64,none"] is None
    assert {"length": 64, "status": "unsupported"}.items() <= summary["notes"]["flags"][0].items()
    assert set(summary["versions"]) == set(summary["results"]) == set(summary["n-samples"])
    notes = [note for note in summary["notes"]["rescales"] if note["rescale"] == "yarn:auto"]
    assert [note["factor"] for note in notes] == [1.0, 2.0, 4.0]
    assert all(note["kept"] + note["blended"] + note["interpolated"] == 4 for note in notes)
    assert summary["notes"]["documents"]["kept"] == 3


def test_rows_name_the_kernel_that_runs_under_a_control(study, tmp_path, monkeypatch):
    """And the mask it runs under: a control may ask for another kernel than the plain model."""

    def chosen(kernel, device, dtype, encoding, mask_kind, *, consecutive=True):
        return "sdpa" if mask_kind == "causal" and consecutive else "eager"

    monkeypatch.setattr(attention, "resolve", chosen)
    plan = plan_of(rescales=["none"], attention_window="0.5x", shuffle_positions=True)
    evaluate("tiny", plan, runs_root=study, output=tmp_path, only={"encoding": "rope"})
    frame = rows.read_rows(tmp_path)
    found = frame[["control", "kernel", "mask_kind"]].drop_duplicates()
    assert sorted(found.itertuples(index=False, name=None)) == [
        ("attention_window=8", "eager", "window"),
        ("none", "sdpa", "causal"),
        ("shuffle_positions", "eager", "causal"),
    ]


def test_finished_cells_are_not_measured_again(results, study, monkeypatch):
    monkeypatch.setattr(evaluation, "measure_together", lambda *_: pytest.fail("measured again"))
    learned = results["label"] == "learned"
    with pytest.raises(pytest.fail.Exception):  # what failed is tried again, and only that
        evaluate("tiny", plan_of(), runs_root=study)
    evaluate("tiny", plan_of(), runs_root=study, only={"encoding": "rope"})
    kept = rows.read_rows(study / "tiny" / "eval" / "test")
    assert set(kept["label"]) == {"rope", "learned"}
    assert len(kept) == len(results[~learned]) + len(results[learned & (results["status"] == "ok")])


def test_dry_run_lists_the_cells_and_writes_nothing(study, tmp_path):
    cells = evaluate("tiny", plan_of(), runs_root=study, output=tmp_path / "out", dry_run=True)
    assert len(cells) == 2 * 2 * 3 + 2 * 3
    assert {"run": "rope-s0", "rescale": "none", "length": 16, "protocol": "prefix", "stride": None} in cells
    assert not (tmp_path / "out").exists()


def test_truncation_reads_the_same_targets_with_training_length_context(study, tmp_path):
    """At the training length the line is the curve; past it no target sees more than the training length."""
    plan = plan_of(
        lengths=["1x", "4x"],
        protocols=["prefix", {"name": "exact-context", "num_targets": 3}],
        truncation=True,
        rescales=["none"],
    )
    evaluate("tiny", plan, runs_root=study, output=tmp_path, only={"encoding": "rope"})
    frame = rows.read_rows(tmp_path)
    sums = frame.groupby(["rescale", "protocol", "length"])[["nll_sum", "num_tokens"]].sum()
    exact = sums.xs("exact-context", level="protocol")
    assert exact.loc[("truncation", 64), "nll_sum"] == pytest.approx(exact.loc[("none", 16), "nll_sum"])
    prefix = frame[(frame["protocol"] == "prefix") & (frame["length"] == 64)]
    own = prefix[prefix["rescale"] == "none"].set_index(["document", "position_lo"])
    cut = prefix[prefix["rescale"] == "truncation"].set_index(["document", "position_lo"])
    assert own["num_tokens"].to_dict() == cut["num_tokens"].to_dict()
    for document in range(3):
        for low in (1, 2, 4, 8):  # contexts below the training length are what they were
            assert cut.loc[(document, low), "nll_sum"] == pytest.approx(own.loc[(document, low), "nll_sum"])


def test_both_parts_of_a_change_are_over_one_index_range(study, tmp_path):
    """What nonoverlapping lost past the longest length is measured where exact-context draws its targets."""
    plan = plan_of(
        lengths=["1x", "4x"],
        protocols=["nonoverlapping", {"name": "exact-context", "num_targets": 10_000}],
        rescales=["none", "linear:auto"],
    )
    evaluate("tiny", plan, runs_root=study, output=tmp_path, only={"encoding": "rope"})
    frame = rows.read_rows(tmp_path)
    late = frame[frame["protocol"] == LATE]
    assert set(late["rescale"]) == {"none"} and set(late["length"]) == {16, 64}
    counts = frame[frame["rescale"] == "none"].groupby(["protocol", "length", "document"])["num_tokens"].sum()
    for length in (16, 64):
        assert counts[LATE, length].to_dict() == counts["exact-context", length].to_dict()
    [one] = comparisons.decompose(tables.prepare(frame.assign(plan="test")))
    assert one.same_range
    at = {
        (name, length): part["nll_sum"].sum() / part["num_tokens"].sum()
        for (name, length), part in frame[frame["rescale"] == "none"].groupby(["protocol", "length"])
    }
    assert one.total.estimate == pytest.approx(at[LATE, 64] - at[LATE, 16])
    assert one.context.estimate == pytest.approx(at["exact-context", 64] - at["exact-context", 16])


def llama_folder(folder: Path, **changes) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**{"vocab_size": 257, "max_position_embeddings": 32, **sizes, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text" / "a.txt"
    path.parent.mkdir()
    path.write_text("a line of words, and some more of them. " * 30, encoding="utf-8")
    return path


def test_a_checkpoint_runs_the_same_plan(tmp_path, text):
    source = str(llama_folder(tmp_path / "llama"))
    plan = plan_of(corpus=str(text), rescales=["none", "dynamic", "ntk:auto"], num_documents=1)
    folder = evaluate(source, plan, runs_root=tmp_path / "runs")
    assert folder.parent == tmp_path / "runs" / "eval"
    frame = rows.read_rows(folder)
    assert set(frame["status"]) == {"ok"}
    assert set(frame["model"]) == {source}
    assert set(frame["train_length"]) == {32}
    assert set(frame["length"]) == {32, 64, 128}


def test_means_of_windows_are_what_is_printed_and_written(tmp_path, text):
    """`aggregation: yarn` is the mean of window means wherever its number is read."""
    source = str(llama_folder(tmp_path / "llama"))
    plan = plan_of(corpus=str(text), lengths=[32, 64], protocols=[{"name": "sliding", "stride": 8}])
    plan = plan.with_overrides(["rescales=[none]", "num_documents=2", "aggregation=yarn"])
    folder = evaluate(source, plan, runs_root=tmp_path / "runs")
    frame = rows.read_rows(folder)
    [cell] = json.loads((folder / "results.json").read_text())["results"].values()
    for length, part in frame.groupby("length"):
        mean = part["window_mean_sum"].sum() / part["num_windows"].sum()
        assert mean != pytest.approx(part["nll_sum"].sum() / part["num_tokens"].sum(), rel=1e-6)
        assert cell[f"nll_{length},none"] == pytest.approx(mean, rel=1e-9)
        bits = mean * part["num_tokens"].sum() / np.log(2) / part["num_bytes"].sum()
        assert cell[f"bits_per_byte_{length},none"] == pytest.approx(bits, rel=1e-9)
        shown = tables.length_curves(frame[frame["length"] == length], "yarn")
        assert shown["bits_per_byte"].tolist() == pytest.approx([bits], rel=1e-9)
    assert "sliding (means of window means)" in listing.results(folder)


def test_two_strides_are_printed_as_two_protocols(tmp_path, text):
    source = str(llama_folder(tmp_path / "llama"))
    plan = plan_of(corpus=str(text), lengths=[32, 64], rescales=["none"], num_documents=1)
    plan = plan.with_overrides(["protocols=[{name: sliding, stride: 8}, {name: sliding, stride: 32}]"])
    folder = evaluate(source, plan, runs_root=tmp_path / "runs")
    cells = json.loads((folder / "results.json").read_text())["results"]
    for stride in (8, 32):
        [values] = [cell for task, cell in cells.items() if task.endswith(f"none/sliding_{stride}")]
        [line] = [
            block.split("\n")[2].split()
            for block in listing.results(folder).split("\n\n")
            if block.startswith(f"bits per byte, sliding_{stride}\n")
        ]
        assert line[-2:] == [f"{values[f'bits_per_byte_{length},none']:.3f}" for length in (32, 64)]


def test_targets_that_end_alike_get_a_folder_each(tmp_path, text):
    """One must not write over the rows of the other."""
    sources = [str(llama_folder(tmp_path / name / "final", intermediate_size=size)) for name, size in SIZES]
    flags = [
        "--corpus",
        str(text),
        "--lengths",
        "16",
        "--num-documents",
        "1",
        "--output",
        str(tmp_path / "out"),
    ]
    assert cli.main(["eval", *sources, *flags]) == 0
    written = [rows.read_rows(path.parent) for path in sorted((tmp_path / "out").glob("*/results.parquet"))]
    assert [set(frame["model"]) for frame in written] == [{source} for source in sources]


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (PlanError, {"lengths": [64, 32]}, "ascending"),
        (PlanError, {"rescales": ["yarn:0.5"]}, "factor"),
        (DataError, {"lengths": [100_000]}, "no document is long enough"),
        (DataError, {"corpus": "no/such/text"}, "no/such/text"),
    ],
)
def test_plans_that_cannot_be_measured(study, error, changes, message):
    with pytest.raises(error, match=message):
        evaluate("tiny", plan_of(**changes), runs_root=study)


def test_a_model_that_turns_is_not_said_to_have_no_rotary_positions(tmp_path):
    FalconConfig(alibi=False).save_pretrained(tmp_path)
    said = r"accepted: none, linear:S, ntk:S, .*, longrope:FILE \(.* takes no logn: the attention of falcon"
    with pytest.raises(RescaleError, match=said):
        evaluate(str(tmp_path), plan_of(rescales=["logn", "yarn:2+logn"]), runs_root=tmp_path / "runs")


def test_what_no_subject_can_do_is_refused_before_any_work(study, monkeypatch):
    """A rescale where no run has RoPE, a kernel that is unknown or cannot run here."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(evaluation.Texts, "of", lambda *_: pytest.fail("read the text first"))
    learned = str(study / "tiny" / "learned-s0")
    with pytest.raises(
        RescaleError, match=r"found yarn:4; accepted: none, linear:S, logn \(learned-s0 has no"
    ):
        evaluate(learned, plan_of(rescales=["yarn:4"]), runs_root=study)
    with pytest.raises(UsageError, match='did you mean "flash"'):
        evaluate("tiny", plan_of(), runs_root=study, kernel="flsh")
    with pytest.raises(UsageError, match="flash cannot run"):
        evaluate("tiny", plan_of(), runs_root=study, kernel="flash")


def test_only_picks_as_it_does_in_training(study):
    def picked(target="tiny", **only):
        cells = evaluate(target, plan_of(), runs_root=study, only=only, dry_run=True)
        return {cell["run"] for cell in cells}

    assert picked(run="rope-s0") == {"rope-s0"}
    assert picked(encoding="learned", seed="0") == {"learned-s0"}
    with pytest.raises(UsageError, match="no such run"):
        picked(str(study / "tiny" / "rope-s0"), seed="1")


def test_targets_that_cannot_be_measured(study, tmp_path, text):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        evaluate("no/such/thing/there", plan_of(), runs_root=study)
    with pytest.raises(CheckpointError, match='no such study or run; did you mean "tiny"'):
        evaluate(f"{study}/tiyn", plan_of(), runs_root=study)
    with pytest.raises(CheckpointError, match='no such study or run; did you mean "rope-s0"'):
        evaluate(f"{study}/tiny/rope-s1", plan_of(), runs_root=study)
    with pytest.raises(CheckpointError, match=r"a folder of studies; name one of them \(tiny\)"):
        evaluate(str(study), plan_of(), runs_root=study)
    with pytest.raises(UsageError, match="did you mean"):
        evaluate("tiny", plan_of(), runs_root=study, only={"encodin": "rope"})
    with pytest.raises(UsageError, match="no such run"):
        evaluate("tiny", plan_of(), runs_root=study, only={"encoding": "alibi"})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match="not empty and not ours"):
        evaluate("tiny", plan_of(), runs_root=study, output=tmp_path / "full")
    gpt2 = tmp_path / "gpt2"
    config = GPT2Config(vocab_size=257, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(gpt2)
    byte_tokenizer().save_pretrained(gpt2)
    with pytest.raises(RescaleError, match="no rotary positions"):
        evaluate(str(gpt2), plan_of(corpus=str(text), rescales=["yarn:2"], lengths=[32]), runs_root=tmp_path)
    small = llama_folder(tmp_path / "small", vocab_size=90)
    with pytest.raises(CheckpointError, match="tokenizer and model do not fit"):
        evaluate(str(small), plan_of(corpus=str(text), num_documents=1), runs_root=tmp_path)


def test_an_unfinished_run_is_left_out(study, tmp_path):
    shutil.copytree(study / "tiny", tmp_path / "tiny", ignore=shutil.ignore_patterns("eval"))
    (tmp_path / "tiny" / "rope-s0" / "DONE").unlink()
    cells = evaluate("tiny", plan_of(), runs_root=tmp_path, dry_run=True)
    assert {cell["run"] for cell in cells} == {"learned-s0"}


def test_default_plans_and_folders(study):
    assert default_plan("tiny", study).lengths == ("1x",)
    assert default_plan("some/model", study).corpus == "stdlib"
    assert default_folder("some/model", study, plan_of()) == study / "eval" / "some--model"
    assert (
        default_folder(str(study / "tiny" / "rope-s0"), study, plan_of()) == study / "tiny" / "eval" / "test"
    )
