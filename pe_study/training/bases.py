"""The weights that a recipe goes on from (`init.from`): where they lie, and which they are. No torch here."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pe_study import finished, kept, runs, shipped

if TYPE_CHECKING:
    from pe_study.recipe import Recipe

WEIGHTS = "initial_weights"  # their hash, in provenance, snapshots and DONE
CONFIG = "initial_config"  # there, too: the configuration that they are built under
NOTED = (WEIGHTS, CONFIG)
# What a configuration says of who wrote it and how: no number of a training depends on it.
_ASIDE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "kernel", "seed")


def locate(source: str, runs_root: Path | str) -> str:
    """`source` where it exists, else what lies under that name in the folder of runs, else `source`.

    The name may begin with the folder where its runs would lie by default, as `runs/demo/rope-s0` does.
    """
    path = Path(source).expanduser()
    if path.is_absolute() or path.exists():
        return source
    inside = (Path(runs_root, *path.parts), Path(runs_root, *path.parts[1:]))
    return next((str(found) for found in inside if len(path.parts) > 1 and found.is_dir()), source)


def absence(recipe: Recipe, runs_root: Path | str) -> str | None:
    """Why `init.from` names no weights, with the command that makes them; None where it does, or where only
    the Hub can tell."""
    if recipe.init is None:
        return None
    source = recipe.init.source
    found = Path(locate(source, runs_root)).expanduser()
    where = f'{recipe.path or recipe.name}: init.from: found "{source}"'
    if found.is_dir() and (found / runs.RECIPE).is_file() and not (found / runs.FINAL).is_dir():
        return f"{where}, an unfinished run; finish it first: {finished.command(found)}"
    if found.exists() or (source.count("/") == 1 and source[0] not in "./~"):
        return None
    default = Path(runs_root) == Path("runs") or found.is_absolute()
    under = "" if default else f" and none under {runs_root}"
    if len(found.parts) > 1 and "-s" in found.name:
        return f"{where}, no such run{under}; make it first: {_command(recipe, found, runs_root)}"
    return (
        f"{where}, no such file or folder{under}; accepted: a run directory, a checkpoint folder, a .gguf "
        "file or a Hugging Face id"
    )


def _command(recipe: Recipe, run: Path, runs_root: Path | str) -> str:
    """What trains the run of a study whose recipe lies beside this one, or comes with pe-study."""
    study = run.parent.name
    beside = [] if recipe.path is None else [recipe.path.with_name(f"{study}.yaml")]
    shipped_ones = [Path(name) for name in shipped.names("recipes") if Path(name).stem == study]
    name = next((str(path) for path in [*beside, *shipped_ones] if shipped.find(path).is_file()), "RECIPE")
    typed = ["pe-study", "train", name, "--only", f"run={run.name}"]
    if Path(runs_root) != Path("runs"):
        typed += ["--runs", str(runs_root)]
    said = "" if name != "RECIPE" else f", with the recipe of {study}"
    return f"`{shlex.join(typed)}`{said}"


def weights_sha256(name: str, options: Mapping[str, Any]) -> str | None:
    """A hash of the weights that a checkpoint's name stands for: for a run what `DONE` says, else of the
    files that hold them. None where they are not on this machine (yet)."""
    if "gguf_file" in options:
        return finished.files_sha256([Path(name) / options["gguf_file"]])
    path = Path(name) if Path(name).exists() else _cached(name, options.get("revision"))
    if path is None:
        return None
    said = runs.read_done(path.parent if path.name == runs.FINAL else path)
    if said is None and (path / kept.FACTS).is_file():
        said = runs.read_json(path / kept.FACTS)
    return (said or {}).get("weights_sha256") or finished.files_sha256(finished.weight_files(path))


def configuration(name: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the configuration beside the weights says that may decide a number. None for a GGUF file, whose
    hash covers it, and where there is none on this machine."""
    path = Path(name) if Path(name).exists() else _cached(name, options.get("revision"))
    if path is None or "gguf_file" in options or not (path / "config.json").is_file():
        return None
    text = (path / "config.json").read_bytes()
    # As words, the numbers that strict JSON does not have, such as Mamba's limits.
    return json.loads(text, parse_constant=str, object_pairs_hook=_deciding)


def _deciding(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if key not in _ASIDE}


def by_key(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with every key of a configuration among them by its own name: `initial_config.hidden_act`."""
    others = {key: value for key, value in values.items() if key != CONFIG}
    return others | dict(_flat(CONFIG, values.get(CONFIG) or {}))


def _flat(place: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(f"{place}.{key}", value)
        else:
            yield f"{place}.{key}", value


def _cached(name: str, revision: str | None) -> Path | None:
    """The folder of a downloaded checkpoint."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None
