/**
 * The server's stats over a WebSocket, which reconnects.
 *
 * Events: `state`, and `message` with a `Message`.
 */

import { Http, PenstockError } from "../http.js";
import { backoffDelayMs } from "../penstock-client.js";

/**
 * See gateway/api/status/stats_socket.py.
 * @typedef {{ time: number, series: Record<string, number | null>, engine?: Engine | null }} Message
 * @typedef {{ model: string, device: string, dtype: string, quantization: string, weight_bytes: number, max_num_seqs: number,
 *   max_model_len: number, block_size: number, bytes_per_block: number, num_engines?: number }} Engine
 */
/** @typedef {"connecting" | "open" | "waiting" | "unauthorized"} FeedState */

const PROBE_TIMEOUT_MS = 10_000;
/** The server sends a message every half second; after this long without one it is gone. */
const SILENCE_MS = 6_000;

export class Feed extends EventTarget {
  /** @type {FeedState} */ state = "waiting";
  numFailures = 0;
  http;
  /** @type {WebSocket | null} */ #socket = null;
  /** @type {ReturnType<typeof setTimeout> | undefined} */ #timer;
  /** Counts tries, so that a late result is recognised as stale. */
  #attempt = 0;

  /** @param {{ baseUrl: string, apiKey: string | null }} options */
  constructor(options) {
    super();
    this.http = new Http(options);
  }

  /** Connects now: the first time, or instead of waiting for the next try. */
  connect() {
    if (this.state === "waiting" || this.state === "unauthorized") void this.#connect();
  }

  setApiKey(/** @type {string} */ key) {
    this.http.apiKey = key;
    this.#drop("waiting");
    this.connect();
  }

  /** One try: request the models (to tell a wrong key from a dead server), then open the socket. */
  async #connect() {
    const attempt = ++this.#attempt;
    clearTimeout(this.#timer);
    this.#setState("connecting");
    try {
      await this.http.request("GET", "v1/models", { signal: AbortSignal.timeout(PROBE_TIMEOUT_MS) });
      const url = await this.#socketUrl();
      if (attempt === this.#attempt) this.#open(attempt, url);
    } catch (error) {
      if (attempt !== this.#attempt) return;
      if (error instanceof PenstockError && error.status === 401) this.#drop("unauthorized");
      else this.#retryLater();
    }
  }

  /** With a ticket instead of the key, since a browser's WebSocket cannot send headers. */
  async #socketUrl() {
    const url = this.http.url("v1/stats");
    url.protocol = url.protocol.replace("http", "ws");
    if (this.http.apiKey) {
      const { ticket } = await this.http.request("POST", "v1/tickets");
      url.searchParams.set("ticket", ticket);
    }
    return url;
  }

  #open(/** @type {number} */ attempt, /** @type {URL} */ url) {
    const socket = new WebSocket(url.href);
    this.#socket = socket;
    const listen = () => {
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.#retryLater(), SILENCE_MS);
    };
    listen();
    socket.addEventListener("message", ({ data }) => {
      if (attempt !== this.#attempt) return;
      listen();
      this.numFailures = 0;
      this.#setState("open");
      this.dispatchEvent(new CustomEvent("message", { detail: JSON.parse(data) }));
    });
    socket.addEventListener("close", () => {
      if (attempt === this.#attempt) this.#retryLater();
    });
  }

  #retryLater() {
    const delay = backoffDelayMs(this.numFailures);
    this.numFailures += 1;
    this.#drop("waiting");
    this.#timer = setTimeout(() => this.connect(), delay);
  }

  #drop(/** @type {FeedState} */ state) {
    this.#attempt += 1;
    clearTimeout(this.#timer);
    this.#socket?.close();
    this.#socket = null;
    this.#setState(state);
  }

  #setState(/** @type {FeedState} */ state) {
    if (state === this.state) return;
    this.state = state;
    this.dispatchEvent(new CustomEvent("state"));
  }
}
