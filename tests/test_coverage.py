"""Coverage of the intervals by simulation.

The process: loss of encoding e, seed s on document d =
    level_e + difficulty_d + interaction_ed + seed effect u_s + residual r_es + noise_esd
with interaction and noise skewed t4 (0.03 and 0.01 nats), u and r normal of the seed spread. The truth of
level (a) holds the weights fixed and redraws documents; (b) holds the documents and redraws seeds; (c)
redraws both. Documents are of equal size but in the section on unequal ones.
"""

from __future__ import annotations

import numpy as np
import pytest

from pe_study import stats
from pe_study.stats import Variance

NUM_ENCODINGS = 6
INTERACTION, NOISE = 0.03, 0.01


def skewed(rng: np.random.Generator, scale: float, shape: tuple[int, ...]) -> np.ndarray:
    """Skewed t4 of mean zero and standard deviation `scale`: a skew-normal over the root of a chi-square."""
    delta = 0.9
    first, second = np.abs(rng.normal(size=shape)), rng.normal(size=shape)
    normal = delta * first + np.sqrt(1 - delta**2) * second
    t4 = normal / np.sqrt(rng.chisquare(4, size=shape) / 4)
    mean = delta * np.sqrt(4 / np.pi) * 0.886227  # E of t4: delta sqrt(nu/pi) Gamma(3/2) / Gamma(2)
    return scale * (t4 - mean) / np.sqrt(2 - mean**2)


def intervals(loss: np.ndarray) -> dict[str, stats.Interval]:
    """The first encoding minus the second at each level, (a) with the first seed."""
    difference = loss[0] - loss[1]
    residual = stats.pooled_residual(loss.mean(2).T)
    over_seeds = stats.seed_difference(loss[0].mean(1), loss[1].mean(1), residual)
    variance = Variance(over_seeds.error**2, residual.df)
    both = stats.over_both(difference, np.ones(loss.shape[2]), variance)
    return {"a": stats.over_documents(difference[0]), "b": over_seeds, "c": both}


def covers(interval: stats.Interval, truth: float) -> bool:
    low, high = interval.bounds()
    return low <= truth <= high


def coverage(seeds: int, documents: int, spread: float, repeats: int) -> dict[str, float]:
    """Share of studies whose interval holds the truth of its own level; "a for b": (a)'s, of (b)'s truth."""
    rng = np.random.default_rng(seeds * 1000 + documents)
    hits = dict.fromkeys(("a", "b", "c", "a for b"), 0)
    for _ in range(repeats):
        shape = (NUM_ENCODINGS, seeds, 1)
        interaction = skewed(rng, INTERACTION, (NUM_ENCODINGS, 1, documents))
        residual = rng.normal(0, spread, shape)
        shared = rng.normal(0, 0.3, documents) + rng.normal(0, spread, (1, seeds, 1))
        noise = skewed(rng, NOISE, (NUM_ENCODINGS, seeds, documents))
        found = intervals(2.0 + shared + residual + interaction + noise)
        these_documents = float((interaction[0] - interaction[1]).mean())
        hits["a"] += covers(found["a"], float(residual[0, 0, 0] - residual[1, 0, 0]))
        hits["b"] += covers(found["b"], these_documents)
        hits["c"] += covers(found["c"], 0.0)
        hits["a for b"] += covers(found["a"], 0.0)
    return {name: count / repeats for name, count in hits.items()}


@pytest.mark.parametrize(("seeds", "documents", "spread"), [(3, 10, 0.006), (5, 30, 0.012)])
def test_every_level_covers_its_own_truth(seeds: int, documents: int, spread: float) -> None:
    found = coverage(seeds, documents, spread, repeats=1500)
    for level in "abc":
        assert 0.93 <= found[level] <= 0.97, found


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 0.006, 0.012])
@pytest.mark.parametrize("documents", [10, 30, 100])
@pytest.mark.parametrize("seeds", [3, 5])
def test_every_level_covers_its_own_truth_in_full(seeds: int, documents: int, spread: float) -> None:
    found = coverage(seeds, documents, spread, repeats=6000)
    for level in "abc":
        assert 0.93 <= found[level] <= 0.97, found


def test_documents_do_not_speak_of_seeds() -> None:
    """Level (a)'s interval misses what holds of the encoding far more often than one time in twenty."""
    assert coverage(3, 100, 0.012, repeats=1000)["a for b"] < 0.6


