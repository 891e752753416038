/**
 * The sidebar: the list of conversations, and a search over them. On a narrow screen it covers the open
 * conversation.
 */

import { byId } from "./dom.js";
import { icon } from "./elements.js";
import { conversationOf, sectionsOf, titleOf } from "./page-state.js";
import { keyName } from "./shortcuts.js";
import { Component, html } from "./vendor/htm-preact.js";

/** @typedef {import("./conversations.js").Conversation} Conversation */
/** @typedef {import("./page-state.js").State} State */
/**
 * What a reader may want of the list.
 * @typedef {object} Wishes
 * @property {() => void} newChat
 * @property {(id: string, turn: string | null) => void} open  at a turn, if one is named
 * @property {(id: string, isPinned: boolean) => void} pin
 * @property {(id: string) => void} rename
 * @property {(id: string) => void} duplicate
 * @property {(id: string, format: "json" | "md") => void} save
 * @property {(id: string) => void} remove
 * @property {() => void} undo
 * @property {() => void} deleteNow
 * @property {() => void} loadMore
 * @property {(query: string) => void} find
 * @property {() => void} findMore
 */

const ITEM = "penstock.sidebar";
const sidebar = byId("sidebar");
const rest = byId("pane");
const toggle = byId("toggle-list");
const backdrop = byId("backdrop");
const narrow = matchMedia("(max-width: 860px)");

export class Sidebar {
  #store;

  /**
   * @param {ReturnType<typeof import("./page-state.js").newStore>} store
   * @param {Wishes} wishes
   */
  constructor(store, wishes) {
    this.#store = store;
    const on = {
      ...wishes,
      close: () => this.#set(false),
      tab: (/** @type {string} */ id) => { if (store.state.tabbable !== id) store.update({ tabbable: id }); },
      showMenu: (/** @type {State["menu"]} */ menu) => store.update({ menu }),
    };
    store.mount(sidebar, ["list", "search", "current", "tabbable", "menu", "hidden"], (state) => html`<${Chats} state=${state} on=${on} />`);
    store.mount(byId("toast"), ["undoable"], ({ undoable }) => undoable && html`<${Toast} conversation=${undoable} on=${on} />`);
    toggle.addEventListener("click", () => this.toggle());
    backdrop.addEventListener("click", () => this.#set(false));
    sidebar.addEventListener("click", (event) => {
      if (/** @type {Element} */ (event.target).closest("a")) this.closeOverlay();
    });
    sidebar.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !narrow.matches) return;
      event.stopPropagation();
      this.#set(false);
    });
    narrow.addEventListener("change", () => this.#set(!narrow.matches && isWanted()));
    this.#set(!narrow.matches && isWanted(), { movesFocus: false });
  }

  toggle() {
    this.#set(sidebar.hidden);
    if (!narrow.matches) want(!sidebar.hidden);
  }

  /** Where it lies over the conversation: away with it. */
  closeOverlay() {
    if (narrow.matches && !sidebar.hidden) this.#set(false);
  }

  /** Lets the reader write what to look for. */
  search() {
    if (sidebar.hidden) this.#set(true);
    const input = /** @type {HTMLInputElement} */ (byId("search"));
    input.focus();
    input.select();
  }

  #set(/** @type {boolean} */ isOpen, { movesFocus = narrow.matches } = {}) {
    const isOverlay = isOpen && narrow.matches;
    sidebar.hidden = !isOpen;
    backdrop.hidden = !isOverlay;
    rest.inert = isOverlay;
    toggle.setAttribute("aria-expanded", String(isOpen));
    if (!isOpen) this.#store.update({ menu: null });
    if (movesFocus) (isOpen ? byId("new-chat") : toggle).focus();
  }
}

function isWanted() {
  try {
    return localStorage.getItem(ITEM) !== "closed";
  } catch {
    return true;
  }
}

function want(/** @type {boolean} */ isOpen) {
  try {
    localStorage.setItem(ITEM, isOpen ? "open" : "closed");
  } catch {} // a browser that keeps nothing
}

// ---- views ---------------------------------------------------------------------------------

/** @typedef {Wishes & { close: () => void, tab: (id: string) => void, showMenu: (menu: State["menu"]) => void }} On */

