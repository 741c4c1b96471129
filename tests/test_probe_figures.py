"""Controls, snapshots and attention on the page, from constructed rows with known answers."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest
import synthetic_studies as synthetic

from pe_study import report, rows, tables
from pe_study.reporting import attention_figures, control_effects, control_figures, drawing, palette

SMALL = {"encodings": ["nope", "rope"], "lengths": (64, 128, 256), "num_documents": 3, "rescales": ("none",)}
LOOKS = palette.looks([("nope", "nope"), ("rope", "rope")])


def plain(**options: object) -> pd.DataFrame:
    return synthetic.plain_rows(**{**SMALL, "protocols": ("nonoverlapping",), **options})


# --- controls --------------------------------------------------------------------------------------------


def controlled() -> pd.DataFrame:
    """nope loses a nat a token when its far text is shuffled, rope nothing."""
    frame = plain().assign(control="far_context=shuffled")
    far = (frame["label"] == "nope") & (frame["length"] > 64)
    frame.loc[far, "nll_sum"] += frame.loc[far, "num_tokens"]
    return frame


def test_a_control_is_a_line_beside_the_plain_one() -> None:
    curves = control_figures.control_curves(tables.length_curves(plain()), controlled())
    wide = curves[curves["length"] == 256].set_index(["label", "control"])["nll"]
    assert wide["nope", "far_context=shuffled"] - wide["nope", "none"] == pytest.approx(1)
    assert wide["rope", "far_context=shuffled"] == pytest.approx(wide["rope", "none"])
    figure = control_figures.control_figure(curves, "nll", "nonoverlapping", "synthetic")
    assert figure is not None
    svg = drawing.render(figure, "one-column", ("svg",))["svg"].decode()
    for text in ("far_context=shuffled", "as it is", "nope", "rope", "trained at 64"):
        assert text in svg
    assert control_figures.control_figure(curves, "nll", "sliding", "synthetic") is None


def test_the_effect_of_a_control_is_measured_on_the_same_documents() -> None:
    """A nat for nope and nothing for rope, exactly: the documents' own spread cancels."""
    found = control_effects.effects(plain(), controlled(), "nonoverlapping")
    assert [(one.label, one.length, one.num_seeds) for one in found] == [("nope", 256, 1), ("rope", 256, 1)]
    assert [one.interval.estimate for one in found] == pytest.approx([1, 0], abs=1e-12)
    assert found[0].interval.bounds() == pytest.approx((1, 1))
    (said,) = control_effects.sentences(found)
    assert "**far_context=shuffled** at 256 changes the loss, in these runs, by nope +1.000 [" in said
    assert control_effects.effects(plain(), controlled(), "sliding") == []
    other_seed = controlled().assign(seed=1)
    both = pd.concat([controlled(), other_seed])
    assert [one.num_seeds for one in control_effects.effects(plain(), both, "nonoverlapping")] == [1, 1]


@pytest.mark.parametrize(
    ("control", "said"),
    [
        (
            "attention_window=32",
            "attention_window hides all but the last 32 keys of each query. Where",
        ),
        ("shuffle_positions", "shuffle_positions permutes the positions of a window, its text stays. Where"),
        (
            "far_context=shuffled",
            "far_context replaces the text farther back than the training length. Where",
        ),
    ],
)
def test_a_caption_says_what_its_controls_do_and_no_other(control: str, said: str) -> None:
    curves = control_figures.control_curves(
        tables.length_curves(plain()), controlled().assign(control=control)
    )
    figure = control_figures.control_figure(curves, "nll", "nonoverlapping")
    assert figure is not None
    assert said in figure.caption
    kinds = {"attention_window", "shuffle_positions", "far_context"} - {control.partition("=")[0]}
    assert not any(kind in figure.caption for kind in kinds)


# --- over training ---------------------------------------------------------------------------------------


def snapshots() -> pd.DataFrame:
    parts = []
    for step in (100, 200, 400):
        frame = plain().assign(step=float(step), trained_tokens=step * 1000.0)
        frame["device_hours"] = frame["trained_tokens"] * frame["label"].map(
            {"nope": 1e-6, "rope": 2e-6}
        ).astype(float)
        frame["nll_sum"] = frame["num_tokens"] * (2 + 100 / step)
        parts.append(frame)
    return pd.concat(parts, ignore_index=True)


def test_snapshots_are_curves_over_tokens_and_hours() -> None:
    curves = control_figures.training_curves(snapshots())
    one = curves[(curves["label"] == "rope") & (curves["length"] == 128)].sort_values("step")
    assert one["nll"].tolist() == pytest.approx([3, 2.5, 2.25])
    assert one["trained_tokens"].tolist() == [100_000, 200_000, 400_000]
    assert one["device_hours"].tolist() == pytest.approx([0.2, 0.4, 0.8])
    figure = control_figures.over_training_figure(curves, "nll", "nonoverlapping", LOOKS)
    assert figure is not None
    svg = drawing.render(figure, "two-column", ("svg",))["svg"].decode()
    for text in ("device-hours", "tokens trained on", "length 64", "length 256"):
        assert text in svg
    last = curves[curves["step"] == 400]
    assert control_figures.over_training_figure(last, "nll", "nonoverlapping", LOOKS) is None


# --- attention -------------------------------------------------------------------------------------------


