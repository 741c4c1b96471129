"""Find the recipes, plans and report definitions that come with pe_study, from a clone or from a wheel."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
OTHER_KINDS = {"accelerate", "skypilot", "tasks"}  # launchers beside recipes, lm-eval tasks beside plans
ROOTS = (PACKAGE.parent, PACKAGE / "_shipped")  # a clone (or editable install), an installed wheel


def find(path: str | Path) -> Path:
    """The file as typed when it exists, else the shipped file of that name, else the path as typed.

    `recipes/demo.yaml` therefore works in a clone, and in any folder once the wheel is installed.
    """
    typed = Path(path)
    if typed.exists() or typed.is_absolute():
        return typed
    return next((root / typed for root in ROOTS if (root / typed).is_file()), typed)


def names(folder: str) -> list[str]:
    """Shipped YAML files under `folder` ("recipes", "evals", "reports"), as they are typed."""
    found = {path.relative_to(root) for root in ROOTS for path in (root / folder).rglob("*.yaml")}
    return sorted(str(path) for path in found if path.parent.name not in OTHER_KINDS)
