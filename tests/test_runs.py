"""Run directories, their files and the rows."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from pe_study import runs
from pe_study.errors import DataError, UsageError
from pe_study.files import replacing, write_text
from pe_study.metrics import ranges


def test_replacing_leaves_the_old_file_when_the_writer_fails(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "old")
    with pytest.raises(OSError, match="full"), replacing(tmp_path / "file") as beside:
        beside.write_text("half of the n")
        raise OSError("disk full")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [-float("inf")]}])
def test_json_is_strict(tmp_path: Path, value: object) -> None:
    """case 34"""
    with pytest.raises(ValueError, match="JSON"):
        runs.write_json(tmp_path / "x.json", value)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "DONE").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="DONE: damaged, not JSON"):
        runs.read_json(tmp_path / "DONE")
    (tmp_path / "DONE").write_bytes(b"\xff\xfe{}")
    with pytest.raises(DataError, match="DONE: damaged, not JSON"):
        runs.read_json(tmp_path / "DONE")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\noops\n{"step": 3}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"metrics.jsonl:2: damaged"):
        runs.read_metrics(tmp_path)


@pytest.mark.parametrize("line", [b"oops", b'{"step": 2, "loss": \xff}', b"[]", b"7", b"{}", b"[" * 100_000])
def test_a_damaged_line_of_the_log_names_its_remedies_and_both_work(tmp_path: Path, line: bytes) -> None:
    rows = [b'{"step": 1}', line, b'{"step": 3}']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(rows) + b"\n")
    said = r"metrics.jsonl:2: damaged.*; delete this line.*, or start the run over with --resume never"
    with pytest.raises(DataError, match=said):
        runs.read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([rows[0], rows[2]]) + b"\n")
    assert [row["step"] for row in runs.read_metrics(tmp_path)] == [1, 3]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(rows) + b"\n")
    runs.Metrics(tmp_path).close()  # from the beginning
    assert runs.read_metrics(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_names_the_log(tmp_path: Path) -> None:
    log = runs.Metrics(tmp_path)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), log._file.fileno())
    with pytest.raises(OSError, match=r"No space left on device.*metrics\.jsonl"):
        log.append({"step": 1})
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        log.close()


def test_ranges_of_steps() -> None:
    assert ranges([1, 2, 3, 5, 7, 8]) == "1-3, 5, 7-8"
    assert ranges([]) == ""


def test_a_folder_that_is_not_ours_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not empty and not ours"):
        runs.claim_folder(tmp_path, ours=("provenance.json",))
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        runs.claim_folder(tmp_path / "runs" / "study", ours=())


@pytest.mark.parametrize("place", ["", "below/it"])
def test_an_output_is_checked_before_it_is_made(tmp_path: Path, place: str) -> None:
    assert runs.check_output(tmp_path / "a" / "b", ours=()) == tmp_path / "a" / "b"
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(UsageError, match=f"cannot be used for output .*{name} is not a folder"):
            runs.check_output(tmp_path / name / place, ours=())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_the_command_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/lib/pe_study/__main__.py", "train", "my recipe.yaml"])
    assert runs.command_line() == "python -m pe_study train 'my recipe.yaml'"
    monkeypatch.setattr("sys.argv", ["/usr/bin/pe-study", "ls"])
    assert runs.command_line() == "pe-study ls"


def test_empty_and_own_folders_are_claimed(tmp_path: Path) -> None:
    folder = runs.claim_folder(tmp_path / "a" / "b", ours=("DONE",))
    (folder / "DONE").touch()
    (folder / "something").touch()
    assert runs.claim_folder(folder, ours=("DONE",)) == folder


def test_what_a_killed_writer_left_beside_is_not_another_s(tmp_path: Path) -> None:
    (tmp_path / ".recipe.yaml.123.tmp").write_text("name: x", encoding="utf-8")
    assert runs.claim_folder(tmp_path, ours=("recipe.yaml",)) == tmp_path


def hold(folder: str, held: "multiprocessing.synchronize.Event", let_go: object) -> None:
    with runs.locked(folder):
        held.set()
        let_go.wait()  # type: ignore[attr-defined]


def test_a_second_process_is_told_who_holds_the_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held, let_go = context.Event(), context.Event()
    other = context.Process(target=hold, args=(str(tmp_path), held, let_go))
    other.start()
    held.wait()
    with pytest.raises(UsageError, match=f"in use by process {other.pid}"), runs.locked(tmp_path):
        pass
    other.kill()
    other.join()
    with runs.locked(tmp_path):  # a lock dies with its process
        pass


def test_metrics_drop_what_will_be_written_again(tmp_path: Path) -> None:
    first = runs.Metrics(tmp_path)
    for step in (1, 2, 3):
        first.append({"step": step, "loss": 0.1})
    first.close()
    with (tmp_path / runs.METRICS).open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    again = runs.Metrics(tmp_path, after_step=2)
    again.append({"step": 3, "loss": 0.3})
    again.close()
    found = [(row["step"], row["loss"]) for row in runs.read_metrics(tmp_path)]
    assert found == [
        (1, 0.1),
        (2, 0.1),
        (3, 0.3),
    ]


def test_provenance_says_what_ran() -> None:
    facts = runs.provenance(steps=3)
    assert facts["steps"] == 3
    assert facts["versions"]["torch"]
    assert set(facts) >= {"command", "started", "versions", "git_commit", "git_dirty", "platform"}
    json.dumps(facts, allow_nan=False)


def make_run(folder: Path, *, step: int, steps: int) -> None:
    folder.mkdir(parents=True)
    (folder / runs.RECIPE).write_text("name: x\n")
    runs.write_json(folder / runs.PROVENANCE, {"steps": steps})
    log = runs.Metrics(folder)
    log.append({"step": step, "loss": 2.5})
    log.close()


def test_list_runs_tells_finished_from_unfinished(tmp_path: Path) -> None:
    make_run(tmp_path / "study" / "rope-s0", step=7, steps=10)
    make_run(tmp_path / "study" / "alibi-s0", step=10, steps=10)
    alibi = tmp_path / "study" / "alibi-s0"
    (alibi / runs.DONE).write_text("{}")
    assert runs.run_state(alibi).status == "partial", "without a model there is nothing to show for it"
    (alibi / "final").mkdir()
    for name in ("config.json", "model.safetensors"):
        (alibi / "final" / name).touch()
    (tmp_path / "study" / "eval").mkdir()
    found = [(run.study, run.run_id, run.status, run.step, run.steps) for run in runs.list_runs(tmp_path)]
    assert found == [("study", "alibi-s0", "done", 10, 10), ("study", "rope-s0", "partial", 7, 10)]
    assert [run.run_id for run in runs.list_runs(tmp_path / "study")] == ["alibi-s0", "rope-s0"]


def test_a_locked_run_is_running(tmp_path: Path) -> None:
    make_run(tmp_path / "study" / "rope-s0", step=1, steps=2)
    with runs.locked(tmp_path / "study" / "rope-s0"):
        assert runs.run_state(tmp_path / "study" / "rope-s0").status == "running"


def test_rows_keep_their_columns_and_types(tmp_path: Path) -> None:
    written = runs.make_rows([{"study": "s", "length": 64, "nll_sum": 1.5, "bos": True, "status": "ok"}])
    runs.write_rows(written, tmp_path)
    read = runs.read_rows(tmp_path)
    assert list(read.columns) == list(runs.ROW_COLUMNS)
    assert read.dtypes.astype(str).to_dict() == dict(runs.ROW_COLUMNS)
    assert read.equals(written)
    assert read["num_tokens"].isna().all()


def test_rows_refuse_unknown_columns() -> None:
    with pytest.raises(AssertionError, match="nll"):
        runs.make_rows([{"nll": 1.0}])


def test_reading_what_is_not_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no results there"):
        runs.read_rows(tmp_path)
    (tmp_path / "results.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        runs.read_rows(tmp_path)
