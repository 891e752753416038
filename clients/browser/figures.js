/**
 * The figures of an answer, as texts: how fast it came, how long the first word took, what was
 * cached, which drafts were right.
 */

import { make } from "./dom.js";

/** @typedef {import("./answer.js").Answer} Answer */
/** @typedef {import("./answer.js").Usage} Usage */
/** @typedef {[before: string, number: string, after: string]} Figure */

/** Tokens at the end of a turn that may be computed again: a block of KV, and what the template puts around an answer. */
const CACHE_SLACK = 64;

/** Tokens per second between the first and the last piece; null when there is nothing to measure. */
function rateOf(/** @type {Answer} */ answer, /** @type {number} */ numTokens) {
  const { firstDeltaAt, lastDeltaAt } = answer;
  if (firstDeltaAt === null || lastDeltaAt === null || numTokens < 2) return null;
  const seconds = (lastDeltaAt - firstDeltaAt) / 1000;
  return seconds > 0.005 ? decimals((numTokens - 1) / seconds, 100) : null;
}

/** Of an answer that came here. @returns {Figure[]} */
export function timesOf(/** @type {Answer} */ answer, /** @type {Usage | null} */ usage) {
  if (answer.firstDeltaAt === null || answer.request === null) return [];
  const rate = rateOf(answer, usage?.output_tokens ?? answer.numDeltas);
  const seconds = (answer.firstDeltaAt - answer.sentAt) / 1000;
  /** @type {Figure[]} */ const found = [["first token after ", decimals(seconds, 10), " s"]];
  return rate ? [["", rate, " tokens/s"], ...found] : found;
}

/** Of any answer. @returns {Figure[]} */
export function countsOf(/** @type {Usage} */ { input_tokens, input_tokens_details, output_tokens, penstock }) {
  const cached = input_tokens_details?.cached_tokens ?? 0;
  /** @type {Figure[]} */ const found = [
    ["", String(output_tokens), output_tokens === 1 ? " token" : " tokens"],
    ["prompt ", String(input_tokens), " tokens"],
    ["", String(cached), " of them cached"],
  ];
  if (!penstock) return found;
  const { draft_tokens, accepted_draft_tokens } = penstock;
  return [...found, ["", String(accepted_draft_tokens), ` of ${draft_tokens} drafted tokens right`]];
}

/** The elements that show them. */
export function figureElements(/** @type {Figure[]} */ figures) {
  return figures.map(([before, number, after]) => {
    const figure = make("span", "figure", before);
    figure.append(make("b", "", number), after);
    return figure;
  });
}

/** The status of an answer while it streams. */
export function liveText(/** @type {Answer} */ answer) {
  const rate = answer.numDeltas < 8 ? null : rateOf(answer, answer.numDeltas);
  return rate ? `≈ ${rate} tokens/s` : "Answering…";
}

/** How long a request will wait: by how fast its queue has moved, or, before that, as the server says. */
export class QueueEstimate {
  /** @type {{ position: number, at: number } | null} */ #first = null;

  /** Milliseconds until there is nobody before it; null: nothing is known. */
  note(/** @type {import("./answer.js").QueuePlace} */ { position, estimatedWaitMs }, now = performance.now()) {
    this.#first ??= { position, at: now };
    const numMoved = this.#first.position - position;
    if (numMoved > 0 && now > this.#first.at) return position * (now - this.#first.at) / numMoved;
    return estimatedWaitMs > 0 ? estimatedWaitMs : null;
  }
}

export function queueText(/** @type {import("./answer.js").QueuePlace} */ { position }, /** @type {number | null} */ waitMs) {
  const before = position === 1 ? "1 request is" : `${position} requests are`;
  const wait = waitMs === null || position === 0 ? "" : `, ${waitText(waitMs)} to go`;
  return position > 0 ? `Waiting: ${before} before this one${wait}` : "Waiting: next in line";
}

/** As exact as such an estimate is. */
function waitText(/** @type {number} */ waitMs) {
  const seconds = waitMs / 1000;
  if (seconds < 5) return "a few seconds";
  const step = seconds < 20 ? 5 : seconds < 90 ? 10 : 60;
  const rounded = step * Math.ceil(seconds / step);
  return rounded < 120 ? `about ${rounded} s` : `about ${rounded / 60} min`;
}

/** `resource`: the kind of what is loaded, as the server calls it. */
export function preparingText(/** @type {string} */ resource) {
  return `Waiting: the server loads the ${resource} that this answer needs`;
}

export function prefillText(/** @type {import("./answer.js").Prefill} */ { numComputed, numTokens, leftMs }) {
  const left = leftMs > 0 ? `, ${waitText(leftMs)} to go` : "";
  return `Reading the prompt: ${numComputed.toLocaleString()} of ${numTokens.toLocaleString()} tokens${left}`;
}

/** `waitMs`: until an engine is expected; null: not known. */
export function restartText(/** @type {number | null} */ waitMs) {
  const when = waitMs === null ? "" : waitMs > 1_000 ? `, in about ${Math.ceil(waitMs / 1000)} s` : ", any moment now";
  return `The model is restarting; your answer will go on${when}.`;
}

/**
 * Why not more of a prompt was in the cache, where it can be told; empty: all was, but for its end.
 * @param {Usage} usage
 * @param {{ usage: Usage, isSame: boolean } | null} before  the turn before, and whether model, system prompt and tools are the same
 * @param {boolean} isFirst  there is none before it
 */
export function cacheText({ input_tokens, input_tokens_details }, before, isFirst) {
  const cached = input_tokens_details?.cached_tokens ?? 0;
  if (before && !before.isSame) return "not more, as model, system prompt or tools differ from the turn before";
  const known = before ? Math.min(input_tokens, before.usage.input_tokens + before.usage.output_tokens) : 0;
  if (!before) return cached === 0 && isFirst ? "none, as this is the first message of the chat" : "";
  // The end of a turn is in a block that was not full, and so is not kept.
  if (cached >= known - CACHE_SLACK) return cached < input_tokens ? newText(input_tokens - cached) : "";
  return "not more, as what was known of this chat has made room for others";
}

function newText(/** @type {number} */ num) {
  return num === 1 ? "the last one is new" : `the other ${num.toLocaleString()} are new`;
}

/** A number with as many decimals as are of interest: fewer from `large` on. */
function decimals(/** @type {number} */ value, /** @type {number} */ large) {
  if (value >= large) return value.toFixed(large >= 100 ? 0 : 1);
  return value.toFixed(large >= 100 ? 1 : 2);
}
