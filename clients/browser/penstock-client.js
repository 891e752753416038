/**
 * A small client for the Responses WebSocket mode of a penstock server.
 *
 * What lives here: finding the server's models, keeping one WebSocket open (reconnecting with
 * jittered backoff), and handing each server event to the answer it belongs to.
 * What it does not know: the page, conversations, Markdown.
 *
 *     const client = new PenstockClient({ baseUrl: location.href });
 *     client.addEventListener("state", () => console.log(client.state));
 *     client.connect();
 *     const answer = client.respond({ model: client.models[0], input: "Hello" });
 *     answer.addEventListener("delta", (event) => console.log(event.detail));
 *     const outcome = await answer.done;
 */

/**
 * `connecting` a try is under way · `open` ready · `waiting` for the next try ·
 * `unauthorized` the server wants another key; no more tries until `setApiKey` · `closed` by us.
 * @typedef {"connecting" | "open" | "waiting" | "unauthorized" | "closed"} ConnectionState
 */

/** @typedef {{ input_tokens: number, output_tokens: number }} Usage */
/** @typedef {{ message: string, code: string | null, param?: string | null }} Problem */

/**
 * How an answer ended. `refused`: an error before it started. `disconnected`: the socket closed
 * before the terminal event, so how the answer went on is unknown.
 * @typedef {object} Outcome
 * @property {"completed" | "cancelled" | "incomplete" | "failed" | "refused" | "disconnected"} kind
 * @property {string | null} responseId
 * @property {Usage | null} usage
 * @property {string | null} reason   why it is incomplete, e.g. `max_output_tokens`
 * @property {Problem | null} problem
 */

/**
 * @typedef {object} RespondOptions
 * @property {string} model
 * @property {string | object[]} input
 * @property {string | null} [previousResponseId]
 * @property {string} [lane]  answers of one lane come in order, those of different lanes side by side
 */

