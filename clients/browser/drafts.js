/**
 * Messages that are written and not sent, by conversation. They are kept in this tab's session
 * storage: over a reload, and until the tab is closed.
 */

/** @typedef {import("./conversations.js").Part} Part */
/** @typedef {Readonly<{ text: string, images: readonly Part[] }>} Message  of the user */

const PREFIX = "penstock.draft.";
/** Where there is no session storage, or no room in it: until a reload. @type {Map<string, Message>} */
const drafts = new Map();

/** @type {Message} */ export const NOTHING = { text: "", images: [] };

/** Whether there is anything to send. */
export function isEmpty(/** @type {Message} */ { text, images }) {
  return !text.trim() && images.length === 0;
}

/** The draft of a conversation (null: of a new one). */
export function draftOf(/** @type {string | null} */ id) {
  const name = PREFIX + (id ?? "");
  return drafts.get(name) ?? read(name);
}

/** Keeps a draft; an empty one is forgotten. */
export function keepDraft(/** @type {string | null} */ id, /** @type {Message} */ draft) {
  const name = PREFIX + (id ?? "");
  drafts.set(name, draft);
  try {
    sessionStorage.removeItem(name);
    if (draft.text) sessionStorage.setItem(name, JSON.stringify({ ...draft, images: [] }));
    if (draft.images.length > 0) sessionStorage.setItem(name, JSON.stringify(draft)); // if there is room
  } catch {}
}

/** @returns {Message} */
function read(/** @type {string} */ name) {
  try {
    const { text = "", images = [] } = JSON.parse(sessionStorage.getItem(name) ?? "{}");
    return { text, images };
  } catch {
    return NOTHING;
  }
}
