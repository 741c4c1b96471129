"""Several processes share the windows and end with the sums of one."""

from __future__ import annotations

import pandas as pd
import pytest
from processes import launch

from pe_study.evaluators import sharing


def rows_of(folder, num_processes, failing_rank=-1):
    folder.mkdir()
    codes = launch("shared_perplexity.py", folder, failing_rank, num_processes=num_processes)
    assert codes == [0] * num_processes
    return [pd.read_parquet(folder / f"{rank}.parquet") for rank in range(num_processes)]


@pytest.mark.slow
def test_two_processes_end_with_the_sums_of_one(tmp_path):
    [alone] = rows_of(tmp_path / "one", 1)
    together = rows_of(tmp_path / "two", 2)
    for frame in together:
        for column in (
            "length",
            "document",
            "position_lo",
            "num_tokens",
            "num_windows",
            "num_skipped",
            "status",
        ):
            assert frame[column].tolist() == alone[column].tolist()
        for column in ("nll_sum", "window_mean_sum"):
            assert frame[column].tolist() == pytest.approx(alone[column].tolist(), rel=1e-12)
    calls = [int(frame["calls"].iloc[0]) for frame in together]
    assert sum(calls) == alone["calls"].iloc[0]
    assert abs(calls[0] - calls[1]) <= 2


@pytest.mark.slow
def test_out_of_memory_on_one_process_is_a_row_on_all(tmp_path):
    for frame in rows_of(tmp_path / "two", 2, failing_rank=1):
        assert set(frame[frame["length"] == 16]["status"]) == {"ok", "skipped"}
        assert frame[frame["length"] == 48]["status"].tolist() == ["oom"]


def test_alone_everything_is_mine():
    assert list(sharing.mine("abcd")) == ["a", "b", "c", "d"]
    assert sharing.is_main()


def test_the_model_goes_to_the_gpu_that_is_there(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert sharing.device() is None
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert str(sharing.device()) == "cuda:0"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert str(sharing.device()) == "cuda:1"
