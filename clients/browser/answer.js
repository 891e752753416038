/**
 * One answer: its text as it grows, where to resume its stream, how it ended. Connections are
 * handled elsewhere.
 */

/** @typedef {import("./http.js").Problem} Problem */
/**
 * @typedef {object} Usage
 * @property {number} input_tokens
 * @property {{ cached_tokens: number }} [input_tokens_details]
 * @property {number} output_tokens
 * @property {{ draft_tokens: number, accepted_draft_tokens: number }} [penstock]  if there were drafts
 */
/**
 * How an answer ended. `refused`: an error before it started. `lost`: it broke off, and the server
 * no longer has the rest (it was not stored, or a server without Redis was restarted).
 * @typedef {object} Outcome
 * @property {"completed" | "cancelled" | "incomplete" | "failed" | "refused" | "lost"} kind
 * @property {string | null} responseId
 * @property {Usage | null} usage
 * @property {string | null} reason   why it is incomplete, e.g. `max_output_tokens`
 * @property {Problem | null} problem
 * @property {Steer[]} steers   what became of what it was steered with
 */
/**
 * Input for an answer that was under way. `committed`: its successor answers it. `pending`: the next
 * request that continues the answer, with the results of its tool calls, gets it. `failed`: nobody does.
 * @typedef {object} Steer
 * @property {string} id
 * @property {"accepted" | "committed" | "pending" | "failed"} status
 * @property {string} [successor_id]
 * @property {Problem} [error]
 */
/** @typedef {{ position: number, estimatedWaitMs: number }} QueuePlace */
/** How many tokens of its prompt are computed. @typedef {{ numComputed: number, numTokens: number, leftMs: number }} Prefill */
/**
 * A token of the answer, and those that were likely in its place.
 * @typedef {{ token: string, logprob: number, bytes: number[], top_logprobs: { token: string, logprob: number }[] }} Token
 */

/**
 * A thought, or a tool call with its arguments as JSON.
 * @typedef {object} Block
 * @property {"reasoning" | "call"} kind
 * @property {string} id  of the item
 * @property {string} callId
 * @property {string} name  of the tool
 * @property {string} text
 * @property {number} textBefore  how long the answer's text was when it began
 * @property {boolean} isDone
 */

const BLOCK_DELTAS = new Set([
  "response.reasoning_text.delta", "response.reasoning_summary_text.delta",
  "response.function_call_arguments.delta", "response.custom_tool_call_input.delta",
]);
const TERMINAL = new Set(["response.completed", "response.incomplete", "response.failed"]);

/**
 * What makes a value of an output's JSON, as a schema of zod does; throws if the value is invalid.
 * @typedef {{ parse: (value: unknown) => any }} Parser
 */

/**
 * What a loop over an answer throws when it fails, is refused, or is lost; and what `parsed` throws
 * when it is not complete either.
 */
export class AnswerError extends Error {
  constructor(/** @type {Outcome} */ outcome) {
    super(outcome.problem?.message ?? `the answer was ${[outcome.kind, outcome.reason].filter(Boolean).join(": ")}`);
    this.name = "AnswerError";
    this.outcome = outcome;
  }
}

/**
 * Events: `started`, `delta` (detail: the new text), `block` (detail: a Block that has changed), `queue` (detail: QueuePlace), `preparing` (detail: a kind of resource), `prefill` (detail: Prefill), `pause` (detail:
 * true when the server has paused it for lack of memory, false when it continues), `end` (detail:
 * Outcome).
 *
 *     for await (const text of answer) process.stdout.write(text);
 *
 * A loop starts at the first word, whenever it is started, and ends with the answer.
 */
