/**
 * A figure with its chart: the current number, large, and the last minutes.
 */

import { make } from "../dom.js";
import { DETAILED_S, SPAN_S, STEP_S } from "./history.js";
import { Sparkline } from "./sparkline.js";

/** @typedef {import("./history.js").View} View */
/**
 * What a tile shows.
 * @typedef {object} Figure
 * @property {string} id
 * @property {string} title
 * @property {{ name: string, read: (view: View) => number | null }[]} lines  the first is the important one
 * @property {(value: number | null) => string} text
 * @property {number} [least]  what the chart reaches to at least
 * @property {(view: View) => string} [note]  one more thing worth knowing
 * @property {(view: View) => boolean} [isUsed]  whether there is anything to show; always, if it does not say
 */

/** How far back a chart goes: what there is, in steps. */
const SPANS_S = [60, 120, DETAILED_S, 900, SPAN_S];

export class Tile {
  node = make("section", "tile");
  #figure;
  #chart;
  #numbers;
  #peak = make("span", "peak");
  #note = make("p", "note");
  /** Where the axes end. */
  #top = make("span", "axis-top");
  #from = make("span");
  /** @type {import("./sparkline.js").Point[]} */ #points = [];
  /** @type {(number | null)[]} */ #values = [];
  #now = 0;
  /** How many seconds the chart shows. */
  spanS = DETAILED_S;
  /** How many the reader wants at most. */
  maxSpanS = DETAILED_S;
  /** Points before `#points`, further apart. @type {import("./sparkline.js").Point[]} */ #old = [];
  /** Where the reader points, as a share of the chart's width. @type {number | null} */ #cursor = null;

  constructor(/** @type {Figure} */ figure) {
    this.#figure = figure;
    this.#chart = new Sparkline(figure.lines.length);
    this.node.id = `tile-${figure.id}`;
    const title = make("h3", "", figure.title);
    title.id = `${this.node.id}-title`;
    this.node.setAttribute("aria-labelledby", title.id);
    this.#numbers = figure.lines.map(() => make("b"));
    const numbers = make("p", "numbers");
    figure.lines.forEach(({ name }, index) => {
      const one = make("span", `number number-${index}`);
      if (name) one.append(make("span", "name", name), " ");
      one.append(this.#numbers[index]);
      numbers.append(one);
    });
    const head = make("div", "tile-head");
    head.append(title, this.#peak);
    const axis = make("div", "axis");
    axis.setAttribute("aria-hidden", "true"); // the chart's name says the same
    axis.append(this.#from, make("span", "", "now"));
    const chart = make("div", "chart");
    this.#top.setAttribute("aria-hidden", "true");
    chart.append(this.#chart.node, this.#top);
    this.node.append(head, numbers, this.#note, chart, axis);
  }

  /** Takes what the charts show of one moment. */
  keep(/** @type {View} */ view, /** @type {number} */ time) {
    this.#points.push({ time, values: this.#read(view) });
    while (this.#points[0].time < time - DETAILED_S) {
      const point = /** @type {import("./sparkline.js").Point} */ (this.#points.shift());
      if (point.time - (this.#old.at(-1)?.time ?? 0) >= STEP_S - 1) this.#old.push(point);
    }
    while (this.#old[0]?.time < time - SPAN_S) this.#old.shift();
  }

  forget() {
    this.#points = [];
    this.#old = [];
  }

  show(/** @type {View} */ view, /** @type {number} */ now) {
    this.#now = now;
    this.#values = this.#read(view);
    const { text, title, least = 0, note, isUsed } = this.#figure;
    this.node.hidden = isUsed?.(view) === false;
    const known = [...this.#old, ...this.#points, { time: now, values: this.#values }];
    this.spanS = Math.min(this.maxSpanS, SPANS_S.find((span) => span >= now - known[0].time) ?? SPAN_S);
    const points = known.filter((point) => point.time >= now - this.spanS);
    const all = points.flatMap(({ values }) => values.filter((value) => value !== null));
    const peak = Math.max(0, ...all);
    this.#chart.draw(points, { now, span: this.spanS, max: Math.max(peak, least) });
    this.#top.textContent = text(Math.max(peak, least));
    this.#from.textContent = `${this.spanS / 60} min ago`;
    this.#peak.textContent = all.length > 0 ? `max ${text(peak)}` : "";
    this.#chart.describe(`${title}: ${text(this.#values[0] ?? null)}, ${this.#peak.textContent} in ${this.spanS / 60} min`);
    this.#note.textContent = note?.(view) ?? "";
    this.#showNumbers();
  }

  /** Shows another moment's numbers; null: those of now. */
  pointAt(/** @type {number | null} */ share) {
    this.#cursor = share;
    this.#chart.mark(share);
    this.#showNumbers();
  }

  #showNumbers() {
    const values = this.#cursor === null ? this.#values : this.#valuesAt(this.#now - this.spanS * (1 - this.#cursor));
    this.#numbers.forEach((number, index) => { number.textContent = this.#figure.text(values[index] ?? null); });
  }

  #valuesAt(/** @type {number} */ time) {
    const distance = (/** @type {{ time: number }} */ point) => Math.abs(point.time - time);
    const kept = [...this.#old, ...this.#points];
    const nearest = kept.reduce((best, point) => (distance(point) < distance(best) ? point : best), kept[0]);
    return nearest && distance(nearest) < (this.spanS > DETAILED_S ? STEP_S : 2) ? nearest.values : [];
  }

  #read(/** @type {View} */ view) {
    return this.#figure.lines.map(({ read }) => read(view));
  }
}
