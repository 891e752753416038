/**
 * A small, safe Markdown renderer: paragraphs, headings, lists, fenced code, bold, italic, code.
 *
 * Safe by construction: text reaches the page through `textContent` alone, never as HTML, so
 * markup in it is shown as written. Whatever is not recognised stays plain text.
 */

/**
 * @typedef {{ indent: number, ordered: boolean, number: number, text: string }} ListItem
 * @typedef {{ type: "code", language: string, text: string, start: number }
 *   | { type: "heading", level: number, text: string, start: number }
 *   | { type: "list", items: ListItem[], start: number }
 *   | { type: "paragraph", text: string, start: number }} Block
 */

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)(?:[-*+•]|(\d{1,9})[.)])\s+(.*)$/;
/** The start of a line that may turn out to go on with the list before it. */
const MAY_BECOME_ITEM = /^[^\S\n]*(?:\d{1,9}[.)]?|[-*+•])$/;
// Every span is bounded, so that unclosed markers cannot make the search quadratic.
const INLINE = new RegExp(
  [
    String.raw`(?<ticks>\x60{1,3})(?<code>[^\x60](?:[^\n]{0,400}?[^\x60])?)\k<ticks>(?!\x60)`,
    String.raw`\*\*(?<bold>[^\s*](?:[\s\S]{0,400}?\S)?)\*\*`,
    String.raw`\*(?<star>[^\s*](?:[^*]{0,400}?[^\s*])?)\*`,
    String.raw`(?<![\p{L}\p{N}_])_(?<under>[^\s_](?:[^_]{0,400}?[^\s_])?)_(?![\p{L}\p{N}_])`,
  ].join("|"),
  "gu",
);

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
  if (heading) {
    blocks.push({ type: "heading", level: heading[1].length, text: heading[2], start });
  } else if (item) {
    const [, indent, number, text] = item;
    const entry = { indent: indent.length, ordered: number !== undefined, number: Number(number ?? 0), text };
    if (last?.type === "list" && continuesList(last.items, entry)) last.items.push(entry);
    else blocks.push({ type: "list", items: [entry], start });
  } else if (last?.type === "list" && (!isAfterBlank || /^\s{2,}/.test(line))) {
    /** @type {ListItem} */ (last.items.at(-1)).text += `\n${line.trim()}`;
  } else if (last?.type === "paragraph" && !isAfterBlank) {
    last.text += `\n${line}`;
  } else {
    blocks.push({ type: "paragraph", text: line, start });
  }
}

function continuesList(/** @type {ListItem[]} */ items, /** @type {ListItem} */ entry) {
  return entry.indent > items[0].indent || entry.ordered === items[0].ordered;
}

/** @returns {HTMLElement} */
function renderBlock(/** @type {Block} */ block) {
  switch (block.type) {
    case "code":
      return renderCode(block);
    case "heading":
      return withInline(element(`h${Math.min(6, block.level + 3)}`), block.text);
    case "list":
      return renderList(block.items);
    default:
      return withInline(element("p"), block.text);
  }
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
  const list = element(first.ordered ? "ol" : "ul");
  if (first.ordered && first.number !== 1) list.setAttribute("start", String(first.number));
  return list;
}

/** Fills `parent` with text, its spans marked up; line breaks stay. */
function withInline(/** @type {HTMLElement} */ parent, /** @type {string} */ text) {
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const { code, bold, star, under } = match.groups ?? {};
    parent.append(text.slice(end, match.index));
    if (code !== undefined) parent.append(element("code", code));
    else if (bold !== undefined) parent.append(withInline(element("strong"), bold));
    else parent.append(withInline(element("em"), star ?? under));
    end = match.index + match[0].length;
  }
  parent.append(text.slice(end));
  return parent;
}

function element(/** @type {string} */ name, text = "") {
  const node = document.createElement(name);
  if (text) node.textContent = text;
  return node;
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
    const [before, after] = [[...old.childNodes], [...fresh.childNodes]];
    before.slice(after.length).forEach((node) => node.remove());
    after.forEach((node, index) => (index < before.length ? morph(before[index], node) : old.appendChild(node)));
  }
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
    if (blocks.length > 1 && !MAY_BECOME_ITEM.test(last)) {
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
