"""What every test runs under: one thread, no network, a cache of its own, deterministic property tests."""

import gc
import logging
import os

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
os.environ |= {"MPLBACKEND": "Agg", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tokenized corpora and trained tokenizers of the tests never touch the user's cache."""
    os.environ.setdefault("PE_STUDY_CACHE", str(tmp_path_factory.mktemp("cache")))
    os.environ["MPLCONFIGDIR"] = str(tmp_path_factory.mktemp("matplotlib"))


@pytest.fixture(scope="session", autouse=True)
def _libraries() -> None:
    """One thread: small tensors are slower on many, and sums differ between thread counts.

    The libraries' own objects are set aside from garbage collection: the trainer collects after every run,
    and walking through all of torch and transformers takes longer than training a test's model.
    """
    import datasets  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _log_records() -> None:
    """A command that a test runs in this process takes our log records for the terminal: give them back."""
    ours = logging.getLogger("pe_study")
    ours.handlers, ours.propagate = [], True


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages whose figures are composed and left blank: for tests of words and tables."""
    blank = b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"/>'
    monkeypatch.setattr("pe_study.report.render_all", lambda drawings: [{"svg": blank}] * len(drawings))
