"""Documents of the pe_* tasks of lm-eval: made here, for the tokenizer and length of `--model_args`."""

from functools import partial

from pe_study.evaluators.lm_tasks import is_right, task_documents

__all__ = ["distractors", "is_right", "needle", "passkey", "uuid"]

passkey = partial(task_documents, "passkey")
needle = partial(task_documents, "needle")
distractors = partial(task_documents, "distractors")
uuid = partial(task_documents, "uuid")