function Chats(/** @type {{ state: State, on: On }} */ { state, on }) {
  const { search } = state;
  return html`
    <div class="sidebar-top">
      <button type="button" class="quiet" id="new-chat" title="New chat (Alt+N)" onClick=${on.newChat}>${icon("plus")}<span>New chat</span></button>
      <button type="button" class="icon" id="close-list" aria-label="Hide conversations" title="Hide conversations (Alt+L)" onClick=${on.close}>${icon("close")}</button>
    </div>
    <div class="search" role="search">
      ${icon("search")}
      <input type="search" id="search" dir="auto" autocomplete="off" spellcheck="false" maxlength="1000" placeholder="Search chats"
        aria-label="Search chats" title="Search chats (Control+K)" value=${search.query}
        onInput=${(/** @type {any} */ { target }) => on.find(target.value)} onKeyDown=${(/** @type {KeyboardEvent} */ event) => fromSearch(event, on)} />
      <kbd aria-hidden="true">${keyName("Ctrl")} K</kbd>
    </div>
    ${search.query.trim() ? html`<${Found} state=${state} on=${on} />` : html`<${List} state=${state} on=${on} />`}
    <p class="kept" id="kept">${state.list.kept}</p>
    <a class="sidebar-link" href="./dashboard/">${icon("figures")}Dashboard</a>
    ${state.menu && html`<${Menu} state=${state} menu=${state.menu} on=${on} />`}`;
}

/** From the search into what it has found. */
function fromSearch(/** @type {KeyboardEvent} */ event, /** @type {On} */ on) {
  const first = /** @type {HTMLElement | null} */ (sidebar.querySelector("nav a"));
  if (event.key === "Escape" && /** @type {HTMLInputElement} */ (event.target).value) {
    event.stopPropagation();
    event.preventDefault();
    on.find("");
  } else if (event.key === "ArrowDown" && first) {
    event.preventDefault();
    first.focus();
  } else if (event.key === "Enter") first?.click();
}

/** Up and down through the rows; the menu of one by the keys for it. */
function throughRows(/** @type {KeyboardEvent} */ event) {
  const links = /** @type {HTMLElement[]} */ ([...sidebar.querySelectorAll("nav a")]);
  const index = links.indexOf(/** @type {HTMLElement} */ (event.target));
  const to = { ArrowDown: index + 1, ArrowUp: index - 1, Home: 0, End: links.length - 1 }[event.key];
  if (index < 0 || to === undefined) return;
  event.preventDefault();
  if (to < 0) byId("search").focus();
  else links[to]?.focus();
}

class List extends Component {
  /** A page ahead of the reader, once there is one. */
  /** @type {IntersectionObserver | null} */ #ahead = null;
  #isScrolled = false;

