/**
 * Answers as server-sent events, where WebSockets do not get through: a request for each.
 */

import { PenstockError } from "./http.js";

/** @typedef {import("./answer.js").Answer} Answer */
/** @typedef {import("./http.js").Http} Http */
/** @typedef {import("./socket-transport.js").Carrier} Carrier */

const QUIET_MS = 60_000; // the server sends comments far more often than this

export class SseTransport {
  name = /** @type {const} */ ("sse");
  #http;
  #carrier;
  #closing = new AbortController();
  /** @type {Set<Answer>} */ #reading = new Set();

  constructor(/** @type {Http} */ http, /** @type {Carrier} */ carrier) {
    this.#http = http;
    this.#carrier = carrier;
    queueMicrotask(() => { if (!this.#closing.signal.aborted) carrier.onOpen(); });
  }

  create(/** @type {Answer} */ answer) {
    answer.wasSent = true;
    void this.#read(answer, "POST", "v1/responses", { ...answer.request, stream: true });
  }

  /** Goes on with an answer behind the last event it has seen. */
  resume(/** @type {Answer} */ answer) {
    const query = `stream=true&starting_after=${answer.lastSequenceNumber}`;
    void this.#read(answer, "GET", `v1/responses/${answer.responseId}?${query}`);
  }

  cancel(/** @type {Answer} */ answer) {
    if (answer.responseId) this.#http.request("POST", `v1/responses/${answer.responseId}/cancel`).catch(() => {});
  }

  /** Goes on with an answer's successor, which has a stream of its own. */
  succeed(/** @type {Answer} */ _, /** @type {Answer} */ next) {
    this.resume(next);
    return true;
  }

  close() {
    this.#closing.abort();
  }

  async #read(
    /** @type {Answer} */ answer,
    /** @type {string} */ method,
    /** @type {string} */ path,
    /** @type {object | undefined} */ body = undefined,
  ) {
    const { signal } = this.#closing;
    if (this.#reading.has(answer)) return;
    this.#reading.add(answer);
    try {
      const opened = await this.#http.open(method, path, { body, signal });
      for await (const event of eventsOf(/** @type {ReadableStream} */ (opened.body))) {
        if (signal.aborted || event.type === "error") break;
        answer.feed(event);
      }
      if (!answer.isEnded) this.#down();
    } catch (error) {
      this.#fail(answer, error);
    }
  }

  #fail(/** @type {Answer} */ answer, /** @type {unknown} */ error) {
    this.#reading.delete(answer);
    if (this.#closing.signal.aborted) return;
    if (!(error instanceof PenstockError) || error.status === 0) this.#down();
    else if (answer.responseId) this.#carrier.onBroken(answer, error);
    else answer.end({ kind: "refused", problem: error });
  }

  #down() {
    if (this.#closing.signal.aborted) return;
    this.close();
    this.#carrier.onDown();
  }
}

/** The JSON of each event in a stream. @returns {AsyncGenerator<any>} */
async function* eventsOf(/** @type {ReadableStream<Uint8Array>} */ body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let unread = "";
  /** @type {string[]} */ let data = [];
  try {
    for (;;) {
      const { done, value } = await soon(reader.read());
      if (done) return;
      const lines = (unread + decoder.decode(value, { stream: true })).split(/\r?\n/);
      unread = /** @type {string} */ (lines.pop());
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5));
        if (line || data.length === 0) continue;
        yield JSON.parse(data.join("\n"));
        data = [];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** @template T @returns {Promise<T>} */
function soon(/** @type {Promise<T>} */ promise) {
  /** @type {ReturnType<typeof setTimeout>} */ let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error("the stream fell silent")), QUIET_MS);
    /** @type {any} */ (timer).unref?.(); // Node: it keeps no process alive
  });
  return /** @type {Promise<T>} */ (Promise.race([promise, late]).finally(() => clearTimeout(timer)));
}
