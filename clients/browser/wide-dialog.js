/**
 * A dialog as wide as the screen lets it be, made when it is shown, and gone when the reader has had enough.
 */

import { button, make } from "./dom.js";

/** Shows it. @returns {HTMLDialogElement} */
export function showWideDialog(
  /** @type {{ kind: string, title: string, body: HTMLElement }} */ { kind, title, body },
) {
  const dialog = /** @type {HTMLDialogElement} */ (make("dialog", `wide-dialog ${kind}`));
  const name = make("h2", "", title);
  name.id = `${kind}-title`;
  dialog.setAttribute("aria-labelledby", name.id);
  const head = make("div", "wide-dialog-head");
  head.append(name, button({ label: "Close", picture: "close", run: () => dialog.close() }));
  dialog.append(head, body);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}