  componentDidMount() {
    this.#ahead = new IntersectionObserver(
      (changes) => { if (changes.at(-1)?.isIntersecting) this.props.on.loadMore(); },
      { root: this.base, rootMargin: "0px 0px 4000px" },
    );
    this.base.addEventListener("scroll", () => { this.#isScrolled = true; this.componentDidUpdate(); }, { passive: true, once: true });
  }

  componentWillUnmount() {
    this.#ahead?.disconnect();
  }

  /** Where the focus is, if it is in a row: rows may move, or go. */
  getSnapshotBeforeUpdate() {
    const row = document.activeElement?.closest("nav li");
    if (!row || !this.base.contains(row)) return null;
    const rows = [...this.base.querySelectorAll("li")];
    return { id: row.getAttribute("data-row"), index: rows.indexOf(row), isMenu: document.activeElement?.nodeName === "BUTTON" };
  }

  componentDidUpdate(/** @type {any} */ _ = null, /** @type {any} */ __ = null, /** @type {any} */ focus = null) {
    const more = this.base.querySelector("#more-conversations");
    if (more && this.#isScrolled) {
      this.#ahead?.unobserve(more); // observed anew, it tells where it is now
      this.#ahead?.observe(more);
    }
    if (!focus || this.base.contains(document.activeElement)) return;
    const rows = [...this.base.querySelectorAll("li")];
    const same = rows.find((row) => row.getAttribute("data-row") === focus.id);
    const row = same ?? rows[Math.min(focus.index, rows.length - 1)];
    (row?.querySelector(same && focus.isMenu ? "button" : "a") ?? byId("new-chat")).focus();
  }

  render(/** @type {{ state: State, on: On }} */ { state, on }) {
    const { list, current, tabbable, menu, hidden } = state;
    const sections = sectionsOf(list, hidden);
    const all = sections.flatMap(({ conversations }) => conversations);
    const first = all.some(({ id }) => id === tabbable) ? tabbable : all[0]?.id;
    return html`
      <nav id="conversations" aria-label="Conversations" onKeyDown=${throughRows}>
        ${sections.map(({ title, conversations }) => html`
          <section key=${title} aria-label=${title}>
            <p class="day" aria-hidden="true">${title}</p>
            <ul>${conversations.map((one) => html`
              <${Row} key=${one.id} conversation=${one} isCurrent=${one.id === current} isTabbable=${one.id === first}
                hasMenu=${menu?.id === one.id} on=${on} />`)}
            </ul>
          </section>`)}
        ${all.length === 0 && html`<p class="no-conversations">Your conversations appear here.</p>`}
        ${list.hasMore && html`<button type="button" class="quiet" id="more-conversations" onClick=${on.loadMore}>Older ones</button>`}
      </nav>`;
  }
}

class Row extends Component {
  shouldComponentUpdate(/** @type {any} */ next) {
    return Object.keys(next).some((name) => next[name] !== this.props[name]);
  }

