/**
 * What stands within a line of Markdown: bold, italic, struck, code, links.
 *
 * A link leads to the web or to a mailbox, and says where: whatever else calls itself one stays text.
 */

import { element, GrowingText } from "./markdown-text.js";

const ADDRESS = String.raw`(?:https?:\/\/|mailto:)[^\s<>\x60]`;
const BARE = String.raw`(?<![\p{L}\p{N}])https?:\/\/[^\s<>\x60"|*]`;
// Every span is bounded, so that unclosed markers cannot make the search quadratic.
const INLINE = new RegExp(
  [
    String.raw`\\(?<escaped>[*_~\x60\[\]|>#])`,
    String.raw`(?<ticks>\x60{1,3})(?<code>[^\x60\n](?:[^\n]{0,400}?[^\x60\n])??)\k<ticks>(?!\x60)`,
    String.raw`\[(?<label>[^\[\]\n]{1,400})\]\((?<target>${ADDRESS}{1,1000}?)\)(?!\))`,
    String.raw`(?<bare>${BARE}{0,1000}[^\s<>\x60"|*.,;:!?'()\[\]])`,
    String.raw`\*\*\*(?<both>[^\s*](?:[^*]{0,400}?[^\s*])??)\*\*\*`,
    String.raw`\*\*(?<bold>[^\s*](?:[\s\S]{0,400}?\S)??)\*\*`,
    String.raw`\*(?<star>[^\s*](?:[^*]{0,400}?[^\s*])??)\*`,
    String.raw`~~(?<struck>[^\s~](?:[^~]{0,400}?[^\s~])??)~~`,
    String.raw`(?<![\p{L}\p{N}_])_(?<under>[^\s_](?:[^_]{0,400}?[^\s_])??)_(?![\p{L}\p{N}_])`,
  ].join("|"),
  "gu",
);
/** The start of a span that more text may still complete: the above, as far as the text goes. */
const PENDING = new RegExp(
  [
    String.raw`\\$`,
    String.raw`\x60{1,3}(?:$|[^\x60\n][^\n]{0,405}$)`,
    String.raw`\[(?:[^\[\]\n]{0,400}$|[^\[\]\n]{1,400}\](?:$|\([^\s<>\x60]{0,1010}$))`,
    String.raw`(?<![\p{L}\p{N}])h(?:t(?:t(?:p(?:s?(?::\/{0,2})?)?)?)?)?$`,
    String.raw`${BARE}{0,1001}$`,
    String.raw`\*\*\*(?:$|[^\s*][^*]{0,401}\*{0,3}$)`,
    String.raw`\*\*(?:$|[^\s*][\s\S]{0,404}$)`,
    String.raw`\*(?:$|[^\s*][^*]{0,402}$)`,
    String.raw`~(?:$|~(?:$|[^\s~][^~]{0,401}~{0,2}$))`,
    String.raw`(?<![\p{L}\p{N}_])_(?:$|[^\s_][^_]{0,402}$)`,
  ].join("|"),
  "gu",
);
const PENDING_BARE = new RegExp(`${BARE}{0,1001}$`, "uy");
/** The length of the longest span: what begins further from the end is decided. */
const REACH = 1_500;
/** What the patterns look at behind the end of a span, and before its beginning. */
const MARGIN = 2;

const LETTER = /\p{L}/u;
const RIGHT_TO_LEFT = /[\u0590-\u08FF\uFB1D-\uFDFF\uFE70-\uFEFF\u{10800}-\u{10FFF}\u{1E800}-\u{1EFFF}]/u;

/** @typedef {{ settled: import("./markdown-text.js").Mark, text: string, from: number, dir: string }} InlineMark */

/**
 * Text with spans that grows. What more text cannot change is settled and left alone, so that each
 * update costs what it adds and at most the one span that is open.
 *
 * The first letter outside of links says from which side the text is read. `dir="auto"` would say the
 * same, but the browser reads the whole text again at each change.
 */
export class InlineText {
  #root;
  #settled;
  /** Nodes behind the settled ones, which the next update replaces. @type {ChildNode[]} */ #draft = [];
  /** What is not settled, from `#from`, and a few characters before it. */ #text = "";
  #from = 0;
  #directed;
  #isDirectionDraft = false;

  /**
   * @param {HTMLElement} root
   * @param {HTMLElement} directed  gets the direction, unless it has one
   */
  constructor(root, text = "", directed = root) {
    this.#root = root;
    this.#directed = directed;
    this.#settled = new GrowingText(root);
    this.append(text);
  }

