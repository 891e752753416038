/**
 * Thoughts and tool calls of an answer, as blocks that open and close.
 */

import { make } from "./dom.js";

/** @typedef {import("./answer.js").Block} Block */

/** The blocks of one turn, in the order in which they came: groups of them, with text between. */
export class Blocks {
  #group = make("div", "blocks");
  /** @type {Map<string, { details: HTMLDetailsElement, title: HTMLElement, body: HTMLElement, isTouched: boolean }>} */
  #shown = new Map();

  /** Where the next blocks will be. */
  newGroup() {
    this.#group = make("div", "blocks");
    return this.#group;
  }

  has(/** @type {Block} */ block) {
    return this.#shown.has(block.id);
  }

  /** Shows a block as it is now. */
  show(/** @type {Block} */ block) {
    const view = this.#shown.get(block.id) ?? this.#add(block);
    if (block.kind === "reasoning") {
      view.title.textContent = block.isDone ? "Thought" : "Thinking…";
      view.body.textContent = block.text;
      if (!view.isTouched) view.details.open = !block.isDone; // the reader's own choice stays
    } else {
      view.title.textContent = `${block.isDone ? "Called" : "Calling"} ${block.name}`;
      view.body.textContent = readable(block.text);
    }
  }

  /** Shows what a call returned. */
  showResult(/** @type {string} */ callId, /** @type {string} */ output) {
    const found = [...this.#shown.values()].find(({ details }) => details.dataset.call === callId);
    if (!found || found.details.querySelector(".result")) return;
    const result = make("pre", "result", readable(output));
    result.setAttribute("aria-label", "Result");
    found.details.append(result);
    found.title.textContent += ` → ${output.replace(/\s+/g, " ").slice(0, 60)}`;
  }

  #add(/** @type {Block} */ block) {
    const details = /** @type {HTMLDetailsElement} */ (make("details", `block ${block.kind}`));
    const title = make("summary");
    const body = make(block.kind === "call" ? "pre" : "div", "said");
    body.dir = "auto";
    if (block.callId) details.dataset.call = block.callId;
    details.append(title, body);
    const view = { details, title, body, isTouched: false };
    title.addEventListener("click", () => { view.isTouched = true; });
    this.#shown.set(block.id, view);
    this.#group.append(details);
    return view;
  }
}

/** JSON with line breaks; any other text as it is. */
function readable(/** @type {string} */ text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" ? JSON.stringify(value, null, 2) : text;
  } catch {
    return text;
  }
}
