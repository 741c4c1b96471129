"""Whether a model may have seen the text it is measured on: by document hash for ours, by date for others.

Two documents overlap when their whole texts are equal; a changed or cut copy is not found. A checkpoint's
training text is not known: where its release and the date of the corpus are, the earlier corpus may have been
in it. Nothing is refused; what is found is warned of and written into `results.json` (`notes.documents`).
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from pe_study import data
from pe_study.errors import DataError
from pe_study.text.evaluation_sets import EvaluationSet, overlapping

if TYPE_CHECKING:
    from pe_study.evaluators.subjects import Subject
    from pe_study.plan import Plan

logger = logging.getLogger(__name__)

# When the weights of well-known checkpoints were announced, by the start of their names on the Hugging Face
# Hub; of several sizes the last. What is not here is not known.
RELEASES = {
    "openai-community/gpt2": "2019-11-05",
    "EleutherAI/pythia": "2023-04-03",
    "meta-llama/Llama-2": "2023-07-18",
    "mistralai/Mistral-7B-v0.1": "2023-09-27",
    "meta-llama/Meta-Llama-3-": "2024-04-18",
    "meta-llama/Llama-3.1": "2024-07-23",
    "meta-llama/Llama-3.2": "2024-09-25",
    "Qwen/Qwen2.5": "2024-09-19",
    "HuggingFaceTB/SmolLM-": "2024-07-16",
    "HuggingFaceTB/SmolLM2": "2024-11-01",
}
# When the last text of a corpus was published, under each of its names: PG-19 holds books from before 1919,
# Python's library follows its release.
WIKITEXT = ("Salesforce/wikitext", "EleutherAI/wikitext_document_level", "wikitext")
PG19 = ("deepmind/pg19", "emozilla/pg19", "pg19")
CORPORA = {**dict.fromkeys(WIKITEXT, "2016-09-26"), **dict.fromkeys(PG19, "1918-12-31")}
PYTHONS = {11: "2022-10-24", 12: "2023-10-02", 13: "2024-10-07", 14: "2025-10-07"}


def overlap(subject: Subject, split: data.TokenizedSplit, documents: EvaluationSet) -> tuple[str, ...] | None:
    """Names of evaluated documents that the subject was trained on; None where that cannot be told."""
    if subject.recipe is None:
        return None
    try:
        training = data.load_corpus(subject.recipe.data)
    except DataError as error:
        reason = str(error).splitlines()[0]
        logger.warning("%s: overlap of text and training not checked: %s", subject.name, reason)
        return None
    names = overlapping(training, split)
    if documents.unit == "document":
        names = [name for name in names if name in {document.name for document in documents.documents}]
    if names:
        logger.warning(
            "%s: %d of the documents it is measured on were also trained on (%s%s)",
            subject.name,
            len(names),
            ", ".join(names[:3]),
            ", …" * (len(names) > 3),
        )
    return tuple(names)


def older_than_release(subject: Subject, plan: Plan) -> str | None:
    """A sentence where the corpus was public before a checkpoint was, and both dates are known; else None."""
    if subject.recipe is not None:
        return None
    release, corpus = release_date(subject.name), corpus_date(plan)
    if release is None or corpus is None or corpus > release:
        return None
    return (
        f"{subject.name} was released on {release}, its text dates from {corpus}: "
        "it may have been seen in training"
    )


def release_date(name: str) -> str | None:
    """When a checkpoint was published; None where that is not known."""
    return _known(name, RELEASES)


def corpus_date(plan: Plan) -> str | None:
    """`corpus_date` of the plan, else what is known of its corpus."""
    if plan.corpus_date is not None or plan.corpus is None:
        return plan.corpus_date
    if plan.corpus == "stdlib":
        return PYTHONS.get(sys.version_info.minor) if sys.version_info.major == 3 else None
    return _known(plan.corpus, CORPORA)


def _known(name: str, dates: dict[str, str]) -> str | None:
    found = [start for start in dates if name.lower().startswith(start.lower())]
    return dates[max(found, key=len)] if found else None
