/**
 * A client for a penstock server, for browsers and Node (20 or newer), without dependencies.
 *
 *     const client = new PenstockClient({ baseUrl: location.href });
 *     const answer = client.respond({ model: "demo", input: "Hello" });
 *     for await (const text of answer) console.log(text);
 *
 * Answers arrive over one WebSocket, any number at a time; over server-sent events where a WebSocket
 * is blocked. A lost connection is reopened, and its unfinished answers resume where they left off:
 * no text is lost or repeated.
 */

import { Answer } from "./answer.js";
import { Conversations } from "./conversations.js";
import { Http, PenstockError } from "./http.js";
import { SocketTransport } from "./socket-transport.js";
import { SseTransport } from "./sse-transport.js";

export { Answer, AnswerError, textOf } from "./answer.js";
export { childrenOf, leafOf, pathTo } from "./conversations.js";
export { isSendableKey, PenstockError } from "./http.js";

/**
 * `connecting` a try is under way · `open` ready · `waiting` for the next try ·
 * `unauthorized` the server wants another key; no more tries until `setApiKey` · `closed` by us.
 * @typedef {"connecting" | "open" | "waiting" | "unauthorized" | "closed"} ConnectionState
 */
/**
 * Parameters of `POST /v1/responses` (`model`, `input`, `instructions`, `temperature`,
 * `conversation`, `previous_response_id`, `store`, `prediction`, `penstock`, …). With `schema`, the
 * output is JSON that matches it: a JSON Schema, or what has `toJSONSchema` and `parse`, as schemas
 * of zod.
 * @typedef {Record<string, any> & { model: string }} RespondParameters
 */
/**
 * A function that the model may call. `run` gets the arguments, and may return a promise; what is not
 * text is sent as JSON.
 * @typedef {object} Tool
 * @property {string} name
 * @property {string} [description]
 * @property {object} [parameters]  a JSON Schema
 * @property {boolean} [strict]
 * @property {(given: any) => unknown} run
 */
/**
 * @typedef {object} ClientOptions
 * @property {string} baseUrl
 * @property {string | null} [apiKey]
 * @property {typeof WebSocket | null} [WebSocket]  e.g. of `ws` in Node 20; null: server-sent events
 * @property {number} [quietMs]  how long an answer may be silent before the connection is asked after
 */

const MAX_STEER_TRIES = 12;
const PROBE_TIMEOUT_MS = 10_000;
const STABLE_CONNECTION_MS = 5_000;
const NOTICES = ["queue", "progress", "preempted", "resumed"];
const NOT_RESUMABLE = {
  message: "The connection broke, and the server could not store this answer, so it cannot be resumed.",
  code: "not_resumable",
};
/** Names a request in the metadata of its response, so that it can be found again. */
const REQUEST_KEY = "penstock_request";
/** Where a turn is looked for whose beginning was not heard: among so many of the newest. */
const NUM_SEARCHED = 4;

/**
 * Milliseconds before try number `attempt` (0, 1, …): exponential, capped, half of it random, so
 * that the clients of a restarted server do not all come back in the same instant.
 */
export function backoffDelayMs(/** @type {number} */ attempt, random = Math.random) {
  const ceiling = Math.min(15_000, 400 * 2 ** attempt);
  return ceiling / 2 + (ceiling / 2) * random();
}

/** One connection to a server, kept up. Event: `state`. */
export class PenstockClient extends EventTarget {
  /** @type {ConnectionState} */ state = "closed";
  /** Ids of the models that the server offers; refreshed on every connect. @type {string[]} */
  models = [];
  /** How each is to be sampled in a chat: the model's own defaults, or some that suit most. @type {Record<string, Record<string, number>>} */
  sampling = {};
  /** How many tokens the context of each has, where the server says. @type {Record<string, number>} */
  contexts = {};
  /** Whether messages may have images. */
  takesImages = false;
  /** Tries in a row that brought no lasting connection, and what became of the last one. */
  numFailures = 0;
  /** @type {"unreachable" | "no websocket" | "dropped" | null} */ failure = null;

