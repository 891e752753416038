/**
 * The list of the server's conversations, the last used first; older ones are loaded as it is scrolled.
 */

import { button, byId, make } from "./dom.js";
import { PenstockError } from "./penstock-client.js";
import { isConfirmed, tell } from "./question-dialog.js";
import { quietly } from "./quietly.js";

/** @typedef {import("./conversations.js").Conversation} Conversation */

const list = byId("conversations");
const more = byId("more-conversations");
const empty = byId("no-conversations");
const kept = byId("kept");
const MIN_SHOWN = 30;
const MAX_PAGE = 100; // the server's limit
const dialog = /** @type {HTMLDialogElement} */ (byId("rename-dialog"));
const titleInput = /** @type {HTMLInputElement} */ (byId("rename-input"));

/** Event: `deleted` (detail: the conversation's id). */
export class ConversationList extends EventTarget {
  /** @type {Conversation[]} */ #shown = [];
  #conversations;
  #hasMore = false;
  /** While a page is on its way. */
  #isLoading = false;
  #ahead;
  #numRefreshes = 0;
  /** @type {string | null} */ #current = null;
  /** @type {Conversation | null} */ #renamed = null;

  constructor(/** @type {import("./conversations.js").Conversations} */ conversations) {
    super();
    this.#conversations = conversations;
    more.addEventListener("click", () => void this.#loadMore());
    const scroller = /** @type {HTMLElement} */ (more.parentElement);
    // A page ahead of the reader, once there is one.
    this.#ahead = new IntersectionObserver(
      (changes) => { if (changes.at(-1)?.isIntersecting) void this.#loadMore(); },
      { root: scroller, rootMargin: "0px 0px 4000px" },
    );
    scroller.addEventListener("scroll", () => this.#ahead.observe(more), { passive: true, once: true });
    byId("rename-form").addEventListener("submit", () => void this.#rename());
    byId("rename-cancel").addEventListener("click", () => dialog.close());
  }

  /** Reloads as much of the list as is shown; unchanged if the server cannot be reached. */
  async refresh() {
    await quietly(async () => {
      const number = this.#numRefreshes += 1;
      /** @type {Map<string, Conversation>} */ const found = new Map();
      for (let after = /** @type {string | undefined} */ (undefined); ;) {
        const limit = Math.min(MAX_PAGE, Math.max(MIN_SHOWN, this.#shown.length - found.size));
        const page = await this.#conversations.list({ limit, after });
        if (number < this.#numRefreshes) return; // it may have what has been deleted since
        for (const one of page.data) found.set(one.id, one);
        this.#hasMore = page.has_more;
        if (!after) kept.textContent = whereKept(page.penstock);
        after = page.data.at(-1)?.id;
        if (!page.has_more || found.size >= this.#shown.length) break;
      }
      this.#shown = [...found.values()];
      this.#render();
    });
  }

  /** Moves one up that has got a turn, as the server does; one that is not shown is looked for. */
  use(/** @type {string} */ id) {
    const used = this.#shown.find((one) => one.id === id);
    if (!used) return void this.refresh();
    this.#shown = [used, ...this.#shown.filter((one) => one !== used)];
    this.#render();
  }

  /** Marks the one that is open; one that is not listed yet may have been made elsewhere. */
  mark(/** @type {string | null} */ id) {
    this.#current = id;
    if (id && !this.#shown.some((one) => one.id === id)) void this.refresh();
    this.#showCurrent();
  }

  #showCurrent() {
    const id = this.#current;
    const current = this.#shown.find((one) => one.id === id);
    document.title = current ? `${titleOf(current)} – penstock` : "penstock";
    for (const link of list.querySelectorAll("a")) {
      if (link.dataset.id === id) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  }

  async #loadMore() {
    if (this.#isLoading) return;
    this.#isLoading = true;
    await quietly(async () => {
      const page = await this.#conversations.list({ limit: MAX_PAGE, after: this.#shown.at(-1)?.id });
      const known = new Set(this.#shown.map(({ id }) => id));
      this.#shown.push(...page.data.filter(({ id }) => !known.has(id)));
      this.#hasMore = page.has_more;
      this.#render();
      this.#ahead.unobserve(more); // observed anew, it tells where it is now
      this.#ahead.observe(more);
    });
    this.#isLoading = false;
  }

  async #delete(/** @type {string} */ id) {
    const title = "Delete this conversation?";
    const text = `The server will delete “${titleOf(this.#conversation(id))}” with all its messages.`;
    if (!(await isConfirmed({ title, text, yes: "Delete" }))) return;
    if (!(await wasDone("deleted", () => this.#conversations.delete(id)))) return;
    this.#shown = this.#shown.filter((one) => one.id !== id);
    this.#render();
    this.dispatchEvent(new CustomEvent("deleted", { detail: id }));
    await this.refresh();
  }

  #askForName(/** @type {string} */ id) {
    this.#renamed = this.#conversation(id);
    titleInput.value = titleOf(this.#renamed);
    dialog.showModal();
    titleInput.select();
  }

  async #rename() {
    const title = titleInput.value.trim();
    const renamed = this.#renamed;
    if (!renamed || !title) return;
    await wasDone("renamed", () => this.#conversations.update(renamed.id, { ...renamed.metadata, title }));
    await this.refresh();
  }

  /** Rows that stay are kept: a dialog returns the focus to the button of a row that opened it. */
  #render() {
    const rows = new Map([...list.children].map((row) => [row.querySelector("a")?.dataset.id, row]));
    const shown = this.#shown.map((conversation) => {
      const row = rows.get(conversation.id) ?? this.#row(conversation.id);
      label(row, titleOf(conversation));
      return row;
    });
    if (shown.length !== list.children.length || shown.some((row, index) => row !== list.children[index])) {
      const focus = this.#focused();
      list.replaceChildren(...shown);
      if (focus) this.#focus(focus);
    }
    more.hidden = !this.#hasMore;
    empty.hidden = this.#shown.length > 0;
    this.#showCurrent();
  }

  /** Which part of which row has the focus. */
  #focused() {
    const part = document.activeElement;
    const row = part?.closest("#conversations > li");
    if (!part || !row) return null;
    return {
      id: row.querySelector("a")?.dataset.id,
      index: [...list.children].indexOf(row),
      part: [...row.children].indexOf(part),
    };
  }

  /** The same part of the same row; else the row that is in its place now; else "New chat". */
  #focus(/** @type {{ id: string | undefined, index: number, part: number }} */ { id, index, part }) {
    const same = this.#shown.findIndex((one) => one.id === id);
    const row = list.children[same >= 0 ? same : Math.min(index, list.children.length - 1)];
    const node = row?.children[same >= 0 ? part : 0] ?? byId("new-chat");
    /** @type {HTMLElement} */ (node).focus();
  }

  #row(/** @type {string} */ id) {
    const row = make("li");
    const link = /** @type {HTMLAnchorElement} */ (make("a"));
    link.dir = "auto";
    link.href = `#${id}`;
    link.dataset.id = id;
    row.append(
      link,
      button({ label: "Rename", picture: "edit", run: () => this.#askForName(id) }),
      button({ label: "Delete", picture: "delete", run: () => void this.#delete(id) }),
    );
    return row;
  }

  /** One of those that are shown; whose row is there. */
  #conversation(/** @type {string} */ id) {
    return /** @type {Conversation} */ (this.#shown.find((one) => one.id === id));
  }
}

/** Names a row and its buttons by its conversation's title, which may change. */
function label(/** @type {Element} */ row, /** @type {string} */ title) {
  const [link, rename, remove] = row.children;
  if (link.textContent !== title) link.textContent = title;
  for (const [node, verb] of /** @type {const} */ ([[rename, "Rename"], [remove, "Delete"]])) {
    const name = `${verb} “${title}”`;
    node.setAttribute("title", name);
    node.setAttribute("aria-label", name);
  }
}

/** Whether the server has done it, also if there is nothing left to do it to; says why not. */
async function wasDone(/** @type {string} */ what, /** @type {() => Promise<unknown>} */ work) {
  try {
    await work();
  } catch (error) {
    if (!(error instanceof PenstockError)) throw error;
    if (error.status === 404) return true;
    await tell(`This conversation was not ${what}`, `The reason: ${error.message}`);
    return false;
  }
  return true;
}

function titleOf(/** @type {Conversation} */ { metadata, created_at }) {
  return metadata.title || `Conversation of ${new Date(created_at * 1000).toLocaleString()}`;
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
