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
  const filter = document.querySelector(".filter input");
  if (filter) {
    filter.value = "alibi";
    filter.dispatchEvent(new Event("input"));
    const rows = [...filter.closest(".table").querySelectorAll("tbody tr")];
    seen.filtered = rows.filter((row) => !row.hidden).map((row) => row.cells[0].textContent);
  }
  seen.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  seen.width = document.documentElement.scrollWidth;
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


def browse(page: Path, tmp_path: Path, *options: str) -> tuple[dict, str]:
    """What the probe saw, and what Chromium logged."""
    copy = tmp_path / "page.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
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
