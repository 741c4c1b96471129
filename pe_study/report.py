"""From studies on disk to a page: index.html (self-contained), report.md, figures/, tables/, report.json."""

from __future__ import annotations

import dataclasses
import functools
import html
import io
import logging
import math
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
import pandas as pd

import pe_study
from pe_study.chosen_rates import RESULT as TUNED
from pe_study.errors import UsageError
from pe_study.files import write_json, write_text
from pe_study.planned import STUDY
from pe_study.reporting import drawing, fonts
from pe_study.reporting.bench_files import BENCH
from pe_study.reporting.latex import tabular
from pe_study.reporting.page import Page, compose
from pe_study.reporting.page_parts import LONGEST_NAME, Shown
from pe_study.reporting.page_tables import METRIC_NAMES, Table
from pe_study.reporting.palette import COLOURS
from pe_study.reporting.progress import is_finished, progress
from pe_study.reporting.rendering import Drawing, render_all
from pe_study.reporting.studies import SUMMARY
from pe_study.reporting.targets import Targets, read_targets
from pe_study.reporting.view import read_view
from pe_study.rows import DIAGNOSTICS, OVER_TRAINING, RESULTS, RETRIEVAL
from pe_study.runs import DONE, METRICS, check_output, claim_folder

logger = logging.getLogger(__name__)

MANIFEST = "report.json"
FORMATS = ("svg", "png")
SUFFIXES = {"two-column": "", "one-column": "-one-column"}


def build(
    studies: Sequence[Path | str],
    output: Path | str | None = None,
    *,
    view: Path | str | None = None,
    title: str | None = None,
    formats: Sequence[str] = FORMATS,
    published: bool = False,
) -> Path:
    """Read studies (runs, evaluations of checkpoints, bench files) and write their page, index.html.

    `output` None is reports/<names>/. `formats` of figures and tables are "svg", "png" and "latex".
    `published` lays all printed tables beside ours, also those of other corpora. UsageError: a missing study,
    an output that is not ours, a bad view; DataError: results that cannot be read.
    """
    found = read_targets(studies)
    chosen = read_view(view)
    folder = output_folder(found.names, output)
    claim_folder(folder, ours=(MANIFEST,))
    command = _command(studies, {"output": output, "view": view, "title": title}, formats, published)
    chosen = dataclasses.replace(
        chosen, title=chosen.title if title is None else title, published=published or chosen.published
    )
    page = compose(found, chosen, command)
    _write(page, found, folder, formats)
    return folder / "index.html"


def _command(
    studies: Sequence[Path | str], given: Mapping[str, object], formats: Sequence[str], published: bool
) -> str:
    """What is typed to make this page again, with every flag that decides what it is."""
    words = ["pe-study", "report", *map(str, studies)]
    for name, value in given.items():
        words += [] if value is None else [f"--{name}", str(value)]
    words += ["--format", ",".join(formats)] if formats and set(formats) != set(FORMATS) else []
    return shlex.join([*words, *(["--published"] if published else [])])


def output_folder(names: Sequence[str], output: Path | str | None = None) -> Path:
    """Where the page of the studies of these names goes. UsageError where it could not be written."""
    name = "-".join(re.sub(r"[/\\]+", "-", name) for name in names)
    if output is None and len(name.encode()) > LONGEST_NAME:
        raise UsageError(f"no folder can have the names of these {len(names)} studies; name it with --output")
    return check_output(Path("reports") / name if output is None else output, ours=(MANIFEST,))


def watch(
    studies: Sequence[Path | str], output: Path | str | None = None, *, interval: float = 30.0, **options: Any
) -> Iterator[tuple[Path, str]]:
    """Build the page whenever the studies' files change, until every run is done and evaluated.

    Yields (path of index.html, a line of progress) after each build; `options` are those of `build`.
    """
    before = None
    while True:
        state = _state(studies)
        if state != before:
            before = state
            found = read_targets(studies).studies
            yield build(studies, output, **options), progress(found)
            if all(map(is_finished, found)):
                return
        time.sleep(interval)


def _state(studies: Sequence[Path | str]) -> list[tuple[str, int, int]]:
    """Name, size and time of every file that a report reads."""
    names = (METRICS, DONE, RESULTS, RETRIEVAL, OVER_TRAINING, DIAGNOSTICS, SUMMARY, BENCH, STUDY, TUNED)
    files = [file for path in studies for name in names for file in sorted(Path(path).rglob(name))]
    files += [Path(path) for path in studies if Path(path).is_file()]
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _write(page: Page, targets: Targets, folder: Path, formats: Sequence[str]) -> None:
    write_json(
        folder / MANIFEST, _manifest(page, targets)
    )  # first: an interrupted report is still ours to replace
    for name in ("figures", "tables"):
        (folder / name).mkdir(exist_ok=True)
    colours = {
        **drawing.DARK,
        **dict(COLOURS.values()),
        **{look.light: look.dark for look in page.looks.values()},
    }
    environment = _environment(colours)
    shown = [figure for section in page.sections for figure in section.figures]
    if "png" in formats:
        _warn_of_boxes(shown)
    inline = _save_figures(shown, folder, colours, formats)
    for table in (table for section in page.sections for table in section.tables):
        _save_csv(table.data, folder / "tables" / f"{table.name}.csv")
        if "latex" in formats:
            (folder / "tables" / f"{table.name}.tex").write_text(tabular(table), encoding="utf-8")
    context = _context(page, inline, formats)
    write_text(folder / "index.html", environment.get_template("index.html.j2").render(context))
    write_text(folder / "report.md", environment.get_template("report.md.j2").render(context))


