"""A page's tables as LaTeX: booktabs tabulars that a paper can \\input, the best of each column in bold."""

from __future__ import annotations

from pe_study.reporting.page_tables import Table

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\u00d7": r"$\times$",
    "\u2212": "$-$",
    "\u2013": "--",
    "\u2191": r"$\uparrow$",
    "|": r"$\vert$",
    "<": "$<$",  # the text fonts of OT1 have other characters in these places
    ">": "$>$",
    "\u00b1": r"$\pm$",
    "\u2026": r"\ldots{}",
    "\u00a0": "~",
}


def tabular(table: Table) -> str:
    """The table with its title and note as comments above it; numbers to the right."""
    shape = "".join("r" if column.numeric else "l" for column in table.columns)
    lines = [" & ".join(escaped(column.text) for column in table.columns) + r" \\", r"\midrule"]
    for row in table.rows:
        cells = [rf"\textbf{{{escaped(c.text)}}}" if c.kind == "best" else escaped(c.text) for c in row]
        lines.append(" & ".join(cells) + r" \\")
    comments = [f"% {line}" for line in (table.title, table.note, "needs \\usepackage{booktabs}") if line]
    body = [rf"\begin{{tabular}}{{{shape}}}", r"\toprule", *lines, r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*comments, *body]) + "\n"


def escaped(text: str) -> str:
    """Text with LaTeX's special characters escaped."""
    return "".join(_SPECIAL.get(character, character) for character in text)
