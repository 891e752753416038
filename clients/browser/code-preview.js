/**
 * Code of HTML or SVG as the page that it makes, in a dialog.
 *
 * It is drawn by `preview.html`, which the server sends with a policy of its own: an origin that nobody else has, without
 * network, forms, popups and storage. The page's own policy would not let it have styles and scripts.
 */

import { make } from "./dom.js";
import { showWideDialog } from "./wide-dialog.js";

/** Shows it until the reader has had enough. */
export function showPage(/** @type {string} */ code) {
  const frame = /** @type {HTMLIFrameElement} */ (make("iframe"));
  frame.setAttribute("sandbox", "allow-scripts");
  frame.title = "The page that the code makes";
  frame.src = new URL("./preview.html", document.baseURI).href;
  frame.addEventListener("load", () => frame.contentWindow?.postMessage(code, "*"), { once: true });
  showWideDialog({ kind: "preview", title: "Preview", body: frame });
}
