/**
 * The tokens of an answer, each with how likely it was, and what was likely in its place: where it is pointed
 * at, or reached by the arrow keys.
 */

import { make } from "./dom.js";

/** @typedef {import("./answer.js").Token} Token */

/** Probabilities from which on a token looks surer. */
const BOUNDS = [.1, .3, .6, .9];
const MAX_LIKELY = 5;

export class TokenView {
  node = make("div", "tokens");
  #tip = make("div", "token-tip");
  #tokens;
  #nodes;
  #chosen = -1;

  constructor(/** @type {Token[]} */ tokens) {
    this.#tokens = tokens;
    const text = make("div", "token-text");
    text.tabIndex = 0;
    text.dir = "auto";
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", "Tokens; the arrow keys go through them");
    this.#nodes = tokens.map(({ token, logprob }) => {
      const level = BOUNDS.filter((bound) => Math.exp(logprob) >= bound).length;
      return make("span", `token level-${level}`, token);
    });
    text.append(...this.#nodes);
    this.#tip.hidden = true;
    this.#tip.setAttribute("role", "status");
    this.node.append(text, this.#tip);
    text.addEventListener("pointerover", ({ target }) => this.#choose(this.#nodes.indexOf(/** @type {HTMLElement} */ (target))));
    text.addEventListener("pointerleave", () => this.#choose(-1));
    text.addEventListener("blur", () => this.#choose(-1));
    text.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.#choose(Math.max(0, Math.min(this.#nodes.length - 1, this.#chosen + step)));
    });
  }

  #choose(/** @type {number} */ index) {
    this.#nodes[this.#chosen]?.classList.remove("is-chosen");
    this.#chosen = index;
    this.#tip.hidden = index < 0;
    if (index < 0) return;
    const node = this.#nodes[index];
    node.classList.add("is-chosen");
    this.#tip.replaceChildren(...this.#rows(this.#tokens[index]));
    const box = node.getClientRects()[0] ?? node.getBoundingClientRect();
    const around = this.node.getBoundingClientRect();
    const left = Math.min(box.left - around.left, Math.max(0, around.width - this.#tip.offsetWidth));
    this.#tip.style.left = `${left}px`;
    this.#tip.style.top = `${box.bottom - around.top + 6}px`;
  }

  /** The token, and what was likely in its place. */
  #rows(/** @type {Token} */ { token, logprob, top_logprobs }) {
    const others = top_logprobs.filter((each) => each.token !== token);
    const likely = [{ token, logprob }, ...others].sort((one, other) => other.logprob - one.logprob).slice(0, MAX_LIKELY);
    if (!likely.some((each) => each.token === token)) likely.push({ token, logprob });
    return likely.map((each) => {
      const row = make("div", each.token === token ? "token-row is-taken" : "token-row");
      const bar = /** @type {HTMLMeterElement} */ (make("meter"));
      bar.value = Math.exp(each.logprob);
      bar.setAttribute("aria-hidden", "true"); // the number beside it says the same
      row.append(make("code", "", visible(each.token)), bar, make("span", "", percentText(Math.exp(each.logprob))));
      return row;
    });
  }
}

/** A token so that nothing of it is unseen. */
function visible(/** @type {string} */ token) {
  return token.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/[\p{C}]/gu, (char) => `<U+${char.codePointAt(0)?.toString(16).toUpperCase().padStart(4, "0")}>`) || "∅";
}

function percentText(/** @type {number} */ share) {
  const percent = 100 * share;
  return percent < .1 ? "< 0.1 %" : `${percent.toFixed(percent < 10 ? 1 : 0)} %`;
}
