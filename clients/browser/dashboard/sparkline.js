/**
 * Small line charts of the last minutes, as SVG. Colours are the style sheet's.
 */

import { DETAILED_S } from "./history.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 44;
// Between two points that are joined: of the last minutes, and before.
const MAX_GAP_S = 4, MAX_OLD_GAP_S = 40;

/** `values`: one of each line, null where there is none. @typedef {{ time: number, values: (number | null)[] }} Point */

export class Sparkline {
  node = document.createElementNS(SVG, "svg");
  #area = path("area");
  /** @type {SVGPathElement[]} */ #lines;
  #cursor = path("cursor");

  constructor(/** @type {number} */ numLines) {
    this.node.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.node.setAttribute("preserveAspectRatio", "none");
    this.node.setAttribute("role", "img");
    this.node.classList.add("sparkline");
    this.#lines = Array.from({ length: numLines }, (_, index) => path(`line line-${index}`));
    this.node.append(this.#area, ...this.#lines.toReversed(), this.#cursor);
  }

  /** Draws the `span` seconds until `now`; from 0 to `max`, which is at least the greatest value. */
  draw(/** @type {Point[]} */ points, /** @type {{ now: number, span: number, max: number }} */ { now, span, max }) {
    const x = (/** @type {number} */ time) => round(WIDTH * (1 - (now - time) / span));
    const y = (/** @type {number} */ value) => round(HEIGHT - 1 - (HEIGHT - 4) * (value / (max || 1)));
    this.#lines.forEach((line, index) => {
      const runs = runsOf(points, index, now).map((run) => run.map(({ time, value }) => `${x(time)} ${y(value)}`));
      line.setAttribute("d", runs.map((run) => `M${run.join("L")}${run.length === 1 ? "h.1" : ""}`).join(""));
    });
    const areas = runsOf(points, 0, now).map((run) => {
      const top = run.map(({ time, value }) => `L${x(time)} ${y(value)}`).join("");
      return `M${x(run[0].time)} ${HEIGHT}${top}L${x(run[run.length - 1].time)} ${HEIGHT}Z`;
    });
    this.#area.setAttribute("d", areas.join(""));
  }

  /** Marks a moment; null: none. */
  mark(/** @type {number | null} */ share) {
    this.#cursor.setAttribute("d", share === null ? "" : `M${round(WIDTH * share)} 0V${HEIGHT}`);
  }

  describe(/** @type {string} */ text) {
    this.node.setAttribute("aria-label", text);
  }
}

/** The stretches of a line without a hole. @returns {{ time: number, value: number }[][]} */
function runsOf(/** @type {Point[]} */ points, /** @type {number} */ index, /** @type {number} */ now) {
  /** @type {{ time: number, value: number }[][]} */ const runs = [];
  let lastTime = -Infinity;
  for (const { time, values } of points) {
    const value = values[index] ?? null;
    if (value === null) lastTime = -Infinity;
    else {
      if (time - lastTime > (now - time > DETAILED_S - MAX_OLD_GAP_S ? MAX_OLD_GAP_S : MAX_GAP_S)) runs.push([]);
      runs[runs.length - 1].push({ time, value });
      lastTime = time;
    }
  }
  return runs;
}

function path(/** @type {string} */ className) {
  const node = document.createElementNS(SVG, "path");
  node.setAttribute("class", className);
  node.setAttribute("vector-effect", "non-scaling-stroke");
  return node;
}

function round(/** @type {number} */ value) {
  return Math.round(value * 10) / 10;
}
