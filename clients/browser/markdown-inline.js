/**
 * What stands within a line of Markdown: bold, italic, struck, code, links, line breaks.
 */

import { withoutEntities } from "./markdown-entities.js";
import { linkTo, pictureAt } from "./markdown-links.js";
import { element, GrowingText } from "./markdown-text.js";

/** @typedef {import("./markdown-lexer.js").Token} Token */
/** @typedef {import("./markdown-lexer.js").MarkdownLexer} MarkdownLexer */
/** Takes formulas back, and sets them. @typedef {{ written: (text: string) => string, setFormula: (node: HTMLElement, written: string) => void }} Means */
/** A token as drawn: what it was, and its node. @typedef {{ key: string, isText: boolean, node: ChildNode }} Drawn */

/** A longer text is taken in pieces of at most this: some of marked's rules look through all of it. */
const MAX_PIECE = 4_096;
const ELEMENTS = new Map([["strong", "strong"], ["em", "em"], ["del", "s"]]);
/** What changes nothing before it, at the end of a text that ends in a word. */
const WORDS = /^[\p{L}\p{N}, ]+$/u;
const IN_WORD = / [\p{L}\p{N},]*$/u;
const BREAK = /^<br\s*\/?>$/i;

/** Text with spans that grows. What has not changed is left alone. */
export class InlineText {
  #root;
  #lexer;
  #setFormula;
  #text = "";
  /** @type {{ text: string, numDrawn: number }[]} */ #pieces = [];
  /** @type {Drawn[]} */ #drawn = [];

  /**
   * @param {HTMLElement} root
   * @param {MarkdownLexer} lexer
   * @param {(node: HTMLElement, written: string) => void} setFormula
   */
  constructor(root, lexer, setFormula) {
    this.#root = root;
    this.#lexer = lexer;
    this.#setFormula = setFormula;
  }

