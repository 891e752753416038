/**
 * Asking for the API key. It is kept in this tab's session storage and nowhere else.
 */

import { byId } from "./dom.js";
import { isSendableKey } from "./penstock-client.js";

const ITEM = "penstock.apiKey";
const dialog = /** @type {HTMLDialogElement} */ (byId("key-dialog"));
const input = /** @type {HTMLInputElement} */ (byId("key-input"));
const complaint = byId("key-error");

export function storedKey() {
  try {
    return sessionStorage.getItem(ITEM);
  } catch {
    return null;
  }
}

/** Null: forgets it. Without session storage, the page asks again after a reload. */
function store(/** @type {string | null} */ key) {
  try {
    if (key) sessionStorage.setItem(ITEM, key);
    else sessionStorage.removeItem(ITEM);
  } catch {}
}

/** Asks for a key; one that was kept was not accepted. */
export function askForKey() {
  const rejected = storedKey();
  store(null);
  complaint.textContent = rejected ? "The server did not accept this key." : "";
  if (!dialog.open) dialog.showModal();
  input.select();
}

/** Lets the reader use another one. */
export function openKeyDialog() {
  complaint.textContent = "";
  dialog.showModal();
  input.select();
}

export function closeKeyDialog() {
  if (dialog.open) dialog.close();
}

export function listenForKey(/** @type {(key: string) => void} */ onKey) {
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = input.value.trim();
    if (!key) return;
    if (!isSendableKey(key)) {
      complaint.textContent = "This key cannot be sent: it may hold no spaces, and plain letters, digits and signs only.";
      return;
    }
    complaint.textContent = "";
    store(key);
    onKey(key);
  });
  byId("key-cancel").addEventListener("click", () => dialog.close());
}
