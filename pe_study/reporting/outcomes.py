"""What each series does past its training length, in sentences no stronger than their intervals.

With one seed a sentence says "in this run", over seeds on one document "on this text"; only several seeds and
documents let it speak of an encoding without either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pe_study.reporting.captions import joined, listed
from pe_study.reporting.comparisons import Comparison
from pe_study.reporting.verdicts import DELTA, Verdict
from pe_study.stats import Interval

PERCENT = f"{100 * DELTA:g} %"
_SPEAKS = {
    "a": "these weights on new documents",
    "b": "new seeds on these documents",
    "c": "new seeds and new documents",
    "": "nothing, for one seed on one document has no interval",
    "-": "nothing, for one document with most of the targets leaves no interval",
}
_WHERE = {"a": ", in this run,", "b": ", on this text,", "": ", in this run,", "-": ", in this run,", "c": ""}


def outcomes(plain: Sequence[Verdict]) -> list[str]:
    """Who holds, who fails from where, what is not settled and why, what has no number."""
    return [*_holding(plain), *_failing(plain), *_unsettled(plain), *_unable(plain)]


def _holding(plain: Sequence[Verdict]) -> list[str]:
    said = []
    held = [v for v in plain if v.survives and not v.fails_by]
    for length in sorted({v.survives for v in held if v.survives}, reverse=True):
        for group in _alike([v for v in held if v.survives == length]):
            gain = [v for v in group if v.gains_to]
            flat = [v for v in group if not v.gains_to and _tested(v) and v.flat_to == length]
            unshown = [v for v in group if not v.gains_to and _tested(v) and v.flat_to != length]
            untested = [v for v in group if not v.gains_to and not _tested(v)]
            said += [_gaining(gain, length)] if gain else []
            said += [_flat(flat, length)] if flat else []
            said += [_unshown(unshown, length)] if unshown else []
            said += [_untested(untested, length)] if untested else []
    return said


def _tested(verdict: Verdict) -> bool:
    """Whether a gain could have been seen within what it survives."""
    return any(length <= (verdict.survives or 0) for length in verdict.gains_tested)


def _alike(group: Sequence[Verdict]) -> list[list[Verdict]]:
    """Verdicts apart by what intervals speak of, training length and protocol: no sentence mixes them."""
    return _by(group, lambda v: (v.level, v.train_length, v.protocol))


def _by(group: Sequence[Verdict], key: Callable[[Verdict], object]) -> list[list[Verdict]]:
    kinds = dict.fromkeys(key(v) for v in group)
    return [[v for v in group if key(v) == kind] for kind in kinds]


def _gaining(group: Sequence[Verdict], length: int) -> str:
    to = "; ".join(f"{v.label} to {v.gains_to:,}" for v in group)
    text = (
        f"**{names(group)}** {_verb(group, 'holds', 'hold')} to {_times(length, group[0])}: the loss stays "
        f"within {PERCENT} of that at the training length. A doubled length still lowers it ({to})"
    )
    if group[0].protocol in ("exact-context", "fixed-target"):  # no target has less context than another
        return f"{text}."
    return (
        f"{text}; exact-context was not run, and under {group[0].protocol} longer windows also leave fewer "
        "targets with little context, so part of this may be that alone."
    )


def _unshown(group: Sequence[Verdict], length: int) -> str:
    return (
        f"**{names(group)}** {_verb(group, 'holds', 'hold')} to {_times(length, group[0])} within {PERCENT}. "
        f"No gain from longer input is shown, and one of {PERCENT} is not ruled out."
    )


def _flat(group: Sequence[Verdict], length: int) -> str:
    return (
        f"**{names(group)}** {_verb(group, 'holds', 'hold')} to {_times(length, group[0])} "
        f"within {PERCENT}, and a gain of {PERCENT} from longer input is ruled out: "
        f"{'windowed models' if len(group) > 1 else 'a windowed model'}, in effect."
    )


def _untested(group: Sequence[Verdict], length: int) -> str:
    return (
        f"**{names(group)}** {_verb(group, 'holds', 'hold')} to {_times(length, group[0])} within {PERCENT}. "
        "Whether longer input lowers the loss cannot be tested: no length up to there has its half on the "
        "grid of lengths."
    )


def _failing(plain: Sequence[Verdict]) -> list[str]:
    said = []
    for length in sorted({v.fails_by for v in plain if v.fails_by}):
        for alike in _alike([v for v in plain if v.fails_by == length]):
            for group in _by(alike, lambda v: v.fails_by in dict(v.not_finite)):
                start = f"**{names(group)}** {_verb(group, 'fails', 'fail')} by {_times(length, group[0])}: "
                if length in dict(group[0].not_finite):
                    said.append(f"{start}{_infinite(group, length)}.")
                    continue
                worst = "; ".join(f"{v.label} {_change(v, v.longest)} at {v.longest:,}" for v in group)
                later = [f"{v.label} {_not_finite(v)}" for v in group if v.not_finite]
                said.append(
                    f"{start}the loss is more than {PERCENT} above that at the training length "
                    f"({'; '.join([worst, *later])})."
                )
    return said


def _infinite(group: Sequence[Verdict], length: int) -> str:
    """ "no finite loss at 256", or each with its seeds."""
    why = {v.label: dict(v.not_finite)[length] for v in group}
    if len(set(why.values())) == 1:
        return _at(next(iter(why.values())), length)
    return "; ".join(f"{label} {_at(reason, length)}" for label, reason in why.items())


def _not_finite(verdict: Verdict) -> str:
    length, reason = verdict.not_finite[0]
    return _at(reason, length)


def _at(reason: str, length: int) -> str:
    """ "no finite loss at 512 (seed 2)" of "no finite loss, seed 2"."""
    what, _, seeds = reason.partition(", ")
    return f"{what} at {length:,}" + (f" ({seeds})" if seeds else "")


def _unsettled(plain: Sequence[Verdict]) -> list[str]:
    said = []
    group = [v for v in plain if not v.fails_by and not v.survives and (v.change or v.cannot)]
    for alike in _by(group, _why_unsettled):
        said.append(f"**{names(alike)}**: {_why_unsettled(alike[0])}.")
    return said


def _why_unsettled(verdict: Verdict) -> str:
    past = [n for n in (*verdict.change, *dict(verdict.cannot)) if n > verdict.train_length]
    blocked = _blocked(verdict)
    if blocked:
        return f"nothing is said past the training length, for it {_absence(verdict, blocked)}"
    if not verdict.level:
        return (
            "not settled. One seed on one document gives no interval, so nothing is said of what happens "
            "past the training length"
        )
    first = verdict.change[min(past)]
    if verdict.dominated or (first.num > 1 and math.isnan(first.error)):
        return (
            "not settled. One document has more than two thirds of the targets, and the spread of the others "
            "does not tell its own, so there is no interval"
        )
    if math.isnan(first.error):
        return "not settled. One seed alone has a number there, which gives no interval"
    more = {"a": "documents or seeds", "b": "seeds", "c": "documents or seeds"}[verdict.level]
    return (
        f"not settled. The intervals neither show a rise of {PERCENT} nor rule one out "
        f"at the first length past the training length; more {more} would"
    )


def _blocked(verdict: Verdict) -> str | None:
    """Why nothing can be survived: what ails the training length or the first length past it."""
    cannot = dict(verdict.cannot)
    past = [n for n in (*verdict.change, *cannot) if n > verdict.train_length]
    return cannot.get(verdict.train_length) or cannot.get(min(past, default=0))


def _absence(verdict: Verdict, why: str) -> str:
    """ "cannot run at 256, 512", "has no number at 512 (oom, seed 2)"."""
    words = {"unsupported": "cannot run", "oom": "ran out of memory"}
    lengths = listed(n for n, reason in verdict.cannot if reason == why)
    return f"{words[why]} at {lengths}" if why in words else f"has no number at {lengths} ({why})"


def _unable(plain: Sequence[Verdict]) -> list[str]:
    said = []
    for verdict in plain:
        told = _blocked(verdict) if not verdict.fails_by else None  # by `_unsettled`
        for why in dict.fromkeys(why for _, why in verdict.cannot):
            said += [f"**{verdict.label}** {_absence(verdict, why)}."] if why != told else []
    return said


def speaks_of(found: Sequence[Verdict | Comparison]) -> str:
    """What the intervals of a table speak of, by study (or label) where that differs between rows."""
    named = {(one.study, one.label): _SPEAKS[one.level] for one in found}
    texts = list(dict.fromkeys(named.values()))
    if len(texts) == 1:
        return texts[0]
    by_study = {study: {text for (other, _), text in named.items() if other == study} for study, _ in named}
    whole = all(len(of) == 1 for of in by_study.values())
    who = {
        text: dict.fromkeys(
            study if whole else f"{label} ({study})" for (study, label), t in named.items() if t == text
        )
        for text in texts
    }
    return "; ".join(f"{', '.join(who[text])}: {text}" for text in texts)


# --- words -----------------------------------------------------------------------------------------------


def names(group: Sequence[Verdict]) -> str:
    """ "a, b and c"."""
    return joined([v.label for v in group])


def _verb(group: Sequence[Verdict], one: str, many: str) -> str:
    return (one if len(group) == 1 else many) + _WHERE[group[0].level]


def _times(length: int, verdict: Verdict) -> str:
    return f"{length:,} ({length / verdict.train_length:.4g}\u00d7)"


def _change(verdict: Verdict, length: int) -> str:
    interval = verdict.change[length]
    some = f" over {interval.num} of {verdict.num_seeds} seeds"
    return change_text(interval) + some * (verdict.num_seeds > 1 and interval.num < verdict.num_seeds)


def change_text(interval: Interval) -> str:
    """A change with its 95 % interval, in nats."""
    low, high = interval.bounds()
    bounds = f" [{low:+.3f}, {high:+.3f}]" if low == low else ""
    return f"{interval.estimate:+.3f}{bounds} nats"
