/**
 * A small, safe Markdown renderer: paragraphs, headings, lists, quotations, tables, fenced code,
 * rules, and what `markdown-inline.js` knows.
 *
 * Safe by construction: text reaches the page as text nodes alone, never as HTML, so markup in it is
 * shown as written. Whatever is not recognised stays plain text.
 *
 * It draws line by line. A whole line is drawn once and left alone; the last one, while it grows, is a
 * draft, taken back only if it turns out to be something else. So an answer costs as much as it is
 * long, however small the pieces in which it comes.
 */

import { InlineText, setDirection } from "./markdown-inline.js";
import { alignsOf, Table } from "./markdown-table.js";
import { element, GrowingText } from "./markdown-text.js";

/**
 * What a line is, and where in it the text begins.
 * @typedef {{ type: "blank" | "code" | "fence-end" | "heading" | "paragraph" | "quote" | "row" | "rule" | "text", at: number }
 *   | { type: "fence", at: number, mark: string, language: string }
 *   | { type: "item", at: number, indent: number, ordered: boolean, number: number }
 *   | { type: "table", at: number, aligns: string[] }} Line
 */
/**
 * The block that the next line may continue.
 * @typedef {{ type: "closed" }
 *   | { type: "code", mark: string, text: GrowingText, numLines: number }
 *   | { type: "list", indent: number, ordered: boolean, open: { list: HTMLElement, indent: number }[], text: InlineText }
 *   | { type: "paragraph", node: HTMLElement, text: InlineText, lastLine: string, before: import("./markdown-inline.js").InlineMark, numLines: number }
 *   | { type: "quote", blocks: Blocks }
 *   | { type: "table", table: Table }} Block
 */
/** A line as drawn: how to take it back, where more of it goes, and what it went on from. */
/** @typedef {{ undo: () => void, grow: ((text: string) => void) | null, mark?: import("./markdown-inline.js").InlineMark }} Drawn */
/** @typedef {Drawn & { line: string, found: Line, before: Block }} Draft */

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]{0,40})/;
const HEADING = /^ {0,3}(#{1,6})\s+/;
const ITEM = /^(\s*)(?:[-*+•]|(\d{1,9})[.)])\s+/;
const QUOTE = /^ {0,3}>[^\S\n]?/;
const MAX_QUOTE_DEPTH = 6;
const MAX_LIST_DEPTH = 6;
/** What a line is depends on this many characters; the others are text. */
const MAX_LINE = 2_048;
/** Lines to which more text can be added as it comes. */
const GROWING = new Set(["code", "item", "paragraph", "text"]);
/** @type {Block} */
const CLOSED = { type: "closed" };

/** Blocks in an element: the whole answer, or a quotation. */
class Blocks {
  #root;
  #depth;
  /** @type {Block} */ #last = CLOSED;
  #isAfterBlank = true;
  /** @type {Draft | null} */ #draft = null;
  /** Where the rest of a long line goes. @type {Drawn["grow"]} */ #grow = null;

  constructor(/** @type {HTMLElement} */ root, depth = 0) {
    this.#root = root;
    this.#depth = depth;
  }

