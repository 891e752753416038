/**
 * The sidebar with the list of conversations; on a narrow screen it covers the open conversation.
 */

import { byId } from "./dom.js";

const sidebar = byId("sidebar");
const rest = byId("pane");
const toggle = byId("toggle-list");
const backdrop = byId("backdrop");
const narrow = matchMedia("(max-width: 860px)");

export class Sidebar {
  constructor() {
    toggle.addEventListener("click", () => this.toggle());
    byId("close-list").addEventListener("click", () => this.#set(false));
    backdrop.addEventListener("click", () => this.#set(false));
    sidebar.addEventListener("click", (event) => {
      if (/** @type {Element} */ (event.target).closest("a")) this.closeOverlay();
    });
    sidebar.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !narrow.matches) return;
      event.stopPropagation();
      this.#set(false);
    });
    narrow.addEventListener("change", () => this.#set(!narrow.matches));
    this.#set(!narrow.matches, { movesFocus: false });
  }

  toggle() {
    this.#set(sidebar.hidden);
  }

  /** Where it lies over the conversation: away with it. */
  closeOverlay() {
    if (narrow.matches && !sidebar.hidden) this.#set(false);
  }

  #set(/** @type {boolean} */ isOpen, { movesFocus = narrow.matches } = {}) {
    const isOverlay = isOpen && narrow.matches;
    sidebar.hidden = !isOpen;
    backdrop.hidden = !isOverlay;
    rest.inert = isOverlay;
    toggle.setAttribute("aria-expanded", String(isOpen));
    if (movesFocus) (isOpen ? byId("new-chat") : toggle).focus();
  }
}
