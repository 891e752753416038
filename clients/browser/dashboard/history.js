/**
 * The numbers of the last minutes, and what is read off two moments of them: rates, shares, quantiles.
 *
 * Names are those of `/metrics` without the prefix, labels included: `kv_blocks{state="used",tier="host"}`.
 */

/** What the charts show. */
export const SPAN_S = 3_600;
/** So far back there is a frame a second; before that, one in `STEP_S`, as the server keeps them. */
export const DETAILED_S = 300;
export const STEP_S = 15;
const FRAME_S = 1; // the shortest time between two that are kept
const COUNTER = /_(total|count|sum|bucket)(\{|$)/;

/** @typedef {Record<string, number>} Series */
/** The numbers of a moment; counters grow within an epoch. @typedef {{ time: number, epoch: number, series: Series }} Frame */

export class History {
  /** @type {Frame[]} */ frames = [];
  /** Those before them, further apart. @type {Frame[]} */ old = [];
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
    while (this.frames[0].time < time - 2 * DETAILED_S) {
      const frame = /** @type {Frame} */ (this.frames.shift());
      if (frame.time - (this.old.at(-1)?.time ?? 0) >= STEP_S) this.old.push(frame);
    }
    while (this.old[0]?.time < time - SPAN_S) this.old.shift();
    return true;
  }

  /**
   * Takes what the server has kept of the time before.
   * @param {{ times: number[], series: Record<string, number | (number | null)[]> }} kept
   */
  beginWith({ times, series }) {
    const until = this.frames[0]?.time ?? Infinity;
    this.old = [];
    let epoch = 0;
    times.forEach((time, index) => {
      if (time >= until) return;
      /** @type {Series} */ const now = {};
      for (const [name, column] of Object.entries(series)) {
        const value = typeof column === "number" ? column : column[index];
        if (value !== null) now[name] = value;
      }
      const last = this.old.at(-1);
      if (last && hasRestarted(last.series, now)) epoch += 1;
      this.old.push({ time, epoch, series: now });
    });
    const last = this.old.at(-1);
    const first = this.frames[0];
    if (last && first && hasRestarted(last.series, first.series)) epoch += 1;
    for (const frame of this.frames) frame.epoch += epoch;
    if (this.newest && this.newest !== this.frames.at(-1)) this.newest.epoch += epoch;
    this.#epoch += epoch;
  }

  /** The newest moment, or another, and what came in the `windowS` seconds before it. */
  view(/** @type {number} */ windowS, /** @type {Frame | null} */ frame = this.newest) {
    if (!frame) return null;
    let first = frame;
    const isOld = this.old.includes(frame);
    const frames = isOld ? this.old : this.frames;
    if (isOld) windowS = Math.max(windowS, 1.5 * STEP_S);
    for (let index = frames.length - 1; index >= 0; index -= 1) {
      const other = frames[index];
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

  /** The series of a name with their labels. @returns {[labels: Record<string, string>, name: string][]} */
  labelledBy(/** @type {string} */ name) {
    return Object.keys(this.#last.series)
      .filter((key) => key.startsWith(`${name}{`))
      .map((key) => [Object.fromEntries([...key.matchAll(/(\w+)="([^"]*)"/g)].map(([, label, value]) => [label, value])), key]);
  }

  /** The series of a name by the value of their only label. @returns {[label: string, name: string][]} */
  labelled(/** @type {string} */ name, /** @type {string} */ label) {
    const start = `${name}{${label}="`;
    return Object.keys(this.#last.series)
      .filter((key) => key.startsWith(start))
      .map((key) => [key.slice(start.length, -2), key]);
  }
}
