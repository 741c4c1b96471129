"""The command line as a person meets it: what is printed, where, and the exit code."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import typer

import pe_study
from pe_study import cli, shipped, terminal
from pe_study.commands import flags, listing
from pe_study.errors import (
    CheckpointError,
    DataError,
    Interrupted,
    NonFiniteLossError,
    RecipeError,
    UsageError,
    is_own,
    mark_own,
)
from pe_study.plan import Plan
from pe_study.training import engine

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = tuple(typer.main.get_command(cli.app).commands)

RECIPE = """\
name: tiny
seeds: [0]
encodings: [nope, rope]
model: {num_layers: 1, d_model: 16, num_heads: 2, num_kv_heads: 1, d_ff: 32, max_positions: 64}
train: {length: 16, batch_tokens: 64, steps: 2, lr: 1e-3, warmup_steps: 1}
eval: {name: short, lengths: [1x, 2x], num_documents: 2}
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def pe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Result]:
    """`pe("ls", "runs")` runs a command in an empty folder and returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str | Path) -> Result:
        code = cli.main([str(word) for word in argv])
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


def assert_refused(result: Result, code: int, *words: str) -> None:
    """An error: nothing on stdout, one or two lines on stderr, no traceback."""
    assert result.code == code
    assert result.out == ""
    assert 1 <= result.err.count("\n") <= 2
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err


def python(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python …` in a process of its own, UTF-8 read back."""
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, *argv], capture_output=True, encoding="utf-8", env=env, cwd=ROOT)


# --- help ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_eighty_columns_and_gives_an_example(pe: Callable[..., Result], command: str) -> None:
    result = pe(*[command] * bool(command), "--help")
    assert result.code == 0
    assert result.err == ""
    assert max(map(len, result.out.split("\n"))) <= 80
    assert "pe-study" in result.out.split("\n")[-2]
    if not command:
        assert all(f"  {name} " in result.out for name in COMMANDS)


def test_no_words_at_all_are_a_call_for_help(pe: Callable[..., Result]) -> None:
    assert pe() == pe("--help")


def test_help_and_version_load_nothing_heavy() -> None:
    code = (
        "import sys, pe_study.cli\n"
        "pe_study.cli.main(['--help'])\n"
        "print(*sorted({'torch', 'transformers', 'pandas', 'matplotlib'} & set(sys.modules)), 'loaded')"
    )
    done = python("-c", code)
    assert done.stdout.endswith("\nloaded\n") or done.stdout.endswith("\n loaded\n"), done.stderr


def test_module_is_the_same_command() -> None:
    done = python("-m", "pe_study", "--version")
    assert (done.returncode, done.stdout) == (0, f"pe-study {pe_study.__version__}\n")


def test_every_plan_key_is_a_flag(pe: Callable[..., Result]) -> None:
    out = pe("eval", "--help").out
    for key in Plan.model_fields:
        assert f"--{key.replace('_', '-')} " in out
    assert "--rescale," in out
    assert "--protocol," in out


# --- wrong words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian", "x.yaml"], ["trian", "train"]),
        (["train"], ["RECIPE"]),
        (["train", "tiny.yaml", "--onyl", "seed=0"], ["--onyl", "--only"]),
        (["train", "nothere.yaml"], ["nothere.yaml", "no such file"]),
        (["train", "tiny.yaml", "train.lrr=1"], ["train.lrr", "unknown key", "lr"]),
        (["train", "tiny.yaml", "train.lr=-1"], ["train.lr", "-1", "above 0"]),
        (["train", "tiny.yaml", "--only", "rope"], ["--only", "encoding=rope"]),
        (["train", "tiny.yaml", "--only", "encoding=ropes", "--dry-run"], ["ropes", "rope"]),
        (["ls", "encodngs"], ["encodngs", "encodings"]),
        (["train", "tiny.yaml", "--jobs", "two"], ["--jobs", "two", "auto"]),
        (["report", "x", "--format", "latx"], ["--format", "latx", "latex"]),
        (["bench", "--phases", "trian"], ["--phases", "trian", "train"]),
        (["bench", "--sizes", "d_modl=8"], ["--sizes", "d_modl", "d_model"]),
        (["bench", "--lengths", "4x"], ["--lengths", "4x"]),
        (["bench", "--device", "tpu"], ["device", "tpu", "cuda"]),
        (["sweep", "tiny.yaml", "--executor", "local", "--slurm", "x"], ["--slurm", "timeout_min"]),
        (["validate", "."], ["folder"]),
        (["eval", "x", "--lengths"], ["--lengths"]),
    ],
)
def test_wrong_words_are_named(
    pe: Callable[..., Result], recipe: Path, argv: list[str], words: list[str]
) -> None:
    assert_refused(pe(*argv), 2, *words)


