/**
 * Markdown that grows: marked's tokens as elements.
 *
 * Safe by construction: text reaches the page as text nodes alone, never as HTML, so markup in it is
 * shown as written.
 *
 * A block that another one has ended is drawn for good. Only the one that is open is looked at again when
 * more text comes, and of that only what differs is drawn.
 */

import { InlineText } from "./markdown-inline.js";
import { labelOf, MarkdownLexer, withTabs } from "./markdown-lexer.js";
import { element, GrowingText } from "./markdown-text.js";

/** @typedef {import("./markdown-lexer.js").Token} Token */
/** @typedef {import("./vendor/marked.esm.js").Tokens.List} List */
/** @typedef {import("./vendor/marked.esm.js").Tokens.ListItem} ListItem */
/** @typedef {import("./vendor/marked.esm.js").Tokens.Code} Code */
/** @typedef {import("./vendor/marked.esm.js").Tokens.Paragraph} Paragraph */
/** @typedef {import("./markdown-lexer.js").Table} Table */
/**
 * What can be made of a text beyond its letters; without it, formulas and code are as they are written.
 * @typedef {object} Extras
 * @property {(node: HTMLElement, written: string) => void} setFormula
 * @property {new (draw: (nodes: (Node | string)[], text: string) => void) => { update: (text: string, language: string) => void }} Colours
 */
/** A block as drawn: its element, and how it becomes another of its kind. */
/** @typedef {{ kind: string, raw: string, node: HTMLElement, update: (token: any) => void }} View */

/** An open block of so many characters is drawn only when it has grown by one in `STEP`. */
const LONG = 8_192;
const STEP = 128;
/** The rest of it is drawn after so long. */
const REST_MS = 250;
/** A last line that makes a heading of the one before, or begins an item: the next character tells. */
const UNDECIDED = /^\n[ \t>]*(?:-+|=+)[ \t]*$/;
/** A label in brackets: more text may say what it refers to. */
const LABEL = /\[((?:\\[^]|[^\\[\]]){1,999})\]/g;
/** Languages of what can be shown as a page. */
const SHOWN = /^(?:x?html?|svg)$/i;
const LETTER = /\p{L}/u;
const RIGHT_TO_LEFT = /[\u0590-\u08FF\uFB1D-\uFDFF\uFE70-\uFEFF\u{10800}-\u{10FFF}\u{1E800}-\u{1EFFF}]/u;

/** Renders text that grows. */
export class MarkdownStream {
  #document;
  #blocks;
  /** What is not drawn for good. */ #open = "";
  #hasNewLine = false;
  #numDrawn = 0;
  #timer = 0;
  /** Half of a character, or of a line's end. */ #held = "";

  /**
   * @param {HTMLElement} root
   * @param {Extras | null} [extras]
   */
  constructor(root, extras = null) {
    this.#document = new MarkdownDocument(extras);
    this.#blocks = new Blocks(root, this.#document);
  }

