/**
 * Parts of views.
 */

import { html } from "./vendor/htm-preact.js";

/** One of the page's pictures: a symbol of `index.html`. */
export function icon(/** @type {string} */ name) {
  return html`<svg viewBox="0 0 20 20" aria-hidden="true"><use href=${`#icon-${name}`} /></svg>`;
}
