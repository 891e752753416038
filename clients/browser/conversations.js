/**
 * The Conversations API: conversations are kept by the server, each as a tree of turns of which one
 * is the head. Every method throws PenstockError.
 */

/** @typedef {import("./http.js").Http} Http */
/** @typedef {{ store?: string, durable?: boolean, num_dropped?: number, dropped_at?: number }} Kept  where conversations are, and how many were dropped to make room */
/**
 * @typedef {object} Conversation
 * @property {string} id
 * @property {number} created_at  seconds of the epoch
 * @property {number} [used_at]  of the last turn
 * @property {boolean} [pinned]
 * @property {Record<string, string>} metadata
 */
/** @typedef {{ conversation: Conversation, turn: string | null, excerpt: string }} Hit  `turn`: null where the title has the words */
/** @typedef {{ type: string, text?: string, image_url?: string, name?: string }} Part  `name`: of the image's file, while the page has it */
/**
 * @typedef {object} Item  a message
 * @property {string} id
 * @property {string} type  `message`
 * @property {"user" | "assistant" | "system" | "developer"} role
 * @property {Part[]} content
 */
/**
 * @typedef {object} Turn
 * @property {string} turn
 * @property {string | null} parent
 * @property {"in_progress" | "completed" | "incomplete" | "cancelled" | "failed"} status
 * @property {string | null} response_id
 * @property {number} created_at
 * @property {Item[]} [items]  what came in; of turns on the path to the head, where it was asked for
 * @property {Item | Item[] | null} [output]  what was answered
 * @property {{ reason: string } | null} [incomplete_details]
 */
/**
 * @typedef {object} Tree
 * @property {string | null} head
 * @property {string | null} running  the turn that holds the head until it ends
 * @property {Turn[]} data  parents before children
 */

const path = (/** @type {string} */ id, rest = "") => `v1/conversations/${encodeURIComponent(id)}${rest}`;

export class Conversations {
  #http;

  constructor(/** @type {Http} */ http) {
    this.#http = http;
  }

  /**
   * A new one.
   * @param {{ metadata?: Record<string, string>, items?: object[] }} [options]
   * @returns {Promise<Conversation>}
   */
  create(options = {}) {
    return this.#http.request("POST", "v1/conversations", { body: options });
  }

  /**
   * A page of them, the last used first; and where they are kept.
   * @param {{ limit?: number, after?: string, pinned?: boolean }} [options]
   * @returns {Promise<{ data: Conversation[], has_more: boolean, penstock?: Kept }>}
   */
  list({ limit = 30, after, pinned } = {}) {
    const query = new URLSearchParams({
      limit: String(limit), ...(after && { after }), ...(pinned !== undefined && { pinned: String(pinned) }),
    });
    return this.#http.request("GET", `v1/conversations?${query}`);
  }

  /**
   * Where words are, the newest first: in titles, and in the messages of one turn.
   * @param {string} words
   * @param {{ limit?: number, offset?: number, signal?: AbortSignal }} [options]
   * @returns {Promise<{ data: Hit[], has_more: boolean }>}
   */
  search(words, { limit = 20, offset = 0, signal } = {}) {
    const query = new URLSearchParams({ query: words, limit: String(limit), offset: String(offset) });
    return this.#http.request("GET", `v1/conversations/search?${query}`, { signal });
  }

  /** @returns {Promise<Conversation>} */
  get(/** @type {string} */ id) {
    return this.#http.request("GET", path(id));
  }

  /** Replaces the metadata. @returns {Promise<Conversation>} */
  update(/** @type {string} */ id, /** @type {Record<string, string>} */ metadata) {
    return this.#http.request("POST", path(id), { body: { metadata } });
  }

  /** Keeps it above the others, or no longer. @returns {Promise<Conversation>} */
  pin(/** @type {string} */ id, /** @type {boolean} */ pinned) {
    return this.#http.request("POST", path(id), { body: { pinned } });
  }

  /** Forgets it with all its turns; `keepalive`: also if the page is left. */
  delete(/** @type {string} */ id, { keepalive = false } = {}) {
    return this.#http.request("DELETE", path(id), { keepalive });
  }

  /**
   * Adds items as one turn behind the head, at most 20.
   * @param {string} id
   * @param {object[]} items
   */
  add(id, items) {
    return this.#http.request("POST", path(id, "/items"), { body: { items } });
  }

  /** Deletes an item on the path to the head: the model does not get it any more. */
  deleteItem(/** @type {string} */ id, /** @type {string} */ itemId) {
    return this.#http.request("DELETE", path(id, `/items/${encodeURIComponent(itemId)}`));
  }

  /**
   * Deletes a turn; those after it then continue the one before it. While a turn runs: PenstockError
   * `conversation_locked`.
   */
  deleteTurn(/** @type {string} */ id, /** @type {string} */ turn) {
    return this.#http.request("DELETE", path(id, `/turns/${encodeURIComponent(turn)}`));
  }

  /**
   * Its turns; `items`: with the texts on the path to the head, or to the turn that runs on it;
   * `"all"`: with those of all turns.
   * @param {string} id
   * @param {{ items?: boolean | "all" }} [options]
   * @returns {Promise<Tree>}
   */
  tree(id, { items = false } = {}) {
    return this.#http.request("GET", path(id, items ? `/tree?items=${items}` : "/tree"));
  }

  /**
   * Makes `turn` the head, if `expected` is it now (null: no turn at all). Otherwise, or while a
   * turn runs on the head: PenstockError `conversation_locked`.
   * @param {string} id
   * @param {string | null} turn
   * @param {string | null} expected
   */
  setHead(id, turn, expected) {
    return this.#http.request("POST", path(id, "/head"), { body: { turn, expected } });
  }
}

/** The turns from the root to `turnId`. @returns {Turn[]} */
export function pathTo(/** @type {Tree} */ tree, /** @type {string | null} */ turnId) {
  const byId = new Map(tree.data.map((turn) => [turn.turn, turn]));
  /** @type {Turn[]} */ const found = [];
  for (let turn = byId.get(turnId ?? ""); turn; turn = byId.get(turn.parent ?? "")) found.unshift(turn);
  return found;
}

/** The turns that continue `turnId` (null: that begin), oldest first; failed ones are left out. */
export function childrenOf(/** @type {Tree} */ tree, /** @type {string | null} */ turnId) {
  return tree.data.filter((turn) => turn.parent === turnId && turn.status !== "failed");
}

/** The end of the newest branch through `turnId`. */
export function leafOf(/** @type {Tree} */ tree, /** @type {string} */ turnId) {
  let leaf = turnId;
  for (let last = childrenOf(tree, leaf).at(-1); last; last = childrenOf(tree, leaf).at(-1)) leaf = last.turn;
  return leaf;
}
