"""What a report was asked to show: studies and bench files, each under a name of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from pe_study.reporting.bench_files import BenchFile, bench_at, read_bench
from pe_study.reporting.studies import Evaluation, Study, read_study


@dataclass(frozen=True)
class Targets:
    """The studies, whose rows carry names that tell them apart, and the bench files by name."""

    studies: tuple[Study, ...]
    benches: tuple[tuple[str, BenchFile], ...] = ()

    @property
    def names(self) -> list[str]:
        return [*(study.name for study in self.studies), *(name for name, _ in self.benches)]


def read_targets(paths: Sequence[Path | str]) -> Targets:
    """Read each path once. UsageError for one that is not there, DataError for one that cannot be read."""
    distinct = list({Path(path).resolve(): Path(path) for path in paths}.values())
    bench_paths = {path: file for path in distinct if (file := bench_at(path)) is not None}
    studies = [read_study(path) for path in distinct if path not in bench_paths]
    files = list(bench_paths.values())
    names = _apart(
        [file.resolve().parent.name if file.name == "bench.json" else file.stem for file in files], files
    )
    benches = tuple((name, read_bench(file)) for name, file in zip(names, files, strict=True))
    wanted = _apart([study.name for study in studies], [study.path for study in studies])
    renamed = [
        study if name == study.name else _renamed(study, name)
        for study, name in zip(studies, wanted, strict=True)
    ]
    return Targets(tuple(renamed), benches)


def _apart(names: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """Names that several share get their path: two studies must never be added up as one."""
    return [
        name if names.count(name) == 1 else f"{name} ({path.as_posix()})"
        for name, path in zip(names, paths, strict=True)
    ]


def _renamed(study: Study, name: str) -> Study:
    evaluations = tuple(_with_study(evaluation, name) for evaluation in study.evaluations)
    return dataclasses.replace(study, name=name, evaluations=evaluations)


def _with_study(evaluation: Evaluation, name: str) -> Evaluation:
    """The evaluation with `name` as the study of every row."""
    frames = {
        field.name: frame.assign(study=pd.Categorical([name] * len(frame)))
        for field in dataclasses.fields(evaluation)
        if isinstance(frame := getattr(evaluation, field.name), pd.DataFrame)
    }
    return dataclasses.replace(evaluation, **frames)
