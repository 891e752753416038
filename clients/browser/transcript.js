/**
 * How turns look: the reader's words, the answer as it grows, and the line beneath it.
 *
 * What it does not know: sockets and what comes next in the conversation.
 * Text of either side enters the page through `textContent` only.
 */

import { MarkdownStream } from "./markdown.js";

/** @typedef {import("./penstock-client.js").Answer} Answer */
/** @typedef {import("./penstock-client.js").Usage} Usage */
/** @typedef {{ label: string, run: () => void }} Action */

const LIVE_RATE_INTERVAL_MS = 250;

/** One question and its answer. */
export class TurnView {
  #article;
  #body;
  #foot;
  #stats;
  #markdown;
  #pending = "";
  #frame = 0;
  #nextRateAt = 0;
  /** What the note under the answer says. */
  noteText = "";

  constructor(/** @type {HTMLElement} */ parent, /** @type {string} */ question) {
    const asked = make("article", "message user");
    asked.append(make("h3", "visually-hidden", "You"), make("div", "bubble", question));
    this.#article = make("article", "message assistant is-waiting");
    this.#article.setAttribute("aria-busy", "true");
    this.#body = make("div", "prose");
    this.#foot = make("div", "foot");
    this.#stats = make("p", "stats");
    this.#foot.append(this.#stats);
    this.#article.append(make("h3", "visually-hidden", "Assistant"), this.#body, this.#foot);
    this.#markdown = new MarkdownStream(this.#body);
    parent.append(asked, this.#article);
    /** Both halves, so that a retry can take them away. */
    this.elements = [asked, this.#article];
  }

  /** Takes new text; however many pieces come, the page changes once per animation frame. */
  append(/** @type {string} */ text) {
    this.#pending += text;
    this.#frame ||= requestAnimationFrame(() => this.#flush());
  }

  /** Shows how fast the answer comes, a few times a second. */
  showLiveRate(/** @type {Answer} */ answer) {
    const now = performance.now();
    if (now < this.#nextRateAt || answer.numDeltas < 8) return;
    this.#nextRateAt = now + LIVE_RATE_INTERVAL_MS;
    const rate = rateOf(answer, answer.numDeltas);
    if (rate) this.#stats.replaceChildren(...figures([["≈ ", rate, " tokens/s"]]));
  }

  /** Says why nothing comes for a while, or that it goes on. */
  showPause(/** @type {boolean} */ isPaused) {
    this.#stats.textContent = isPaused ? "Paused: the server is short of memory and will go on." : "";
  }

  /** Ends the answer: the rest of its text, then its figures. */
  finish(/** @type {Answer} */ answer, /** @type {Usage | null} */ usage) {
    this.#flush();
    this.#article.classList.remove("is-waiting", "is-streaming");
    this.#article.setAttribute("aria-busy", "false");
    this.#stats.replaceChildren(...figures(statsOf(answer, usage)));
  }

  /** A line under the answer, with at most one thing to do about it. */
  addNote(/** @type {string} */ text, { isError = false, action = /** @type {Action | null} */ (null) } = {}) {
    this.noteText = text;
    const note = make("p", isError ? "note is-error" : "note");
    note.append(make("span", "", text));
    if (action) {
      const button = /** @type {HTMLButtonElement} */ (make("button", "quiet", action.label));
      button.type = "button";
      button.dataset.asks = ""; // the page enables it only while a question can be sent
      button.addEventListener("click", action.run);
      note.append(button);
    }
    this.#foot.prepend(note);
  }

  /** Takes away the buttons: a later turn has made them meaningless. */
  retire() {
    for (const button of this.#foot.querySelectorAll("button")) button.remove();
  }

  remove() {
    cancelAnimationFrame(this.#frame);
    this.elements.forEach((element) => element.remove());
  }

  #flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    if (!this.#pending) return;
    this.#article.classList.replace("is-waiting", "is-streaming");
    this.#markdown.append(this.#pending);
    this.#pending = "";
  }
}

/** Tokens per second between the first and the last piece; null when there is nothing to measure. */
function rateOf(/** @type {Answer} */ answer, /** @type {number} */ numTokens) {
  const { firstDeltaAt, lastDeltaAt } = answer;
  if (firstDeltaAt === null || lastDeltaAt === null || numTokens < 2) return null;
  const seconds = (lastDeltaAt - firstDeltaAt) / 1000;
  return seconds > 0.005 ? decimals((numTokens - 1) / seconds, 100) : null;
}

/** The figures of a finished answer, each as [before, number, after]. */
function statsOf(/** @type {Answer} */ answer, /** @type {Usage | null} */ usage) {
  /** @type {[string, string, string][]} */ const stats = [];
  if (answer.firstDeltaAt === null) return stats;
  const numTokens = usage?.output_tokens ?? answer.numDeltas;
  const rate = rateOf(answer, numTokens);
  const seconds = (answer.firstDeltaAt - answer.sentAt) / 1000;
  if (rate) stats.push(["", rate, " tokens/s"]);
  stats.push(["first token after ", decimals(seconds, 10), " s"]);
  stats.push(["", String(numTokens), numTokens === 1 ? " token" : " tokens"]);
  return stats;
}

/** A number with as many decimals as are of interest: fewer from `large` on. */
function decimals(/** @type {number} */ value, /** @type {number} */ large) {
  if (value >= large) return value.toFixed(large >= 100 ? 0 : 1);
  return value.toFixed(large >= 100 ? 1 : 2);
}

function figures(/** @type {[string, string, string][]} */ stats) {
  return stats.map(([before, number, after]) => {
    const figure = make("span", "figure", before);
    figure.append(make("b", "", number), after);
    return figure;
  });
}

function make(/** @type {string} */ name, className = "", text = "") {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}
