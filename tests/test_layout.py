"""The rules of the house: imports go one way, reports need no torch, nobody knows an encoding by name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from pe_study import encodings

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pe_study"
HEAVY = {"torch", "transformers", "accelerate", "lm_eval"}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

COMMANDS = {"cli", "commands"}
TRAINING = {"train", "training", "tune", "sweep"}
REPORT = {"report", "reporting", "plots", "tables", "stats"}
MODELS = {"model", "checkpoints", "loading"}
FORBIDDEN = {
    "commands": {"cli"},
    "train": {"evaluators", "cli", "commands", *REPORT},
    "training": {"train", "tune", "sweep", "evaluators", *COMMANDS, *REPORT},
    "evaluators": {*TRAINING, *COMMANDS, *REPORT},
    "report": {"encodings", "attention", "evaluators", *TRAINING, *COMMANDS, *MODELS},
    "reporting": {"report", "recipe", "data", "text", "encodings", "attention", "evaluators"}
    | {*TRAINING, *COMMANDS, *MODELS},
    "plots": {"report", "evaluators", *TRAINING, *COMMANDS, *MODELS},
    "tables": {"plots", "report", "evaluators", *TRAINING, *COMMANDS, *MODELS},
    "stats": {name.split(".")[1] for name in MODULES if "." in name} - {"stats"},
    "model": {"evaluators", "checkpoints", "recipe", "plan", "data", "text", "runs"}
    | {*TRAINING, *COMMANDS, *REPORT},
    "attention": {"evaluators", "recipe", "data", "text", "runs"} | {*TRAINING, *COMMANDS, *REPORT, *MODELS},
    "encodings": {"attention", "kernels", "evaluators", "recipe", "data", "text"}
    | {*TRAINING, *COMMANDS, *REPORT, *MODELS},
    "rope_scaling": {"evaluators", "recipe", "data", "text", "encodings"}
    | {*TRAINING, *COMMANDS, *REPORT, *MODELS},
    "data": {"evaluators", "encodings", "runs"} | {*TRAINING, *COMMANDS, *REPORT, *MODELS},
    "text": {"evaluators", "encodings", "runs"} | {*TRAINING, *COMMANDS, *REPORT, *MODELS},
    "checkpoints": {"evaluators", "recipe", *TRAINING, *COMMANDS, *REPORT},
    "loading": {"checkpoints", "evaluators", "recipe", "plan", "data", "text", "runs"}
    | {*TRAINING, *COMMANDS, *REPORT},
    "export": {"evaluators", *TRAINING, *COMMANDS, *REPORT},
    "bench": {"evaluators", "recipe", *TRAINING, *COMMANDS, *REPORT},
    "kernels": {"attention", "evaluators", "recipe", "data", "text"}
    | {*TRAINING, *COMMANDS, *REPORT, *MODELS},
    "recipe": {"evaluators", "data", "text", *TRAINING, *COMMANDS, *REPORT, *MODELS},
    "settings": {"recipe", "plan", "evaluators", "data", "text", "runs"}
    | {*TRAINING, *COMMANDS, *REPORT, *MODELS},
    "plan": {"recipe", "evaluators", "data", "text", *TRAINING, *COMMANDS, *REPORT, *MODELS},
    "runs": {"recipe", "evaluators", "data", "text", "encodings"} | {*TRAINING, *COMMANDS, *REPORT, *MODELS},
    "snapshots": {"evaluators", *TRAINING, *COMMANDS, *REPORT, *MODELS},
    "errors": {name.split(".")[1] for name in MODULES if "." in name} - {"errors"},
}
NOT_TEXT = {"os", "Image", "gzip", "zipfile", "tarfile", "webbrowser"}  # modules whose open() is another
TORCH_FREE = ["cli", "errors", "plan", "plots", "recipe", "report", "rope_scaling", "runs", "stats", "tables"]
TORCH_FREE += [
    name.removeprefix("pe_study.")
    for name in MODULES
    if name.startswith(("pe_study.commands", "pe_study.reporting", "pe_study.settings"))
]


def part(module: str) -> str:
    """`pe_study.evaluators.study` -> `evaluators`: rules speak of files and folders of the first level."""
    return module.split(".")[1] if "." in module else ""


class _AsRun(ast.NodeTransformer):
    """The code that runs: without `if TYPE_CHECKING`, and on loading without the bodies of functions."""

    def __init__(self, *, on_load: bool) -> None:
        self.on_load = on_load

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if ast.unparse(node.test).endswith("TYPE_CHECKING") else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        if self.on_load:
            node.body = [ast.Pass()]
        return node


def imports(path: Path, *, on_load: bool = False) -> set[str]:
    """Modules of ours that a file imports, by full name; `on_load` leaves out those inside functions."""
    tree = _AsRun(on_load=on_load).visit(ast.parse(path.read_text(encoding="utf-8")))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and node.level == 0, f"{path}: imports are absolute"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return (found & MODULES.keys()) - {"pe_study"}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_imports_go_one_way(name: str) -> None:
    for module, path in MODULES.items():
        if part(module) == name:
            wrong = {other for other in imports(path) if part(other) in FORBIDDEN[name]}
            assert not wrong, f"{module} imports {', '.join(sorted(wrong))}"


def test_no_circles_between_files() -> None:
    """Files form floors: loading one never comes back to it."""
    TopologicalSorter({module: imports(path, on_load=True) for module, path in MODULES.items()}).prepare()


def test_reports_recipes_and_commands_load_no_torch() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {TORCH_FREE!r}:\n"
        "    importlib.import_module(f'pe_study.{name}')\n"
        f"    print(name, *sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split("\n")[:-1] == TORCH_FREE, done.stderr


@pytest.mark.parametrize("name", ["model.py", "train.py", "evaluators"])
def test_no_encoding_is_known_by_name(name: str) -> None:
    """Adding an encoding touches its own file: others ask for its traits, never for its name."""
    names = re.compile(rf"\b({'|'.join(encodings.available())})\b")
    target = PACKAGE / name
    for path in [target] if target.is_file() else sorted(target.rglob("*.py")):
        strings = [
            node.value
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value
        ]
        known = {text for text in strings if names.fullmatch(text)}
        assert not known, f"{path}: {known}"


def test_files_and_functions_keep_their_size() -> None:
    """A file is one thing a person can name; a function fits on a screen."""
    outgrown = []
    for path in MODULES.values():
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > 300:
            outgrown.append(f"{path.name}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > 60:
                outgrown.append(f"{path.name}:{node.lineno} {node.name}")
    assert outgrown == []


def test_every_module_says_what_it_is() -> None:
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
    assert [name for name, tree in trees.items() if tree.body and not ast.get_docstring(tree)] == []


def test_nobody_prints_or_exits_but_the_command_line() -> None:
    """Errors travel as PEStudyError; only the terminal module speaks, only __main__ exits."""
    loud = []
    for name, path in MODULES.items():
        if name in ("pe_study.terminal", "pe_study.__main__", "pe_study.lm_eval"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.exit", "exit"):
                loud.append(f"{name}:{node.lineno}")
    assert loud == []


def test_text_files_are_opened_as_utf8() -> None:
    """case 62: a machine whose locale is not UTF-8 reads and writes the same text."""
    unsafe = []
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _opens_text(node):
                unsafe.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert unsafe == []


def _opens_text(call: ast.Call) -> bool:
    """Whether a call opens a text file without saying its encoding."""
    function, _, method = ast.unparse(call.func).rpartition(".")
    openers = ("open", "read_text", "write_text") if function else ("open",)
    if function in NOT_TEXT or method not in openers:
        return False
    modes = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    modes += [
        str(keyword.value.value) for keyword in call.keywords if isinstance(keyword.value, ast.Constant)
    ]
    return "utf-8" not in modes and not any(re.fullmatch("[rwxa+]*b[+]?", mode) for mode in modes)


def test_documents_keep_up_with_the_code() -> None:
    """The README names every command; its links lead somewhere."""
    import typer

    from pe_study.cli import app

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in typer.main.get_command(app).commands:
        assert f"pe-study {name}" in readme, f"README.md does not mention pe-study {name}"
    for link in re.findall(r"\]\(([^)#]+)", readme):
        assert (ROOT / link).exists(), f"README.md links to {link}"


def test_definitions_name_every_column_and_protocol() -> None:
    from pe_study import encodings, plan, rope_scaling, rows

    text = (ROOT / "docs/definitions.md").read_text(encoding="utf-8")
    for name in (*plan.PROTOCOLS, *encodings.available(), *rope_scaling.KINDS, *rows.ROW_COLUMNS):
        assert re.search(rf"\b{re.escape(name)}\b", text), f"docs/definitions.md does not mention {name}"
