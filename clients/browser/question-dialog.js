/**
 * Questions and news that must not be missed, in a dialog of the page's own.
 */

import { byId } from "./dom.js";

const dialog = /** @type {HTMLDialogElement} */ (byId("question-dialog"));
const no = /** @type {HTMLButtonElement} */ (byId("question-no"));
const yes = /** @type {HTMLButtonElement} */ (byId("question-yes"));

/**
 * Whether the user says yes. The focus starts on "Cancel", and returns to where it was.
 * @param {{ title: string, text: string, yes: string }} question
 */
export function isConfirmed({ title, text, yes: label }) {
  yes.textContent = label;
  return opened(title, text, "Cancel");
}

/** Tells the user something; ends when it is closed. */
export function tell(/** @type {string} */ title, /** @type {string} */ text) {
  return opened(title, text, "Close", { isQuestion: false });
}

/** Ends the last question, if it has not ended yet. */
let settle = (/** @type {boolean} */ _) => {};
dialog.addEventListener("close", () => { if (!dialog.open) settle(isYes()); });

function isYes() {
  return dialog.returnValue === "yes";
}

/** @returns {Promise<boolean>} */
function opened(/** @type {string} */ title, /** @type {string} */ text, /** @type {string} */ closing, { isQuestion = true } = {}) {
  settle(!dialog.open && isYes()); // the event of its end may be still to come
  byId("question-title").textContent = title;
  byId("question-text").textContent = text;
  no.textContent = closing;
  yes.hidden = !isQuestion;
  if (dialog.open) dialog.close();
  dialog.returnValue = "";
  dialog.showModal();
  no.focus();
  return new Promise((resolve) => { settle = resolve; });
}
