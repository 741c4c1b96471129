"use strict";
// Tables are plain HTML; this adds sorting by a column's button and, to longer tables, a filter.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const key = (row, column) => {
    const cell = row.cells[column];
    const value = cell.dataset.key ?? cell.textContent.trim();
    return value !== "" && !Number.isNaN(Number(value)) ? Number(value) : value;
  };
  const compare = (a, b) => {
    const numbers = typeof a === "number", others = typeof b === "number";
    if (numbers !== others) return numbers ? -1 : 1;  // statuses after numbers
    return numbers ? a - b : a.localeCompare(b);
  };
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map((row) => [key(row, column), row]);
      rows.sort((a, b) => {
        const order = compare(a[0], b[0]);
        return down && typeof a[0] === typeof b[0] ? -order : order;
      });
      body.append(...rows.map(([, row]) => row));
    });
  });
  if (body.rows.length >= 8) {
    const label = document.createElement("label");
    label.className = "filter";
    const input = document.createElement("input");
    input.type = "search";
    label.append("Filter rows", input);
    table.closest(".scroll").before(label);
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
  }
}
// What is folded is printed all the same, and folded again afterwards.
let folded = [];
window.addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  for (const details of folded) details.open = true;
});
window.addEventListener("afterprint", () => {
  for (const details of folded) details.open = false;
});
