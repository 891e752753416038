/**
 * A small, safe Markdown renderer: paragraphs, headings, lists, quotations, tables, fenced code,
 * rules, and what `markdown-inline.js` knows.
 *
 * Safe by construction: text reaches the page through `textContent` alone, never as HTML, so
 * markup in it is shown as written. Whatever is not recognised stays plain text.
 */

import { element, withInline } from "./markdown-inline.js";
import { alignsOf, cellsOf, renderTable } from "./markdown-table.js";

/**
 * @typedef {{ indent: number, ordered: boolean, number: number, text: string }} ListItem
 * @typedef {{ type: "code", language: string, text: string, start: number }
 *   | { type: "heading", level: number, text: string, start: number }
 *   | { type: "list", items: ListItem[], start: number }
 *   | { type: "paragraph" | "quote", text: string, start: number }
 *   | { type: "rule", start: number }
 *   | import("./markdown-table.js").Table} Block
 */

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)(?:[-*+•]|(\d{1,9})[.)])\s+(.*)$/;
/** The start of a line that may turn out to go on with the list before it. */
const MAY_BECOME_ITEM = /^[^\S\n]*(?:\d{1,9}[.)]?|[-*+•])$/;
const RULE = /^ {0,3}([-*_])(?:[^\S\n]*\1){2,}[^\S\n]*$/;
const QUOTE = /^ {0,3}>[^\S\n]?(.*)$/;
const MAX_QUOTE_DEPTH = 6;

/** Splits text into blocks; each remembers the offset at which it starts. @returns {Block[]} */
export function parseBlocks(/** @type {string} */ text) {
  const lines = text.split("\n");
  /** @type {Block[]} */ const blocks = [];
  let start = 0;
  let isAfterBlank = true;
  for (let index = 0; index < lines.length; ) {
    const line = lines[index];
    const fence = FENCE.exec(line);
    let numLines = 1;
    if (fence) {
      numLines = takeCode(blocks, lines, index, { mark: fence[1], language: fence[2], start });
    } else if (line.trim()) {
      takeLine(blocks, line, { isAfterBlank, start });
    }
    isAfterBlank = !line.trim();
    for (const end = index + numLines; index < end; index += 1) start += lines[index].length + 1;
  }
  return blocks;
}

/** Takes a fenced block, closed or still open; returns the number of lines it spans. */
function takeCode(
  /** @type {Block[]} */ blocks,
  /** @type {string[]} */ lines,
  /** @type {number} */ first,
  /** @type {{ mark: string, language: string, start: number }} */ { mark, language, start },
) {
  let last = first + 1;
  while (last < lines.length && !isFenceEnd(lines[last], mark)) last += 1;
  blocks.push({ type: "code", language, text: lines.slice(first + 1, last).join("\n"), start });
  return Math.min(last + 1, lines.length) - first;
}

function isFenceEnd(/** @type {string} */ line, /** @type {string} */ mark) {
  const trimmed = line.trim();
  return trimmed.length >= mark.length && trimmed === mark[0].repeat(trimmed.length);
}

/** Adds one line that is not blank: to the last block where it goes on, else as a new one. */
function takeLine(
  /** @type {Block[]} */ blocks,
  /** @type {string} */ line,
  /** @type {{ isAfterBlank: boolean, start: number }} */ { isAfterBlank, start },
) {
  const last = blocks.at(-1);
  const heading = HEADING.exec(line);
  const item = ITEM.exec(line);
  const quote = QUOTE.exec(line);
  if (last?.type === "table" && !isAfterBlank && line.includes("|")) {
    last.rows.push(cellsOf(line));
  } else if (heading) {
    blocks.push({ type: "heading", level: heading[1].length, text: heading[2], start });
  } else if (quote) {
    if (last?.type === "quote" && !isAfterBlank) last.text += `\n${quote[1]}`;
    else blocks.push({ type: "quote", text: quote[1], start });
  } else if (RULE.test(line)) {
    blocks.push({ type: "rule", start });
  } else if (item) {
    const [, indent, number, text] = item;
    const entry = { indent: indent.length, ordered: number !== undefined, number: Number(number ?? 0), text };
    if (last?.type === "list" && continuesList(last.items, entry)) last.items.push(entry);
    else blocks.push({ type: "list", items: [entry], start });
  } else if (last?.type === "list" && (!isAfterBlank || /^\s{2,}/.test(line))) {
    /** @type {ListItem} */ (last.items.at(-1)).text += `\n${line.trim()}`;
  } else if (last?.type === "paragraph" && !isAfterBlank) {
    if (!takeTable(blocks, last, line)) last.text += `\n${line}`;
  } else {
    blocks.push({ type: "paragraph", text: line, start });
  }
}

/** Makes a table of a paragraph's last line, if `line` is one of dashes below it. */
function takeTable(
  /** @type {Block[]} */ blocks,
  /** @type {{ text: string, start: number }} */ paragraph,
  /** @type {string} */ line,
) {
  const above = paragraph.text.lastIndexOf("\n") + 1;
  const names = paragraph.text.slice(above);
  const aligns = alignsOf(line, names);
  if (!aligns) return false;
  const start = paragraph.start + above;
  if (above === 0) blocks.pop();
  else paragraph.text = paragraph.text.slice(0, above - 1);
  blocks.push({ type: "table", aligns, rows: [cellsOf(names)], start });
  return true;
}

