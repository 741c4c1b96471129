"""Every command of the README is run, on a study and a checkpoint that a test can afford."""

from __future__ import annotations

import json
import re
import shlex
import sys
import warnings
from pathlib import Path

import pytest

from pe_study import cli, recipe
from pe_study.evaluators import far_context, jobs, study
from pe_study.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, flags=re.S)
COMMANDS = [line.split("  #")[0].strip() for block in BLOCKS for line in block.strip().split("\n")]

TINY = """\
name: tiny
seeds: [0]
encodings: [nope, rope]
model: {num_layers: 1, d_model: 16, num_heads: 2, num_kv_heads: 1, d_ff: 32, max_positions: 64}
data: {corpus: texts, validation_fraction: 0.25}
train: {length: 16, batch_tokens: 256, steps: 3, lr: 1e-3, warmup_steps: 1}
eval: {name: short, lengths: [1x, 2x], num_documents: 2, rescales: [none, "yarn:auto"]}
"""
# A checkpoint and lengths in the proportions of SmolLM2's, every number divided by 256: two lengths lie below
# the positions of the checkpoint, as 2k and 4k do.
SHRUNK = 256
POSITIONS = 8192 // SHRUNK
SHORT = ",".join(str(int(length) * 1024 // SHRUNK) for length in ("2", "4", "8", "16", "32"))
# What a command says beside its result: a line that a part of the command goes with.
SAID = {
    f"--lengths {SHORT}": "pe-study: warning: protocols: sliding: stride 0.5x is 16 tokens, cut to 8, "
    "the shortest length (there it is nonoverlapping)\n"
}
# What a reader types, and what the test runs in its place.
STAND_INS = {
    "accelerate launch -m pe_study": "pe-study",
    "recipes/demo.yaml": "tiny.yaml",
    "recipes/wikitext103-512.yaml": "tiny.yaml",
    "runs/wikitext103-512": "runs/tiny",
    "runs/demo": "runs/tiny",
    "demo-tuned": "tiny-tuned",
    "tuned:demo": "tuned:tiny",
    "runs/eval/HuggingFaceTB--SmolLM2-135M": "runs/eval/checkpoint",
    "HuggingFaceTB/SmolLM2-135M": "checkpoint",
    "--lengths 2k,4k,8k,16k,32k": f"--lengths {SHORT} --corpus texts --num-documents 2",
    "rope alibi t5 --lengths 128,2k --peers": "rope --lengths 16 --phases eval --rounds 1 --no-memory",
    "recipes/small.yaml": "tiny.yaml",
    " --executor slurm --jobs 8 --slurm slurm_partition=gpu,timeout_min=600": "",
    "train.lr=3e-4": "name=changed train.lr=3e-4",
    "mine": "alibi",
    "pe-study report": "pe-study report --view brief.yaml",
    "--plan evals/controls.yaml": "--plan evals/controls.yaml --num-documents 2",
    "evals/tasks": f"{ROOT / 'evals' / 'tasks'} --limit 1 --output_path lm",
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny recipe, its texts and a tiny checkpoint, in which the commands run."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "tiny.yaml").write_text(TINY, encoding="utf-8")
    (folder / "brief.yaml").write_text("figures: [length]\ntables: [main]\n", encoding="utf-8")
    (folder / "texts").mkdir()
    for number in range(12):
        text = " ".join(f"Line {line} of text {number}: größer als {line * number}." for line in range(40))
        (folder / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    _save_checkpoint(folder / "checkpoint")
    return folder


def _save_checkpoint(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from pe_study.data import load_tokenizer
    from pe_study.recipe import DataSpec

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=POSITIONS, **sizes)).save_pretrained(
        folder
    )
    load_tokenizer(DataSpec(), None).save(folder)


def test_the_two_commands_stand_at_the_top() -> None:
    assert [command.split()[:2] for command in COMMANDS[:2]] == [["make", "demo"], ["make", "test"]]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) - {"set"} <= targets


def test_the_commands_run(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From top to bottom, each in the state that the ones before it left."""
    monkeypatch.chdir(desk)
    ran = 0
    for command in COMMANDS:
        for typed, run in STAND_INS.items():
            command = command.replace(typed, run)
        program, *argv = shlex.split(command)
        if program == "pe-study":
            code = cli.main(argv)
            printed = capsys.readouterr()
            assert code == 0, f"{command}\n{printed.err}"
            assert printed.err == "".join(line for part, line in SAID.items() if part in command), command
            ran += 1
        elif argv[:2] == ["-m", "pe_study.lm_eval"]:
            _run_lm_eval(argv[1:], monkeypatch)
            assert "pe_passkey" in capsys.readouterr().out
            ran += 1
        else:
            assert (program, *argv[:2]) in {("make", *argv[:2]), ("python", "-m", "pytest")}, command
    assert ran >= 11
    assert (desk / "runs/tiny/rope-s0/DONE").is_file()
    assert (desk / "runs/tiny/eval/short/results.parquet").is_file()
    assert (desk / "runs/eval/checkpoint/results.json").is_file()
    assert (desk / "reports/tiny/index.html").is_file()
    assert (desk / "reports/checkpoint/report.md").is_file()
    [path] = (desk / "lm").rglob("results_*.json")
    measured = json.loads(path.read_text(encoding="utf-8"))
    assert measured["n-samples"]["pe_passkey"]["effective"] == 1
    assert measured["config"]["task_lengths"] == {"pe_passkey": 1024}


def test_evaluations_of_shipped_recipes_suit_the_plans_of_those(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that each command makes of its recipe's own can be measured: `--far-context` of a stream."""
    inline = re.findall(r"`(pe-study eval runs/[^`]+)`", README)
    commands = [command for command in [*COMMANDS, *inline] if command.startswith("pe-study eval runs/")]
    recipes = {name: ROOT / "recipes" / f"{name}.yaml" for name in ("demo", "wikitext103-512")}
    shown = []

    def suits(target: str, plan: Plan, **_: object) -> list[dict[str, object]]:
        trained = recipe.load(recipes[Path(target).name.removesuffix("-tuned")]).train.length
        resolved = plan.resolve(trained)
        far_context.check(resolved, target, trained)
        texts = ([1, 2], [3, 4])[: 1 if plan.unit == "stream" else 2]
        far_context.check_documents(resolved, jobs.read_documents(texts, None))
        shown.append(plan)
        return []

    def own_plan(target: str, runs_root: Path) -> Plan:
        return recipe.load(recipes[Path(target).name.removesuffix("-tuned")]).eval

    monkeypatch.setattr(study, "default_plan", own_plan)
    monkeypatch.setattr(study, "evaluate", suits)
    for command in commands:
        assert cli.main(shlex.split(command)[1:]) == 0, command
    assert len(shown) == len(commands) >= 3
    assert any(plan.far_context != ("own",) for plan in shown)


def _run_lm_eval(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m pe_study.lm_eval` in this process; what lm-eval warns of is its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pe_study import lm_eval

        monkeypatch.setattr(sys, "argv", argv)
        assert lm_eval.main() == 0


def test_the_checkpoint_has_the_proportions_of_the_one_that_is_named() -> None:
    """2k to 32k beside 8192 positions: lengths below, at and above them."""
    lengths = [int(length) for length in SHORT.split(",")]
    assert [length / POSITIONS for length in lengths] == [0.25, 0.5, 1, 2, 4]
    assert "SmolLM2-135M --lengths 2k,4k,8k,16k,32k" in README


def test_python_in_the_readme_is_the_public_surface() -> None:
    import pe_study

    names = set(re.findall(r"pe_study\.([a-z_]+)\(", README))
    assert names
    assert all(callable(getattr(pe_study, name)) for name in names)
