"""Command lines for clusters, and submitit's executors."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from submitit.core.utils import DelayedSubmission
from tiny import tiny_recipe

from pe_study import runs
from pe_study.errors import Interrupted, PEStudyError, UsageError
from pe_study.sweep import TrainJob, slurm_job_id, submit, sweep


def test_one_line_a_run(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, encodings=("rope", "alibi"))
    lines = sweep(
        recipe.path or "", ["seeds=[0, 1]"], runs_root=tmp_path / "runs", only={"encoding": "alibi"}
    )
    assert [line["run_id"] for line in lines] == ["alibi-s0", "alibi-s1"]
    assert lines[1]["argv"][1:] == [
        *("-m", "pe_study", "train", str(recipe.path), "seeds=[0, 1]"),
        *("--runs", str(tmp_path / "runs"), "--only", "run=alibi-s1"),
    ]
    json.dumps(lines)


def test_a_command_line_trains_its_run_and_nothing_else(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, encodings=("rope", "alibi"))
    line = sweep(recipe.path or "", ["train.steps=2"], runs_root=tmp_path / "runs")[1]
    subprocess.run(line["argv"], check=True)
    assert [run.run_id for run in runs.list_runs(tmp_path / "runs")] == ["alibi-s0"]
    assert runs.is_done(tmp_path / "runs" / "tiny" / "alibi-s0")


def command(code: int) -> dict[str, object]:
    return {"run_id": f"ends-with-{code}", "argv": [sys.executable, "-c", f"raise SystemExit({code})"]}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # submitit leaves logs open
@pytest.mark.parametrize("executor", ["debug", "local"])
def test_executors_run_all_and_report_failures(tmp_path: Path, executor: str) -> None:
    done = submit([command(0)], tmp_path, executor=executor, jobs=2)
    assert [(line["run_id"], line["exit_code"]) for line in done] == [("ends-with-0", 0)]
    if executor == "local":
        return
    with pytest.raises(PEStudyError, match=r"ends-with-5 \(exit code 5\)") as caught:
        submit([command(5), command(75), command(0)], tmp_path, executor=executor)
    assert not isinstance(caught.value, Interrupted)
    with pytest.raises(Interrupted, match="ends-with-75"):
        submit([command(75), command(0)], tmp_path, executor=executor)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # submitit leaves logs open
def test_a_training_that_was_killed_wants_to_be_started_again(tmp_path: Path) -> None:
    killed = {"run_id": "killed", "argv": [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]}
    with pytest.raises(Interrupted, match=r"killed \(SIGKILL \(out of memory, or stopped from outside\)\)"):
        submit([killed], tmp_path, executor="debug")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # submitit leaves logs open
def test_local_runs_get_a_gpu_each_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """submitit's local executor hides every GPU that it was not told of."""
    monkeypatch.setattr("pe_study.sweep.visible_gpus", lambda: ["3", "GPU-8a1f"])
    show = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(os.environ['CUDA_VISIBLE_DEVICES'])"
    lines = [
        {"run_id": str(number), "argv": [sys.executable, "-c", show, str(tmp_path / str(number))]}
        for number in range(3)
    ]
    submit(lines, tmp_path / "logs", executor="debug", jobs=2)
    assert [(tmp_path / str(number)).read_text() for number in range(3)] == ["3", "3", "3"], "one at a time"
    submit(lines, tmp_path / "logs", executor="local", jobs=2)
    assert {(tmp_path / str(number)).read_text() for number in range(3)} == {"3", "GPU-8a1f"}


def test_unknown_executors_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='did you mean "slurm"'):
        submit([command(0)], tmp_path, executor="slrum")
    with pytest.raises(UsageError, match="submitit refuses an option"):
        submit([command(0)], tmp_path, executor="debug", options={"partitoin": "gpu"})


def test_slurm_gets_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Slurm here: commands of its names record what they were asked."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, says in {"srun": "", "sbatch": "Submitted batch job 42", "squeue": "", "sacct": ""}.items():
        tool = tools / name
        tool.write_text(f'#!/bin/sh\necho "$0 $@" >> {tmp_path}/calls\necho "{says}"\n')
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    options = {"slurm_partition": "gpu", "timeout_min": 30}
    submitted = submit([command(0), command(0)], tmp_path / "logs", executor="slurm", jobs=2, options=options)
    assert [line["job_id"] for line in submitted] == ["42_0", "42_1"]
    script = next((tmp_path / "logs").glob("*.sh")).read_text()
    assert "#SBATCH --array=0-1%2" in script
    assert "#SBATCH --partition=gpu" in script
    assert "#SBATCH --signal=USR2@" in script


def test_a_job_may_run_out_of_time_as_often_as_it_needs(tmp_path: Path) -> None:
    """submitit would give it up after three times; its options may still say so."""
    for options, expected in (({}, 1_000_000), ({"slurm_max_num_timeout": 7}, 7)):
        folder = tmp_path / str(expected)
        submit([command(0)], folder, executor="local", options=options)
        pickled = next(folder.glob("*_submitted.pkl"))
        assert DelayedSubmission.load(pickled)._timeout_countdown == expected


