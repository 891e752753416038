/**
 * Parts of views.
 */

import { html } from "./vendor/htm-preact.js";

/** One of the page's pictures: a symbol of `index.html`. */
export function icon(/** @type {string} */ name) {
  return html`<svg viewBox="0 0 20 20" aria-hidden="true"><use href=${`#icon-${name}`} /></svg>`;
}

/**
 * Draws a dialog, and opens and closes it as a part of the state says.
 * @template {object} S
 * @param {import("./store.js").Store<S>} store
 * @param {object} given
 * @param {HTMLDialogElement} given.dialog
 * @param {keyof S} given.part
 * @param {(state: S) => boolean} given.isOpen
 * @param {(state: S) => import("./vendor/htm-preact.js").Child} given.view  while it is open
 * @param {() => void} given.close  called when the reader has closed it
 */
export function mountDialog(store, { dialog, part, isOpen, view, close }) {
  store.mount(dialog, [part], (state) => isOpen(state) && view(state));
  store.watch([part], (state) => {
    if (isOpen(state) && !dialog.open) dialog.showModal();
    else if (!isOpen(state) && dialog.open) dialog.close();
  });
  dialog.addEventListener("close", () => { if (isOpen(store.state)) close(); });
}
