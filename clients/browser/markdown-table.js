/**
 * Tables of Markdown: a line of names, a line of dashes, lines of cells.
 */

import { InlineText, directionOf, setDirection } from "./markdown-inline.js";
import { element } from "./markdown-text.js";

const DASHES = /^:?-+:?$/;
const CELL_END = /(?<!\\)\|/;
/** A wider table stays text. */
const MAX_COLUMNS = 100;

/** The cells of a line; code may hold no bar that is not escaped, as with everybody. */
function cellsOf(/** @type {string} */ line) {
  return line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(CELL_END, MAX_COLUMNS + 1).map((cell) => cell.trim());
}

/**
 * How the columns stand, if this line is the one below the names of as many.
 * @returns {string[] | null}
 */
export function alignsOf(/** @type {string} */ line, /** @type {string} */ names) {
  if (!line.includes("|") || !names.includes("|")) return null;
  const cells = cellsOf(line);
  if (cells.length > MAX_COLUMNS || !cells.every((cell) => DASHES.test(cell))) return null;
  if (cells.length !== cellsOf(names).length) return null;
  return cells.map((cell) => (!cell.endsWith(":") ? "" : cell.startsWith(":") ? "center" : "right"));
}

/** A table that grows by rows, within a box that scrolls: a wide table moves nothing else. */
export class Table {
  box = element("div");
  #body = element("tbody");
  #aligns;

  constructor(/** @type {string[]} */ aligns, /** @type {string} */ names) {
    this.#aligns = aligns;
    const [table, head] = [element("table"), element("thead")];
    this.box.className = "table";
    this.box.tabIndex = 0;
    setDirection(this.box, directionOf(names)); // decides where the first column stands
    head.append(this.#row("th", names).row);
    table.append(head, this.#body);
    this.box.append(table);
  }

  /** Appends a row; returns it and the text of its last cell. */
  append(/** @type {string} */ line) {
    const made = this.#row("td", line);
    this.#body.append(made.row);
    return made;
  }

  /** Cells that a line lacks are one, or a bar on each line could make a hundred cells of it. */
  #row(/** @type {"th" | "td"} */ name, /** @type {string} */ line) {
    const row = element("tr");
    const texts = cellsOf(line).slice(0, this.#aligns.length);
    let last = new InlineText(row);
    texts.forEach((text, column) => {
      const cell = /** @type {HTMLTableCellElement} */ (element(name));
      last = new InlineText(cell, text);
      if (this.#aligns[column]) cell.setAttribute("align", this.#aligns[column]);
      row.append(cell);
    });
    const numMissing = this.#aligns.length - texts.length;
    if (numMissing > 0) {
      const rest = /** @type {HTMLTableCellElement} */ (element(name));
      if (numMissing > 1) rest.colSpan = numMissing;
      row.append(rest);
    }
    return { row, last };
  }
}