def test_holm_keeps_null_studies_quiet() -> None:
    """15 pairs at 3 seeds: uncorrected, half of the null studies have a false difference; after Holm, few."""
    rng = np.random.default_rng(1)
    pairs = [(i, j) for i in range(NUM_ENCODINGS) for j in range(i)]
    raw = corrected = 0
    repeats = 400
    for _ in range(repeats):
        loss_ES = rng.normal(0, 0.012, (1, 3)) + rng.normal(0, 0.012, (NUM_ENCODINGS, 3))
        residual = stats.pooled_residual(loss_ES.T)
        p = [stats.seed_difference(loss_ES[i], loss_ES[j], residual).p_value for i, j in pairs]
        raw += min(p) < 0.05
        corrected += stats.holm(p).min() < 0.05
    assert raw / repeats > 0.3
    assert corrected / repeats < 0.08


# --- changes, gains, decompositions and controls: every interval that a page prints -----------------------

# Ten skewed documents without a spread over seeds: 93.3 % is what a t interval of their mean covers, so the
# draw may come out under 93 %.
LEAST = {(3, 10, 0.0): 0.925, (5, 10, 0.0): 0.925}
ONE_SIDED = 0.05 / 8  # of a simultaneous bound over eight grid lengths
GRID = [(s, d, spread) for s in (3, 5) for d in (10, 30, 100) for spread in (0.0, 0.006, 0.012)]


def changes(rng: np.random.Generator, repeats: int, seeds: int, documents: int, spread: float) -> np.ndarray:
    """(repeats, encodings, seeds, documents): changes of truth zero; encodings share half the seed spread."""
    shape = (repeats, NUM_ENCODINGS, seeds, documents)
    draws = rng.normal(0, 1, (repeats, 1, seeds, 1)) + rng.normal(0, 1, (*shape[:3], 1))
    interaction = skewed(rng, INTERACTION, (*shape[:2], 1, documents))
    return interaction + spread / np.sqrt(2) * draws + skewed(rng, NOISE, shape)


def intervals_of_changes(change: np.ndarray) -> dict[str, stats.Interval]:
    """Of the first encoding with its own spread over seeds (decompositions, controls) and the pooled one."""
    weight_D = np.ones(change.shape[2])
    pooled = stats.pooled_within(change.mean(2).T)
    return {
        "own": stats.own_interval(change[0], weight_D),
        "pooled": stats.own_interval(change[0], weight_D, pooled),
    }


def rates(seeds: int, documents: int, spread: float, repeats: int) -> dict[str, np.ndarray]:
    """Of each interval: coverage, and how often its one-sided bounds lie wrongly above and below zero."""
    rng = np.random.default_rng(seeds * 1000 + documents)
    counts = {name: np.zeros(3) for name in ("own", "pooled")}
    for _ in range(repeats // 500):
        for change in changes(rng, 500, seeds, documents, spread):
            for name, interval in intervals_of_changes(change).items():
                wrong = interval.lower(ONE_SIDED) > 0, interval.upper(ONE_SIDED) < 0
                counts[name] += (covers(interval, 0.0), *wrong)
    return {name: count / repeats for name, count in counts.items()}


def check(seeds: int, documents: int, spread: float, repeats: int) -> None:
    """Coverage, and bounds near their 0.6 %.

    Documents that are skewed and spread more than seeds leave the bound on the side of their long tail (here
    the upper one) wrong up to 2.5 % of the time, as they do every t interval of their mean.
    """
    for name, (covered, above, below) in rates(seeds, documents, spread, repeats).items():
        where = (name, seeds, documents, spread, covered, above, below)
        assert LEAST.get((seeds, documents, spread), 0.93) <= covered <= 0.97, where
        assert above <= 0.01, where
        assert below <= (0.012 if seeds_dominate(documents, spread) else 0.025), where


def seeds_dominate(documents: int, spread: float) -> bool:
    """Whether the spread over seeds weighs at least as much as that over documents."""
    return 2 * spread**2 / 3 >= INTERACTION**2 / documents


@pytest.mark.parametrize(("seeds", "documents", "spread"), [(3, 10, 0.006), (3, 100, 0.012), (5, 30, 0.012)])
def test_changes_are_covered(seeds: int, documents: int, spread: float) -> None:
    """Satterthwaite's degrees of freedom cover 92.2 % at (3, 100, 0.012), with bounds wrong at 1.8 %."""
    check(seeds, documents, spread, repeats=1500)


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "documents", "spread"), GRID)
def test_changes_are_covered_in_full(seeds: int, documents: int, spread: float) -> None:
    check(seeds, documents, spread, repeats=6000)


# --- documents of unequal sizes --------------------------------------------------------------------------

