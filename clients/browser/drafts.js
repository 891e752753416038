/**
 * Messages that are written and not sent, by conversation. They are kept in this tab's session
 * storage: over a reload, and until the tab is closed.
 */

/** @typedef {import("./conversations.js").Part} Part */
/**
 * What the user says. Attachments: images, and texts of files, which have names.
 * @typedef {Readonly<{ text: string, attachments: readonly Part[] }>} Message
 */

const TEXT = "penstock.draft.", ATTACHMENTS = "penstock.draft-attachments.";
/** Where there is no session storage, or no room in it: until a reload. @type {Map<string, Message>} */
const drafts = new Map();

/** @type {Message} */ export const NOTHING = { text: "", attachments: [] };

/** Whether there is nothing to send. */
export function isEmpty(/** @type {Message} */ { text, attachments }) {
  return !text.trim() && attachments.length === 0;
}

/** The draft of a conversation (null: of a new one). */
export function draftOf(/** @type {string | null} */ id) {
  const key = id ?? "";
  const known = drafts.get(key);
  if (known) return known;
  try {
    const attachments = /** @type {Part[]} */ (JSON.parse(sessionStorage.getItem(ATTACHMENTS + key) ?? "[]"));
    return { text: sessionStorage.getItem(TEXT + key) ?? "", attachments };
  } catch {
    return NOTHING;
  }
}

/** Keeps a draft; an empty one is forgotten. */
export function keepDraft(/** @type {string | null} */ id, /** @type {Message} */ draft) {
  const key = id ?? "";
  const isNew = draft.attachments !== drafts.get(key)?.attachments; // they are long, and text comes by letters
  drafts.set(key, draft);
  store(TEXT + key, draft.text);
  if (isNew) store(ATTACHMENTS + key, draft.attachments.length > 0 ? JSON.stringify(draft.attachments) : "");
}

function store(/** @type {string} */ name, /** @type {string} */ text) {
  try {
    sessionStorage.removeItem(name);
    if (text) sessionStorage.setItem(name, text);
  } catch {}
}