  #http;
  #WebSocket;
  #quietMs;
  /** @type {SocketTransport | SseTransport | null} */ #transport = null;
  /** Those that have not ended. @type {Set<Answer>} */ #answers = new Set();
  /** @type {ReturnType<typeof setTimeout> | undefined} */ #retryTimer;
  /** Counts tries, so that a result that comes late can tell that it is stale. */
  #attempt = 0;
  #numBlocked = 0;

  /** @param {ClientOptions} options */
  constructor({ baseUrl, apiKey = null, WebSocket = globalThis.WebSocket ?? null, quietMs = 8_000 }) {
    super();
    this.#quietMs = quietMs;
    this.#http = new Http({ baseUrl, apiKey });
    this.#WebSocket = WebSocket;
    this.conversations = new Conversations(this.#http);
  }

  /** What carries the answers; null while nothing does. */
  get transport() {
    return this.state === "open" ? (this.#transport?.name ?? null) : null;
  }

  /** Connects now: the first time, or instead of waiting for the next try. */
  connect() {
    if (this.state !== "open" && this.state !== "connecting") void this.#connect();
  }

  /** Uses another key (null: none) and reconnects. */
  setApiKey(/** @type {string | null} */ apiKey) {
    this.#http.apiKey = apiKey;
    this.#disconnect("closed");
    this.connect();
  }

  /** Lets go of the connection. Answers under way run on at the server; here they wait. */
  close() {
    this.#disconnect("closed");
  }

  /** Takes the connection for dead, as when the system says that the network is gone. */
  suspect() {
    if (this.state === "open") this.#retryLater("dropped");
  }

  /** Asks for an answer; connects first where there is no connection. @returns {Answer} */
  respond(/** @type {RespondParameters} */ { metadata, penstock, schema, ...parameters }) {
    /** @type {Answer} */ const answer = new Answer({
      request: {
        ...parameters,
        ...(schema !== undefined && { text: { ...parameters.text, format: formatOf(schema) } }),
        metadata: { ...metadata, [REQUEST_KEY]: requestId() },
        penstock: { events: NOTICES, ...penstock },
      },
      onCancel: () => this.#transport?.cancel(answer),
      parser: typeof schema?.parse === "function" ? schema : null,
    });
    return this.#take(answer);
  }

  /**
   * The output of an answer to these parameters, `schema` among them. Throws AnswerError, and what
   * the schema's `parse` throws.
   * @returns {Promise<any>}
   */
  parse(/** @type {RespondParameters & { schema: any }} */ parameters) {
    return this.respond(parameters).parsed();
  }

  /**
   * The answers of a model that calls tools, one after the other, until one calls none. Each call is
   * run once, however often the connection breaks: it is read from an answer that is complete. What a
   * tool throws is told to the model.
   * @param {RespondParameters & { tools: Tool[], maxRounds?: number }} parameters
   * @returns {AsyncGenerator<Answer, void>}
   */
  async *runTools({ tools, maxRounds = 10, ...parameters }) {
    const definitions = tools.map(({ run: _, ...tool }) => ({ type: "function", ...tool }));
    /** @type {RespondParameters} */ let next = { ...parameters, tools: definitions };
    for (let round = 1; ; round += 1) {
      const answer = this.respond(next);
      yield answer;
      const { kind, responseId } = await answer.done;
      const calls = answer.blocks.filter((block) => block.kind === "call");
      if (kind !== "completed" || calls.length === 0 || round === maxRounds) return;
      const outputs = [];
      for (const call of calls) {
        outputs.push({ type: "function_call_output", call_id: call.callId, output: await outputOf(call, tools) });
      }
      const same = { ...next, tool_choice: relaxed(next.tool_choice) };
      const said = typeof next.input === "string" ? [{ role: "user", content: next.input }] : (next.input ?? []);
      if (next.store === false) next = { ...same, input: [...said, ...answer.items, ...outputs] };
      else next = { ...same, input: outputs, ...(!next.conversation && { previous_response_id: responseId }) };
    }
  }

  /** Follows a response that runs, or ended lately, from its first word. @returns {Answer} */
  follow(/** @type {string} */ responseId) {
    for (const known of this.#answers) if (known.responseId === responseId) return known;
    /** @type {Answer} */ const answer = new Answer({
      responseId,
      onCancel: () => this.#transport?.cancel(answer),
    });
    return this.#take(answer);
  }

  /**
   * Has an answer under way end for these messages of the user, which its successor answers:
   * `answer.successor`, once it has ended. Sent until the server says what became of it. Throws
   * PenstockError: nothing was taken (`code` says why), and the answer goes on.
   * @param {Answer} answer
   * @param {string | object[]} input
   * @returns {Promise<import("./answer.js").Steer>}
   */
  async steer(answer, input) {
    if (!answer.responseId && !answer.isEnded) {
      await new Promise((resolve) => {
        for (const name of ["started", "end"]) answer.addEventListener(name, resolve, { once: true });
      });
    }
    const path = `v1/responses/${answer.responseId}/steer`;
    const headers = { "Idempotency-Key": requestId() };
    for (let attempt = 0; ; attempt += 1) {
      try {
        return await this.#http.request("POST", path, { body: { input }, headers });
      } catch (error) {
        const mayPass = error instanceof PenstockError && error.isTemporary && error.status !== 429;
        if (!mayPass || attempt === MAX_STEER_TRIES) throw error;
        await new Promise((resolve) => setTimeout(resolve, backoffDelayMs(attempt)));
      }
    }
  }

  /** A response as the server has it. Throws PenstockError. */
  response(/** @type {string} */ responseId) {
    return this.#http.request("GET", `v1/responses/${encodeURIComponent(responseId)}`);
  }

  /**
   * What a response answers: its input items, the newest first, then those of the turns before it.
   * Throws PenstockError.
   * @returns {Promise<{ data: import("./conversations.js").Item[] }>}
   */
  inputItems(/** @type {string} */ responseId, { limit = 20 } = {}) {
    const path = `v1/responses/${encodeURIComponent(responseId)}/input_items`;
    return this.#http.request("GET", `${path}?order=desc&limit=${limit}`);
  }

  /** Whether the server has an engine at the moment; true as well if the server cannot be asked. */
  async hasEngine() {
    return (await this.engineState()).isUp;
  }

  /**
   * The same, and in how many milliseconds an engine that is restarted is expected, where the server
   * knows how long that takes.
   * @returns {Promise<{ isUp: boolean, waitMs: number | null }>}
   */
  async engineState() {
    try {
      await this.#http.request("GET", "health");
    } catch (error) {
      if (!(error instanceof PenstockError)) throw error;
      return { isUp: error.status !== 503, waitMs: error.details.estimated_wait_ms ?? null };
    }
    return { isUp: true, waitMs: null };
  }

  /**
   * How many tokens a message alone would take, and how many the model's context has. Throws
   * PenstockError.
   * @param {string} model
   * @param {string} text
   * @returns {Promise<{ count: number, max_model_len: number | null }>}
   */
  countTokens(model, text) {
    const messages = [{ role: "user", content: text }];
    return this.#http.request("POST", "tokenize", { body: { model, messages } });
  }

  /**
   * The vector of each text. Throws PenstockError.
   * @param {{ model: string, input: string | string[], dimensions?: number }} parameters
   * @returns {Promise<number[][]>}
   */
  async embeddings(parameters) {
    const { data } = await this.#http.request("POST", "v1/embeddings", { body: parameters });
    return data.map((/** @type {{ embedding: number[] }} */ each) => each.embedding);
  }

  /**
   * Documents by how well they answer a query, the best first. Throws PenstockError.
   * @param {{ model: string, query: string, documents: string[], top_n?: number }} parameters
   * @returns {Promise<{ index: number, relevance_score: number, document: { text: string } }[]>}
   */
  async rerank(parameters) {
    const { results } = await this.#http.request("POST", "v1/rerank", { body: parameters });
    return results;
  }

  #take(/** @type {Answer} */ answer) {
    this.#keep(answer);
    if (this.state === "open") void this.#carry(answer);
    else this.connect();
    return answer;
  }

  #keep(/** @type {Answer} */ answer) {
    this.#answers.add(answer);
    answer.addEventListener("end", () => {
      this.#answers.delete(answer);
      this.#succeed(answer);
    }, { once: true });
  }

  /** Goes on with what answers after an answer that was steered. */
  #succeed(/** @type {Answer} */ answer) {
    const responseId = answer.outcome?.steers.find((steer) => steer.successor_id)?.successor_id;
    if (!responseId) return;
    /** @type {Answer} */ const next = new Answer({
      request: answer.request,
      responseId,
      onCancel: () => this.#transport?.cancel(next),
    });
    next.wasSent = true;
    answer.successor = next;
    this.#keep(next);
    if (this.state === "open" && !this.#transport?.succeed(answer, next)) void this.#carry(next);
    if (answer.isCancelling) next.cancel();
  }

  // ---- connection --------------------------------------------------------------------------

  /** One try: ask for the models (which tells a wrong key from a dead server), then the transport. */
  async #connect() {
    const attempt = ++this.#attempt;
    clearTimeout(this.#retryTimer);
    this.#setState("connecting");
    try {
      const models = await this.#http.request("GET", "v1/models", { signal: AbortSignal.timeout(PROBE_TIMEOUT_MS) });
      const url = this.#WebSocket && (await this.#socketUrl());
      if (attempt !== this.#attempt) return;
      this.models = models.data.map((/** @type {{ id: string }} */ model) => model.id);
      this.sampling = Object.fromEntries(
        models.data.map((/** @type {any} */ model) => [model.id, model.chat_sampling ?? {}]),
      );
      this.contexts = Object.fromEntries(
        models.data.map((/** @type {any} */ model) => [model.id, model.max_model_len ?? 0]),
      );
      this.takesImages = models.data[0]?.input_modalities?.includes("image") ?? false;
      this.#open(attempt, url);
    } catch (error) {
      if (attempt !== this.#attempt) return;
      if (error instanceof PenstockError && error.status === 401) this.#setState("unauthorized");
      else this.#retryLater("unreachable");
    }
  }

  /** With a ticket in place of the key: a browser's WebSocket carries no header. */
  async #socketUrl() {
    const url = this.#http.url("v1/responses");
    url.protocol = url.protocol.replace("http", "ws");
    if (this.#http.apiKey) {
      const { ticket } = await this.#http.request("POST", "v1/tickets");
      url.searchParams.set("ticket", ticket);
    }
    return url;
  }

  #open(/** @type {number} */ attempt, /** @type {URL | null} */ url) {
    let openedAt = Infinity;
    const usesSocket = url !== null && this.#numBlocked < 2;
    const carrier = {
      onOpen: () => {
        openedAt = performance.now();
        if (usesSocket) this.#numBlocked = 0;
        this.#setState("open");
        for (const answer of this.#answers) void this.#carry(answer);
      },
      onDown: () => {
        if (attempt !== this.#attempt) return;
        const wasOpen = openedAt < Infinity;
        if (performance.now() - openedAt > STABLE_CONNECTION_MS) this.numFailures = 0;
        if (!wasOpen) this.#numBlocked += 1;
        else if (!usesSocket) this.#numBlocked = 1; // one more try with a WebSocket
        this.#retryLater(wasOpen ? "dropped" : "no websocket");
      },
      onBroken: (/** @type {Answer} */ answer) => void this.#recover(answer),
    };
    this.#transport = usesSocket
      ? new SocketTransport(url, carrier, {
          WebSocket: /** @type {typeof WebSocket} */ (this.#WebSocket),
          quietMs: this.#quietMs,
        })
      : new SseTransport(this.#http, carrier);
  }

  #retryLater(/** @type {PenstockClient["failure"]} */ failure) {
    this.failure = failure;
    const delay = backoffDelayMs(this.numFailures);
    this.numFailures += 1;
    this.#disconnect("waiting");
    this.#retryTimer = setTimeout(() => this.connect(), delay);
    for (const answer of this.#answers) if (!isStored(answer) && answer.wasSent) answer.end({ kind: "lost" });
  }

  #disconnect(/** @type {ConnectionState} */ state) {
    this.#attempt += 1;
    clearTimeout(this.#retryTimer);
    this.#transport?.close();
    this.#transport = null;
    this.#setState(state);
  }

  #setState(/** @type {ConnectionState} */ state) {
    if (state === this.state) return;
    this.state = state;
    this.dispatchEvent(new CustomEvent("state"));
  }

  // ---- answers -----------------------------------------------------------------------------

  /** Starts or resumes an answer on this connection. */
  async #carry(/** @type {Answer} */ answer) {
    const attempt = this.#attempt;
    try {
      if (!answer.responseId && answer.wasSent) answer.responseId = await this.#find(answer);
    } catch {
      if (attempt === this.#attempt) this.#later(answer);
      return;
    }
    if (attempt !== this.#attempt || answer.isEnded) return;
    if (!answer.responseId) this.#transport?.create(answer);
    else if (!answer.isResumable) void this.#recover(answer);
    else {
      this.#transport?.resume(answer);
      if (answer.isCancelling) this.#transport?.cancel(answer);
    }
  }

  /**
   * The response of a request whose answer broke off before its first event. A turn of a
   * conversation must not be requested twice; any other may, since the first has no effect.
   */
  async #find(/** @type {Answer} */ answer) {
    const { conversation, metadata } = answer.request ?? {};
    if (!conversation) return null;
    const tree = await this.conversations.tree(conversation);
    const newest = tree.data.filter((turn) => turn.response_id).slice(-NUM_SEARCHED);
    for (const { response_id } of newest.reverse()) {
      const response = await this.response(/** @type {string} */ (response_id));
      if (response.metadata?.[REQUEST_KEY] === metadata[REQUEST_KEY]) return /** @type {string} */ (response_id);
    }
    return null;
  }

  /** An answer whose events are not to be had any more: perhaps all of it is. */
  async #recover(/** @type {Answer} */ answer) {
    try {
      const response = await this.response(/** @type {string} */ (answer.responseId));
      if (["queued", "in_progress"].includes(response.status)) this.#later(answer);
      else answer.settle(response);
    } catch (error) {
      if (error instanceof PenstockError && error.isTemporary) this.#later(answer);
      else answer.end({ kind: "lost", problem: answer.isResumable ? null : NOT_RESUMABLE });
    }
  }

  #later(/** @type {Answer} */ answer) {
    setTimeout(() => {
      if (this.state === "open" && !answer.isEnded) void this.#carry(answer);
    }, backoffDelayMs(1));
  }
}

/** A call that was required has been made; which tools may be called stays. */
function relaxed(/** @type {any} */ choice) {
  if (choice?.type === "allowed_tools") return { ...choice, mode: "auto" };
  return choice === "none" ? choice : undefined;
}

/** What a call returns, or why it does not. @returns {Promise<string>} */
async function outputOf(/** @type {import("./answer.js").Block} */ call, /** @type {Tool[]} */ tools) {
  const tool = tools.find(({ name }) => name === call.name);
  if (!tool) return `error: there is no tool ${call.name}`;
  try {
    const value = await tool.run(JSON.parse(call.text || "{}"));
    return typeof value === "string" ? value : (JSON.stringify(value) ?? "");
  } catch (error) {
    return `error: ${error instanceof Error ? error.message : error}`;
  }
}

/** The format of an output that matches a schema. */
function formatOf(/** @type {any} */ schema) {
  const isConvertible = typeof schema?.toJSONSchema === "function";
  return { type: "json_schema", name: "output", strict: true, schema: isConvertible ? schema.toJSONSchema() : schema };
}

function isStored(/** @type {Answer} */ answer) {
  return answer.request?.store !== false;
}

function requestId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
