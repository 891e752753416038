/**
 * Messages that are written and not sent, by conversation. They are kept in this tab's session
 * storage: over a reload, and until the tab is closed.
 */

/** @typedef {import("./conversations.js").Part} Part */
/** @typedef {Readonly<{ text: string, images: readonly Part[] }>} Message  of the user */

const TEXT = "penstock.draft.", IMAGES = "penstock.draft-images.";
/** Where there is no session storage, or no room in it: until a reload. @type {Map<string, Message>} */
const drafts = new Map();

/** @type {Message} */ export const NOTHING = { text: "", images: [] };

/** Whether there is nothing to send. */
export function isEmpty(/** @type {Message} */ { text, images }) {
  return !text.trim() && images.length === 0;
}

/** The draft of a conversation (null: of a new one). */
export function draftOf(/** @type {string | null} */ id) {
  const key = id ?? "";
  const known = drafts.get(key);
  if (known) return known;
  try {
    const images = /** @type {Part[]} */ (JSON.parse(sessionStorage.getItem(IMAGES + key) ?? "[]"));
    return { text: sessionStorage.getItem(TEXT + key) ?? "", images };
  } catch {
    return NOTHING;
  }
}

/** Keeps a draft; an empty one is forgotten. */
export function keepDraft(/** @type {string | null} */ id, /** @type {Message} */ draft) {
  const key = id ?? "";
  const isNew = draft.images !== drafts.get(key)?.images; // they are long, and text comes by letters
  drafts.set(key, draft);
  store(TEXT + key, draft.text);
  if (isNew) store(IMAGES + key, draft.images.length > 0 ? JSON.stringify(draft.images) : "");
}

function store(/** @type {string} */ name, /** @type {string} */ text) {
  try {
    sessionStorage.removeItem(name);
    if (text) sessionStorage.setItem(name, text);
  } catch {}
}
