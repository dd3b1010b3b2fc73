"use strict";
const table = document.querySelector("#layouts table");
const body = table.tBodies[0];
table.querySelectorAll("th button").forEach((button, column) => {
  button.addEventListener("click", () => {
    const head = button.closest("th");
    const down = head.getAttribute("aria-sort") === "ascending";
    table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => row.cells[column].dataset.value;
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      const order = x === "" || y === "" ? (x === "") - (y === "")
        : isNaN(x) || isNaN(y) ? x.localeCompare(y) : Number(x) - Number(y);
      return down ? -order : order;
    };
    [...body.rows].sort(compare).forEach((row) => body.append(row));
  });
});
