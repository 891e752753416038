/**
 * What each API key has used today, in UTC; asked for while the page is seen.
 */

import { make } from "../dom.js";
import { Polling } from "./polling.js";
import { amount, count, percent } from "./texts.js";

/**
 * A key's part of a day of `/v1/usage`.
 * @typedef {{ project_id: string, api_key_id: string, num_model_requests: number, input_tokens: number, input_cached_tokens: number, output_tokens: number, penstock: { compute_seconds: number, kv_block_seconds: number } }} Used
 */

const INTERVAL_MS = 5_000;
const MAX_ROWS = 12;

export class UsageTable {
  #body;
  #note;
  #http;
  #polling = new Polling({ ask: () => this.#ask(), intervalMs: INTERVAL_MS });

  /** @param {{ body: HTMLElement, note: HTMLElement, http: import("../http.js").Http }} options */
  constructor({ body, note, http }) {
    this.#body = body;
    this.#note = note;
    this.#http = http;
  }

  /** Asks, now and again. */
  watch() {
    return this.#polling.watch();
  }

  async #ask() {
    const today = new Date().toISOString().slice(0, 10);
    const page = await this.#http.request("GET", `v1/usage?start_date=${today}`);
    this.#show(page.data.at(-1)?.results ?? []);
  }

  #show(/** @type {Used[]} */ all) {
    const most = all.toSorted((one, other) => tokens(other) - tokens(one)).slice(0, MAX_ROWS);
    this.#body.replaceChildren(...most.map(rowOf));
    const numMore = all.length - most.length;
    this.#note.textContent = all.length === 0 ? "Nothing yet." : numMore > 0 ? `and ${numMore} more` : "";
  }
}

function tokens(/** @type {Used} */ used) {
  return used.input_tokens + used.output_tokens;
}

function rowOf(/** @type {Used} */ used) {
  const name = make("th", "", used.api_key_id ? `${used.project_id} · ${used.api_key_id}` : used.project_id);
  name.setAttribute("scope", "row");
  const cached = used.input_tokens > 0 ? used.input_cached_tokens / used.input_tokens : null;
  const numbers = [
    count(used.num_model_requests),
    count(used.input_tokens),
    percent(cached),
    count(used.output_tokens),
    amount(used.penstock.compute_seconds),
  ];
  const row = make("tr");
  row.append(name, ...numbers.map((number) => make("td", "", number)));
  return row;
}