export class Answer extends EventTarget {
  /** @type {string | null} */ responseId;
  text = "";
  /** Its thoughts and tool calls. @type {Block[]} */ blocks = [];
  /** The tokens of its text, where log-probabilities were asked for. @type {Token[]} */ tokens = [];
  /** All that it consists of, as the API has it, once it has ended. @type {any[]} */ items = [];
  /** The last event seen; a resumed stream continues after it. */
  lastSequenceNumber = -1;
  /** False once an event has said that the server could not store the answer. */
  isResumable = true;
  numDeltas = 0;
  sentAt = performance.now();
  /** @type {number | null} */ firstDeltaAt = null;
  /** @type {number | null} */ lastDeltaAt = null;
  isCancelling = false;
  /** Whether the request has left at least once, so that the server may know it. */
  wasSent = false;
  /** @type {Outcome | null} */ outcome = null;
  /** What answers after it, if it was steered; known once it has ended. @type {Answer | null} */ successor = null;

  /** @type {() => void} */ #onCancel;
  /** @type {Parser | null} */ #parser;
  /** @type {(outcome: Outcome) => void} */ #resolve = () => {};

  /**
   * @param {object} options
   * @param {Record<string, any> | null} [options.request]  the body; null: one that already runs
   * @param {string | null} [options.responseId]
   * @param {() => void} [options.onCancel]
   * @param {Parser | null} [options.parser]
   */
  constructor({ request = null, responseId = null, onCancel = () => {}, parser = null }) {
    super();
    this.#parser = parser;
    this.request = request;
    this.responseId = responseId;
    this.#onCancel = onCancel;
    /** @type {Promise<Outcome>} */
    this.done = new Promise((resolve) => { this.#resolve = resolve; });
  }

  get isEnded() {
    return this.outcome !== null;
  }

  /** Asks the server to stop. The answer ends when the server says so (`cancelled`). */
  cancel() {
    if (this.isCancelling || this.isEnded) return;
    this.isCancelling = true;
    if (this.wasSent || this.responseId) this.#onCancel();
    else this.end({ kind: "cancelled" });
  }

  /** Processes one server event of this answer; ignores one that it has had already. */
  feed(/** @type {any} */ event) {
    // What became of steers is told by the end, too; after it they may be those of the answer before.
    if (this.isEnded || event.type.startsWith("response.steer.")) return;
    if (typeof event.sequence_number === "number") {
      if (event.sequence_number <= this.lastSequenceNumber) return;
      this.lastSequenceNumber = event.sequence_number;
    }
    if (event.penstock?.resumable === false) this.isResumable = false;
    if (event.type === "response.output_text.delta") {
      this.tokens.push(...(event.logprobs ?? []));
      this.#grow(event.delta);
    }
    else if (event.type === "response.created") this.#start(event.response.id);
    else if (BLOCK_DELTAS.has(event.type)) this.#fill(event.item_id, event.delta);
    else if (event.type === "response.output_item.added") this.#take(event.item, false);
    else if (event.type === "response.output_item.done") this.#take(event.item, true);
    else if (event.type === "penstock.queue") {
      this.#tell("queue", { position: event.position, estimatedWaitMs: event.estimated_wait_ms });
    } else if (event.type === "penstock.progress" && event.stage === "prefilling") {
      const leftMs = event.estimated_ms;
      this.#tell("prefill", { numComputed: event.computed_tokens, numTokens: event.prompt_tokens, leftMs });
    } else if (event.type === "penstock.progress" && event.stage === "preparing") {
      this.#tell("preparing", event.resource);
    } else if (event.type === "penstock.preempted" || event.type === "penstock.resumed") {
      this.#tell("pause", event.type === "penstock.preempted");
    } else if (TERMINAL.has(event.type)) this.settle(event.response);
  }

  /** Takes the rest from the finished Response. */
  settle(/** @type {any} */ response) {
    let text = "";
    this.items = response.output ?? [];
    if (this.items.some((item) => item.type === "message")) this.tokens = this.items.flatMap(tokensOf);
    for (const item of this.items) {
      this.#take(item, true);
      text += textOf({ output: [item] });
      if (text.length > this.text.length) this.#grow(text.slice(this.text.length));
    }
    /** @type {Record<string, Outcome["kind"]>} */
    const kinds = { completed: "completed", cancelled: "cancelled", failed: "failed" };
    this.end({
      kind: kinds[response.status] ?? "incomplete",
      usage: response.usage ?? null,
      reason: response.incomplete_details?.reason ?? null,
      problem: response.error ?? null,
      steers: response.penstock?.steers ?? [],
    });
  }

  end(/** @type {Partial<Outcome> & { kind: Outcome["kind"] }} */ how) {
    if (this.isEnded) return;
    this.outcome = { responseId: this.responseId, usage: null, reason: null, problem: null, steers: [], ...how };
    this.#tell("end", this.outcome);
    this.#resolve(this.outcome);
  }

  async *[Symbol.asyncIterator]() {
    for (let shown = 0; ; ) {
      if (shown < this.text.length) {
        const fresh = this.text.slice(shown);
        shown = this.text.length;
        yield fresh;
      } else if (this.outcome) break;
      else await this.#change();
    }
    if (["failed", "refused", "lost"].includes(this.outcome.kind)) throw new AnswerError(this.outcome);
  }

  /**
   * The output that its schema describes, once it is complete. Throws AnswerError if it does not
   * complete, and whatever the parser throws.
   * @returns {Promise<any>}
   */
  async parsed(/** @type {Parser | null} */ parser = this.#parser) {
    const outcome = await this.done;
    if (outcome.kind !== "completed") throw new AnswerError(outcome);
    const value = JSON.parse(this.text);
    return parser ? parser.parse(value) : value;
  }

  /** Until there is more text, or the end. */
  #change() {
    return new Promise((resolve) => {
      const done = new AbortController();
      const settle = () => { done.abort(); resolve(undefined); };
      for (const name of ["delta", "end"]) this.addEventListener(name, settle, { signal: done.signal });
    });
  }

  #start(/** @type {string} */ responseId) {
    this.responseId = responseId;
    this.#tell("started");
    if (this.isCancelling) this.#onCancel();
  }