  render(/** @type {{ conversation: Conversation, isCurrent: boolean, isTabbable: boolean, hasMenu: boolean, on: On }} */ { conversation, isCurrent, isTabbable, hasMenu, on }) {
    const { id } = conversation;
    const title = titleOf(conversation);
    const showMenu = (/** @type {Event} */ event) => {
      event.preventDefault();
      const row = /** @type {Element} */ (event.currentTarget).closest("li");
      const { top, bottom } = /** @type {Element} */ (row).getBoundingClientRect();
      on.showMenu(hasMenu ? null : { id, top, bottom });
    };
    return html`
      <li data-row=${id} class=${hasMenu ? "has-menu" : ""} onContextMenu=${showMenu}>
        <a dir="auto" href=${`#${id}`} data-id=${id} tabindex=${isTabbable ? 0 : -1} aria-current=${isCurrent ? "page" : null} title=${title} onFocus=${() => on.tab(id)}>${title}</a>
        <button type="button" class="icon" tabindex=${isTabbable ? 0 : -1} aria-haspopup="menu" aria-expanded=${String(hasMenu)}
          aria-label=${`More for “${title}”`} title="More" onFocus=${() => on.tab(id)} onClick=${showMenu}>${icon("more")}</button>
      </li>`;
  }
}

/** What can be done with a conversation. */
class Menu extends Component {
  #closing = new AbortController();

  componentDidMount() {
    const { signal } = this.#closing;
    const { height } = this.base.getBoundingClientRect();
    const { menu } = this.props;
    const isBelow = menu.bottom + height <= innerHeight;
    this.base.style.top = `${Math.max(4, isBelow ? menu.bottom : menu.top - height)}px`;
    this.base.querySelector("button").focus();
    // What is clicked beside it is clicked.
    document.addEventListener("pointerdown", (event) => { if (!this.base.contains(event.target)) this.#close(false); }, { signal });
    sidebar.addEventListener("scroll", () => this.#close(false), { signal, capture: true });
    window.addEventListener("resize", () => this.#close(false), { signal });
  }

  componentWillUnmount() {
    this.#closing.abort();
  }

  #close(movesFocus = true) {
    const { id } = this.props.menu;
    this.props.on.showMenu(null);
    if (movesFocus) /** @type {HTMLElement | null} */ (sidebar.querySelector(`[data-row="${id}"] button`))?.focus();
  }

  #keys(/** @type {KeyboardEvent} */ event) {
    const items = /** @type {HTMLElement[]} */ ([...this.base.querySelectorAll("button")]);
    const index = items.indexOf(/** @type {HTMLElement} */ (document.activeElement));
    const to = { ArrowDown: index + 1, ArrowUp: index - 1, Home: 0, End: -1 }[event.key];
    if (to !== undefined) items.at(to % items.length)?.focus();
    else if (event.key === "Escape" || event.key === "Tab") this.#close();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  render(/** @type {{ state: State, menu: NonNullable<State["menu"]>, on: On }} */ { state, menu, on }) {
    const { id } = menu;
    const conversation = conversationOf(state, id);
    if (!conversation) return html`<div></div>`;
    const item = (/** @type {string} */ label, /** @type {string} */ picture, /** @type {() => void} */ run, kind = "") => html`
      <button type="button" role="menuitem" tabindex="-1" class=${kind} onClick=${() => { this.#close(); run(); }}>${icon(picture)}${label}</button>`;
    const isPinned = Boolean(conversation.pinned);
    return html`
      <div class="menu" role="menu" aria-label=${titleOf(conversation)} onKeyDown=${(/** @type {KeyboardEvent} */ event) => this.#keys(event)}>
        ${item(isPinned ? "Unpin" : "Pin", "pin", () => on.pin(id, !isPinned))}
        ${item("Rename", "edit", () => on.rename(id))}
        ${item("Duplicate", "copy", () => on.duplicate(id))}
        ${item("Save as Markdown", "download", () => on.save(id, "md"))}
        ${item("Save as JSON", "download", () => on.save(id, "json"))}
        ${item("Delete", "delete", () => on.remove(id), "deletes")}
      </div>`;
  }
}

/** What a search has found. */
function Found(/** @type {{ state: State, on: On }} */ { state, on }) {
  const { query, hits, hasMore, problem } = state.search;
  const shown = hits?.filter(({ conversation }) => !state.hidden.has(conversation.id)) ?? null;
  const words = query.trim().split(/\s+/);
  return html`
    <nav id="found" aria-label="Found" onKeyDown=${throughRows}>
      <p class="no-conversations" role="status">${problem || (!shown ? "Searching…" : shown.length === 0 ? "Nothing was found." : "")}</p>
      <ul>${shown?.map(({ conversation, turn, excerpt }) => html`
        <li key=${`${conversation.id} ${turn}`}>
          <a dir="auto" href=${`#${conversation.id}`} data-id=${conversation.id} aria-current=${conversation.id === state.current ? "page" : null}
            onClick=${() => on.open(conversation.id, turn)}>
            <b>${marked(titleOf(conversation), words)}</b>
            ${turn && html`<span dir="auto">${marked(unmarkedDown(excerpt), words)}</span>`}
          </a>
        </li>`)}
      </ul>
      ${hasMore && html`<button type="button" class="quiet" onClick=${on.findMore}>More</button>`}
    </nav>`;
}

/** A piece of Markdown as words: without fences, and without what is around words that stand out. */
function unmarkedDown(/** @type {string} */ text) {
  return text.replace(/```\w*|`|\*\*|(?<!\S)\*(?=\p{L})|(?<=\p{L})\*(?!\p{L})|(?<!\S)#{1,6}(?=\s)/gu, "").replace(/\s+/g, " ");
}

/** A text with the words marked that it was found by. */
function marked(/** @type {string} */ text, /** @type {string[]} */ words) {
  const any = words.map((word) => word.replace(/[^\p{L}\p{N}]+/gu, "")).filter(Boolean).join("|");
  if (!any) return text;
  return text.split(new RegExp(`((?<![\\p{L}\\p{N}])(?:${any})[\\p{L}\\p{N}]*)`, "giu"))
    .map((part, index) => (index % 2 === 1 ? html`<mark>${part}</mark>` : part));
}

function Toast(/** @type {{ conversation: Conversation, on: On }} */ { conversation, on }) {
  return html`
    <div class="toast">
      <p>Deleted <bdi>“${titleOf(conversation)}”</bdi></p>
      <button type="button" class="quiet" onClick=${on.undo}>Undo</button>
      <button type="button" class="icon" aria-label="Delete now" title="Delete now" onClick=${on.deleteNow}>${icon("close")}</button>
    </div>`;
}
