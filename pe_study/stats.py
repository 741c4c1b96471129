"""Intervals and tests at the three levels that sentences may claim. Arrays in, intervals out.

(a) *these weights, new documents*: paired differences of documents (`over_documents`). Says "this run".
(b) *this encoding, new seeds*: the seed is the unit (`over_seeds`, `seed_difference`, `welch`).
(c) *both*: the variances of (a) and (b) added (`over_both`). Only (b) and (c) speak of an encoding.
    One document has no variance of its own: there `over_both` is level (b), new seeds on this text.

A document bootstrap covers documents alone and a percentile bootstrap of ten documents covers too little, so
nothing here resamples. Shapes: S seeds, E encodings, D documents. All values are nats per token unless said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special

CONFIDENCE = 0.95
DOMINATES = 2 / 3  # of the targets: one document with more leaves no interval
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Variance:
    """A variance with the degrees of freedom of its estimate."""

    value: float
    df: float


@dataclass(frozen=True)
class Interval:
    """An estimate with its standard error and degrees of freedom; `num` is the number of units behind it.

    An error that adds up independent variances names them in `parts`; its quantiles are Cochran's then.
    """

    estimate: float
    error: float = math.nan
    df: float = math.nan
    num: int = 1
    parts: tuple[Variance, ...] = ()

    def quantile(self, probability: float) -> float:
        """Student's t; of a sum of variances the mean of their quantiles, weighted by them (Cochran 1964).

        Satterthwaite's degrees of freedom cover too little where one part has few: a spread over 3 seeds that
        is small by chance lends its sum the degrees of the documents.
        """
        total = sum(part.value for part in self.parts)
        if total <= 0:
            return t_quantile(probability, self.df)
        return sum(part.value * t_quantile(probability, part.df) for part in self.parts) / total

    def bounds(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """The two-sided t interval; (nan, nan) where one unit gives no error."""
        margin = self.error * self.quantile(0.5 + confidence / 2)
        return self.estimate - margin, self.estimate + margin

    def lower(self, alpha: float = 1 - CONFIDENCE) -> float:
        """The one-sided lower bound, exceeded by the truth with probability 1 - `alpha`."""
        return self.estimate - self.error * self.quantile(1 - alpha)

    def upper(self, alpha: float = 1 - CONFIDENCE) -> float:
        """The one-sided upper bound."""
        return self.estimate + self.error * self.quantile(1 - alpha)

    @property
    def p_value(self) -> float:
        """Two-sided p of "the true value is zero"; nan without an error. Exactly equal units give 0 or 1."""
        if math.isnan(self.error):
            return math.nan
        if self.error == 0:
            return 1.0 if self.estimate == 0 else 0.0
        size = abs(self.estimate / self.error)
        if not self.parts:
            return float(2 * special.stdtr(self.df, -size))
        if size == 0:
            return 1.0
        smallest = -700.0  # log p: under the least float64
        if -self.quantile(math.exp(smallest) / 2) <= size:
            return 0.0
        return math.exp(
            optimize.brentq(lambda log_p: -self.quantile(math.exp(log_p) / 2) - size, smallest, 0)
        )


def t_quantile(probability: float, df: float) -> float:
    """Student's t quantile; nan when there are no degrees of freedom."""
    return float(special.stdtrit(df, probability)) if df > 0 else math.nan


def mean_interval(values: ArrayLike) -> Interval:
    """Mean of independent units with its t error. Units that are not finite are left out and not counted.

    Seeds with NLL 1, 2, 3 give 2 +- 2.484; one unit gives no error, none gives nan.
    """
    kept = np.asarray(values, dtype=np.float64)
    kept = kept[np.isfinite(kept)]
    if kept.size == 0:
        return Interval(math.nan, num=0)
    if kept.size == 1:
        return Interval(float(kept[0]))
    error = float(kept.std(ddof=1) / math.sqrt(kept.size))
    return Interval(float(kept.mean()), error, kept.size - 1, kept.size)


def over_documents(difference_D: ArrayLike, weight_D: ArrayLike | None = None) -> Interval:
    """Level (a): the token-weighted mean of paired document differences, with the error of its linearisation.

    `weight_D` is the number of targets of each document; equal weights give the plain paired t interval.
    Others correct the variance for the pull of large documents on the mean, and take the degrees of freedom
    that Satterthwaite's approximation gives that estimate (as Bell & McCaffrey 2002 do for regressions),
    both exact for documents that spread alike. Where one document `dominates` there is no error.
    """
    value_D = np.asarray(difference_D, dtype=np.float64)
    tokens_D = np.ones_like(value_D) if weight_D is None else np.asarray(weight_D, dtype=np.float64)
    kept = np.isfinite(value_D) & (tokens_D > 0)
    value_D, tokens_D = value_D[kept], tokens_D[kept]
    num = int(kept.sum())
    if num == 0:
        return Interval(math.nan, num=0)
    share_D = tokens_D / tokens_D.sum()
    estimate = float(share_D @ value_D)
    if num == 1:
        return Interval(estimate)
    if dominates(tokens_D):
        return Interval(estimate, num=num)
    variance = _inflation(share_D) * float(np.sum((share_D * (value_D - estimate)) ** 2))
    return Interval(estimate, math.sqrt(variance), _degrees(share_D), num)


