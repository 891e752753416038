/**
 * Text in the page that grows at its end. It enters through text nodes alone, never as HTML.
 */

/**
 * Characters that nobody sees and that can make a text look like another one: bidirectional
 * controls, zero-width spaces, tags. Joiners stay where writing needs them: behind a mark, an emoji
 * or a letter of a script that joins; tags behind a flag; a zero-width space between words of
 * South-East Asia.
 */
const HIDDEN = new RegExp(
  [
    String.raw`[\u00AD\u061C\u200E\u200F\u2028-\u202E\u2060-\u206F\uFEFF\uFFF9-\uFFFB]`,
    String.raw`(?<![\p{sc=Thai}\p{sc=Laoo}\p{sc=Khmr}\p{sc=Mymr}\p{sc=Tibt}])\u200B`,
    String.raw`(?<![\p{M}\p{Extended_Pictographic}\p{Emoji_Modifier}]|(?![\p{sc=Latn}\p{sc=Grek}\p{sc=Cyrl}])\p{L})[\u180E\u200C\u200D]`,
    String.raw`(?<!\u{1F3F4}[\u{E0020}-\u{E007F}]{0,8})[\u{E0000}-\u{E007F}]`,
  ].join("|"),
  "gu",
);
/** How much text `HIDDEN` looks back at: a flag and its tags. */
const CONTEXT = 18;
/** The longest text node: appending to one copies it. */
const MAX_NODE = 4_096;

export function element(/** @type {string} */ name, text = "") {
  const node = document.createElement(name);
  if (text) node.textContent = text;
  return node;
}

/** @typedef {{ numNodes: number, length: number, context: string }} Mark */

/** Appends to an element, and goes back to an earlier state of it. */
export class GrowingText {
  #root;
  /** @type {ChildNode[]} */ #nodes = [];
  #context = "";

  constructor(/** @type {HTMLElement} */ root) {
    this.#root = root;
  }

  /** @returns {Mark} */
  mark() {
    const last = this.#nodes.at(-1);
    return { numNodes: this.#nodes.length, length: last instanceof Text ? last.length : 0, context: this.#context };
  }

  rewind(/** @type {Mark} */ { numNodes, length, context }) {
    this.#nodes.splice(numNodes).forEach((node) => node.remove());
    const last = this.#nodes.at(-1);
    if (last instanceof Text && last.length > length) last.deleteData(length, last.length - length);
    this.#context = context;
  }

  appendNode(/** @type {ChildNode} */ node) {
    this.#root.append(node);
    this.#nodes.push(node);
  }

  appendText(/** @type {string} */ text) {
    if (!text) return;
    const last = this.#nodes.at(-1);
    if (last instanceof Text && last.length < MAX_NODE) last.appendData(text);
    else this.appendNode(document.createTextNode(text));
  }

  /** Appends text in which every hidden character is shown by its number; copying keeps it. */
  appendVisibly(/** @type {string} */ text) {
    const whole = this.#context + text;
    let end = this.#context.length;
    HIDDEN.lastIndex = end;
    for (let found = HIDDEN.exec(whole); found; found = HIDDEN.exec(whole)) {
      this.appendText(whole.slice(end, found.index));
      const mark = element("span", found[0]);
      mark.className = "hidden-character";
      mark.dataset.code = `U+${found[0].codePointAt(0)?.toString(16).toUpperCase().padStart(4, "0")}`;
      this.appendNode(mark);
      end = found.index + found[0].length;
    }
    this.appendText(whole.slice(end));
    this.#context = whole.slice(-CONTEXT);
  }
}
