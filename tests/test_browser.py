"""The page in a real browser: toggles, sorting, filtering, no error, no request, nothing wider than a phone.

Needs Chromium (Debian's, or the one named in PE_STUDY_CHROMIUM), driven through a probe script in a copy of
the page; skipped with a message where there is none.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
import synthetic_studies as synthetic

from pe_study import report

CHROMIUM = os.environ.get("PE_STUDY_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: set PE_STUDY_CHROMIUM or install it"
)
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
]

PROBE = """
<script>
const seen = {errors: []};
window.addEventListener("error", (event) => seen.errors.push(String(event.message)));
window.addEventListener("load", () => {
  const shown = (element) => element.getClientRects().length > 0;
  const visible = (query) => [...document.querySelectorAll(query)].filter(shown);
  const figures = () => visible("figure[data-metric]").map((figure) => figure.dataset.metric);
  seen.before = [...new Set(figures())];
  document.getElementById("metric-perplexity").click();
  seen.after = [...new Set(figures())];
  document.getElementById("protocol-exact-context").click();
  const table = [...document.querySelectorAll("table.sortable")].find(shown);
  const column = () => [...table.tBodies[0].rows].map((row) => row.cells[1].dataset.key);
  const button = table.tHead.rows[0].cells[1].querySelector("button");
  button.click();
  seen.ascending = column();
  button.click();
  seen.descending = column();
  seen.sort = table.tHead.rows[0].cells[1].getAttribute("aria-sort");
  seen.sorted = [...document.querySelectorAll("table.sortable")].flatMap((one) =>
    [...one.tHead.rows[0].cells].map((head, place) => {
      head.querySelector("button").click();
      const rows = [...one.tBodies[0].rows].map((row) => row.cells[place].textContent.trim());
      return [one.getAttribute("aria-labelledby"), head.textContent.trim(), rows];
    }));
  const scrolled = [...document.querySelectorAll(".scroll")].filter((e) => e.scrollWidth > e.clientWidth);
  const stuck = scrolled.map((e) => e.querySelector("tbody th").getBoundingClientRect().width);
  seen.names = stuck.map((width) => width / document.documentElement.clientWidth);
  const folded = [...document.querySelectorAll("details")];
  window.dispatchEvent(new Event("beforeprint"));
  seen.printed = folded.map((one) => one.open);
  window.dispatchEvent(new Event("afterprint"));
  seen.after_print = folded.map((one) => one.open);
  const filter = document.querySelector(".filter input");
  if (filter) {
    filter.value = "alibi";
    filter.dispatchEvent(new Event("input"));
    const rows = [...filter.closest(".table").querySelectorAll("tbody tr")];
    seen.filtered = rows.filter((row) => !row.hidden).map((row) => row.cells[0].textContent);
  }
  seen.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  seen.width = document.documentElement.scrollWidth;
  seen.bar = document.querySelector(".choices").getBoundingClientRect().height;
  seen.below = parseFloat(getComputedStyle(document.documentElement).scrollPaddingTop);
  const name = (e) => (e.labels?.[0] ?? e).textContent.trim() || e.getAttribute("aria-label");
  seen.unnamed = [...document.querySelectorAll("input, button, a, summary")].filter((e) => !name(e)).length;
  const small = (e) => e.getClientRects().length && e.getBoundingClientRect().height < 20;
  seen.small = [...document.querySelectorAll("label, thead button, summary")].filter(small).length;
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify(seen);
  document.body.append(out);
});
</script>
</body>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    rows = synthetic.rows(
        lengths=(64, 128, 512), num_documents=4, protocols=("nonoverlapping", "exact-context")
    )
    return report.build([synthetic.write_study(folder / "runs", rows)], folder / "out", formats=())