# --- exit codes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RecipeError("r.yaml:3: train.lr: found -1"), 2),
        (UsageError("out: not empty"), 2),
        (DataError("corpus: empty"), 3),
        (CheckpointError("final: damaged"), 4),
        (NonFiniteLossError("step 7: loss is nan"), 5),
        (Interrupted("stopped"), 75),
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), 2),
        (ValueError("Error while serializing: I/O error: No space left on device (os error 28)"), 2),
        (RuntimeError("a bug"), 1),
        (KeyboardInterrupt(), 75),
    ],
)
def test_each_error_has_its_exit_code(
    pe: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(*_: object) -> str:
        raise error

    monkeypatch.setattr(listing, "listed", fail)
    assert_refused(pe("ls", "runs"), code, "pe-study: ", *str(error).split("\n")[:1] if code != 2 else [])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_signals_end_a_command_that_can_be_typed_again(
    pe: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    inherited = signal.getsignal(number)
    if number == signal.SIGINT:  # what a shell starts in the background ignores it
        signal.signal(number, signal.default_int_handler)
    before = signal.getsignal(number)
    monkeypatch.setattr(listing, "listed", lambda *_: os.kill(os.getpid(), number))
    try:
        assert_refused(pe("ls", "runs"), 75, "the same command continues")
        assert signal.getsignal(number) is before
    finally:
        signal.signal(number, inherited)


def test_a_fault_of_ours_shows_its_traceback_when_asked(
    pe: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "listed", lambda *_: 1 / 0)
    monkeypatch.setenv(terminal.DEBUG, "1")
    assert "Traceback" in pe("ls", "runs").err


def test_other_ranks_say_nothing(pe: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pe("ls", "kernels") == (0, "", "")
    assert pe("ls", "nothing") == (2, "", "")


def test_warnings_are_one_line_each() -> None:
    code = (
        "import logging, warnings, pe_study.cli\n"
        "pe_study.cli.main(['--version'])\n"
        "warnings.warn('rows untrained')\n"
        "logging.getLogger('pe_study.train').warning('snapshot %s is damaged', 7)\n"
    )
    expected = "pe-study: warning: rows untrained\npe-study: warning: snapshot 7 is damaged\n"
    assert python("-c", code).stderr == expected


def test_nobody_reads_the_rest(tmp_path: Path) -> None:
    """`pe-study ls keys | head -1` ends quietly."""
    script = f"{sys.executable} -m pe_study ls keys | head -1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("keys\n", "")


def test_output_is_utf8_in_any_locale(tmp_path: Path) -> None:
    """case 62: names that ASCII cannot hold are printed, not tripped over."""
    (tmp_path / "é.yaml").write_text("größe: 1\n", encoding="utf-8")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = python("-m", "pe_study", "validate", str(tmp_path / "é.yaml"), **locale)
    assert done.returncode == 2
    assert "é.yaml" in done.stderr
    assert "größe" in done.stderr


# --- overrides -------------------------------------------------------------------------------------------


def test_plan_flags_are_overrides() -> None:
    given = {
        "lengths": "512,2k,4x",
        "rescales": "none,yarn:4:beta_fast=32",
        "protocols": "prefix,sliding:stride=256",
        "bos": "true",
        "num_documents": "3",
        "unit": None,
    }
    assert flags.plan_overrides(given) == [
        "lengths=[512, 2k, 4x]",
        'rescales=[none, "yarn:4:beta_fast=32"]',
        "protocols=[prefix, {name: sliding, stride: 256}]",
        "bos=true",
        "num_documents=3",
    ]
    plan = Plan().with_overrides(flags.plan_overrides(given))
    assert plan.lengths == (512, 2048, "4x")
    assert plan.protocols[1].stride == 256
    assert plan.bos is True


def test_overrides_are_told_from_targets() -> None:
    words = ["runs/demo", "train.lr=3e-4", "./a=b", "org/model", "bos=true"]
    assert flags.split_overrides(words) == (
        ["runs/demo", "./a=b", "org/model"],
        ["train.lr=3e-4", "bos=true"],
    )


def test_only_is_read() -> None:
    assert flags.only(None) == {}
    assert flags.only("encoding=rope, seed=0") == {"encoding": "rope", "seed": "0"}


# --- the whole way ---------------------------------------------------------------------------------------


def test_run_goes_the_whole_way_and_follows_its_recipe(
    pe: Callable[..., Result], recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the second time, when what changed is the plan and every run is finished."""
    monkeypatch.setattr("pe_study.report.build", lambda studies, page: f"{page} of {studies[0]}")
    corpus = recipe.parent / "text"
    corpus.mkdir()
    for number in range(8):
        (corpus / f"{number}.txt").write_text(f"{number} words in a row. " * 20, encoding="utf-8")
    mine = ("run", recipe, f"data.corpus={corpus}", "data.validation_fraction=0.5")
    first = pe(*mine, "--only", "run=rope-s0")
    assert (first.code, first.err) == (0, "")
    assert first.out.endswith("\nreports/tiny of runs/tiny\n")
    assert [path.name for path in Path("runs/tiny").glob("*-s0")] == ["rope-s0"]
    second = pe(*mine, "--only", "run=rope-s0", "eval.lengths=[1x, 3x]")
    assert second.out.startswith("skipped")
    assert second.out.split("bits per byte")[1].split("\n")[1].split()[-2:] == ["16", "48"]


def test_run_refuses_a_page_that_is_not_ours_before_it_trains(
    pe: Callable[..., Result], recipe: Path
) -> None:
    Path("thesis").mkdir()
    Path("thesis/chapter.tex").touch()
    assert_refused(pe("run", recipe, "--output", "thesis"), 2, "thesis", "not ours")
    assert_refused(pe("bench", "--output", "thesis"), 2, "thesis", "not ours")
    assert not Path("runs").exists()


# --- lists and costs ---------------------------------------------------------------------------------------


def test_ls_names_everything_there_is(pe: Callable[..., Result]) -> None:
    from pe_study import attention, encodings, plan, rope_scaling

    out = pe("ls").out
    names = [*encodings.available(), *rope_scaling.KINDS, *plan.PROTOCOLS, *attention.KERNELS]
    assert all(f"\n  {name} " in out for name in names)
    assert set(attention.KERNELS) | {"auto"} == set(listing.KERNELS)
    assert "recipes/demo.yaml" in out
    assert "evals/length.yaml" in out
    assert "evals/controls.yaml" in out
    assert "no runs yet" in out
    assert max(map(len, out.split("\n"))) <= 80
    assert all(kind in cli.LISTS for kind in listing.KINDS)


def test_ls_keys_describes_every_key(pe: Callable[..., Result]) -> None:
    out = pe("ls", "keys").out
    assert "train.lr " in out
    assert "eval.lengths " in out


def test_dry_run_shows_the_work_and_touches_nothing(
    pe: Callable[..., Result], recipe: Path, tmp_path: Path
) -> None:
    result = pe("train", recipe, "--dry-run", "train.steps=4")
    assert result.code == 0
    assert "2 runs" in result.out
    assert "4 steps of 64 tokens at length 16: 256 tokens a run" in result.out
    assert "64 bytes a token in float32" in result.out  # 2 x 1 head x 8 wide x 4 bytes x 1 layer
    assert result.out.count("to do") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.yaml"]


def test_validate_says_what_it_read(pe: Callable[..., Result], recipe: Path) -> None:
    out = pe("validate", recipe, "evals/length.yaml").out
    assert "recipe tiny, 2 runs" in out
    assert "plan length" in out


def test_shipped_files_are_found_from_anywhere(pe: Callable[..., Result]) -> None:
    assert pe("validate", *shipped.names("recipes"), *shipped.names("evals")).code == 0
    assert shipped.find("recipes/none.yaml") == Path("recipes/none.yaml")


def test_an_error_that_one_process_meets_alone_is_told_by_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of what all processes raise, the first of a machine speaks; what one alone knows, it has to say."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "5")

    def command(own: bool, kind: type[Exception]) -> Callable[[Sequence[str] | None], int]:
        def fail(_: Sequence[str] | None) -> int:
            error = kind("it does not fit")
            if own:
                mark_own(error)
            raise error

        return fail

    assert terminal.guarded(command(False, UsageError), []) == 2
    assert capsys.readouterr().err == ""
    assert terminal.guarded(command(True, UsageError), []) == 2
    assert capsys.readouterr().err == "pe-study: process 5: it does not fit\n"
    assert terminal.guarded(command(True, ValueError), []) == 1
    assert "process 5: unexpected ValueError: it does not fit" in capsys.readouterr().err


def test_own_errors_are_those_that_are_not_agreed_on(tmp_path: Path) -> None:
    """Two processes stood for by one: what `on_main` raises everywhere is nobody's own."""
    accelerator = SimpleNamespace(num_processes=2, process_index=1, is_main_process=True)
    for error, own in (
        (UsageError("no memory"), True),
        (ValueError("odd"), True),
        (Interrupted("stopped"), False),
        (NonFiniteLossError("nan", {}), False),
    ):
        with pytest.raises(type(error)), engine.losing_others(accelerator, tmp_path):
            raise error
        assert is_own(error) is own
    alone = SimpleNamespace(num_processes=1, process_index=0, is_main_process=True)

    def full() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full") as caught:
        engine.on_main(alone, full)
    with pytest.raises(OSError, match="disk full"), engine.losing_others(accelerator, tmp_path):
        raise caught.value
    assert not is_own(caught.value)
