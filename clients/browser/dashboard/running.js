/**
 * The requests that run and wait, each with a button that ends it; asked for while the page is seen.
 */

import { button, make } from "../dom.js";
import { PenstockError } from "../http.js";
import { Polling } from "./polling.js";
import { count } from "./texts.js";

/** @typedef {{ id: string, created_at: number, tenant: string, status: string, prompt_tokens: number, output_tokens: number }} Running */

const INTERVAL_MS = 2_000;
const MAX_ROWS = 12;

export class RunningTable {
  #body;
  #note;
  #http;
  /** What the last cancellation came to, until there is something else to say. */
  #told = "";
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
    this.#show((await this.#http.request("GET", "v1/requests")).data);
  }

  #show(/** @type {Running[]} */ all) {
    const shown = all.slice(0, MAX_ROWS);
    // Rows stay, so that a button is not lost while it is pressed.
    const ids = shown.map(({ id }) => id);
    for (const row of [...this.#body.children]) if (!ids.includes(/** @type {HTMLElement} */ (row).dataset.id ?? "")) row.remove();
    for (const running of shown) {
      const row = [...this.#body.children].find((each) => /** @type {HTMLElement} */ (each).dataset.id === running.id);
      fill(row ?? this.#body.appendChild(this.#newRow(running)), running);
    }
    const numMore = all.length - shown.length;
    this.#note.textContent = this.#told || (all.length === 0 ? "None." : numMore > 0 ? `and ${numMore} more` : "");
    this.#told = "";
  }

  #newRow(/** @type {Running} */ { id }) {
    const row = make("tr");
    row.dataset.id = id;
    const name = make("th", "request-id", id);
    name.setAttribute("scope", "row");
    name.title = id;
    const cancel = button({ label: "Cancel", run: () => void this.#cancel(id, cancel) });
    cancel.setAttribute("aria-label", `Cancel ${id}`);
    const last = make("td");
    last.append(cancel);
    row.append(name, make("td"), make("td"), make("td"), make("td"), last);
    return row;
  }

  async #cancel(/** @type {string} */ id, /** @type {HTMLButtonElement} */ node) {
    node.disabled = true;
    try {
      await this.#http.request("POST", `v1/requests/${encodeURIComponent(id)}/cancel`);
      this.#told = `${id} was cancelled.`;
    } catch (error) {
      if (!(error instanceof PenstockError)) throw error;
      this.#told = error.status === 404 ? `${id} had ended.` : `Not cancelled: ${error.message}`;
    }
    await this.watch();
  }
}

function fill(/** @type {Element} */ row, /** @type {Running} */ { created_at, tenant, status, prompt_tokens, output_tokens }) {
  const [, tenantCell, prompt, output, since] = row.children;
  tenantCell.textContent = tenant;
  prompt.textContent = count(prompt_tokens);
  output.textContent = status === "waiting" ? "waits" : count(output_tokens);
  since.textContent = `${Math.max(0, Math.round(Date.now() / 1000 - created_at))} s`;
}