function continuesList(/** @type {ListItem[]} */ items, /** @type {ListItem} */ entry) {
  return entry.indent > items[0].indent || entry.ordered === items[0].ordered;
}

/** @returns {HTMLElement} */
function renderBlock(/** @type {Block} */ block, depth = 0) {
  switch (block.type) {
    case "code":
      return renderCode(block);
    case "heading":
      return withDirection(withInline(element(`h${Math.min(6, block.level + 3)}`), block.text));
    case "list":
      return renderList(block.items);
    case "table":
      return renderTable(block);
    case "rule":
      return element("hr");
    case "quote":
      return renderQuote(block.text, depth);
    default:
      return withDirection(withInline(element("p"), block.text));
  }
}

/** Lets the text say from which side it is read. */
function withDirection(/** @type {HTMLElement} */ node) {
  node.dir = "auto";
  return node;
}

function renderQuote(/** @type {string} */ text, /** @type {number} */ depth) {
  const quote = element("blockquote");
  if (depth === MAX_QUOTE_DEPTH) return withInline(quote, text);
  quote.append(...parseBlocks(text).map((block) => renderBlock(block, depth + 1)));
  return quote;
}

/** A block of code under its language's name and a button, of which the page makes one that copies. */
function renderCode(/** @type {{ language: string, text: string }} */ { language, text }) {
  const [block, head, pre] = [element("div"), element("div"), element("pre")];
  const copy = /** @type {HTMLButtonElement} */ (element("button", "Copy"));
  block.className = "code";
  head.className = "code-head";
  copy.type = "button";
  copy.dataset.copies = "";
  copy.setAttribute("aria-label", "Copy code");
  head.append(element("span", language), copy);
  pre.tabIndex = 0; // a wide block scrolls; the keyboard must be able to
  pre.append(element("code", text));
  block.append(head, pre);
  return block;
}

/** Nests items by their indentation. */
function renderList(/** @type {ListItem[]} */ items) {
  const root = listElement(items[0]);
  const open = [{ list: root, indent: items[0].indent }];
  for (const item of items) {
    while (open.length > 1 && item.indent < open[open.length - 1].indent) open.pop();
    let { list, indent } = open[open.length - 1];
    if (item.indent > indent + 1 && list.lastElementChild && open.length < 6) {
      const parent = list.lastElementChild;
      list = listElement(item);
      parent.append(list);
      open.push({ list, indent: item.indent });
    }
    list.append(withInline(element("li"), item.text));
  }
  return root;
}

function listElement(/** @type {ListItem} */ first) {
  const list = withDirection(element(first.ordered ? "ol" : "ul"));
  if (first.ordered && first.number !== 1) list.setAttribute("start", String(first.number));
  return list;
}

/**
 * Makes `old` equal to `fresh` with the fewest changes: grown text is appended in place, so a
 * selection survives and the browser lays out little.
 */
function morph(/** @type {Node} */ old, /** @type {Node} */ fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    /** @type {ChildNode} */ (old).replaceWith(fresh);
  } else if (old instanceof Text && fresh instanceof Text) {
    if (fresh.data === old.data) return;
    if (fresh.data.startsWith(old.data)) old.appendData(fresh.data.slice(old.data.length));
    else old.data = fresh.data;
  } else {
    for (const { name, value } of /** @type {Element} */ (fresh).attributes) {
      if (/** @type {Element} */ (old).getAttribute(name) !== value) /** @type {Element} */ (old).setAttribute(name, value);
    }
    const [before, after] = [[...old.childNodes], [...fresh.childNodes]];
    before.slice(after.length).forEach((node) => node.remove());
    after.forEach((node, index) => (index < before.length ? morph(before[index], node) : old.appendChild(node)));
  }
}

/** Whether a block stays the beginning of one, however its text goes on. */
function isSettled(/** @type {Block} */ { type }, /** @type {string} */ text) {
  const numLineEnds = text.split("\n", 3).length - 1;
  if (type === "rule") return numLineEnds > 0;
  if (type === "table") return numLineEnds > 1;
  return !MAY_BECOME_ITEM.test(text);
}

/**
 * Renders text that grows. A block followed by another can no longer change and is left alone, so
 * each update costs as much as the last block only, however long the answer.
 */
export class MarkdownStream {
  #root;
  #tail = "";
  /** The elements of the blocks in the tail, which may still change. @type {HTMLElement[]} */
  #live = [];

  constructor(/** @type {HTMLElement} */ root) {
    this.#root = root;
  }

  append(/** @type {string} */ text) {
    this.#tail += text;
    const blocks = parseBlocks(this.#tail);
    this.#live = blocks.map((block, index) => this.#show(renderBlock(block), this.#live[index]));
    while (this.#root.lastChild && this.#root.lastChild !== this.#live.at(-1)) this.#root.lastChild.remove();
    const last = this.#tail.slice(blocks.at(-1)?.start ?? 0);
    if (blocks.length > 1 && isSettled(/** @type {Block} */ (blocks.at(-1)), last)) {
      this.#tail = last;
      this.#live = this.#live.slice(-1);
    }
  }

  #show(/** @type {HTMLElement} */ fresh, /** @type {HTMLElement | undefined} */ old) {
    if (old?.nodeName === fresh.nodeName) {
      morph(old, fresh);
      return old;
    }
    if (old) old.replaceWith(fresh);
    else this.#root.append(fresh);
    return fresh;
  }
}