def saving(folder: Path) -> list[str]:
    """A command that says when it is ready, and on SIGTERM saves and exits 75; started again it is done."""
    script = (
        "import pathlib, signal, sys, time\n"
        f"folder = pathlib.Path({str(folder)!r})\n"
        "(folder / 'saved').exists() and sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, lambda *_: ((folder / 'saved').touch(), sys.exit(75)))\n"
        "(folder / 'ready').touch()\n"
        "time.sleep(120)\n"
    )
    return [sys.executable, "-c", script]


def send(number: int, script: str, folder: Path, *, group: bool = False, times: int = 1) -> tuple[int, str]:
    """Run a script in a process of its own, signal it when its run is ready; exit code and stderr."""
    process = subprocess.Popen(
        [sys.executable, "-c", script], start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    try:
        while not (folder / "ready").exists():
            assert process.poll() is None
            time.sleep(0.01)
        for earlier in range(times):
            time.sleep(earlier)
            os.killpg(process.pid, number) if group else process.send_signal(number)
        said = process.communicate(timeout=60)[1]
        return process.returncode, said
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_preemption_lets_the_run_save_and_queues_it_again(tmp_path: Path) -> None:
    """The signal comes while the job waits for its run, in the same thread."""
    script = (
        "import os, signal\n"
        "from pe_study.sweep import TrainJob\n"
        f"job = TrainJob({saving(tmp_path)!r})\n"
        "def answer(*_):\n"
        "    again = job.checkpoint().function\n"
        "    os._exit(7 if (again.argv, again._process) == (job.argv, None) else 1)\n"
        "signal.signal(signal.SIGUSR2, answer)\n"
        "job()\n"
    )
    assert send(signal.SIGUSR2, script, tmp_path) == (7, "")
    assert (tmp_path / "saved").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # submitit leaves logs open
def test_submitit_queues_a_job_again_that_is_out_of_time(tmp_path: Path) -> None:
    """Its local executor sends SIGUSR2 ten seconds after the start, and starts again what it queued."""
    from submitit import LocalExecutor

    engine = LocalExecutor(tmp_path / "logs")
    engine.update_parameters(timeout_min=1, signal_delay_s=50)
    job = engine.submit(TrainJob(saving(tmp_path)))
    assert job.result() == 0
    assert (tmp_path / "saved").exists()
    assert "this job is timed-out" in job.stderr()


@pytest.mark.parametrize(
    ("executor", "number"),
    [("local", signal.SIGTERM), ("local", signal.SIGINT), ("debug", signal.SIGUSR2)],
)
def test_a_stop_is_passed_on_to_the_runs(tmp_path: Path, executor: str, number: int) -> None:
    """The run saves, the next does not start, exit 75; a Ctrl-C reaches every process of a terminal."""
    lines = [{"run_id": "a", "argv": saving(tmp_path)}, command(3)]
    script = (
        "import sys\n"
        "from pe_study.errors import PEStudyError\n"
        "from pe_study.sweep import submit\n"
        f"try: submit({lines!r}, {str(tmp_path / 'logs')!r}, executor={executor!r})\n"
        "except PEStudyError as error: sys.exit(print(error, file=sys.stderr) or error.exit_code)\n"
    )
    code, said = send(number, script, tmp_path, group=number == signal.SIGINT)
    assert code == 75, said
    assert "a (exit code 75), ends-with-3 (exit code 75)" in said
    assert (tmp_path / "saved").exists()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_the_runs(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "time.sleep(120)\n"
    )
    lines = [{"run_id": "a", "argv": [sys.executable, "-c", program]}]
    script = (
        "from pe_study.sweep import submit\n"
        f"submit({lines!r}, {str(tmp_path / 'logs')!r}, executor='local')\n"
    )
    code, said = send(signal.SIGINT, script, tmp_path, times=2)
    assert code == -signal.SIGINT, said
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int((tmp_path / "pid").read_text())).status() == psutil.STATUS_ZOMBIE


def test_exit_code_75_under_slurm_requeues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $@ > {tmp_path}/calls\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert TrainJob(command(75)["argv"])() == 75  # type: ignore[arg-type]
    assert not (tmp_path / "calls").exists(), "another executor, within a Slurm job of the user's"
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    assert slurm_job_id() == "17"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "16")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert TrainJob(command(75)["argv"])() == 75  # type: ignore[arg-type]
    assert (tmp_path / "calls").read_text() == "requeue 16_3\n"


def test_a_run_that_fails_under_slurm_fails_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Slurm takes it for COMPLETED, and `afterok` starts what needs it."""
    fails = TrainJob(command(5)["argv"])  # type: ignore[arg-type]
    assert fails() == 5, "`sweep --executor local` reads the code"
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with pytest.raises(PEStudyError, match=r"^exit code 5: "):
        fails()
    killed = TrainJob([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    with pytest.raises(PEStudyError, match=r"^SIGKILL "):
        killed()
    assert TrainJob(command(0)["argv"])() == 0  # type: ignore[arg-type]