const DEFAULT_LANE = "main";
const PROBE_TIMEOUT_MS = 10_000;
const STABLE_CONNECTION_MS = 5_000;
const KEY_SUBPROTOCOL = "openai-insecure-api-key.";
/** What a subprotocol name may consist of (RFC 9110 `token`). */
const TOKEN = /^[A-Za-z0-9!#$%&'*+.^_`|~-]+$/;

/** Whether a browser can send this key at all: it travels as a WebSocket subprotocol. */
export function isSendableKey(/** @type {string} */ key) {
  return TOKEN.test(key);
}

/**
 * Milliseconds before try number `attempt` (0, 1, …): exponential, capped, half of it random, so
 * that the clients of a restarted server do not all come back in the same instant.
 */
export function backoffDelayMs(/** @type {number} */ attempt, random = Math.random) {
  const ceiling = Math.min(15_000, 400 * 2 ** attempt);
  return ceiling / 2 + (ceiling / 2) * random();
}

/**
 * One answer on its way. Events: `started`, `delta` (detail: the new text), `pause` (detail: whether
 * the server has parked it for lack of memory, or goes on), `end` (detail: Outcome).
 */
export class Answer extends EventTarget {
  /** @type {string | null} */ responseId = null;
  text = "";
  /** The seam for resuming: the last event seen. */
  lastSequenceNumber = -1;
  numDeltas = 0;
  sentAt = performance.now();
  /** @type {number | null} */ firstDeltaAt = null;
  /** @type {number | null} */ lastDeltaAt = null;
  isCancelling = false;
  isEnded = false;

  #send;
  /** @type {(outcome: Outcome) => void} */ #resolve = () => {};

  /** @param {(message: object) => void} send */
  constructor(send) {
    super();
    this.#send = send;
    /** @type {Promise<Outcome>} */
    this.done = new Promise((resolve) => { this.#resolve = resolve; });
  }

  /** Asks the server to stop. The answer ends when the server says so (`cancelled`). */
  cancel() {
    if (this.isCancelling || this.isEnded) return;
    this.isCancelling = true;
    if (this.responseId) this.#sendCancel();
  }

  /** Takes one server event of this answer. */
  feed(/** @type {any} */ event) {
    if (typeof event.sequence_number === "number") this.lastSequenceNumber = event.sequence_number;
    switch (event.type) {
      case "response.created":
        this.responseId = event.response.id;
        this.dispatchEvent(new CustomEvent("started"));
        if (this.isCancelling) this.#sendCancel();
        break;
      case "response.output_text.delta":
        this.#addDelta(event.delta);
        break;
      case "penstock.preempted":
      case "penstock.resumed":
        this.dispatchEvent(new CustomEvent("pause", { detail: event.type === "penstock.preempted" }));
        break;
      case "response.completed":
      case "response.incomplete":
      case "response.failed":
        this.end(outcomeOf(event.response));
        break;
      case "error":
        this.end({ kind: "refused", responseId: null, usage: null, reason: null, problem: event.error });
        break;
      default: // other events carry nothing that a plain-text reader needs
    }
  }

  end(/** @type {Outcome} */ outcome) {
    if (this.isEnded) return;
    this.isEnded = true;
    this.dispatchEvent(new CustomEvent("end", { detail: outcome }));
    this.#resolve(outcome);
  }

  #addDelta(/** @type {string} */ delta) {
    this.lastDeltaAt = performance.now();
    this.firstDeltaAt ??= this.lastDeltaAt;
    this.numDeltas += 1;
    this.text += delta;
    this.dispatchEvent(new CustomEvent("delta", { detail: delta }));
  }

  #sendCancel() {
    this.#send({ type: "penstock.cancel", response_id: this.responseId });
  }
}

/** @returns {Outcome} */
function outcomeOf(/** @type {any} */ response) {
  /** @type {Record<string, Outcome["kind"]>} */
  const kinds = { completed: "completed", cancelled: "cancelled", failed: "failed" };
  return {
    kind: kinds[response.status] ?? "incomplete",
    responseId: response.id,
    usage: response.usage ?? null,
    reason: response.incomplete_details?.reason ?? null,
    problem: response.error ?? null,
  };
}

/**
 * One connection to a server, kept open. Events: `state`, and `problem` (detail: Problem) for an
 * error that belongs to no answer.
 */
export class PenstockClient extends EventTarget {
  /** @type {ConnectionState} */ state = "closed";
  /** Ids of the models that the server offers; refreshed on every connect. @type {string[]} */
  models = [];
  /** Tries in a row that brought no lasting connection, and what became of the last one. */
  numFailures = 0;
  /** @type {"unreachable" | "no websocket" | "dropped" | null} */ failure = null;

  #baseUrl;
  #apiKey;
  #WebSocket;
  /** @type {WebSocket | null} */ #socket = null;
  /** Answers under way, oldest first, by lane. @type {Map<string, Answer[]>} */ #lanes = new Map();
  /** @type {ReturnType<typeof setTimeout> | undefined} */ #retryTimer;
  /** Counts tries, so that a result that comes late can tell that it is stale. */
  #attempt = 0;

  /** @param {{ baseUrl: string, apiKey?: string | null, WebSocket?: typeof WebSocket }} options */
  constructor({ baseUrl, apiKey = null, WebSocket = globalThis.WebSocket }) {
    super();
    this.#baseUrl = baseUrl;
    this.#apiKey = apiKey;
    this.#WebSocket = WebSocket;
  }

  /** Connects now: the first time, or instead of waiting for the next try. */
  connect() {
    if (this.state !== "open" && this.state !== "connecting") void this.#connect();
  }

  /** Uses another key (null: none) and connects anew. */
  setApiKey(/** @type {string | null} */ apiKey) {
    this.#apiKey = apiKey;
    this.#dropSocket();
    this.connect();
  }

  close() {
    this.#dropSocket();
  }

  /** Asks for an answer. Throws when the connection is not open. */
  respond(/** @type {RespondOptions} */ { model, input, previousResponseId = null, lane = DEFAULT_LANE }) {
    if (this.state !== "open") throw new Error("not connected");
    const answer = new Answer((message) => this.#send(message));
    this.#lanes.set(lane, [...(this.#lanes.get(lane) ?? []), answer]);
    answer.addEventListener("end", () => this.#forget(lane, answer));
    this.#send({
      type: "response.create",
      model,
      input,
      stream_id: lane,
      penstock: { events: ["preempted", "resumed"] },
      ...(previousResponseId && { previous_response_id: previousResponseId }),
    });
    return answer;
  }

  /** One try: ask for the models (which tells a wrong key from a dead server), then the socket. */
  async #connect() {
    const attempt = ++this.#attempt;
    clearTimeout(this.#retryTimer);
    this.#setState("connecting");
    let status = 0;
    try {
      const answer = await fetch(new URL("v1/models", this.#baseUrl), {
        headers: this.#apiKey ? { Authorization: `Bearer ${this.#apiKey}` } : {},
        signal: AbortSignal.timeout(PROBE_TIMEOUT_MS),
      });
      status = answer.status;
      const models = answer.ok ? (await answer.json()).data : null;
      if (attempt !== this.#attempt) return;
      if (models) this.models = models.map((/** @type {{ id: string }} */ model) => model.id);
    } catch {
      status = 0;
    }
    if (attempt !== this.#attempt) return;
    if (status === 401) this.#setState("unauthorized");
    else if (status !== 200) this.#retryLater("unreachable");
    else this.#openSocket(attempt);
  }

  #openSocket(/** @type {number} */ attempt) {
    const url = new URL("v1/responses", this.#baseUrl);
    url.protocol = url.protocol.replace("http", "ws");
    const socket = new this.#WebSocket(url, this.#apiKey ? [KEY_SUBPROTOCOL + this.#apiKey] : []);
    let openedAt = Infinity;
    this.#socket = socket;
    socket.addEventListener("open", () => {
      if (attempt !== this.#attempt) return;
      openedAt = performance.now();
      this.#setState("open");
    });
    socket.addEventListener("message", (message) => {
      if (attempt === this.#attempt) this.#receive(message.data);
    });
    socket.addEventListener("close", () => {
      if (attempt !== this.#attempt) return;
      if (performance.now() - openedAt > STABLE_CONNECTION_MS) this.numFailures = 0;
      this.#retryLater(openedAt < Infinity ? "dropped" : "no websocket");
    });
  }

  #retryLater(/** @type {PenstockClient["failure"]} */ failure) {
    this.failure = failure;
    const delay = backoffDelayMs(this.numFailures);
    this.numFailures += 1;
    this.#dropSocket("waiting");
    this.#retryTimer = setTimeout(() => this.connect(), delay);
  }

  /** Lets go of the socket; every answer under way ends as `disconnected`. */
  #dropSocket(/** @type {ConnectionState} */ state = "closed") {
    this.#attempt += 1;
    clearTimeout(this.#retryTimer);
    this.#socket?.close();
    this.#socket = null;
    this.#setState(state);
    const orphans = [...this.#lanes.values()].flat();
    for (const answer of orphans) {
      answer.end({
        kind: "disconnected", responseId: answer.responseId, usage: null, reason: null, problem: null,
      });
    }
  }

  #receive(/** @type {string} */ data) {
    const event = JSON.parse(data);
    const answer = this.#addressee(event);
    if (answer) answer.feed(event);
    else if (event.type === "error") this.dispatchEvent(new CustomEvent("problem", { detail: event.error }));
  }

  /**
   * The answer that an event belongs to: the oldest of its lane. An error without a lane concerns
   * the connection, unless a single answer waits for its start and can be the only one meant.
   * @returns {Answer | undefined}
   */
  #addressee(/** @type {any} */ event) {
    if (event.stream_id !== undefined) return this.#lanes.get(event.stream_id)?.[0];
    const all = [...this.#lanes.values()].flat();
    const [only] = all.length === 1 ? all : [];
    return event.type === "error" && only?.responseId ? undefined : only;
  }

  #forget(/** @type {string} */ lane, /** @type {Answer} */ answer) {
    const rest = (this.#lanes.get(lane) ?? []).filter((other) => other !== answer);
    if (rest.length > 0) this.#lanes.set(lane, rest);
    else this.#lanes.delete(lane);
  }

  #send(/** @type {object} */ message) {
    this.#socket?.send(JSON.stringify(message));
  }

  #setState(/** @type {ConnectionState} */ state) {
    if (state === this.state) return;
    this.state = state;
    this.dispatchEvent(new CustomEvent("state"));
  }
}
