/**
 * Answers over one WebSocket, each on a lane (`stream_id`) of its own, side by side.
 *
 * It never tries twice: what it cannot carry on it hands back (`Carrier`), and the client decides.
 */

import { jsonOf } from "./http.js";

/** @typedef {import("./answer.js").Answer} Answer */
/** @typedef {import("./http.js").Problem} Problem */
/**
 * Who uses a transport.
 * @typedef {object} Carrier
 * @property {() => void} onOpen
 * @property {() => void} onDown  the connection is gone, with every answer on it
 * @property {(answer: Answer, problem: Problem | null) => void} onBroken  this one cannot be read any further here
 */

// The server's limits of one connection.
const MAX_IN_FLIGHT = 16;
const MAX_MESSAGE_BYTES = 2 ** 20;
const TOO_LARGE = { message: "The message is larger than 1 MiB.", code: "request_too_large" };
const LANES = Array.from({ length: MAX_IN_FLIGHT }, (_, number) => `lane-${number}`);

export class SocketTransport {
  name = /** @type {const} */ ("websocket");
  #socket;
  #carrier;
  /** Answers under way by lane. @type {Map<string, Answer>} */ #answers = new Map();
  /** What waits for a lane. @type {(() => void)[]} */ #waiting = [];
  #isClosed = false;
  #wasPinged = false;
  #heardAt = performance.now();
  #quietMs;
  #heart;

  /**
   * @param {URL} url
   * @param {Carrier} carrier
   * @param {{ WebSocket: typeof WebSocket, quietMs: number }} options
   */
  constructor(url, carrier, { WebSocket: WebSocketClass, quietMs }) {
    this.#carrier = carrier;
    this.#quietMs = quietMs;
    this.#socket = new WebSocketClass(url.href);
    this.#socket.addEventListener("open", () => { if (!this.#isClosed) carrier.onOpen(); });
    this.#socket.addEventListener("message", (message) => this.#receive(String(message.data)));
    this.#socket.addEventListener("error", () => {}); // `close` follows, and says as much
    this.#socket.addEventListener("close", () => this.#down());
    this.#heart = setInterval(() => this.#listen(), quietMs / 4);
    /** @type {any} */ (this.#heart).unref?.(); // Node: it keeps no process alive
  }

  create(/** @type {Answer} */ answer) {
    this.#onLane(answer, (lane) => {
      const message = jsonOf({ type: "response.create", ...answer.request, stream_id: lane });
      // It would cost all others their connection.
      if (new Blob([message]).size > MAX_MESSAGE_BYTES) return answer.end({ kind: "refused", problem: TOO_LARGE });
      answer.wasSent = true;
      this.#sendText(message);
    });
  }

  /** Goes on with an answer behind the last event it has seen. */
  resume(/** @type {Answer} */ answer) {
    this.#onLane(answer, (lane) => this.#send({
      type: "penstock.resume",
      response_id: answer.responseId,
      starting_after: answer.lastSequenceNumber,
      stream_id: lane,
    }));
  }

  cancel(/** @type {Answer} */ answer) {
    if (answer.responseId) this.#send({ type: "penstock.cancel", response_id: answer.responseId });
  }

  /** The server goes on with an answer's successor on its lane; whether it has one here. */
  succeed(/** @type {Answer} */ answer, /** @type {Answer} */ next) {
    const [lane] = [...this.#answers].find(([, each]) => each === answer) ?? [];
    if (!lane) return false;
    this.#answers.set(lane, next);
    next.addEventListener("end", () => this.#free(lane, next), { once: true });
    return true;
  }

  close() {
    this.#isClosed = true;
    clearInterval(this.#heart);
    this.#answers.clear();
    this.#socket.close();
  }

  #onLane(/** @type {Answer} */ answer, /** @type {(lane: string) => void} */ begin) {
    const start = () => {
      const isHere = [...this.#answers.values()].includes(answer);
      if (answer.isEnded || this.#isClosed || isHere) return;
      const lane = /** @type {string} */ (LANES.find((name) => !this.#answers.has(name)));
      this.#answers.set(lane, answer);
      answer.addEventListener("end", () => this.#free(lane, answer), { once: true });
      begin(lane);
    };
    if (this.#answers.size < MAX_IN_FLIGHT) start();
    else this.#waiting.push(start);
  }

  #free(/** @type {string} */ lane, /** @type {Answer} */ answer) {
    if (this.#answers.get(lane) !== answer) return;
    this.#answers.delete(lane);
    while (this.#waiting.length > 0 && this.#answers.size < MAX_IN_FLIGHT) this.#waiting.shift()?.();
  }

  #receive(/** @type {string} */ data) {
    this.#heardAt = performance.now();
    this.#wasPinged = false;
    if (this.#isClosed) return;
    const event = JSON.parse(data);
    const answer = this.#answers.get(event.stream_id);
    if (!answer) return;
    if (event.type === "penstock.recovered") {
      if (!event.recovered) this.#giveBack(event.stream_id, answer, event.error);
    } else if (event.type !== "error") answer.feed(event);
    else if (answer.responseId) this.#giveBack(event.stream_id, answer, event.error);
    else answer.end({ kind: "refused", problem: event.error });
  }

  #giveBack(/** @type {string} */ lane, /** @type {Answer} */ answer, /** @type {Problem | null} */ problem) {
    this.#free(lane, answer);
    this.#carrier.onBroken(answer, problem);
  }

  /**
   * Browsers do not report dead connections. After some silence the connection is checked, and closed
   * if there is no reply.
   */
  #listen() {
    const quietMs = performance.now() - this.#heardAt;
    if (this.#answers.size === 0) this.#heardAt = performance.now();
    else if (quietMs > 2 * this.#quietMs && this.#wasPinged) this.#down();
    else if (quietMs > this.#quietMs && !this.#wasPinged) {
      this.#wasPinged = true;
      this.#send({ type: "penstock.ping" });
    }
  }

  #down() {
    if (this.#isClosed) return;
    this.close();
    this.#carrier.onDown();
  }

  #send(/** @type {object} */ message) {
    this.#sendText(JSON.stringify(message));
  }

  #sendText(/** @type {string} */ text) {
    if (this.#socket.readyState === 1) this.#socket.send(text);
  }
}
