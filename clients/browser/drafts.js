/**
 * Messages that are written and not sent, by conversation. They are kept in this tab's session
 * storage: over a reload, and until the tab is closed.
 */

const PREFIX = "penstock.draft.";
/** Where there is no session storage, or no room in it: until a reload. @type {Map<string, string>} */
const drafts = new Map();

/** The draft of a conversation (null: of a new one); empty if there is none. */
export function draftOf(/** @type {string | null} */ id) {
  const name = PREFIX + (id ?? "");
  try {
    return drafts.get(name) ?? sessionStorage.getItem(name) ?? "";
  } catch {
    return "";
  }
}

/** Keeps a draft; an empty one is forgotten. */
export function keepDraft(/** @type {string | null} */ id, /** @type {string} */ text) {
  const name = PREFIX + (id ?? "");
  drafts.set(name, text);
  try {
    if (text) sessionStorage.setItem(name, text);
    else sessionStorage.removeItem(name);
  } catch {}
}
