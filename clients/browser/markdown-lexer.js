/**
 * Markdown as tokens: marked's lexer, within bounds, and with formulas left as they are written.
 */

import { Lexer, Tokenizer } from "./vendor/marked.esm.js";

/** @typedef {import("./vendor/marked.esm.js").Token} Token */
/** @typedef {import("./vendor/marked.esm.js").Tokens.Table & { lines: string[] }} Table */
/** @typedef {import("./vendor/marked.esm.js").Tokens.TableCell} TableCell */
/** @typedef {{ href: string | null, title: string | null | undefined }} Target */

/** Quotations and lists within each other; what is deeper is text. */
const MAX_DEPTH = 8;
/** A wider table stays text. */
const MAX_COLUMNS = 100;

/** A line that begins a formula of several lines. */
const OPENED = String.raw` {0,3}(?:\$\$|\\\[)[ \t]*(?:\n|\\[A-Za-z])`;
const FORMULA = new RegExp(`^${OPENED}`);
const BEFORE_FORMULA = new RegExp(String.raw`^[^\n]*\n(?:[^\S\n]*\S[^\n]*\n)*?(?=${OPENED})`);
/** Formulas within a line. Code and escapes come first: what begins in them is none. */
const INLINE_FORMULA = new RegExp(
  [
    String.raw`(?<!\x60)(?<ticks>\x60+)(?!\x60)[^]*?(?<!\x60)\k<ticks>(?!\x60)`,
    String.raw`(?<kept>[\uE000-\uF8FF]`,
    String.raw`\\\((?!\s*\\[^A-Za-z])[^]{1,1000}?\\\)`,
    String.raw`\\\[(?!\s*\\[^A-Za-z])[^]{1,1000}?\\\]`,
    String.raw`\$\$(?!\$)[^$]{1,1000}\$\$`,
    String.raw`\$(?![\s$])(?:\\[^]|[^\\$\x60]){1,500}(?<!\s)\$(?!\d))`,
    String.raw`\\[^]`,
  ].join("|"),
  "g",
);
const FIRST_STAND_IN = 0xE000;

/** Stands in for a tab of code: no text has this character. */
const TAB = "\uFDD0";
const FENCE = /^([ \t>]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*)(`{3,}(?!.*`)|~{3,})(.*)/;

/** Hides the tabs that code in lists begins its lines with: marked would make spaces of them. */
function withoutTabs(/** @type {string} */ text) {
  if (!text.includes("\t")) return text;
  /** @type {{ indent: string, mark: string } | null} */ let open = null;
  const lines = text.split("\n").map((line) => {
    const [, before, mark, rest] = FENCE.exec(line) ?? [];
    if (open && line.trim() && !line.startsWith(open.indent)) open = null; // its item has ended
    if (!open) {
      if (mark) open = { indent: before.replace(/[^\s>]/g, " "), mark };
      return line;
    }
    if (mark?.startsWith(open.mark) && !rest.trim()) {
      open = null;
      return line;
    }
    const { indent } = open;
    return indent + line.slice(indent.length).replace(/^[ \t]+/, (spaces) => spaces.replaceAll("\t", TAB));
  });
  return lines.join("\n");
}

/** A token's text as it was written. */
export const withTabs = (/** @type {string} */ text) => text.replaceAll(TAB, "\t");

/** marked's rules, with bounds. */
class BoundedTokenizer extends Tokenizer {
  #depth = 0;

  /** @override */
  blockquote(/** @type {string} */ src) {
    return this.#deeper(() => super.blockquote(src));
  }

  /** @override */
  list(/** @type {string} */ src) {
    return this.#deeper(() => super.list(src));
  }

  /** The rows stay lines, which are taken apart when they are drawn. @override */
  table(/** @type {string} */ src) {
    const found = this.rules.block.table.exec(src);
    if (!found) return undefined;
    const [names, aligns, ...lines] = found[0].replace(/\n+$/, "").split("\n");
    const head = super.table(`${names}\n${aligns}`);
    if (!head || head.header.length > MAX_COLUMNS) return undefined;
    return { ...head, raw: found[0].replace(/\n+$/, ""), lines };
  }

  rowOf(/** @type {Table} */ table, /** @type {string} */ line) {
    const names = "a|".repeat(table.header.length);
    const aligns = "-|".repeat(table.header.length);
    return super.table(`|${names}\n|${aligns}\n${line}`)?.rows[0] ?? [];
  }

  /** A definition of several lines is one only where they could be a paragraph's. @override */
  def(/** @type {string} */ src) {
    const found = super.def(src);
    if (!found?.raw.includes("\n")) return found;
    const paragraph = this.rules.block.paragraph.exec(found.raw)?.[0] ?? "";
    return paragraph.length >= found.raw.length ? found : undefined;
  }

