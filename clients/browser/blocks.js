/**
 * Thoughts and tool calls of an answer, as blocks that open and close.
 */

import { icon, make } from "./dom.js";
import { MarkdownStream } from "./markdown.js";
import { Colours, setFormula } from "./markdown-extras.js";

/** @typedef {import("./answer.js").Block} Block */

/** The blocks of one turn, in the order in which they came: groups of them, with text between. */
export class Blocks {
  #group = make("div", "blocks");
  /** @type {Map<string, { details: HTMLDetailsElement, title: HTMLElement, body: HTMLElement, isTouched: boolean, startedAt: number, markdown: MarkdownStream, numShown: number }>} */
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
    view.details.classList.toggle("is-running", !block.isDone);
    if (block.kind === "reasoning") {
      const seconds = view.startedAt > 0 ? Math.round((performance.now() - view.startedAt) / 1000) : 0;
      if (!block.isDone) view.startedAt ||= performance.now();
      view.title.textContent = !block.isDone ? "Thinking…" : seconds > 0 ? `Thought for ${timeText(seconds)}` : "Thought";
      view.markdown.append(block.text.slice(view.numShown));
      view.numShown = block.text.length;
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
    const summary = make("summary");
    const title = make("span", "block-title");
    const body = make(block.kind === "call" ? "pre" : "div", block.kind === "call" ? "said" : "said thought");
    if (block.callId) details.dataset.call = block.callId;
    if (block.kind === "call") {
      body.dir = "auto";
      body.setAttribute("aria-label", "Arguments");
    }
    summary.append(icon(block.kind === "call" ? "tool" : "thought"), title);
    details.append(summary, body);
    const markdown = new MarkdownStream(body, { Colours, setFormula });
    const view = { details, title, body, isTouched: false, startedAt: 0, markdown, numShown: 0 };
    summary.addEventListener("click", () => { view.isTouched = true; });
    this.#shown.set(block.id, view);
    this.#group.append(details);
    return view;
  }
}

function timeText(/** @type {number} */ seconds) {
  return seconds < 60 ? `${seconds} s` : `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
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
