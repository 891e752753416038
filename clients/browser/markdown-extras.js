/**
 * Formulas and colours of code. What sets them is loaded when a text first has some; until then, and
 * where it fails, a text is shown as it is written.
 */

import { element } from "./markdown-text.js";

/** @typedef {import("./vendor/highlight.js").Scope} Scope */
/** @typedef {{ __renderToDomTree: (tex: string, options: object) => any }} Katex */

const MAX_FORMULA = 4_000;
const MAX_CODE = 60_000;
/** How long a finished line waits for its colours; longer where they take long. */
const COLOUR_MS = 250;
const MAX_SHARE = 1 / 40;

/** @type {Promise<Katex> | null} */ let katex = null;
/** @type {Promise<typeof import("./vendor/highlight.js").default> | null} */ let highlight = null;

function withKatex() {
  // A script: it leaves what it is in the page.
  katex ??= import("./vendor/katex.js").then(() => /** @type {any} */ (globalThis).katex);
  return katex;
}

function withHighlight() {
  highlight ??= import("./vendor/highlight.js").then((module) => module.default);
  return highlight;
}

/** Sets a formula, whose text with its marks an element has. */
export function setFormula(/** @type {HTMLElement} */ node, /** @type {string} */ written) {
  const { tex, isBlock } = withoutMarks(written);
  if (!tex || tex.length > MAX_FORMULA) return;
  withKatex().then(({ __renderToDomTree: tree }) => {
    if (node.textContent !== written) return; // it has changed meanwhile
    const made = tree(tex, { output: "mathml", displayMode: isBlock, throwOnError: true, strict: "ignore", trust, maxSize: 20, maxExpand: 300 });
    withoutStyles(made);
    const math = made.toNode().querySelector("math");
    math.setAttribute("aria-label", tex); // where a reader does not know MathML
    node.classList.toggle("is-block", isBlock);
    node.classList.add("is-set");
    node.replaceChildren(math);
  }).catch(() => {}); // no formula, or not loaded: as it is written
}

/** @returns {{ tex: string, isBlock: boolean }} */
function withoutMarks(/** @type {string} */ written) {
  const text = written.trim();
  const mark = /^(\$\$|\\\[|\\\(|\$)/.exec(text)?.[0] ?? "";
  const end = { "$$": "$$", "\\[": "\\]", "\\(": "\\)", "$": "$" }[mark] ?? "";
  const isWhole = mark && text.length > mark.length + end.length && text.endsWith(end);
  return { tex: isWhole ? text.slice(mark.length, -end.length).trim() : "", isBlock: mark === "$$" || mark === "\\[" };
}

/** What would make a link, or load something. */
function trust() {
  throw new Error("is not allowed");
}

/** Takes the style attributes away, which the page's policy forbids. */
function withoutStyles(/** @type {any} */ node) {
  if (node.attributes) delete node.attributes.style;
  for (const child of node.children ?? []) withoutStyles(child);
}

/** Colours the text of a block of code as it grows. */
export class Colours {
  #draw;
  #timer = 0;
  #text = "";
  #seen = "";
  #language = "";
  #wait = COLOUR_MS;

  /** @param {(nodes: (Node | string)[], text: string) => void} draw  shows nodes in place of this beginning of the text */
  constructor(draw) {
    this.#draw = draw;
  }

  update(/** @type {string} */ text, /** @type {string} */ language) {
    this.#text = text;
    this.#language = language.toLowerCase();
    if (language && text.length <= MAX_CODE) this.#timer ||= setTimeout(() => void this.#run(), this.#wait);
  }

  async #run() {
    const hljs = await withHighlight().catch(() => null);
    this.#timer = 0;
    const language = this.#language;
    if (!hljs?.getLanguage(language)) return;
    // The last line may still grow.
    const isGrowing = this.#text !== this.#seen;
    this.#seen = this.#text;
    const text = isGrowing ? this.#text.slice(0, this.#text.lastIndexOf("\n") + 1) : this.#text;
    const start = performance.now();
    if (text) {
      const { rootNode } = hljs.highlight(text, { language, ignoreIllegals: true })._emitter;
      this.#draw(rootNode.children.map(nodeOf), text);
    }
    this.#wait = Math.max(COLOUR_MS, (performance.now() - start) / MAX_SHARE);
    if (isGrowing) this.#timer ||= setTimeout(() => void this.#run(), this.#wait);
  }
}

/** @returns {Node | string} */
function nodeOf(/** @type {Scope | string} */ scope) {
  if (typeof scope === "string") return scope;
  const node = element("span");
  if (scope.scope) node.className = `hl-${scope.scope.split(".")[0].replace(/_$/, "")}`;
  node.append(...scope.children.map(nodeOf));
  return node;
}