  /**
   * @template T
   * @param {() => T} found
   */
  #deeper(found) {
    if (this.#depth >= MAX_DEPTH) return undefined;
    this.#depth += 1;
    try {
      return found();
    } finally {
      this.#depth -= 1;
    }
  }
}

/** Texts between formulas, and these, as tokens of their own; not within links, where nothing may hide. */
function withFormulas(/** @type {any[]} */ tokens) {
  /** @type {any[]} */ const found = [];
  for (const token of tokens) {
    if (token.type !== "text") {
      const isOpen = token.tokens && token.type !== "link" && token.type !== "image";
      found.push(isOpen ? { ...token, tokens: withFormulas(token.tokens) } : token);
      continue;
    }
    for (const raw of token.raw.split(/([\uE000-\uF8FF])/)) {
      if (raw) found.push({ type: /^[\uE000-\uF8FF]$/.test(raw) ? "formula" : "text", raw, text: raw });
    }
  }
  return found;
}

/** A formula of several lines is a block: a minus in it begins no list. */
function formula(/** @type {string} */ src) {
  if (!FORMULA.test(src)) return undefined;
  const end = /\n[ \t]*(?:\n|$)/.exec(src)?.index ?? src.length;
  const mark = src.trimStart().slice(0, 2);
  const open = src.indexOf(mark);
  const close = src.indexOf(mark === "$$" ? "$$" : "\\]", open + 2);
  const line = close < 0 || close > end ? end : src.indexOf("\n", close);
  const raw = src.slice(0, line < 0 ? src.length : line);
  if (!raw.includes("\n") && close >= 0) return undefined; // of one line: a part of a paragraph
  return { type: "formula", raw, text: raw };
}

/** Blocks and what is in them; knows which references are defined. */
export class MarkdownLexer {
  #tokenizer = new BoundedTokenizer();
  #lexer;
  /** Definitions by label. @type {Record<string, Target>} */ #targets = Object.create(null);

  constructor() {
    const block = [formula];
    const startBlock = [(/** @type {string} */ rest) => BEFORE_FORMULA.exec(rest)?.[0].length];
    const extensions = { renderers: {}, childTokens: {}, block, startBlock };
    this.#lexer = new Lexer({ gfm: true, silent: true, tokenizer: this.#tokenizer, extensions });
  }

  /** Blocks; what is within their lines is not looked at. `withTabs` gives their texts back. */
  blocks(/** @type {string} */ text) {
    this.#reset(Object.create(null));
    return this.#lexer.blockTokens(withoutTabs(text), []);
  }

  /**
   * What is within a line. Formulas are out of marked's sight: there are characters in their stead,
   * which `written` takes back.
   */
  inline(/** @type {string} */ text) {
    /** @type {string[]} */ const formulas = [];
    const hasFormulas = /\$|\\[([]|[\uE000-\uF8FF]/.test(text);
    const source = !hasFormulas ? text : text.replace(INLINE_FORMULA, (found, ...more) => {
      if (more.at(-1).kept === undefined) return found;
      return String.fromCharCode(FIRST_STAND_IN + formulas.push(found) - 1);
    });
    const written = (/** @type {string} */ part) => formulas.length === 0 ? part
      : part.replace(/[\uE000-\uF8FF]/g, (char) => formulas[char.charCodeAt(0) - FIRST_STAND_IN] ?? char);
    this.#reset(this.#targets);
    const tokens = this.#lexer.inlineTokens(source, []);
    return { tokens: formulas.length > 0 ? withFormulas(tokens) : tokens, written };
  }

  /** The cells of a line of a table. @returns {TableCell[]} */
  cells(/** @type {Table} */ table, /** @type {string} */ line) {
    this.#reset(this.#targets);
    return this.#tokenizer.rowOf(table, line);
  }

  /** Defines what a label refers to, or nothing; says whether that is news. */
  define(/** @type {string} */ label, /** @type {Target | null} */ target) {
    const before = this.#targets[label];
    if (target) this.#targets[label] = target;
    else delete this.#targets[label];
    return before?.href !== target?.href || before?.title !== target?.title;
  }

  isDefined(/** @type {string} */ label) {
    return label in this.#targets;
  }

  #reset(/** @type {Record<string, any>} */ links) {
    this.#lexer.tokens.links = links;
    this.#lexer.inlineQueue = [];
    this.#lexer.state = { inLink: false, inRawBlock: false, linkEmitted: false, linkParenPossible: true, top: true };
  }
}

/** A label as definitions and references are compared by, as marked does. */
export function labelOf(/** @type {string} */ text) {
  return text.trim().replace(/\s+/g, " ").toLowerCase().toUpperCase().toLowerCase();
}