# Sizes: log-normal with a spread of 1.1 (as the modules of Python's library have, 1.0 to 1.2), cut to whole
# windows of the longest length, of which half of the documents have one or two; drawn anew each time. Values:
# `alike`, normal with one spread; `skewed`, the skewed t4; `by size`, with a part that shrinks as documents
# grow. A draw in which one document dominates has no interval and is not counted.
KINDS = ("alike", "skewed", "by size")


def sizes(rng: np.random.Generator, documents: int) -> np.ndarray:
    return np.floor(rng.lognormal(1.0, 1.1, documents)) + 1.0


def values(rng: np.random.Generator, kind: str, size_D: np.ndarray, seeds: int = 1) -> np.ndarray:
    """(seeds, documents) of mean zero: what seeds share, and with several seeds some noise of each."""
    if kind == "skewed":
        shared = skewed(rng, INTERACTION, size_D.shape)
    else:
        scale = (
            INTERACTION * np.sqrt(0.1 + 0.9 * np.median(size_D) / size_D)
            if kind == "by size"
            else INTERACTION
        )
        shared = rng.normal(0, scale, size_D.shape)
    own = rng.normal(0, NOISE, (seeds, size_D.size)) + rng.normal(0, 0.006, (seeds, 1))
    return shared + own * (seeds > 1)


def unequal(documents: int, kind: str, seeds: int, repeats: int) -> np.ndarray:
    """Coverage, the share of one-sided bounds that are wrong on either side, and what D - 1 would cover."""
    rng = np.random.default_rng(documents)
    counts, num = np.zeros(4), 0
    while num < repeats:
        size_D = sizes(rng, documents)
        if stats.dominates(size_D):
            continue
        value_SD = values(rng, kind, size_D, seeds)
        found = stats.own_interval(value_SD, size_D)
        naive = abs(found.estimate) <= found.error * stats.t_quantile(0.975, documents - 1)
        counts += (covers(found, 0.0), found.lower(ONE_SIDED) > 0, found.upper(ONE_SIDED) < 0, naive)
        num += 1
    return counts / repeats


def check_unequal(documents: int, kind: str, seeds: int, repeats: int) -> None:
    """Conservative where few documents carry the mean: no degrees of freedom make that exact."""
    covered, above, below, _ = found = unequal(documents, kind, seeds, repeats)
    assert 0.955 <= covered <= 0.995, found
    assert max(above, below) <= 0.012, found


@pytest.mark.parametrize(
    ("documents", "kind", "seeds"), [(10, "alike", 1), (30, "skewed", 1), (10, "by size", 3)]
)
def test_documents_of_unequal_sizes_are_covered(documents: int, kind: str, seeds: int) -> None:
    check_unequal(documents, kind, seeds, repeats=1500)


def test_as_many_degrees_of_freedom_as_documents_cover_too_little() -> None:
    assert unequal(10, "alike", 1, repeats=1500)[3] < 0.93


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("documents", [6, 10, 16, 30, 100])
def test_documents_of_unequal_sizes_are_covered_in_full(documents: int, kind: str, seeds: int) -> None:
    check_unequal(documents, kind, seeds, repeats=6000)


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("ratio", [1.0, 3.0, 10.0])
def test_welch_covers_a_failing_encoding(seeds: int, ratio: float) -> None:
    """Seeds of one encoding spread `ratio` times as much as those of the other."""
    rng = np.random.default_rng(seeds)
    one, other = rng.normal(0, 0.012, (4000, seeds)), rng.normal(0, 0.012 * ratio, (4000, seeds))
    hits = sum(covers(stats.welch(*pair), 0.0) for pair in zip(one, other, strict=True))
    assert 0.93 <= hits / 4000 <= 0.97


@pytest.mark.parametrize("seeds", [3, 5])
def test_one_document_covers_new_seeds(seeds: int) -> None:
    """Level (b) on one text: the mean over new seeds of the change on that document."""
    rng = np.random.default_rng(seeds)
    hits = np.zeros(2)
    for _ in range(3000):
        on_this_text = skewed(rng, INTERACTION, (NUM_ENCODINGS, 1, 1))
        shared = rng.normal(0, 0.012, (1, seeds, 1))
        change = on_this_text + shared + rng.normal(0, 0.012, (NUM_ENCODINGS, seeds, 1))
        truth = float(on_this_text[0, 0, 0])
        hits += [covers(interval, truth) for interval in intervals_of_changes(change).values()]
    assert ((hits / 3000 >= 0.93) & (hits / 3000 <= 0.97)).all()