  append(/** @type {string} */ text) {
    const all = this.#held + text;
    this.#held = /[\r\uD800-\uDBFF]$/.exec(all)?.[0] ?? "";
    const more = all.slice(0, all.length - this.#held.length).replace(/\r\n?/g, "\n").replaceAll("\0", "\uFFFD");
    this.#open += more;
    this.#hasNewLine ||= more.includes("\n");
    const { length } = this.#open;
    const isLong = length >= LONG && length - this.#numDrawn < length / STEP;
    const mayWait = isLong || UNDECIDED.test(this.#open.slice(this.#open.lastIndexOf("\n")));
    if (this.#numDrawn === 0 || !mayWait) this.flush();
    else this.#timer ||= setTimeout(() => this.flush(), REST_MS);
  }

  /** Draws all there is. */
  flush() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    if (this.#hasNewLine) this.#settle();
    this.#hasNewLine = false;
    const tokens = this.#document.lexer.blocks(this.#open);
    this.#blocks.update(tokens);
    this.#document.define(tokens);
    this.#numDrawn = this.#open.length;
  }

  /** Draws for good what whole lines have ended. */
  #settle() {
    const tokens = this.#document.lexer.blocks(this.#open.slice(0, this.#open.lastIndexOf("\n") + 1));
    let last = tokens.findLastIndex(({ type }) => type !== "space");
    if (tokens[last]?.type === "paragraph" && tokens[last - 1]?.type === "def") last -= 1; // may be its title
    const ended = tokens.slice(0, Math.max(0, last));
    const length = ended.reduce((sum, { raw }) => sum + raw.length, 0);
    if (length === 0 || !this.#open.startsWith(withTabs(ended.map(({ raw }) => raw).join("")))) return;
    this.#blocks.settle(ended);
    this.#document.define(ended, true);
    this.#open = this.#open.slice(length);
  }
}

/** What the blocks of a text share: its references. */
class MarkdownDocument {
  lexer = new MarkdownLexer();
  /** Texts that would change with a label's definition. @type {Map<string, Set<InlineText>>} */ #waiting = new Map();
  /** Labels that are defined in what is still open. @type {Set<string>} */ #open = new Set();

  constructor(/** @type {Extras | null} */ extras) {
    this.extras = extras;
  }

  setFormula = (/** @type {HTMLElement} */ node, /** @type {string} */ written) => this.extras?.setFormula(node, written);

  /** A text in an element. */
  inline(/** @type {HTMLElement} */ root) {
    const inline = new InlineText(root, this.lexer, this.setFormula);
    return (/** @type {string} */ given) => {
      const text = withTabs(given);
      inline.update(text);
      if (!text.includes("]")) return;
      for (const [, label] of text.matchAll(LABEL)) {
        const key = labelOf(label);
        if (!this.#waiting.has(key)) this.#waiting.set(key, new Set());
        this.#waiting.get(key)?.add(inline);
      }
    };
  }

  /** Notes the definitions among blocks; those that are settled stay. */
  define(/** @type {Token[]} */ tokens, isSettled = false) {
    const found = new Map();
    for (const { tag, href, title } of definitionsOf(tokens)) {
      const isTaken = found.has(tag) || (this.lexer.isDefined(tag) && !this.#open.has(tag));
      if (!isTaken) found.set(tag, { href, title });
    }
    const changed = [...found].filter(([label, target]) => this.lexer.define(label, target)).map(([label]) => label);
    if (!isSettled) {
      const gone = [...this.#open].filter((label) => !found.has(label));
      changed.push(...gone.filter((label) => this.lexer.define(label, null)));
      this.#open = new Set(found.keys());
    } else {
      for (const label of found.keys()) this.#open.delete(label);
    }
    for (const label of changed) this.#waiting.get(label)?.forEach((inline) => inline.redraw());
  }
}

/** @returns {Generator<import("./vendor/marked.esm.js").Tokens.Def>} */
function* definitionsOf(/** @type {any[]} */ tokens) {
  for (const token of tokens) {
    if (token.type === "def") yield token;
    else if (token.type === "blockquote") yield* definitionsOf(token.tokens);
    else if (token.type === "list") for (const item of token.items) yield* definitionsOf(item.tokens);
  }
}

/** Blocks in an element: the whole answer, a quotation, an item of a list. */
class Blocks {
  #root;
  #document;
  /** @type {View[]} */ #views = [];

  constructor(/** @type {HTMLElement} */ root, /** @type {MarkdownDocument} */ document) {
    this.#root = root;
    this.#document = document;
  }

  update(/** @type {Token[]} */ tokens) {
    const shown = this.#draw(tokens);
    this.#views.splice(shown).forEach(({ node }) => node.remove());
  }

  /** Draws blocks that nothing changes any more; what is drawn behind them stays. */
  settle(/** @type {Token[]} */ tokens) {
    this.#views.splice(0, this.#draw(tokens));
  }

  #draw(/** @type {Token[]} */ tokens) {
    const shown = tokens.filter(({ type }) => type !== "space" && type !== "def");
    shown.forEach((token, index) => {
      const kind = kindOf(token);
      const old = this.#views[index];
      if (old?.kind === kind) {
        if (old.raw === token.raw) return;
        old.update(token);
        old.raw = token.raw;
        return;
      }
      const view = { kind, raw: token.raw, ...this.#view(kind, token) };
      view.update(token);
      if (old) old.node.replaceWith(view.node);
      else this.#root.append(view.node);
      this.#views[index] = view;
    });
    return shown.length;
  }

  /** @returns {Pick<View, "node" | "update">} */
  #view(/** @type {string} */ kind, /** @type {Token} */ token) {
    const document = this.#document;
    switch (token.type) {
      case "paragraph":
        return paragraph(document);
      case "text": // a paragraph of a list whose items are close to each other
        return inlineBlock(element("span"), document);
      case "heading":
        return heading(kind, document);
      case "code":
        return code(document);
      case "hr":
        return { node: element("hr"), update: () => {} };
      case "checkbox":
        return checkbox();
      case "blockquote": {
        const node = element("blockquote");
        const blocks = new Blocks(node, document);
        return { node, update: ({ tokens }) => { blocks.update(tokens); direct(node); } };
      }
      case "list":
        return list(kind, document);
      case "table":
        return table(document);
      case /** @type {any} */ ("formula"):
        return formula(document);
      default:
        return asWritten();
    }
  }
}

/** What two blocks must have in common for one to become the other in place. */
function kindOf(/** @type {Token} */ token) {
  if (token.type === "heading") return `h${Math.min(6, token.depth + 3)}`; // the page's own are above
  if (token.type === "list") return token.ordered ? "ol" : "ul";
  return token.type;
}

/** @returns {Pick<View, "node" | "update">} */
function inlineBlock(/** @type {HTMLElement} */ node, /** @type {MarkdownDocument} */ document) {
  const update = document.inline(node);
  return { node, update: ({ text }) => { update(text); direct(node); } };
}

/** As large as its depth says, which may be deeper than the page's own headings allow. @returns {Pick<View, "node" | "update">} */
function heading(/** @type {string} */ kind, /** @type {MarkdownDocument} */ document) {
  const { node, update } = inlineBlock(element(kind), document);
  return { node, update(token) { node.dataset.depth = token.depth; update(token); } };
}

/** A paragraph, before which there may be a task's checkbox. @returns {Pick<View, "node" | "update">} */
function paragraph(/** @type {MarkdownDocument} */ document) {
  const node = element("p");
  const text = element("span");
  /** @type {Pick<View, "node" | "update"> | null} */ let box = null;
  /** @type {((text: string) => void) | null} */ let update = null;
  return {
    node,
    update(/** @type {Paragraph} */ token) {
      const task = token.tokens?.[0]?.type === "checkbox" ? token.tokens[0] : null;
      if (task && !box) {
        box = checkbox();
        node.replaceChildren(box.node, text);
        update = document.inline(text);
      } else if (!task && box) {
        box = null;
        node.replaceChildren();
        update = document.inline(node);
      }
      box?.update(task);
      update ??= document.inline(node);
      update(task ? token.text.slice(task.raw.length) : token.text);
      direct(node);
    },
  };
}

/** @returns {Pick<View, "node" | "update">} */
function checkbox() {
  const node = /** @type {HTMLInputElement} */ (element("input"));
  node.type = "checkbox";
  node.disabled = true;
  const update = (/** @type {any} */ { checked }) => {
    node.toggleAttribute("checked", checked);
    node.setAttribute("aria-label", checked ? "Done" : "To do");
  };
  return { node, update };
}

/** @returns {Pick<View, "node" | "update">} */
function list(/** @type {string} */ kind, /** @type {MarkdownDocument} */ document) {
  const node = element(kind);
  /** @type {{ item: HTMLElement, blocks: Blocks, key: string }[]} */ const drawn = [];
  const update = (/** @type {List} */ { items, start, loose }) => {
    if (typeof start === "number" && start !== 1) node.setAttribute("start", String(start));
    else node.removeAttribute("start");
    items.forEach((token, index) => {
      if (!drawn[index]) {
        const item = element("li");
        node.append(item);
        drawn.push({ item, blocks: new Blocks(item, document), key: "" });
      }
      const view = drawn[index];
      const key = `${loose}${token.task}${token.raw}`;
      if (view.key === key) return;
      view.key = key;
      view.item.classList.toggle("task", token.task);
      if (!view.item.className) view.item.removeAttribute("class");
      view.blocks.update(token.tokens);
    });
    drawn.splice(items.length).forEach(({ item }) => item.remove());
    direct(node);
  };
  return { node, update };
}

/** A block of code under its language's name, with buttons that the page gives their meanings. */
function code(/** @type {MarkdownDocument} */ document) {
  const [block, head, name, pre, inside] = [element("div"), element("div"), element("span"), element("pre"), element("code")];
  block.className = "code";
  head.className = "code-head";
  const show = codeButton("Show", "shows", "Show as a page");
  show.hidden = true;
  head.append(name, show, codeButton("Wrap", "wraps", "Wrap lines"), codeButton("Save", "saves", "Save code as a file"), codeButton("Copy", "copies", "Copy code"));
  pre.tabIndex = 0; // a wide block scrolls; the keyboard must be able to
  pre.append(inside);
  block.append(head, pre);
  let shown = new GrowingText(inside);
  /** What is coloured; the rest of the text, and its whole lines, are behind that. */
  let [coloured, text, whole] = ["", "", ""];
  let start = shown.mark();
  let end = start;
  const restart = (/** @type {(Node | string)[]} */ nodes, /** @type {string} */ of) => {
    inside.replaceChildren(...nodes);
    [coloured, text, whole] = [of, "", ""];
    shown = new GrowingText(inside);
    end = start = shown.mark();
  };
  const put = (/** @type {string} */ given) => {
    if (!given.startsWith(text)) {
      // The last line has become something else: it ends the block.
      if (!given.startsWith(whole)) [whole, end] = ["", start];
      shown.rewind(end);
      text = whole;
    }
    const lines = given.slice(0, Math.max(0, given.lastIndexOf("\n")));
    if (lines.length >= text.length) {
      shown.appendVisibly(lines.slice(text.length));
      [whole, end, text] = [lines, shown.mark(), lines];
    }
    shown.appendVisibly(given.slice(text.length));
    text = given;
  };
  const colours = document.extras && new document.extras.Colours((nodes, of) => {
    const all = coloured + text;
    // A character that nobody sees is shown by its number, and not coloured.
    if (!all.startsWith(of) || inside.querySelector(".hidden-character")) return;
    restart(nodes, of);
    put(all.slice(of.length));
  });
  const update = (/** @type {Code} */ token) => {
    const language = /^[\w+#.-]{0,40}/.exec(token.lang ?? "")?.[0] ?? "";
    if (name.textContent !== language) name.textContent = language;
    show.hidden = !SHOWN.test(language);
    const given = withTabs(token.text);
    if (!given.startsWith(coloured)) restart([], "");
    put(given.slice(coloured.length));
    colours?.update(given, language);
  };
  return { node: block, update };
}

function codeButton(/** @type {string} */ text, /** @type {string} */ meaning, /** @type {string} */ label) {
  const node = /** @type {HTMLButtonElement} */ (element("button", text));
  node.type = "button";
  node.dataset[meaning] = "";
  node.setAttribute("aria-label", label);
  return node;
}

/** A table within a box that scrolls: a wide one moves nothing else. @returns {Pick<View, "node" | "update">} */
function table(/** @type {MarkdownDocument} */ document) {
  const [box, node, head, body] = [element("div"), element("table"), element("thead"), element("tbody")];
  box.className = "table";
  box.tabIndex = 0;
  node.append(head, body);
  box.append(node);
  let names = "";
  /** @type {{ line: string, row: HTMLElement, show: (cells: import("./markdown-lexer.js").TableCell[]) => void }[]} */ const rows = [];
  const update = (/** @type {Table} */ token) => {
    const key = JSON.stringify([token.header.map(({ text }) => text), token.align]);
    if (key !== names) {
      names = key;
      const first = row("th", token.align, document);
      first.show(token.header);
      head.replaceChildren(first.row);
      rows.splice(0);
      body.replaceChildren();
      box.removeAttribute("dir");
      direct(box); // decides where the first column stands
    }
    token.lines.forEach((line, index) => {
      if (!rows[index]) {
        const made = row("td", token.align, document);
        body.append(made.row);
        rows.push({ line: "", ...made });
      }
      if (rows[index].line === line) return;
      rows[index].line = line;
      rows[index].show(document.lexer.cells(token, line));
    });
    rows.splice(token.lines.length).forEach((one) => one.row.remove());
  };
  return { node: box, update };
}

/** Cells that a line lacks are one, or a bar on each line could make a hundred cells of it. */
function row(/** @type {"th" | "td"} */ name, /** @type {Table["align"]} */ aligns, /** @type {MarkdownDocument} */ document) {
  const node = element("tr");
  /** @type {{ cell: HTMLTableCellElement, update: (text: string) => void }[]} */ const drawn = [];
  const show = (/** @type {import("./markdown-lexer.js").TableCell[]} */ cells) => {
    const numFilled = cells.findLastIndex(({ text }) => text) + 1;
    const numMissing = aligns.length - numFilled;
    const texts = cells.slice(0, numFilled).map(({ text }) => text);
    if (numMissing > 0) texts.push("");
    texts.forEach((text, column) => {
      if (!drawn[column]) {
        const cell = /** @type {HTMLTableCellElement} */ (element(name));
        if (aligns[column] === "right" || aligns[column] === "center") cell.setAttribute("align", aligns[column]);
        node.append(cell);
        drawn.push({ cell, update: document.inline(cell) });
      }
      const { cell, update } = drawn[column];
      update(text);
      direct(cell);
      const span = column === numFilled ? numMissing : 1;
      if (cell.colSpan !== span) cell.colSpan = span;
      if (span === 1) cell.removeAttribute("colspan");
    });
    drawn.splice(texts.length).forEach(({ cell }) => cell.remove());
  };
  return { row: node, show };
}

/** A formula of its own lines. @returns {Pick<View, "node" | "update">} */
function formula(/** @type {MarkdownDocument} */ document) {
  const node = element("p");
  const inside = element("span");
  inside.className = "formula";
  node.append(inside);
  const update = (/** @type {Token} */ { raw }) => {
    const written = withTabs(raw).trim();
    inside.classList.remove("is-set", "is-block");
    inside.textContent = written;
    document.setFormula(inside, written);
    direct(node);
  };
  return { node, update };
}

/** HTML: as it is written, but for `<br>`. @returns {Pick<View, "node" | "update">} */
function asWritten() {
  const node = element("p");
  const update = (/** @type {Token} */ { raw }) => {
    const lines = withTabs(raw).trim().split(/<br\s*\/?>\n?/i);
    node.replaceChildren(...lines.flatMap((line, index) => (index === 0 ? [line] : [element("br"), line])));
    direct(node);
  };
  return { node, update };
}

/**
 * The first letter outside of links says from which side a text is read. `dir="auto"` would say the same,
 * but the browser reads the whole text again at each change.
 */
function direct(/** @type {HTMLElement} */ node) {
  const letter = firstLetter(node);
  const dir = !letter ? "" : RIGHT_TO_LEFT.test(letter) ? "rtl" : "ltr";
  if (!dir) node.removeAttribute("dir");
  else if (node.dir !== dir) node.dir = dir;
}

/** @returns {string} */
function firstLetter(/** @type {ParentNode} */ node) {
  for (const child of node.childNodes) {
    const isSkipped = child instanceof HTMLElement && (child.nodeName === "A" || child.className === "code-head");
    const letter = child instanceof Text ? LETTER.exec(child.data)?.[0]
      : child instanceof Element && !isSkipped ? firstLetter(child) : "";
    if (letter) return letter;
  }
  return "";
}
