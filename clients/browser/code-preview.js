/**
 * Code of HTML or SVG as the page that it makes, in a dialog.
 *
 * It is drawn by `preview.html`, which the server sends with a policy of its own: an origin that nobody else has, without
 * network, forms, popups and storage. The page's own policy would not let it have styles and scripts.
 */

import { button, make } from "./dom.js";

/** Shows it until the reader has had enough. */
export function showPage(/** @type {string} */ code) {
  const dialog = /** @type {HTMLDialogElement} */ (make("dialog", "comparison preview"));
  const title = make("h2", "", "Preview");
  title.id = "preview-title";
  dialog.setAttribute("aria-labelledby", title.id);
  const frame = /** @type {HTMLIFrameElement} */ (make("iframe"));
  frame.setAttribute("sandbox", "allow-scripts");
  frame.title = "The page that the code makes";
  frame.src = new URL("./preview.html", document.baseURI).href;
  frame.addEventListener("load", () => frame.contentWindow?.postMessage(code, "*"), { once: true });
  const head = make("div", "comparison-head");
  head.append(title, button({ label: "Close", picture: "close", run: () => dialog.close() }));
  dialog.append(head, frame);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