def dominates(weight_D: ArrayLike) -> bool:
    """Whether one of several documents has more than two thirds of the targets.

    The mean then is that document's, whose spread the others cannot tell.
    """
    weight_D = np.asarray(weight_D, dtype=np.float64)
    return weight_D.size > 1 and bool(weight_D.max() > DOMINATES * weight_D.sum())


def _inflation(share_D: Array) -> float:
    """What sum(share^2 (value - mean)^2) lacks of the variance of the mean: D / (D - 1) for equal shares."""
    if np.all(share_D == share_D[0]):
        return share_D.size / (share_D.size - 1)
    squares = float(share_D @ share_D)
    return squares / float(np.sum(share_D**2 * (1 - 2 * share_D + squares)))


def _degrees(share_D: Array) -> float:
    """Satterthwaite's degrees of freedom of the same sum: D - 1 for equal shares, fewer otherwise.

    (tr G)^2 / tr(G^2), G = M' diag(share^2) M, M = I - 1 share', for documents that spread alike.
    """
    if np.all(share_D == share_D[0]):
        return share_D.size - 1
    s, d = float(share_D @ share_D), share_D**2
    trace = float(np.sum(d * (1 - 2 * share_D + s)))
    total, first, second = float(d.sum()), float(d @ share_D), float(d @ share_D**2)
    pairs = s**2 * total**2 - 4 * s * total * first + 2 * total * second + 2 * first**2
    return trace**2 / (pairs + float(np.sum(d**2 * (1 + 2 * (s - 2 * share_D)))))


def pooled_residual(value_SE: ArrayLike) -> Variance:
    """Variance of the encoding x seed residual, with (E-1)(S-1) degrees of freedom.

    It is what is left of E encodings at S paired seeds after the means of both. Pass encodings that do not
    fail; failing ones spread otherwise. Cells may be nan: the means are those of least squares, the degrees
    of freedom the cells less the means that they determine.
    """
    value_SE = np.asarray(value_SE, dtype=np.float64)
    seed, encoding = np.nonzero(np.isfinite(value_SE))
    if seed.size == 0:
        return Variance(math.nan, 0)
    design = np.hstack([np.eye(value_SE.shape[0])[seed], np.eye(value_SE.shape[1])[encoding]])
    value = value_SE[seed, encoding] - np.nanmean(value_SE)
    means, _, rank, _ = np.linalg.lstsq(design, value)
    df = value.size - int(rank)
    if df <= 0:
        return Variance(math.nan, 0)
    return Variance(float(np.sum((value - design @ means) ** 2) / df), df)


def pooled_within(value_SE: ArrayLike) -> Variance:
    """Variance of one encoding's value from seed to seed (seed effect and residual), pooled over encodings.

    Encodings that share a seed are correlated, so the degrees of freedom are Satterthwaite's for the two mean
    squares that make up the sum, between S - 1 and E(S-1).
    """
    value_SE = np.asarray(value_SE, dtype=np.float64)
    num_seeds, num_encodings = value_SE.shape
    if num_seeds < 2:
        return Variance(math.nan, 0)
    seed = num_encodings * float(value_SE.mean(1).var(ddof=1)) if num_encodings else math.nan
    residual = pooled_residual(value_SE) if num_encodings > 1 else Variance(0.0, 1)
    parts = (
        Variance(seed / num_encodings, num_seeds - 1),
        Variance(residual.value * (num_encodings - 1) / num_encodings, residual.df),
    )
    return add_variances(parts)


def add_variances(parts: Sequence[Variance]) -> Variance:
    """The sum of independent variances, with Satterthwaite's degrees of freedom."""
    total = sum(part.value for part in parts)
    spread = sum(part.value**2 / part.df for part in parts if part.df > 0)
    if math.isnan(total) or any(part.df <= 0 < part.value for part in parts):
        return Variance(math.nan, 0)
    return Variance(total, total**2 / spread if spread > 0 else sum(part.df for part in parts))