def diagnostics(**changed: object) -> pd.DataFrame:
    """Entropy ratio 1 in layer 0, a half in layer 1; all mass near in head 0, far in head 1."""
    records = []
    for label in ("nope", "rope"):
        for layer, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
            one = {"study": "synthetic", "run": f"{label}-s0", "model": label, "label": label, "seed": 0}
            one |= {
                "encoding": label,
                "rescale": "none",
                "train_length": 64,
                "length": 256,
                "corpus": "stdlib",
            }
            one |= {"layer": layer, "head": head, "status": "ok", "control": "none"}
            for low, high in ((1, 64), (64, 129), (129, 257)):
                place = one | {"position_lo": low, "position_hi": high, "num_queries": high - low}
                ratio = 1.0 if layer == 0 else 0.5
                beyond = None if high <= 64 else 0.25
                records.append(
                    place | {"entropy_ratio": ratio, "max_logit": 3.0 + head, "mass_beyond": beyond}
                )
                records += [
                    place
                    | {"distance_lo": at, "distance_hi": at + 64, "mass": float((at == 0) == (head == 0))}
                    for at in (0, 64)
                ]
    return rows.make_rows([one | changed for one in records], rows.DIAGNOSTICS_COLUMNS)


def test_measures_are_means_over_heads_and_the_largest_logit() -> None:
    found = attention_figures.by_position(attention_figures.plain(diagnostics()))
    assert len(found) == 6
    assert found["entropy_ratio"].tolist() == pytest.approx([0.75] * 6)
    assert found["max_logit"].tolist() == [4] * 6
    first, last = found.iloc[0], found.iloc[2]
    assert math.isnan(first["mass_beyond"])
    assert last["mass_beyond"] == pytest.approx(0.25)


def test_lost_and_controlled_rows_are_left_out() -> None:
    kept = diagnostics()
    lost = diagnostics(status="oom", entropy_ratio=None, length=512)
    other = diagnostics(control="far_context=shuffled", entropy_ratio=9.0)
    everything = attention_figures.plain(pd.concat([kept, lost, other]))
    assert attention_figures.by_position(everything)["entropy_ratio"].max() == pytest.approx(0.75)
    assert attention_figures.position_figure(attention_figures.plain(lost), LOOKS) is None


def small_windows() -> pd.DataFrame:
    """Windows of 128 tokens: the first query sees one key and has no entropy, the last, 128 keys, a bin."""
    records = []
    one = {"study": "synthetic", "run": "nope-s0", "model": "nope", "label": "nope", "encoding": "nope"}
    one |= {"rescale": "none", "train_length": 64, "length": 128, "corpus": "stdlib", "status": "ok"}
    for low, queries in ((1, 2), (2, 4), (64, 128), (128, 2)):
        place = one | {"layer": 0, "head": 0, "position_lo": low, "position_hi": 2 * low}
        place["num_queries"] = queries
        ratio = None if low == 1 else 0.5
        records.append(place | {"entropy_ratio": ratio, "max_logit": 1.0, "mass_beyond": 0.1})
        records.append(place | {"distance_lo": 0, "distance_hi": 64, "mass": 0.7 if low == 64 else 0.2})
    return attention_figures.plain(rows.make_rows(records, rows.DIAGNOSTICS_COLUMNS))


def test_a_query_that_sees_one_key_has_no_entropy() -> None:
    found = attention_figures.by_position(small_windows()).set_index("position_lo")["entropy_ratio"]
    assert math.isnan(found[1])
    assert found[[2, 64, 128]].tolist() == [0.5] * 3


def test_no_query_sees_more_keys_than_a_window_has() -> None:
    """The last query of a window begins a bin: it is placed where it is, and heads rest on the bin before."""
    frame = small_windows()
    (line,) = attention_figures._lines(attention_figures.by_position(frame), "max_logit", LOOKS, False)
    assert line.x[-1] == pytest.approx(7)
    heads = attention_figures.heads_figure(frame)
    assert heads is not None
    assert "64 to 127 keys in sight, in windows of 128 tokens" in heads.caption
    assert heads.table["mass"].tolist() == [0.7]


def test_heads_of_a_chosen_run() -> None:
    frame = attention_figures.plain(diagnostics())
    assert attention_figures.heads_figure(frame).name == "attention-heads-nope-s0"
    figure = attention_figures.heads_figure(frame, "rope-s0")
    assert figure is not None
    assert "129 to 256 keys in sight" in figure.caption
    assert "layer 1, head 0: most at 0\u201363" in figure.alt
    assert "layer 1, head 1: most at 64\u2013127" in figure.alt


@pytest.mark.usefixtures("undrawn")
def test_all_three_are_sections_of_the_page(tmp_path: Path) -> None:
    made = synthetic.rows(**SMALL, protocols=("nonoverlapping",))
    folder = synthetic.write_study(tmp_path / "runs", made)
    evaluation = folder / "eval" / "length"
    shuffled = made[made["length"] > 64].assign(control="far_context=shuffled")
    both = pd.concat([made.assign(control="none"), shuffled], ignore_index=True)
    rows.write_rows(both, evaluation)
    steps = [made.assign(step=n, trained_tokens=n * 4096, device_hours=n / 1000) for n in (100, 300)]
    rows.write_rows(pd.concat(steps, ignore_index=True), evaluation, rows.OVER_TRAINING)
    rows.write_rows(diagnostics(), evaluation, rows.DIAGNOSTICS)
    view = tmp_path / "view.yaml"
    view.write_text("attention_run: rope-s0\n", encoding="utf-8")
    page = report.build([folder], tmp_path / "out", view=view, formats=()).read_text(encoding="utf-8")
    for name in (
        "controls-nonoverlapping-bits_per_byte",
        "over-training-nonoverlapping-bits_per_byte",
        "attention-position",
        "attention-heads-rope-s0",
    ):
        assert f'id="figure-{name}"' in page, name
