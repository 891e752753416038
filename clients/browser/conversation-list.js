/**
 * The list of the server's conversations, the last used first; older ones are loaded as it is scrolled.
 * Pins, names, searches in it, and deletions, which can be taken back for a while.
 *
 * What it does not know: how any of it looks.
 */

import { byId } from "./dom.js";
import { conversationOf, NO_SEARCH, titleOf } from "./page-state.js";
import { PenstockError } from "./penstock-client.js";
import { quietly } from "./quietly.js";

/** @typedef {import("./conversations.js").Conversation} Conversation */

const MIN_SHOWN = 30;
const MAX_PAGE = 100; // the server's limit
const FOUND = 30;
const TYPING_MS = 150;
const UNDO_MS = 8_000;

/** Events (detail: the conversation's id): `removed`; then `restored`, or `deleted`. */
export class ConversationList extends EventTarget {
  #conversations;
  #store;
  /** While a page is on its way. */
  #isLoading = false;
  #numRefreshes = 0;
  #searching = new AbortController();
  #undoTimer = 0;

  /**
   * @param {import("./conversations.js").Conversations} conversations
   * @param {ReturnType<typeof import("./page-state.js").newStore>} store
   */
  constructor(conversations, store) {
    super();
    this.#conversations = conversations;
    this.#store = store;
    window.addEventListener("pagehide", () => this.deleteNow({ keepalive: true }));
    store.watch(["list", "current"], ({ list, current }) => {
      const open = [...list.recent, ...list.pinned].find((one) => one.id === current);
      const title = open ? titleOf(open) : "";
      document.title = title ? `${title} – penstock` : "penstock";
      byId("chat-title").textContent = title;
    });
  }

  get #list() { return this.#store.state.list; }

