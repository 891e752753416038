/**
 * The state of the chat page, and how it begins.
 */

import { NOTHING } from "./drafts.js";
import { NO_SETTINGS } from "./settings.js";
import { Store } from "./store.js";

/** @typedef {import("./conversations.js").Conversation} Conversation */
/**
 * The list of conversations, as far as it is loaded.
 * @typedef {object} Listed
 * @property {readonly Conversation[]} recent  the last used first; pinned ones are among them
 * @property {readonly Conversation[]} pinned
 * @property {boolean} hasMore  older ones
 * @property {string} kept  where conversations are kept, in words
 */
/**
 * A search over all conversations.
 * @typedef {object} Search
 * @property {string} query  empty: there is none
 * @property {readonly import("./conversations.js").Hit[] | null} hits  null: they are on their way
 * @property {boolean} hasMore
 * @property {string} problem
 */
/**
 * The connection to the server.
 * @typedef {object} Link
 * @property {"connecting" | "open" | "restarting" | "waiting" | "unauthorized" | "closed"} state  restarting: the engine, not the server
 * @property {boolean} hasSocket
 * @property {string} failure  why there is none
 */
/**
 * What can be sent now.
 * @typedef {object} Sending
 * @property {boolean} canAsk
 * @property {boolean} canSteer  a message would interrupt the answer that comes
 * @property {boolean} isAnswering
 * @property {boolean} isStopping  the answer, as the reader wants
 */
/**
 * What is said below the message box.
 * @typedef {object} Notes
 * @property {string} obstacle  why the last wish to send something had no effect; empty once it would have
 * @property {string} refusal  why something is not, or not any more, part of what was sent
 * @property {string} progress  how the answer under way gets on
 */
/**
 * @typedef {object} State
 * @property {Listed} list
 * @property {Search} search
 * @property {string | null} current  the id of the open conversation
 * @property {string | null} tabbable  the row of the list that Tab leads to
 * @property {{ id: string, top: number, bottom: number } | null} menu  of which row, and where its button is
 * @property {ReadonlySet<string>} hidden  ids of those that are about to be deleted
 * @property {{ models: readonly string[], model: string, think: string, tools: string }} choices  what is asked for next
 * @property {{ used: number, limit: number } | null} context  tokens of the open conversation, where known
 * @property {typeof NO_SETTINGS} settings
 * @property {Conversation | null} undoable  the one among them that can still be taken back
 * @property {Conversation | null} renamed  the one that is to get another title
 * @property {{ title: string, text: string } | null} news  what must not be missed
 * @property {Link} link
 * @property {Sending} sending
 * @property {Notes} notes
 * @property {import("./drafts.js").Message} message  that is being written
 * @property {boolean} isNew  the open conversation has nothing in it yet
 * @property {boolean} isLoading  the open conversation is on its way
 */

/** @type {Search} */ export const NO_SEARCH = { query: "", hits: null, hasMore: false, problem: "" };

export function newStore() {
  return new Store(/** @type {State} */ ({
    list: { recent: [], pinned: [], hasMore: false, kept: "" },
    search: NO_SEARCH,
    current: null,
    tabbable: null,
    menu: null,
    hidden: new Set(),
    undoable: null,
    choices: { models: [], model: "", think: "", tools: "" },
    context: null,
    settings: NO_SETTINGS,
    renamed: null,
    news: null,
    link: { state: "connecting", hasSocket: true, failure: "unreachable" },
    sending: { canAsk: false, canSteer: false, isAnswering: false, isStopping: false },
    notes: { obstacle: "", refusal: "", progress: "" },
    message: NOTHING,
    isNew: true,
    isLoading: false,
  }));
}

export function titleOf(/** @type {Conversation} */ { metadata, created_at }) {
  return metadata.title || `Conversation of ${new Date(created_at * 1000).toLocaleString()}`;
}

/** A conversation that is listed or was found. @returns {Conversation | undefined} */
export function conversationOf(/** @type {State} */ { list, search }, /** @type {string} */ id) {
  return [...list.pinned, ...list.recent, ...(search.hits ?? []).map((hit) => hit.conversation)]
    .find((one) => one.id === id);
}

const DAY_MS = 86_400_000;

/**
 * The list as it is read: pinned ones, and the others by the day of their last use.
 * @param {Listed} list
 * @param {ReadonlySet<string>} hidden  ids
 * @param {Date} [now]
 * @returns {{ title: string, conversations: Conversation[] }[]}
 */
export function sectionsOf({ recent, pinned }, hidden, now = new Date()) {
  const shown = (/** @type {Conversation} */ { id }) => !hidden.has(id);
  const isPinned = new Set(pinned.map(({ id }) => id));
  const today = new Date(now.getFullYear(), now.getMonth(), now.getDate()).getTime();
  /** @type {{ title: string, conversations: Conversation[] }[]} */
  const sections = [{ title: "Pinned", conversations: pinned.filter(shown) }];
  for (const one of recent.filter(shown)) {
    if (isPinned.has(one.id)) continue;
    const title = dayOf(usedAt(one) * 1000, today, now);
    if (sections.at(-1)?.title !== title) sections.push({ title, conversations: [] });
    sections[sections.length - 1].conversations.push(one);
  }
  return sections.filter(({ conversations }) => conversations.length > 0);
}

function usedAt(/** @type {Conversation} */ { used_at, created_at }) {
  return used_at ?? created_at;
}

function dayOf(/** @type {number} */ time, /** @type {number} */ today, /** @type {Date} */ now) {
  if (time >= today) return "Today";
  if (time >= today - DAY_MS) return "Yesterday";
  if (time >= today - 6 * DAY_MS) return "Last 7 days";
  if (time >= today - 29 * DAY_MS) return "Last 30 days";
  const date = new Date(time);
  const year = date.getFullYear() === now.getFullYear() ? undefined : "numeric";
  return date.toLocaleDateString(undefined, { month: "long", year });
}