  #grow(/** @type {string} */ delta) {
    this.lastDeltaAt = performance.now();
    this.firstDeltaAt ??= this.lastDeltaAt;
    this.numDeltas += 1;
    this.text += delta;
    this.#tell("delta", delta);
  }

  /** Takes an item that is shown as a block, as it is now. */
  #take(/** @type {any} */ item, /** @type {boolean} */ isDone) {
    const known = this.blocks.find((block) => block.id === item.id);
    const fresh = blockOf(item, isDone, known ? known.textBefore : this.text.length);
    if (!fresh || known?.isDone) return;
    if (known) Object.assign(known, fresh);
    else this.blocks.push(fresh);
    this.#tell("block", known ?? fresh);
  }

  #fill(/** @type {string} */ id, /** @type {string} */ delta) {
    const block = this.blocks.find((each) => each.id === id);
    if (!block) return;
    this.lastDeltaAt = performance.now();
    this.firstDeltaAt ??= this.lastDeltaAt;
    block.text += delta;
    this.#tell("block", block);
  }

  #tell(/** @type {string} */ name, /** @type {unknown} */ detail = null) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}

/** An item as a block; null for a message. @returns {Block | null} */
export function blockOf(/** @type {any} */ item, isDone = true, textBefore = 0) {
  const { id, type, call_id: callId = "", name = "" } = item;
  if (type === "reasoning") {
    const text = [...(item.content ?? []), ...(item.summary ?? [])].map((part) => part.text).join("\n");
    return { kind: "reasoning", id, callId, name, text, textBefore, isDone };
  }
  if (type !== "function_call" && type !== "custom_tool_call") return null;
  return { kind: "call", id, callId, name, text: item.arguments ?? item.input ?? "", textBefore, isDone };
}

/** The tokens of a message's text, where log-probabilities were asked for. @returns {Token[]} */
export function tokensOf(/** @type {any} */ { content }) {
  return (content ?? []).flatMap((/** @type {any} */ part) => part.logprobs ?? []);
}

/** The text of a Response's messages; its other items have none to show. */
export function textOf(/** @type {any} */ response) {
  /** @type {{ type: string, content: { text: string }[] }[]} */ const output = response.output ?? [];
  const messages = output.filter((item) => item.type === "message");
  return messages.flatMap((message) => message.content.map((part) => part.text)).join("");
}