  #set(/** @type {Partial<import("./page-state.js").Listed>} */ parts) {
    this.#store.update({ list: { ...this.#list, ...parts } });
  }

  /** Reloads as much of the list as is shown; unchanged if the server cannot be reached. */
  async refresh() {
    await quietly(async () => {
      const number = this.#numRefreshes += 1;
      const { length } = this.#list.recent;
      const pinned = this.#conversations.list({ limit: MAX_PAGE, pinned: true });
      pinned.catch(() => {}); // looked at below
      /** @type {Map<string, Conversation>} */ const found = new Map();
      let [kept, hasMore] = [this.#list.kept, false];
      for (let after = /** @type {string | undefined} */ (undefined); ;) {
        const limit = Math.min(MAX_PAGE, Math.max(MIN_SHOWN, length - found.size));
        const page = await this.#conversations.list({ limit, after });
        for (const one of page.data) found.set(one.id, one);
        hasMore = page.has_more;
        if (!after) kept = whereKept(page.penstock);
        after = page.data.at(-1)?.id;
        if (!page.has_more || found.size >= length) break;
      }
      const above = (await pinned).data.filter((one) => one.pinned);
      if (number < this.#numRefreshes) return; // it may have what has been deleted since
      this.#set({ recent: [...found.values()], pinned: above, hasMore, kept });
    });
  }

  /** Moves one up that has got a turn, as the server does; one that is not shown is looked for. */
  use(/** @type {string} */ id) {
    const one = this.#list.recent.find((each) => each.id === id);
    if (!one) return void this.refresh();
    const used = { ...one, used_at: Math.floor(Date.now() / 1000) };
    const first = (/** @type {readonly Conversation[]} */ all) => [used, ...all.filter((each) => each.id !== id)];
    const { recent, pinned } = this.#list;
    this.#set({ recent: first(recent), pinned: one.pinned ? first(pinned) : pinned });
  }

  /** Marks the one that is open; one that is not listed yet may have been made elsewhere. */
  mark(/** @type {string | null} */ id) {
    this.#store.update({ current: id, tabbable: id });
    if (id && !this.#list.recent.some((one) => one.id === id)) void this.refresh();
  }

  async loadMore() {
    if (this.#isLoading || !this.#list.hasMore) return;
    this.#isLoading = true;
    await quietly(async () => {
      const page = await this.#conversations.list({ limit: MAX_PAGE, after: this.#list.recent.at(-1)?.id });
      const known = new Set(this.#list.recent.map(({ id }) => id));
      this.#set({
        recent: [...this.#list.recent, ...page.data.filter(({ id }) => !known.has(id))],
        hasMore: page.has_more,
      });
    });
    this.#isLoading = false;
  }

  // ---- search --------------------------------------------------------------------------------

  /** Looks for words as they are typed; none: ends the search. */
  async find(/** @type {string} */ query) {
    this.#searching.abort();
    if (!query.trim()) return this.#store.update({ search: { ...NO_SEARCH, query } });
    const { signal } = this.#searching = new AbortController();
    this.#store.update({ search: { ...this.#store.state.search, query, problem: "" } });
    await new Promise((resolve) => setTimeout(resolve, TYPING_MS));
    if (!signal.aborted) await this.#search(signal, []);
  }

  async findMore() {
    const { hits, hasMore } = this.#store.state.search;
    if (hits && hasMore) await this.#search(this.#searching.signal, hits);
  }

  async #search(/** @type {AbortSignal} */ signal, /** @type {readonly import("./conversations.js").Hit[]} */ before) {
    const { query } = this.#store.state.search;
    try {
      const page = await this.#conversations.search(query, { limit: FOUND, offset: before.length, signal });
      if (signal.aborted) return;
      this.#store.update({ search: { query, hits: [...before, ...page.data], hasMore: page.has_more, problem: "" } });
    } catch (error) {
      if (!(error instanceof PenstockError)) throw error;
      if (!signal.aborted) this.#store.update({ search: { query, hits: [], hasMore: false, problem: error.message } });
    }
  }

  // ---- changing them -------------------------------------------------------------------------

  async pin(/** @type {string} */ id, /** @type {boolean} */ isPinned) {
    await this.#wasDone(isPinned ? "pinned" : "unpinned", () => this.#conversations.pin(id, isPinned));
    await this.refresh();
  }

  /** Takes one off the list, and deletes it unless that is taken back soon. */
  remove(/** @type {string} */ id) {
    const removed = conversationOf(this.#store.state, id);
    if (!removed) return;
    this.deleteNow();
    this.#store.update({ hidden: new Set([...this.#store.state.hidden, id]), undoable: removed });
    this.#undoTimer = setTimeout(() => this.deleteNow(), UNDO_MS);
    this.dispatchEvent(new CustomEvent("removed", { detail: id }));
  }

  /** Puts the one back that was removed last. */
  undo() {
    const { undoable } = this.#store.state;
    if (!undoable) return;
    clearTimeout(this.#undoTimer);
    this.#store.update({ undoable: null });
    this.#show(undoable.id);
    this.dispatchEvent(new CustomEvent("restored", { detail: undoable.id }));
  }

  /** Deletes what was removed, which cannot be taken back any more. */
  deleteNow({ keepalive = false } = {}) {
    const { undoable } = this.#store.state;
    if (!undoable) return;
    clearTimeout(this.#undoTimer);
    this.#store.update({ undoable: null });
    void this.#delete(undoable.id, keepalive);
  }

  async #delete(/** @type {string} */ id, /** @type {boolean} */ keepalive) {
    const isDone = await this.#wasDone("deleted", () => this.#conversations.delete(id, { keepalive }));
    if (!isDone) return this.#show(id);
    const rest = (/** @type {readonly Conversation[]} */ all) => all.filter((one) => one.id !== id);
    this.#set({ recent: rest(this.#list.recent), pinned: rest(this.#list.pinned) });
    const { search } = this.#store.state;
    const hits = search.hits?.filter((hit) => hit.conversation.id !== id) ?? null;
    this.#store.update({ search: { ...search, hits } });
    this.#show(id);
    this.dispatchEvent(new CustomEvent("deleted", { detail: id }));
    await this.refresh();
  }

  #show(/** @type {string} */ id) {
    this.#store.update({ hidden: new Set([...this.#store.state.hidden].filter((each) => each !== id)) });
  }

  askForName(/** @type {string} */ id) {
    this.#store.update({ renamed: conversationOf(this.#store.state, id) ?? null });
  }

  async rename(/** @type {Conversation} */ { id, metadata }, /** @type {string} */ title) {
    await this.#wasDone("renamed", () => this.#conversations.update(id, { ...metadata, title }));
    await this.refresh();
  }

  /** Whether the server has done it, also if there is nothing left to do it to; says why not. */
  async #wasDone(/** @type {string} */ what, /** @type {() => Promise<unknown>} */ work) {
    try {
      await work();
    } catch (error) {
      if (!(error instanceof PenstockError)) throw error;
      if (error.status === 404) return true;
      this.#store.update({ news: { title: `This conversation was not ${what}`, text: `The reason: ${error.message}` } });
      return false;
    }
    return true;
  }
}

/** Where chats are kept, and what was dropped to make room. */
function whereKept(/** @type {import("./conversations.js").Kept | undefined} */ { store, num_dropped, dropped_at } = {}) {
  const place = { disk: "Saved on this server’s disk.", redis: "Saved in this server’s Redis." }[store ?? ""]
    ?? "Kept until the server restarts.";
  if (!num_dropped || !dropped_at) return place;
  const day = new Date(dropped_at * 1000).toLocaleDateString();
  const what = num_dropped === 1 ? "One conversation was" : `${num_dropped} conversations were`;
  return `${place} ${what} dropped to make room, the last on ${day}.`;
}