  /** @returns {InlineMark} */
  mark() {
    return { settled: this.#settled.mark(), text: this.#text, from: this.#from, dir: this.#isDirectionDraft ? "" : this.#directed.dir };
  }

  rewind(/** @type {InlineMark} */ { settled, text, from, dir }) {
    this.#drop();
    this.#settled.rewind(settled);
    setDirection(this.#directed, dir);
    this.#text = text;
    this.#from = from;
    this.#show();
  }

  append(/** @type {string} */ text) {
    if (!text) return;
    this.#drop();
    this.#text += text;
    this.#settle();
    this.#show();
  }

  #drop() {
    this.#draft.forEach((node) => node.remove());
    this.#draft = [];
    if (this.#isDirectionDraft) setDirection(this.#directed, "");
    this.#isDirectionDraft = false;
  }

  #show() {
    if (this.#from === this.#text.length) return;
    const rest = spansOf(this.#text, this.#from);
    this.#draft = rest.map((part) => (typeof part === "string" ? document.createTextNode(part) : part));
    this.#root.append(...this.#draft);
    this.#isDirectionDraft = rest.map((part) => this.#direct(part)).includes(true);
  }

  /** Sets the direction by the first letter. */
  #direct(/** @type {string | Element} */ part) {
    if (this.#directed.dir) return false;
    const text = typeof part === "string" ? part : part.nodeName === "A" ? "" : part.textContent ?? "";
    const dir = directionOf(text);
    if (dir) setDirection(this.#directed, dir);
    return dir !== "";
  }

  #settle() {
    const text = this.#text;
    let from = this.#from;
    let pending = -1;
    for (;;) {
      const match = matchFrom(INLINE, text, from);
      if (pending < from) pending = matchFrom(PENDING, text, Math.max(from, text.length - REACH))?.index ?? text.length;
      const start = match?.index ?? text.length;
      const plain = text.slice(from, Math.min(start, pending));
      this.#settled.appendText(plain);
      this.#direct(plain);
      from = Math.min(start, pending);
      if (!match || pending < start || isOpen(match, text)) break;
      const part = span(match);
      if (typeof part === "string") this.#settled.appendText(part);
      else this.#settled.appendNode(part);
      this.#direct(part);
      from = start + match[0].length;
    }
    const kept = Math.max(0, from - MARGIN);
    this.#text = text.slice(kept);
    this.#from = from - kept;
  }
}

/** By the first letter; empty without one. */
export function directionOf(/** @type {string} */ text) {
  const letter = LETTER.exec(text)?.[0];
  return !letter ? "" : RIGHT_TO_LEFT.test(letter) ? "rtl" : "ltr";
}

export function setDirection(/** @type {HTMLElement} */ node, /** @type {string} */ dir) {
  if (dir) node.dir = dir;
  else node.removeAttribute("dir");
}

/** Whether more text may change a span that is complete. */
function isOpen(/** @type {RegExpExecArray} */ match, /** @type {string} */ text) {
  if (match.index + match[0].length + MARGIN > text.length) return true;
  return match.groups?.bare !== undefined && matchFrom(PENDING_BARE, text, match.index) !== null;
}

function matchFrom(/** @type {RegExp} */ pattern, /** @type {string} */ text, /** @type {number} */ from) {
  pattern.lastIndex = from;
  return pattern.exec(text);
}

/** Text and spans, in order. @returns {(string | HTMLElement)[]} */
function spansOf(/** @type {string} */ text, from = 0, isInLink = false) {
  /** @type {(string | HTMLElement)[]} */ const parts = [];
  let end = from;
  for (let match = matchFrom(INLINE, text, end); match; match = matchFrom(INLINE, text, end)) {
    parts.push(text.slice(end, match.index), span(match, isInLink));
    end = match.index + match[0].length;
  }
  parts.push(text.slice(end));
  return parts;
}

/** @returns {HTMLElement | string} */
function span(/** @type {RegExpExecArray} */ match, isInLink = false) {
  const { escaped, code, label, target, bare, both, bold, struck, star, under } = match.groups ?? {};
  if (escaped !== undefined) return escaped;
  if (code !== undefined) {
    const node = element("code");
    new GrowingText(node).appendVisibly(code);
    return node;
  }
  if (bare !== undefined) return isInLink ? bare : link(bare, bare, [bare]) ?? bare;
  if (label !== undefined) {
    const written = match[0];
    return isInLink ? written : link(target, label, spansOf(label, 0, true)) ?? written;
  }
  const node = element(bold !== undefined || both !== undefined ? "strong" : struck !== undefined ? "s" : "em");
  const inside = both !== undefined ? element("em") : node;
  if (inside !== node) node.append(inside);
  fill(inside, spansOf(both ?? bold ?? struck ?? star ?? under, 0, isInLink), isInLink);
  return node;
}

function fill(/** @type {HTMLElement} */ node, /** @type {(string | HTMLElement)[]} */ parts, /** @type {boolean} */ isInLink) {
  const text = new GrowingText(node);
  for (const part of parts) {
    if (typeof part !== "string") text.appendNode(part);
    else if (isInLink) text.appendVisibly(part);
    else text.appendText(part);
  }
}

/** A link that opens in another tab, without referrer and opener; null: it leads nowhere. */
function link(/** @type {string} */ address, /** @type {string} */ label, /** @type {(string | HTMLElement)[]} */ parts) {
  if (!URL.canParse(address)) return null;
  const node = /** @type {HTMLAnchorElement} */ (element("a"));
  node.href = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  fill(node, parts, true);
  const destination = destinationOf(new URL(address), label.trim().toLowerCase());
  if (destination) {
    const place = element("span");
    place.className = "destination";
    place.dir = "ltr";
    new GrowingText(place).appendVisibly(` (${destination})`);
    node.append(place);
  }
  return node;
}

/**
 * The host or mailbox that a link leads to, as the browser will ask for it: `xn--…` for a host in
 * other letters, without the user's name. Empty if the text of the link begins with it.
 */
function destinationOf(/** @type {URL} */ { protocol, pathname, host }, /** @type {string} */ label) {
  const destination = protocol === "mailto:" ? pathname : host;
  const named = label.startsWith(`${protocol}//`) ? label.slice(protocol.length + 2) : label;
  const isNamed = named.startsWith(destination.toLowerCase()) && /^(?:[/?#]|$)/.test(named.slice(destination.length));
  return isNamed ? "" : destination;
}
