/**
 * The KV blocks of a tier as a picture: a square for each block (or for several, if there are many),
 * those in use first. It shows how many are in each state, not which ones.
 */

import { make } from "../dom.js";
import { bytes, count, percent } from "./texts.js";

const SVG = "http://www.w3.org/2000/svg";
const MAX_CELLS = 1_200;
const HEIGHT = 116;
const MAX_CELL = 26;
const MIN_CELL = 4;
const LABELS = { used: "in use", empty: "empty slots", cached: "cached", free: "free" };

/** @typedef {keyof typeof LABELS} State */
/**
 * A tier. `emptyShare`: of the slots of blocks in use, those without a token; null: not known.
 * @typedef {{ used: number, cached: number, free: number, emptyShare: number | null, bytesPerBlock: number }} Tier
 */

const STATES = /** @type {State[]} */ (Object.keys(LABELS));

export class BlocksPicture {
  #node;
  #title;
  #picture = document.createElementNS(SVG, "svg");
  #paths = new Map(STATES.map((state) => [state, document.createElementNS(SVG, "path")]));
  #legend = make("dl", "legend");
  #numbers = new Map(STATES.map((state) => [state, make("dd")]));
  #scale = make("p", "note");
  /** @type {Tier | null} */ #tier = null;
  /** What is drawn, so that it is not redrawn unchanged. */
  #drawn = "";

  constructor(/** @type {HTMLElement} */ node, /** @type {string} */ title) {
    this.#node = node;
    this.#title = title;
    this.#picture.setAttribute("role", "img");
    this.#picture.classList.add("blocks");
    for (const [state, path] of this.#paths) path.setAttribute("class", `block ${state}`);
    this.#picture.append(...this.#paths.values());
    for (const [state, number] of this.#numbers) {
      const item = make("div", state);
      item.append(make("dt", "", LABELS[state]), number);
      this.#legend.append(item);
    }
    node.append(this.#picture, this.#legend, this.#scale);
    new ResizeObserver(() => this.#draw()).observe(node);
  }

  show(/** @type {Tier} */ tier) {
    this.#tier = tier;
    this.#draw();
  }

  #draw() {
    if (!this.#tier) return;
    const { used, cached, free, emptyShare, bytesPerBlock } = this.#tier;
    const num = used + cached + free;
    this.#legend.hidden = num === 0;
    const perCell = blocksPerCell(num);
    const size = bytesPerBlock > 0 ? ` · ${bytes(num * bytesPerBlock)}` : "";
    this.#scale.textContent = num === 0
      ? "There are no blocks in this tier."
      : `${count(num)} blocks${size} · 1 square = ${count(perCell)} ${perCell === 1 ? "block" : "blocks"}`;
    this.#tell("used", `${count(used)} · ${percent(used / num)}`);
    this.#tell("empty", emptyShare === null ? null : percent(emptyShare));
    this.#tell("cached", `${count(cached)} · ${percent(cached / num)}`);
    this.#tell("free", `${count(free)} · ${percent(free / num)}`);
    const empty = used * (emptyShare ?? 0);
    this.#arrange(cellsOf({ used: used - empty, empty, cached, free }, perCell));
    this.#picture.setAttribute("aria-label", `${this.#title}: of ${count(num)} blocks ${count(used)} in use, ${count(cached)} cached, ${count(free)} free`);
  }

  #tell(/** @type {State} */ state, /** @type {string | null} */ text) {
    const number = /** @type {HTMLElement} */ (this.#numbers.get(state));
    number.textContent = text;
    /** @type {HTMLElement} */ (number.parentElement).hidden = text === null;
  }

  #arrange(/** @type {Record<State, number>} */ cells) {
    const width = this.#node.clientWidth;
    const drawn = `${width} ${Object.values(cells).join(" ")}`;
    if (drawn === this.#drawn || width === 0) return;
    this.#drawn = drawn;
    const num = STATES.reduce((total, state) => total + cells[state], 0);
    const cell = largestCell(num, width);
    const numColumns = Math.max(1, Math.floor(width / cell));
    const side = cell - (cell > 6 ? 2 : 1);
    let index = 0;
    for (const [state, path] of this.#paths) {
      let shape = "";
      for (let left = cells[state]; left > 0; left -= 1, index += 1) {
        shape += `M${(index % numColumns) * cell} ${Math.floor(index / numColumns) * cell}h${side}v${side}h${-side}z`;
      }
      path.setAttribute("d", shape);
    }
    this.#picture.setAttribute("width", String(numColumns * cell));
    this.#picture.setAttribute("height", String(Math.ceil(num / numColumns) * cell));
  }
}

/** 1, 2, 5, 10, 20, …: so many that the squares stay large enough to see. */
function blocksPerCell(/** @type {number} */ num) {
  for (let power = 1; ; power *= 10) {
    for (const step of [1, 2, 5]) if (num <= MAX_CELLS * step * power) return step * power;
  }
}

/** Squares of each state; rounded so that their sum is right. @returns {Record<State, number>} */
function cellsOf(/** @type {Record<State, number>} */ blocks, /** @type {number} */ perCell) {
  const cells = { used: 0, empty: 0, cached: 0, free: 0 };
  let upTo = 0;
  let numBefore = 0;
  for (const state of STATES) {
    upTo += blocks[state];
    const numUpTo = state === "free" ? Math.ceil(upTo / perCell) : Math.round(upTo / perCell);
    cells[state] = numUpTo - numBefore;
    numBefore = numUpTo;
  }
  return cells;
}

/** The side of a square, its gap included, so that the picture is not too high. */
function largestCell(/** @type {number} */ num, /** @type {number} */ width) {
  for (let cell = MAX_CELL; cell > MIN_CELL; cell -= 1) {
    if (Math.ceil(num / Math.max(1, Math.floor(width / cell))) * cell <= HEIGHT) return cell;
  }
  return MIN_CELL;
}
