"""Lengths in bytes: the same text for every tokenizer, against plain counting and a model of known bits."""

from __future__ import annotations

import io
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_of_all_kinds import byte_level
from transformers import AutoModelForCausalLM, LlamaConfig

from pe_study import recipe, rows, runs
from pe_study.commands import listing
from pe_study.errors import DataError, PlanError, RecipeError
from pe_study.evaluators import byte_lengths, cells, live, seen, windows
from pe_study.evaluators.byte_lengths import SPAN, windows_of
from pe_study.evaluators.jobs import DocumentSequence, Job
from pe_study.evaluators.perplexity import measure
from pe_study.evaluators.reading import Reading
from pe_study.evaluators.study import evaluate
from pe_study.evaluators.truncation import Truncation
from pe_study.plan import load_plan
from pe_study.settings import leaves
from pe_study.text.tokenization import byte_tokenizer

BITS = 9.0  # a byte
EXACT = windows.protocol("exact-context", num_targets=5)
PREFIX = windows.protocol("prefix")


def sequence(sizes, bos: bool = False) -> DocumentSequence:
    """A document whose token ids are their numbers of bytes, 7 being BOS."""
    ids = np.array([7, *sizes] if bos else sizes, dtype=np.int64)
    covered = np.array([0, *sizes] if bos else sizes, dtype=np.int64)
    return DocumentSequence(ids, covered, 7 if bos else None)


def uniform(ids_BT):
    """Every byte costs 9 bits, whatever the tokens: what is left of the probability goes to id 0."""
    chances = torch.tensor([0.0, *(2.0 ** (-BITS * size) for size in range(1, 7)), 0.0], dtype=torch.float64)
    chances[0] = 1 - chances.sum()
    logits = torch.log(chances + 1e-300)
    return SimpleNamespace(logits=logits.expand(*ids_BT.shape, -1))


def tokenized(num_bytes: int, seed: int) -> list[int]:
    """A cut of a text into tokens of 1 to 6 bytes."""
    draw, sizes = np.random.default_rng(seed), []
    while sum(sizes) < num_bytes:
        sizes.append(int(min(draw.integers(1, 7), num_bytes - sum(sizes))))
    return sizes


def bits_per_byte(sizes, protocol, num_bytes: int, bos: bool) -> tuple[float, int]:
    document = sequence(sizes, bos)
    plan = windows_of(document, protocol, num_bytes, 200)
    length = int((plan.stop - plan.start).max())
    job = Job([document], protocol, length, np.zeros(len(plan.start), dtype=np.int64), *plan)
    found, reason = measure(job, lambda length: uniform, Reading())
    assert reason is None
    total = sum(row["num_bytes"] for row in found)
    return math.fsum(row["nll_sum"] for row in found) / math.log(2) / total, total


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("protocol", [EXACT, PREFIX])
@pytest.mark.parametrize("num_bytes", [100, 200])
def test_two_tokenizers_of_one_byte_uniform_model_give_equal_bits_per_byte(protocol, num_bytes, bos):
    found = [bits_per_byte(tokenized(1000, seed), protocol, num_bytes, bos) for seed in (0, 1)]
    found.append(bits_per_byte([1] * 1000, protocol, num_bytes, bos))
    assert [bits for bits, _ in found] == pytest.approx([BITS] * 3, rel=1e-6)
    wanted = 5 * SPAN if protocol is EXACT else num_bytes
    assert all(abs(total - wanted) <= (5 if protocol is EXACT else 1) * 6 for _, total in found)


@given(st.lists(st.integers(0, 6), min_size=120, max_size=200), st.integers(1, 60), st.booleans())
def test_windows_against_plain_counting(sizes, num_bytes, bos):
    """Each target begins in a drawn span; its context covers the length, and one token less does not."""
    longest = 60
    if sum(sizes) < longest + SPAN:
        return
    begins = np.cumsum([0, *sizes[:-1]])
    drawn = byte_lengths.draw(sum(sizes), longest, 5, 0)
    expected = []
    for span in longest + SPAN * drawn:
        targets = [i for i, begin in enumerate(begins) if span <= begin < span + SPAN]
        if targets:
            start = max(i for i in range(targets[0] + 1) if begins[targets[0]] - begins[i] >= num_bytes)
            expected.append((start, targets[0], targets[-1]))
    plan = windows_of(sequence(sizes, bos), EXACT, num_bytes, longest)
    # Inputs [start, stop) predict [start + 1, stop + 1) of a sequence that BOS, where it is on, begins.
    first = plan.start + plan.first + 1 - bos
    assert [*zip(plan.start, first, plan.stop - bos, strict=True)] == expected