def seed_difference(value_S: ArrayLike, other_S: ArrayLike, residual: Variance) -> Interval:
    """Level (b) for two encodings at the same seeds, pooled residual: mean difference +- t sqrt(2 s2 / S)."""
    difference_S = np.asarray(value_S, dtype=np.float64) - np.asarray(other_S, dtype=np.float64)
    error = math.sqrt(2 * residual.value / difference_S.size) if residual.df > 0 else math.nan
    return Interval(float(difference_S.mean()), error, residual.df, difference_S.size)


def welch(value_S: ArrayLike, other_S: ArrayLike) -> Interval:
    """Level (b) where an encoding fails: Welch's interval, each encoding with a spread of its own."""
    sides = [mean_interval(value_S), mean_interval(other_S)]
    variance = add_variances([Variance(side.error**2, side.df) for side in sides])
    error = math.sqrt(variance.value) if variance.df > 0 else math.nan
    return Interval(sides[0].estimate - sides[1].estimate, error, variance.df, min(s.num for s in sides))


def over_both(value_SD: ArrayLike, weight_D: ArrayLike, seed_variance: Variance) -> Interval:
    """Level (c): the variance over documents of the mean over seeds, plus that of the seed mean.

    `value_SD` is a contrast (a difference of two encodings, or of two lengths) of every seed and document;
    `seed_variance` the variance of its mean over the S seeds. The residual of seed and document is in both
    of them once and is taken off the seeds' once. One document: level (b), the seeds alone.
    """
    value_SD = np.asarray(value_SD, dtype=np.float64)
    weight_D = np.asarray(weight_D, dtype=np.float64)
    num_seeds = value_SD.shape[0]
    documents = over_documents(value_SD.mean(0), weight_D)
    if seed_variance.df <= 0:
        return Interval(documents.estimate, num=num_seeds)
    if math.isnan(documents.error) and documents.num > 1:
        return Interval(documents.estimate, num=num_seeds)
    if documents.num == 1:
        return Interval(documents.estimate, math.sqrt(seed_variance.value), seed_variance.df, num_seeds)
    alone = max(seed_variance.value - _shared(value_SD, weight_D), 0.0)
    parts = (Variance(documents.error**2, documents.df), Variance(alone, seed_variance.df))
    total = add_variances(parts)
    return Interval(documents.estimate, math.sqrt(total.value), total.df, num_seeds, parts)


def own_interval(value_SD: ArrayLike, weight_D: ArrayLike, spread: Variance | None = None) -> Interval:
    """Of a contrast (seeds, documents): level (a) for one seed; (c), or (b) on one document, for more.

    `spread` is the variance of one seed's contrast, pooled over encodings; None takes that of these seeds.
    One seed and one document have no interval.
    """
    value_SD, weight_D = np.asarray(value_SD, dtype=np.float64), np.asarray(weight_D, dtype=np.float64)
    num_seeds = value_SD.shape[0]
    if num_seeds == 1:
        return over_documents(value_SD[0], weight_D)
    seed_S = value_SD @ (weight_D / weight_D.sum())
    spread = spread or Variance(float(seed_S.var(ddof=1)), num_seeds - 1)
    return over_both(value_SD, weight_D, Variance(spread.value / num_seeds, spread.df))


def _shared(value_SD: Array, weight_D: Array) -> float:
    """Variance of the grand mean that comes from the seed x document residual."""
    num_seeds, num_documents = value_SD.shape
    if num_seeds < 2 or num_documents < 2:
        return 0.0
    share_D = weight_D / weight_D.sum()
    seed_S = value_SD @ share_D
    residual_SD = value_SD - value_SD.mean(0) - (seed_S - seed_S.mean())[:, None]
    scale = num_seeds / (num_seeds - 1) * _inflation(share_D)
    return float(np.sum((residual_SD * share_D) ** 2) * scale / num_seeds**2)


def wilson(right: ArrayLike, num: ArrayLike, confidence: float = CONFIDENCE) -> tuple[Array, Array]:
    """Wilson's bounds of the probability behind `right` of `num` independent answers (1927)."""
    right, num = np.asarray(right, dtype=np.float64), np.asarray(num, dtype=np.float64)
    z = float(special.ndtri(0.5 + confidence / 2))
    middle = (right + z**2 / 2) / (num + z**2)
    margin = z / (num + z**2) * np.sqrt(right * (num - right) / num + z**2 / 4)
    return np.clip(middle - margin, 0, 1), np.clip(middle + margin, 0, 1)


def holm(p_values: ArrayLike) -> Array:
    """Holm's adjusted p values, in the given order; nan stays nan and does not count as a comparison."""
    p = np.asarray(p_values, dtype=np.float64)
    adjusted = np.full_like(p, np.nan)
    order = [index for index in np.argsort(p) if not math.isnan(p[index])]
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * float(p[index])))
        adjusted[index] = largest
    return adjusted
