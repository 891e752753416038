/**
 * The numbers of the last minutes, and what is read off two moments of them: rates, shares, quantiles.
 *
 * Names are those of `/metrics` without the prefix, labels included: `kv_blocks{state="used",tier="host"}`.
 */

/** What the charts show. */
export const SPAN_S = 300;
const FRAME_S = 1; // the shortest time between two that are kept
const COUNTER = /_(total|count|sum|bucket)(\{|$)/;

/** @typedef {Record<string, number>} Series */
/** The numbers of a moment; counters grow within an epoch. @typedef {{ time: number, epoch: number, series: Series }} Frame */

export class History {
  /** @type {Frame[]} */ frames = [];
  /** @type {Frame | null} */ newest = null;
  #epoch = 0;
  #isNew = true;

  /** The next message is of another connection: it has all numbers, and perhaps another server's. */
  begin() {
    this.#isNew = true;
  }

  /** Takes a message; returns whether a frame was kept of it. */
  add(/** @type {import("./feed.js").Message} */ { time, series: changed }) {
    /** @type {Record<string, number | null>} */ const before = this.newest?.series ?? {};
    /** @type {Record<string, number | null>} */ const merged = this.#isNew ? { ...changed } : { ...before, ...changed };
    for (const [name, value] of Object.entries(changed)) if (value === null) delete merged[name];
    const series = /** @type {Series} */ (merged);
    if (this.newest && hasRestarted(before, series)) this.#epoch += 1;
    this.#isNew = false;
    this.newest = { time, epoch: this.#epoch, series };
    const last = this.frames.at(-1);
    if (last && last.epoch === this.#epoch && time - last.time < FRAME_S * 0.9) return false;
    this.frames.push(this.newest);
    while (this.frames[0].time < time - 2 * SPAN_S) this.frames.shift();
    return true;
  }

  /** The newest moment, or another, and what came in the `windowS` seconds before it. */
  view(/** @type {number} */ windowS, /** @type {Frame | null} */ frame = this.newest) {
    if (!frame) return null;
    let first = frame;
    for (let index = this.frames.length - 1; index >= 0; index -= 1) {
      const other = this.frames[index];
      if (other.time < frame.time - windowS || (other.epoch !== frame.epoch && other.time < frame.time)) break;
      if (other.time < frame.time) first = other;
    }
    return new View(first, frame);
  }
}

function hasRestarted(/** @type {Record<string, number | null>} */ before, /** @type {Series} */ after) {
  return Object.entries(before).some(([name, value]) => COUNTER.test(name) && (after[name] ?? 0) < (value ?? 0));
}

/** Two moments of one epoch. Every answer is null where there is nothing to tell it from. */
export class View {
  #first;
  #last;

  constructor(/** @type {Frame} */ first, /** @type {Frame} */ last) {
    this.#first = first;
    this.#last = last;
  }

  /** As of the later moment. */
  value(/** @type {string} */ name) {
    return this.#last.series[name] ?? null;
  }

  /** What a counter grew by. */
  growth(/** @type {string} */ name) {
    const value = this.value(name);
    return value === null ? null : value - (this.#first.series[name] ?? 0);
  }

  perSecond(/** @type {string} */ name) {
    const seconds = this.#last.time - this.#first.time;
    const growth = this.growth(name);
    return growth === null || seconds <= 0 ? null : growth / seconds;
  }

  /** The growth of one counter per growth of another. */
  ratio(/** @type {string} */ name, /** @type {string} */ of) {
    const all = this.growth(of);
    return all ? (this.growth(name) ?? 0) / all : null;
  }

  /** Of a histogram's new observations, as Prometheus has it: straight lines within a bucket. */
  quantile(/** @type {string} */ name, /** @type {number} */ share) {
    const buckets = this.labelled(`${name}_bucket`, "le")
      .map(([bound, bucket]) => ({ bound: bound === "+Inf" ? Infinity : Number(bound), upTo: this.growth(bucket) ?? 0 }))
      .sort((one, other) => one.bound - other.bound);
    const num = buckets.at(-1)?.upTo ?? 0;
    if (num === 0) return null;
    const rank = share * num;
    const index = buckets.findIndex(({ upTo }) => upTo >= rank);
    const lower = index === 0 ? { bound: 0, upTo: 0 } : buckets[index - 1];
    const { bound, upTo } = buckets[index];
    if (bound === Infinity) return lower.bound;
    return lower.bound + (bound - lower.bound) * ((rank - lower.upTo) / (upTo - lower.upTo));
  }

  /** The series of a name by the value of their only label. @returns {[label: string, name: string][]} */
  labelled(/** @type {string} */ name, /** @type {string} */ label) {
    const start = `${name}{${label}="`;
    return Object.keys(this.#last.series)
      .filter((key) => key.startsWith(start))
      .map((key) => [key.slice(start.length, -2), key]);
  }
}
