/**
 * Tables of Markdown: a line of names, a line of dashes, lines of cells.
 */

import { element, withInline } from "./markdown-inline.js";

/** @typedef {{ type: "table", aligns: string[], rows: string[][], start: number }} Table */

const DASHES = /^:?-+:?$/;
const CELL_END = /(?<!\\)\|/;

/** The cells of a line; code may hold no bar that is not escaped, as with everybody. */
export function cellsOf(/** @type {string} */ line) {
  return line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(CELL_END).map((cell) => cell.trim());
}

/**
 * How the columns stand, if this line is the one below the names of as many.
 * @returns {string[] | null}
 */
export function alignsOf(/** @type {string} */ line, /** @type {string} */ names) {
  if (!line.includes("|") || !names.includes("|")) return null;
  const cells = cellsOf(line);
  if (!cells.every((cell) => DASHES.test(cell)) || cells.length !== cellsOf(names).length) return null;
  return cells.map((cell) => (!cell.endsWith(":") ? "" : cell.startsWith(":") ? "center" : "right"));
}

/** Within a box that scrolls: a wide table moves nothing else. */
export function renderTable(/** @type {Table} */ { aligns, rows }) {
  const [box, table, head, body] = [element("div"), element("table"), element("thead"), element("tbody")];
  box.className = "table";
  box.dir = "auto"; // the first letter decides where the first column stands; cells: style sheet
  box.tabIndex = 0;
  rows.forEach((cells, number) => {
    const row = element("tr");
    row.append(...aligns.map((align, column) => {
      const cell = withInline(element(number === 0 ? "th" : "td"), cells[column] ?? "");
      if (align) cell.setAttribute("align", align);
      return cell;
    }));
    (number === 0 ? head : body).append(row);
  });
  table.append(head, body);
  box.append(table);
  return box;
}