  update(/** @type {string} */ text) {
    if (text === this.#text || this.#goesOn(text)) return;
    this.#text = text;
    const pieces = piecesOf(text);
    const changed = pieces.findIndex((piece, index) => piece !== this.#pieces[index]?.text);
    this.#pieces = this.#pieces.slice(0, changed < 0 ? pieces.length : changed);
    let numDrawn = this.#pieces.reduce((sum, piece) => sum + piece.numDrawn, 0);
    for (const piece of pieces.slice(this.#pieces.length)) {
      const { tokens, written } = this.#lexer.inline(piece);
      tokens.forEach((token, index) => this.#draw(numDrawn + index, token, tokens[index - 1], written));
      this.#pieces.push({ text: piece, numDrawn: tokens.length });
      numDrawn += tokens.length;
    }
    this.#drawn.splice(numDrawn).forEach(({ node }) => node.remove());
  }

  /** Appends words to words, which is what mostly comes; says whether that was all. */
  #goesOn(/** @type {string} */ text) {
    const last = this.#drawn.at(-1);
    const piece = this.#pieces.at(-1);
    if (!piece || !(last?.node instanceof Text) || !last.isText || !text.startsWith(this.#text)) return false;
    const more = text.slice(this.#text.length);
    const isShort = piece.text.length + more.length <= MAX_PIECE;
    if (!isShort || !WORDS.test(more) || !IN_WORD.test(last.key.slice(-40))) return false;
    last.node.appendData(more);
    last.key += more;
    piece.text += more;
    this.#text = text;
    return true;
  }

  /** Draws everything again: references lead elsewhere than they did. */
  redraw() {
    const text = this.#text;
    this.#drawn.splice(0).forEach(({ node }) => node.remove());
    this.#pieces = [];
    this.#text = "";
    this.update(text);
  }

  #draw(/** @type {number} */ index, /** @type {Token} */ token, /** @type {Token | undefined} */ before, /** @type {(text: string) => string} */ written) {
    const isText = token.type === "text" || token.type === "escape";
    const key = isText ? textOf(token, before, written) : `${token.type} ${written(token.raw)}`;
    const drawn = this.#drawn[index];
    if (drawn && drawn.isText === isText) {
      if (drawn.key === key) return;
      if (isText && drawn.node instanceof Text) {
        const same = lengthOfSame(drawn.key, key);
        drawn.node.replaceData(same, drawn.key.length - same, key.slice(same));
        drawn.key = key;
        return;
      }
    }
    const node = isText ? document.createTextNode(key) : nodeOf(token, { written, setFormula: this.#setFormula }, false);
    if (drawn) drawn.node.replaceWith(node);
    else this.#root.append(node);
    this.#drawn[index] = { key, isText, node };
  }
}

/** How many characters two texts begin with in common. */
function lengthOfSame(/** @type {string} */ one, /** @type {string} */ other) {
  if (other.startsWith(one)) return one.length;
  let length = 0;
  while (length < one.length && one[length] === other[length]) length += 1;
  return length;
}

/** Where lines or words end, if one does. */
function piecesOf(/** @type {string} */ text) {
  const pieces = [];
  let from = 0;
  while (text.length - from > MAX_PIECE) {
    const piece = text.slice(from, from + MAX_PIECE);
    const end = (piece.lastIndexOf("\n") + 1) || (piece.lastIndexOf(" ") + 1) || MAX_PIECE - (/[\uD800-\uDBFF]$/.test(piece) ? 1 : 0);
    pieces.push(piece.slice(0, end));
    from += end;
  }
  pieces.push(text.slice(from));
  return pieces;
}

/** A text as it is read: without the spaces around line breaks, which nobody sees in Markdown. */
function textOf(/** @type {Token} */ token, /** @type {Token | undefined} */ before, /** @type {(text: string) => string} */ written) {
  if (token.type === "escape") return token.text;
  const text = written(withoutEntities(token.raw.replace(/[ \t]*\n[ \t]*/g, "\n")));
  return before?.type === "html" && BREAK.test(before.raw) ? text.replace(/^\s*\n/, "") : text;
}

/** @returns {ChildNode} */
function nodeOf(/** @type {Token} */ token, /** @type {Means} */ means, /** @type {boolean} */ isInLink) {
  const { written } = means;
  const name = ELEMENTS.get(token.type);
  if (name) {
    const node = element(name);
    fill(node, token, means, isInLink);
    return node;
  }
  switch (token.type) {
    case "br":
      return element("br");
    case "formula": {
      const node = element("span", written(token.raw));
      node.className = "formula";
      means.setFormula(node, written(token.raw));
      return node;
    }
    case "codespan": {
      const node = element("code");
      new GrowingText(node).appendVisibly(written(token.text));
      return node;
    }
    case "link":
    case "image": {
      const [address, title] = [token.href, token.title ?? ""].map((text) => written(withoutEntities(text)));
      const text = written(withoutEntities(token.text));
      const node = isInLink ? null : token.type === "image" ? pictureAt(address, title, text)
        : linkTo(address, title, (link) => fill(link, token, means, true));
      return node ?? document.createTextNode(isInLink && token.type === "image" ? text : written(token.raw));
    }
    default:
      if (token.type === "html" && BREAK.test(token.raw)) return element("br");
      return document.createTextNode(written(token.raw));
  }
}

/** Within a link nothing may hide: it could say that it leads elsewhere. */
function fill(/** @type {HTMLElement} */ node, /** @type {Token} */ token, /** @type {Means} */ means, /** @type {boolean} */ isInLink) {
  const tokens = /** @type {Token[]} */ ("tokens" in token ? token.tokens : []);
  const text = new GrowingText(node);
  tokens.forEach((inner, index) => {
    if (inner.type !== "text" && inner.type !== "escape") {
      const made = nodeOf(inner, means, isInLink);
      if (made instanceof Text && isInLink) text.appendVisibly(made.data);
      else text.appendNode(made);
      return;
    }
    const shown = textOf(inner, tokens[index - 1], means.written);
    if (isInLink) text.appendVisibly(shown);
    else text.appendText(shown);
  });
}
