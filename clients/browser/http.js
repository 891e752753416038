/**
 * Plain requests to a penstock server, and what it says when it refuses one.
 */

/** @typedef {{ message: string, code: string | null, param?: string | null, penstock?: Record<string, any> }} Problem */

const REQUEST_TIMEOUT_MS = 30_000;

/** The server refused a request, or could not be reached (`status` 0, code `unreachable`). */
export class PenstockError extends Error {
  /**
   * @param {Problem} problem
   * @param {{ status?: number, retryAfterMs?: number | null }} [answer]
   */
  constructor(problem, { status = 0, retryAfterMs = null } = {}) {
    super(problem.message);
    this.name = "PenstockError";
    this.code = problem.code;
    this.param = problem.param ?? null;
    /** What only penstock says of it. @type {Record<string, any>} */
    this.details = problem.penstock ?? {};
    this.status = status;
    /** How long the server asks to wait before a next try. @type {number | null} */
    this.retryAfterMs = retryAfterMs;
  }

  /** Whether the same request may well be taken later. */
  get isTemporary() {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

/** Whether a key can stand in a header at all. */
export function isSendableKey(/** @type {string} */ key) {
  return /^[\x21-\x7e]+$/.test(key);
}

/** Where the server is, and how to sign in. */
export class Http {
  /** @type {string | null} */ apiKey;
  #baseUrl;

  /** @param {{ baseUrl: string, apiKey: string | null }} options */
  constructor({ baseUrl, apiKey }) {
    this.#baseUrl = baseUrl;
    this.apiKey = apiKey;
  }

  /** The address of an endpoint, e.g. `v1/models`. */
  url(/** @type {string} */ path) {
    return new URL(path, this.#baseUrl);
  }

  /**
   * The answer of an endpoint as JSON. Throws PenstockError.
   * @param {string} method
   * @param {string} path
   * @param {{ body?: object, signal?: AbortSignal, keepalive?: boolean, headers?: Record<string, string> }} [options]  `keepalive`: it
   *     goes on when the page is left
   * @returns {Promise<any>}
   */
  async request(method, path, { body, signal = AbortSignal.timeout(REQUEST_TIMEOUT_MS), keepalive, headers } = {}) {
    const answer = await this.open(method, path, { body, signal, keepalive, headers });
    try {
      return await answer.json();
    } catch (error) {
      throw unreachable(error);
    }
  }

  /**
   * An answer whose body is yet to be read. Throws PenstockError.
   * @param {string} method
   * @param {string} path
   * @param {{ body?: object, signal?: AbortSignal, keepalive?: boolean, headers?: Record<string, string> }} options
   */
  async open(method, path, { body, signal, keepalive, headers: others }) {
    /** @type {Record<string, string>} */ const headers = { ...others };
    if (this.apiKey) headers.Authorization = `Bearer ${this.apiKey}`;
    if (body) headers["Content-Type"] = "application/json";
    let answer;
    try {
      answer = await fetch(this.url(path), { method, headers, signal, keepalive, body: body && jsonOf(body) });
    } catch (error) {
      throw unreachable(error);
    }
    if (!answer.ok) throw await refusal(answer);
    return answer;
  }
}

/** A body as JSON; a lone surrogate, which servers refuse, becomes a replacement character. */
export function jsonOf(/** @type {object} */ body) {
  return JSON.stringify(body, (_, value) =>
    typeof value === "string" ? value.replace(/\p{Surrogate}/gu, "\ufffd") : value);
}

function unreachable(/** @type {unknown} */ error) {
  // Of a connection that fails, browsers say no more than that it does.
  const reason = error instanceof TypeError ? "" : `: ${error instanceof Error ? error.message : error}`;
  return new PenstockError({ message: `the server cannot be reached${reason}`, code: "unreachable" });
}

async function refusal(/** @type {Response} */ answer) {
  const body = await answer.json().catch(() => null);
  const problem = body?.error ?? { message: `the server answered ${answer.status}`, code: null };
  const seconds = Number(answer.headers.get("retry-after") ?? NaN);
  return new PenstockError(problem, {
    status: answer.status,
    retryAfterMs: Number.isFinite(seconds) ? seconds * 1000 : null,
  });
}
