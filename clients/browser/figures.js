/**
 * The figures of an answer, as texts: how fast it came, how long the first word took, what was
 * cached, which drafts were right.
 */

import { make } from "./dom.js";

/** @typedef {import("./answer.js").Answer} Answer */
/** @typedef {import("./answer.js").Usage} Usage */
/** @typedef {[before: string, number: string, after: string]} Figure */

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

export function queueText(/** @type {import("./answer.js").QueuePlace} */ { position, estimatedWaitMs }) {
  const before = position === 1 ? "1 request is" : `${position} requests are`;
  const wait = estimatedWaitMs > 0 ? `, about ${decimals(estimatedWaitMs / 1000, 10)} s to go` : "";
  return position > 0 ? `Waiting: ${before} before this one${wait}` : `Waiting: next in line${wait}`;
}

/** A number with as many decimals as are of interest: fewer from `large` on. */
function decimals(/** @type {number} */ value, /** @type {number} */ large) {
  if (value >= large) return value.toFixed(large >= 100 ? 0 : 1);
  return value.toFixed(large >= 100 ? 1 : 2);
}