@given(st.lists(st.integers(0, 6), min_size=1, max_size=100), st.integers(1, 100), st.booleans())
def test_a_prefix_covers_the_length(sizes, num_bytes, bos):
    if sum(sizes) < num_bytes:
        with pytest.raises(DataError):
            windows_of(sequence(sizes, bos), PREFIX, num_bytes, num_bytes)
        return
    plan = windows_of(sequence(sizes, bos), PREFIX, num_bytes, num_bytes)
    if not len(plan.stop):  # one token that covers all is no target without BOS
        assert not bos
        assert np.cumsum(sizes)[0] >= num_bytes
        return
    [stop] = plan.stop
    read = sizes[: stop + 1 - bos]
    assert sum(read) >= num_bytes > sum(read[:-1])


def test_the_drawn_text_does_not_depend_on_tokenizer_length_or_seed_of_others():
    drawn = byte_lengths.draw(10_000, 100, 5, 0)
    assert len(set(drawn)) == 5
    assert (drawn == byte_lengths.draw(10_000, 100, 5, 0)).all()
    assert drawn.max() < (10_000 - 100) // SPAN
    assert (byte_lengths.draw(300, 100, 5, 0) == np.arange(3)).all()


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=257, max_position_embeddings=256, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    for number in range(3):
        text = f"document {number}: größer, and then some more of it. " * 12
        (folder / "texts").mkdir(exist_ok=True)
        (folder / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    return str(folder)


def plan_of(source, **keys):
    plan = {"lengths": ["64B", "0.125kB"], "protocols": ["exact-context", "prefix"], "truncation": False}
    return load_plan({**plan, "corpus": f"{source}/texts", **keys})


def test_rows_have_the_length_in_both_units(source, tmp_path):
    """A byte is a token here: an exact window has the length and the 63 targets before its last, a prefix
    of the length has one input less."""
    found = rows.read_rows(evaluate(source, plan_of(source), runs_root=tmp_path, output=tmp_path / "out"))
    lengths = set(zip(found["protocol"], found["length_bytes"], found["length"], strict=True))
    assert lengths == {
        *(("exact-context", 64, 127), ("exact-context", 128, 191)),
        *(("prefix", 64, 63), ("prefix", 128, 127)),
    }
    assert set(found["status"]) == {"ok"}
    exact = found[found["protocol"] == "exact-context"]
    assert (exact["position_hi"] > exact["length_bytes"]).all()
    spans = exact.groupby(["length", "document"])[["num_tokens", "num_bytes"]].sum()
    assert (spans % SPAN == 0).all().all()
    prefix = found[found["protocol"] == "prefix"].groupby(["length_bytes", "document"])["num_bytes"].sum()
    assert all(total == size - 1 for (size, _), total in prefix.items())  # no BOS: the first is no target


def test_a_text_that_may_have_been_seen_is_warned_of(source, tmp_path, monkeypatch, caplog):
    """As with lengths in tokens: aloud, and in the notes."""
    monkeypatch.setattr(seen, "older_than_release", lambda *_: "the text is older")
    for name, lengths in (("bytes", ["64B"]), ("tokens", [64])):
        caplog.clear()
        plan = plan_of(source, lengths=lengths, protocols=["prefix"])
        folder = evaluate(source, plan, runs_root=tmp_path, output=tmp_path / name)
        assert [record.getMessage() for record in caplog.records].count("the text is older") == 1
        assert runs.read_json(folder / "results.json")["notes"]["documents"]["may_be_seen"]


def test_prefixes_are_those_that_are_read_alone(source, tmp_path):
    """Two lengths together give what each gives alone: no document is cut at another's tokens."""
    both = rows.read_rows(evaluate(source, plan_of(source), runs_root=tmp_path, output=tmp_path / "a"))
    alone = plan_of(source, lengths=["64B"], protocols=["prefix"])
    one = rows.read_rows(evaluate(source, alone, runs_root=tmp_path, output=tmp_path / "b"))
    prefix = both[(both["protocol"] == "prefix") & (both["length_bytes"] == 64)]
    assert prefix["nll_sum"].sum() == pytest.approx(one["nll_sum"].sum(), rel=1e-6)


def test_lengths_in_tokens_are_those_of_each_protocol(source, tmp_path):
    """What a model is declared for, and so its rows, are what each protocol has alone."""
    plan = plan_of(source, rescales=["none", "linear:auto"])
    both = rows.read_rows(evaluate(source, plan, runs_root=tmp_path, output=tmp_path / "both"))
    assert set(both["status"]) == {"ok"}
    for protocol in ("prefix", "exact-context"):
        folder = evaluate(
            source,
            plan.with_overrides([f"protocols=[{protocol}]"]),
            runs_root=tmp_path,
            output=tmp_path / protocol,
        )
        alone = rows.read_rows(folder)
        of_both = both[both["protocol"] == protocol].reset_index(drop=True)
        assert of_both[list(alone)].equals(alone)
    wide = plan.with_overrides(["lengths=[64B]", "protocols=[prefix]"])
    [cell] = evaluate(source, wide, runs_root=tmp_path, dry_run=True)[:1]
    assert (cell["length"], cell["bytes"]) == (63, 64)


def test_cells_in_bytes_in_tokens_and_of_an_older_version_stand_in_no_table_together(source, tmp_path):
    evaluate(source, plan_of(source, lengths=["64B"]), runs_root=tmp_path, output=tmp_path / "out")
    for path in (tmp_path / "out" / "cells").glob("*.json"):
        key = runs.read_json(path)
        assert key["longest"] == (64 if key["protocol"]["name"] == "exact-context" else None)
        in_tokens = {name: key[name] for name in key if name not in ("span_bytes", "bytes_version")}
        others = [in_tokens, {**in_tokens, "span_bytes": SPAN}, {**key, "bytes_version": 1}]
        assert cells.setting(key).table not in [cells.setting(other).table for other in others]


def test_heads_of_the_table_name_the_bytes(source, tmp_path):
    plan = plan_of(source, lengths=["64B", "0.1875kB"])
    printed = listing.results(evaluate(source, plan, runs_root=tmp_path, output=tmp_path / "out"))
    heads = [block.split("\n")[1].split() for block in printed.split("\n\n")]
    assert heads == [["label", "rescale", "64B", "192B"]] * 2
    assert [leaves.bytes_text(size) for size in (1000, 1024, 4096)] == ["1000B", "1kB", "4kB"]


def test_a_line_of_the_growing_table_names_the_bytes(source, tmp_path, monkeypatch):
    plan = plan_of(source, lengths=["64B"], protocols=["prefix"])
    frame = rows.read_rows(evaluate(source, plan, runs_root=tmp_path, output=tmp_path / "out"))
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with live.LiveTable("token") as table:
        table.add(frame)
        table.add(frame.assign(length_bytes=None))
        assert list(table._table.columns[3].cells) == ["64B", "63"]


def by_context(ids_BT):
    """Losses that depend on all that was read in the window."""
    read_BT = torch.as_tensor(ids_BT).cumsum(-1).double()
    return SimpleNamespace(logits=torch.sin(read_BT[..., None] * torch.arange(1, 9)))


@pytest.mark.parametrize("batch_tokens", [1, 10_000])
@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("limit", [5, 30, 60])
def test_the_truncation_line_scores_the_same_targets_one_by_one(limit, bos, batch_tokens):
    """Tokens of 1 to 6 bytes: windows that are cut to one shape come from windows of several."""
    documents = [sequence(tokenized(1000, seed), bos) for seed in range(4)]
    plans = [
        windows_of(document, windows.protocol("exact-context", num_targets=12), 100, 200)
        for document in documents
    ]
    which = np.repeat(np.arange(4), [len(plan.start) for plan in plans])
    places = [np.concatenate(arrays) for arrays in zip(*plans, strict=True)]
    job = Job(documents, EXACT, int((places[1] - places[0]).max()), which, *places)
    assert len({*zip(places[1] - places[0], places[2], strict=True)}) > 10
    line = Truncation(documents, limit, lambda: by_context, Reading(batch_tokens))
    found, reason = line.measure(job)
    assert reason is None
    expected: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for document, start, stop, first in zip(which, *places, strict=True):
        own = documents[document]
        begin = min(max(stop - limit, start), start + first)
        ids = own.ids[begin : stop + 1].copy()
        ids[0] = 7 if bos else ids[0]
        chances = by_context(ids[:-1]).logits.log_softmax(-1)
        for target in range(start + first, stop):  # its context in the window that was not cut
            loss = -float(chances[target - begin, ids[target - begin + 1]])
            at = expected.setdefault((document, int(target - start + 1).bit_length() - 1), [])
            at.append((loss, int(own.token_bytes[target + 1])))
    assert {(row["document"], int(row["position_lo"]).bit_length() - 1) for row in found} == set(expected)
    for row in found:
        here = expected[row["document"], int(row["position_lo"]).bit_length() - 1]
        assert row["nll_sum"] == pytest.approx(sum(loss for loss, _ in here), rel=1e-5)
        assert (row["num_tokens"], row["num_bytes"]) == (len(here), sum(size for _, size in here))


def test_the_truncation_line_of_a_real_tokenizer_scores_the_same_bytes(source, tmp_path):
    shutil.copytree(source, tmp_path / "bpe")
    pieces = byte_level()
    pieces.hf.save_pretrained(tmp_path / "bpe")
    config = LlamaConfig.from_pretrained(source)
    config.vocab_size, config.max_position_embeddings = pieces.vocab_size, 20
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "bpe")
    plan = plan_of(source, lengths=["64B", "256B"], truncation=True)
    found = rows.read_rows(evaluate(str(tmp_path / "bpe"), plan, runs_root=tmp_path, output=tmp_path / "out"))
    assert set(found["status"]) == {"ok"}
    totals = found.groupby(["protocol", "length_bytes", "rescale"])["num_bytes"].sum().unstack("rescale")
    assert (totals["none"] == totals["truncation"]).all() and len(totals) == 4
    assert found["num_bytes"].sum() > found["num_tokens"].sum()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"protocols": ["sliding"], "name": "x"}, "sliding needs a stride"),
        (
            {"protocols": ["nonoverlapping"]},
            "with protocol nonoverlapping; accepted with bytes: exact-context or",
        ),
        ({"unit": "stream"}, "found 64B with unit stream; accepted: lengths in tokens"),
        ({"tasks": ["passkey"]}, "found 64B with tasks"),
        ({"far_context": "shuffled"}, "found 64B with far_context"),
        ({"over_training": True}, "found 64B with over_training"),
        ({"diagnostics": True}, "found 64B with diagnostics"),
        ({"lengths": ["64B", 128]}, "found 64B beside lengths in tokens; accepted: all of one kind"),
        ({"lengths": ["64B", "63B"]}, "found 63B at or below the length before it"),
        (
            {"lengths": ["xB"]},
            r"accepted: a length such as 512, 2k \(2048\) or 4x .*, or 4kB \(bytes of text\)",
        ),
    ],
)
def test_what_does_not_go_with_bytes_is_refused(source, tmp_path, keys, said):
    with pytest.raises(PlanError, match=said):
        evaluate(source, plan_of(source, **keys), runs_root=tmp_path, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_texts_that_are_too_short_are_refused(source, tmp_path):
    with pytest.raises(
        DataError, match=r"longest length needs 1088 bytes, the longest of 3 documents has 576"
    ):
        evaluate(source, plan_of(source, lengths=["1kB"]), runs_root=tmp_path, output=tmp_path / "out")


def test_a_recipes_own_plan_is_in_tokens(tmp_path):
    from tiny_recipe import write

    with pytest.raises(RecipeError, match=r"eval\.lengths: found 4096B; accepted here: lengths in tokens"):
        recipe.load(write(tmp_path), ["eval.lengths=[4kB]"])