def _environment(colours: dict[str, str]) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pe_study"),
        autoescape=lambda name: name is not None and ".html" in name,
        trim_blocks=False,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["emphasis"] = emphasis
    environment.filters["markdown"] = markdown
    environment.globals["colours"] = colours
    return environment


def emphasis(text: str) -> markupsafe.Markup:
    """**bold** of a sentence as HTML; everything else is text."""
    joined = re.sub(r"(?<=\d) %", "\u00a0%", html.escape(text))
    return markupsafe.Markup(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", joined))


def markdown(table: Table) -> str:
    """A table as GitHub's Markdown; the best cells in bold."""
    lines = [
        [column.text for column in table.columns],
        ["--:" if c.numeric else "---" for c in table.columns],
    ]
    for row in table.rows:
        lines.append([f"**{cell.text}**" if cell.kind == "best" else cell.text for cell in row])
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)


# --- files -----------------------------------------------------------------------------------------------


def _save_figures(
    shown: Sequence[Shown], folder: Path, colours: dict[str, str], formats: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Write every figure's files and CSV; returns the inline SVGs of the page by name and size.

    What shows first is written as SVG and PNG in both sizes and themes; other metrics and protocols as SVG.
    """
    drawings = [
        Drawing(
            item.figure,
            size,
            ["svg", "png"] if item.chosen and "png" in formats else ["svg"],
            colours if item.chosen else None,
        )
        for item in shown
        for size in SUFFIXES
    ]
    inline: dict[str, dict[str, str]] = {item.figure.name: {} for item in shown}
    for one, made in zip(drawings, render_all(drawings), strict=True):
        base = f"{one.figure.name}{SUFFIXES[one.size]}"
        for form, content in made.items():
            kind, _, theme = form.partition("-")
            if kind in formats:
                (folder / "figures" / f"{base}{theme and '-'}{theme}.{kind}").write_bytes(content)
        inline[one.figure.name][one.size] = drawing.themed(made["svg"], colours, base)
    for item in shown:
        _save_csv(item.figure.table, folder / "tables" / f"{item.figure.name}.csv")
    return inline


def _warn_of_boxes(shown: Sequence[Shown]) -> None:
    """One warning where no installed font can write the names of a study into a PNG."""
    words = "".join(item.figure.title + item.figure.alt for item in shown)
    if lacking := fonts.unwritable(words):
        logger.warning(
            "no installed font has %s: PNGs show boxes there, SVGs and the page are right; "
            "install one that does, such as Noto Sans CJK",
            lacking if len(lacking) <= 8 else f"{lacking[:8]}\u2026",
        )


def _save_csv(frame: pd.DataFrame, path: Path) -> None:
    out = io.StringIO()
    frame.replace([math.inf, -math.inf], math.nan).to_csv(out, index=False, lineterminator="\n")
    path.write_text(out.getvalue(), encoding="utf-8")


def _context(page: Page, inline: dict[str, dict[str, str]], formats: Sequence[str]) -> dict[str, Any]:
    sections = [
        {
            "slug": section.slug,
            "title": section.title,
            "notes": section.notes,
            "figures": [
                _figure_context(shown, inline[shown.figure.name], formats) for shown in section.figures
            ],
            "tables": section.tables,
        }
        for section in page.sections
    ]
    return {
        "page": {
            **{name: getattr(page, name) for name in ("title", "facts", "findings", "warnings", "commands")},
            "sections": sections,
            "choices": _choices(page),
            "provenance": [{"title": title, "entries": entries} for title, entries in page.provenance],
            "version": pe_study.__version__,
        },
        "css": _asset("report.css"),
        "script": _asset("report.js"),
    }


def _figure_context(shown: Shown, inline: dict[str, str], formats: Sequence[str]) -> dict[str, Any]:
    figure = shown.figure
    written = [form for form in ("png", "svg") if form in formats and (shown.chosen or form == "svg")]
    links = [(form.upper(), f"figures/{figure.name}.{form}") for form in written]
    links.append(("CSV", f"tables/{figure.name}.csv"))
    return {
        **{name: getattr(figure, name) for name in ("name", "title", "caption", "alt")},
        "metric": shown.metric,
        "protocol": shown.protocol,
        "chosen": shown.chosen,
        "wide": inline["two-column"],
        "narrow": inline["one-column"],
        "links": links,
        "image": links[0][1] if written else "",
    }


def _choices(page: Page) -> list[dict[str, Any]]:
    def values(names: Sequence[str], chosen: str, texts: dict[str, str]) -> list[dict[str, Any]]:
        return [{"slug": name, "text": texts.get(name, name), "chosen": name == chosen} for name in names]

    return [
        {"name": "metric", "title": "Show", "options": values(page.metrics, page.metric, METRIC_NAMES)},
        {"name": "protocol", "title": "Protocol", "options": values(page.protocols, page.protocol, {})},
    ]


def _manifest(page: Page, targets: Targets) -> dict[str, Any]:
    """The page's words for scripts; also what marks a folder as ours."""
    return {
        "generator": f"pe_study {pe_study.__version__}",
        "title": page.title,
        "studies": [{"name": study.name, "path": str(study.path)} for study in targets.studies],
        "benches": [name for name, _ in targets.benches],
        "facts": dict(page.facts),
        "findings": page.findings,
        "warnings": page.warnings,
        "figures": [shown.figure.name for section in page.sections for shown in section.figures],
        "tables": [table.name for section in page.sections for table in section.tables],
    }


@functools.cache
def _asset(name: str) -> markupsafe.Markup:
    return markupsafe.Markup((Path(__file__).parent / "templates" / name).read_text(encoding="utf-8"))