  /** Draws the last line as it is now: it begins with what was drafted before. */
  draft(/** @type {string} */ line) {
    this.#draft = this.#draw(line);
    if (this.#draft.found.type === "quote") this.#inner.draft(line.slice(this.#draft.found.at));
  }

  /** Draws a line that is whole. */
  commit(/** @type {string} */ line) {
    const { found, grow, mark } = this.#draw(line);
    const last = this.#last;
    if (found.type === "quote") this.#inner.commit(line.slice(found.at));
    if (found.type === "fence-end") this.#last = CLOSED;
    if (found.type === "code" && last.type === "code") last.numLines += 1;
    if (last.type === "paragraph") {
      if (mark) last.before = mark;
      if (found.type === "text") last.numLines += 1;
      last.lastLine = line;
    }
    this.#grow = grow;
    this.#isAfterBlank = found.type === "blank";
    this.#draft = null;
  }

  /** Adds to the line that was committed last. */
  continueLine(/** @type {string} */ text) {
    this.#grow ??= this.#add({ type: "paragraph", at: 0 }, "").grow;
    this.#grow?.(text);
    this.#isAfterBlank = false;
    if (this.#last.type === "paragraph") this.#last.lastLine = "";
  }

  get #inner() {
    return /** @type {Extract<Block, { type: "quote" }>} */ (this.#last).blocks;
  }

  /** @returns {Draft} */
  #draw(/** @type {string} */ line) {
    const draft = this.#draft;
    const before = draft ? draft.before : this.#last;
    const found = this.#classify(line, before);
    if (draft && draft.found.type === found.type && draft.found.at === found.at) {
      if (found.type === "quote") return draft;
      if (GROWING.has(found.type)) {
        draft.grow?.(line.slice(draft.line.length));
        return { ...draft, line };
      }
    }
    if (draft) {
      draft.undo();
      this.#last = before;
    }
    return { ...this.#add(found, line), line, found, before };
  }

  /** @returns {Line} */
  #classify(/** @type {string} */ line, /** @type {Block} */ last) {
    if (last.type === "code") return { type: isFenceEnd(line, last.mark) ? "fence-end" : "code", at: 0 };
    if (!line.trim()) return { type: "blank", at: 0 };
    const goesOn = !this.#isAfterBlank;
    const [fence, heading, quote, item] = [FENCE, HEADING, QUOTE, ITEM].map((pattern) => pattern.exec(line));
    if (fence && !line.trimStart().slice(fence[1].length).includes("`")) {
      return { type: "fence", at: 0, mark: fence[1], language: fence[2] };
    }
    if (last.type === "table" && goesOn && line.includes("|")) return { type: "row", at: 0 };
    if (heading) return { type: "heading", at: heading[0].length };
    if (quote && this.#depth < MAX_QUOTE_DEPTH) return { type: "quote", at: quote[0].length };
    if (isRule(line)) return { type: "rule", at: 0 };
    if (item) {
      const [{ length: at }, indent, number] = item;
      return { type: "item", at, indent: indent.length, ordered: number !== undefined, number: Number(number ?? 0) };
    }
    if (last.type === "list" && (goesOn || /^\s{2}/.test(line))) return { type: "text", at: line.search(/\S/) };
    if (last.type !== "paragraph" || !goesOn) return { type: "paragraph", at: 0 };
    const aligns = alignsOf(line, last.lastLine);
    return aligns ? { type: "table", at: 0, aligns } : { type: "text", at: 0 };
  }

  /** @returns {Drawn} */
  #add(/** @type {Line} */ found, /** @type {string} */ line) {
    const last = this.#last;
    const text = line.slice(found.at);
    switch (found.type) {
      case "blank":
      case "fence-end":
        return { undo: () => {}, grow: null };
      case "code":
        return last.type === "code" ? growBy(last.text, (last.numLines > 0 ? "\n" : "") + line) : NOTHING;
      case "text":
        return last.type === "paragraph" || last.type === "list" ? growInline(last, `\n${text}`) : NOTHING;
      case "row": {
        if (last.type !== "table") return NOTHING;
        const { row, last: cell } = last.table.append(line);
        return { undo: () => row.remove(), grow: (more) => cell.append(more) };
      }
      case "table":
        return last.type === "paragraph" ? this.#turnIntoTable(last, found.aligns) : NOTHING;
      case "item":
        return this.#addItem(found, text);
      case "fence": {
        const { block, code } = codeBlock(found.language);
        return this.#open(block, { type: "code", mark: found.mark, text: new GrowingText(code), numLines: 0 }, () => {});
      }
      case "heading": {
        const level = line.trimStart().search(/[^#]/);
        const node = element(`h${Math.min(6, level + 3)}`);
        const title = new InlineText(node, withoutClosing(text));
        return this.#open(node, CLOSED, (more) => title.append(more));
      }
      case "rule":
        return this.#open(element("hr"), CLOSED, null);
      case "quote": {
        if (last.type === "quote" && !this.#isAfterBlank) {
          const { blocks } = last;
          return { undo: () => blocks.#takeBack(), grow: (more) => blocks.continueLine(more) };
        }
        const node = element("blockquote");
        const blocks = new Blocks(node, this.#depth + 1);
        return this.#open(node, { type: "quote", blocks }, (more) => blocks.continueLine(more));
      }
      default: {
        const node = element("p");
        const inline = new InlineText(node);
        const before = inline.mark();
        inline.append(text);
        const grow = (/** @type {string} */ more) => inline.append(more);
        return this.#open(node, { type: "paragraph", node, text: inline, lastLine: line, before, numLines: 1 }, grow);
      }
    }
  }

  #takeBack() {
    if (!this.#draft) return;
    this.#draft.undo();
    this.#last = this.#draft.before;
    this.#draft = null;
  }

  /** @returns {Drawn} */
  #open(/** @type {HTMLElement} */ node, /** @type {Block} */ block, /** @type {Drawn["grow"]} */ grow) {
    this.#root.append(node);
    this.#last = block;
    return { undo: () => node.remove(), grow };
  }

  /** The paragraph's last line becomes the names of a table. @returns {Drawn} */
  #turnIntoTable(/** @type {Extract<Block, { type: "paragraph" }>} */ paragraph, /** @type {string[]} */ aligns) {
    const { node, text, before, lastLine, numLines } = paragraph;
    const table = new Table(aligns, lastLine);
    text.rewind(before);
    if (numLines === 1) node.remove();
    const opened = this.#open(table.box, { type: "table", table }, null);
    const undo = () => {
      opened.undo();
      if (numLines === 1) this.#root.append(node);
      text.append((numLines === 1 ? "" : "\n") + lastLine);
    };
    return { undo, grow: null };
  }

  /** Adds an item, nested by its indentation. @returns {Drawn} */
  #addItem(/** @type {Extract<Line, { type: "item" }>} */ item, /** @type {string} */ text) {
    const node = element("li");
    const last = this.#last;
    if (last.type !== "list" || (item.indent <= last.indent && item.ordered !== last.ordered)) {
      const list = listElement(item);
      list.append(node);
      const { indent, ordered } = item;
      const only = new InlineText(node, text, list);
      const open = [{ list, indent }];
      return this.#open(list, { type: "list", indent, ordered, open, text: only }, (more) => only.append(more));
    }
    const open = [...last.open];
    while (open.length > 1 && item.indent < open[open.length - 1].indent) open.pop();
    let added = node;
    let { list, indent } = open[open.length - 1];
    const { dir } = list;
    const undo = () => {
      added.remove();
      setDirection(list, dir);
    };
    const parent = list.lastElementChild;
    if (item.indent > indent + 1 && parent && open.length < MAX_LIST_DEPTH) {
      list = added = listElement(item);
      parent.append(added);
      open.push({ list, indent: item.indent });
    }
    list.append(node);
    const inline = new InlineText(node, text, list);
    this.#last = { ...last, open, text: inline };
    return { undo, grow: (more) => inline.append(more) };
  }
}

/** @type {Drawn} */
const NOTHING = { undo: () => {}, grow: null };

/** @returns {Drawn} */
function growBy(/** @type {GrowingText} */ text, /** @type {string} */ more) {
  const mark = text.mark();
  text.appendVisibly(more);
  return { undo: () => text.rewind(mark), grow: (rest) => text.appendVisibly(rest) };
}

/** @returns {Drawn} */
function growInline(/** @type {Extract<Block, { type: "list" | "paragraph" }>} */ { text }, /** @type {string} */ more) {
  const mark = text.mark();
  text.append(more);
  return { undo: () => text.rewind(mark), grow: (rest) => text.append(rest), mark };
}

function isFenceEnd(/** @type {string} */ line, /** @type {string} */ mark) {
  const trimmed = line.trim();
  return trimmed.length >= mark.length && trimmed === mark[0].repeat(trimmed.length);
}

function isRule(/** @type {string} */ line) {
  return /^ {0,3}[-*_]/.test(line) && /^([-*_])\1{2,}$/.test(line.replace(/\s/g, ""));
}

/** A heading's text without the `#`s that may close it. */
function withoutClosing(/** @type {string} */ text) {
  const trimmed = text.trimEnd();
  let end = trimmed.length;
  while (trimmed[end - 1] === "#") end -= 1;
  return end === 0 || /\s/.test(trimmed[end - 1]) ? trimmed.slice(0, end).trimEnd() : trimmed;
}

/** A block of code under its language's name and a button, of which the page makes one that copies. */
function codeBlock(/** @type {string} */ language) {
  const [block, head, pre, code] = [element("div"), element("div"), element("pre"), element("code")];
  const copy = /** @type {HTMLButtonElement} */ (element("button", "Copy"));
  block.className = "code";
  head.className = "code-head";
  copy.type = "button";
  copy.dataset.copies = "";
  copy.setAttribute("aria-label", "Copy code");
  head.append(element("span", language), copy);
  pre.tabIndex = 0; // a wide block scrolls; the keyboard must be able to
  pre.append(code);
  block.append(head, pre);
  return { block, code };
}

function listElement(/** @type {{ ordered: boolean, number: number }} */ { ordered, number }) {
  const list = element(ordered ? "ol" : "ul");
  if (ordered && number !== 1) list.setAttribute("start", String(number));
  return list;
}

/** Renders text that grows. */
export class MarkdownStream {
  #blocks;
  /** The last line, unless its beginning is drawn for good. */ #line = "";
  #isLong = false;
  /** Half of a character, or of a line's end. */ #held = "";

  constructor(/** @type {HTMLElement} */ root) {
    this.#blocks = new Blocks(root);
  }

  append(/** @type {string} */ text) {
    const all = this.#held + text;
    this.#held = /[\r\uD800-\uDBFF]$/.exec(all)?.[0] ?? "";
    const lines = all.slice(0, all.length - this.#held.length).replace(/\r\n?/g, "\n").replaceAll("\0", "\uFFFD").split("\n");
    lines.forEach((piece, index) => {
      this.#grow(piece);
      if (index === lines.length - 1) return;
      if (!this.#isLong) this.#blocks.commit(this.#line);
      this.#isLong = false;
      this.#line = "";
    });
    if (!this.#isLong) this.#blocks.draft(this.#line);
  }

  #grow(/** @type {string} */ piece) {
    if (!this.#isLong) {
      this.#line += piece;
      if (this.#line.length <= MAX_LINE) return;
      const isSplit = /[\uD800-\uDBFF]/.test(this.#line[MAX_LINE - 1]);
      const end = isSplit ? MAX_LINE - 1 : MAX_LINE;
      this.#blocks.commit(this.#line.slice(0, end));
      this.#isLong = true;
      piece = this.#line.slice(end);
    }
    if (piece) this.#blocks.continueLine(piece);
  }
}
