"use strict";
// A click, Enter or Space on a heading sorts by its column; the next one reverses the order.
const NUMBER = /^(?:± )?([+-]?\d[\d.]*(?:e[+-]?\d+)?)(?=$|[\s%])/;

function compare(a, b) {
  const x = NUMBER.exec(a), y = NUMBER.exec(b);
  if (x && y) return Number(x[1]) - Number(y[1]);
  if (x || y) return x ? -1 : 1;
  return a.localeCompare(b, "en", { numeric: true });
}

for (const table of document.querySelectorAll("table")) {
  table.tHead.addEventListener("click", (event) => {
    const header = event.target.closest("th");
    if (!header) return;
    const descending = header.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.querySelectorAll("th")) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const text = (row) => row.cells[header.cellIndex].textContent.trim();
    const rows = [...table.tBodies[0].rows];
    rows.sort((one, two) => {
      const a = text(one), b = text(two);
      if (a === "-" || b === "-") return (a === "-") - (b === "-");  // what there is not is last in both orders
      return descending ? compare(b, a) : compare(a, b);
    });
    table.tBodies[0].append(...rows);
  });
}
