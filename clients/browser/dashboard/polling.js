/**
 * Asks the server now and again, while the page is seen.
 */

import { PenstockError } from "../http.js";

export class Polling {
  #ask;
  #intervalMs;
  /** @type {ReturnType<typeof setTimeout> | undefined} */ #timer;

  /** @param {{ ask: () => Promise<void>, intervalMs: number }} options  what fails is asked for again */
  constructor({ ask, intervalMs }) {
    this.#ask = ask;
    this.#intervalMs = intervalMs;
  }

  /** Asks at once, and from then on. */
  async watch() {
    clearTimeout(this.#timer);
    if (!document.hidden) await this.#try();
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => void this.watch(), this.#intervalMs);
  }

  async #try() {
    try {
      await this.#ask();
    } catch (error) {
      if (!(error instanceof PenstockError)) throw error;
    }
  }
}