def browse(page: Path, tmp_path: Path, *options: str, metrics: bool = True) -> tuple[dict, str]:
    """What the probe saw, and what Chromium logged; metrics: whether to choose another one and a protocol."""
    copy = tmp_path / "page.html"
    probe = PROBE if metrics else re.sub(r"  document.getElementById.*\n", "", PROBE)
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", probe), encoding="utf-8")
    command = [
        str(CHROMIUM),
        *QUIET,
        f"--user-data-dir={tmp_path / 'profile'}",
        *options,
        "--dump-dom",
        copy.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, encoding="utf-8")
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1])), done.stderr


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_works(page: Path, tmp_path: Path, width: int) -> None:
    seen, log = browse(page, tmp_path, f"--window-size={width},900")
    assert seen["errors"] == []
    assert "CONSOLE" not in log
    assert seen["requests"] == []
    assert seen["before"] == ["bits_per_byte"]
    assert seen["after"] == ["perplexity"]
    numbers = [float(value) for value in seen["ascending"]]
    assert numbers == sorted(numbers)
    assert [float(value) for value in seen["descending"]] == sorted(numbers, reverse=True)
    assert seen["sort"] == "descending"
    assert seen["filtered"]
    assert all("alibi" in name for name in seen["filtered"])
    assert (seen["unnamed"], seen["small"]) == (0, 0)
    assert seen["width"] <= max(width, 500)  # headless windows are at least 500 wide
    assert len(seen["printed"]) >= 1
    assert all(seen["printed"])
    assert not any(seen["after_print"])


@needs_chromium
@pytest.mark.slow
def test_what_has_the_focus_does_not_lie_under_the_bar(tmp_path: Path) -> None:
    """Five protocols on a phone: the bar that stays is lower than what is kept free above a button."""
    rows = synthetic.rows(
        encodings=["rope"],
        lengths=(64, 128),
        num_documents=3,
        protocols=("nonoverlapping", "exact-context", "sliding", "fixed-target", "prefix"),
        rescales=("none",),
    )
    made = report.build([synthetic.write_study(tmp_path / "runs", rows)], tmp_path / "out", formats=())
    seen, _ = browse(made, tmp_path, "--window-size=390,900")
    assert 40 < seen["bar"] < seen["below"]
    assert seen["width"] <= 500


@needs_chromium
def test_intervals_sort_by_their_number(page: Path, tmp_path: Path) -> None:
    """Every column whose words begin with numbers, negative ones too, in every table."""
    seen, _ = browse(page, tmp_path, "--window-size=1280,900")
    columns = {}
    for name, head, texts in seen["sorted"]:
        numbers = [_leading(text) for text in texts if text != "\u2013"]
        if len(set(numbers)) > 1 and None not in numbers:
            columns[name, head] = numbers
    assert all(numbers == sorted(numbers) for numbers in columns.values())
    heads = {head for _, head in columns}
    assert {"difference and 95 % interval, nats", "C: early tokens", "change at the longest, nats"} <= heads
    assert min(columns["table-comparisons", "difference and 95 % interval, nats"]) < 0


def _leading(text: str) -> float | None:
    found = re.match(r"[+-]?\d[\d,]*(?:\.\d+)?", text)
    return float(found[0].replace(",", "")) if found else None


@needs_chromium
def test_long_names_leave_room_for_numbers(tmp_path: Path) -> None:
    """Two checkpoints of long names in a window as narrow as a phone's: numbers are in sight."""
    rows = synthetic.rows(
        encodings=["nope", "rope"],
        lengths=(64, 128),
        num_documents=3,
        protocols=("nonoverlapping",),
        rescales=("none",),
    )
    names = [f"organisation-{n}/a-checkpoint-of-a-name-that-is-long-and-never-ends" for n in range(2)]
    folders = [
        synthetic.write_study(tmp_path / f"{n}", rows.assign(study=f"study-{n}-" + "of-a-long-name" * 4))
        for n in range(2)
    ]
    for folder, name in zip(folders, names, strict=True):
        path = folder / "eval" / "length" / "results.parquet"
        pd.read_parquet(path).replace({"label": {"rope": name}}).to_parquet(path)
    page = report.build(folders, tmp_path / "out", formats=())
    seen, _ = browse(page, tmp_path, "--window-size=500,900", metrics=False)
    assert seen["names"]  # of tables that scroll sideways
    assert max(seen["names"]) <= 0.45
    assert seen["width"] <= 500
