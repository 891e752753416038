/**
 * What the page knows, in one place, and views of it.
 *
 * A part of the state is replaced, never changed. What follows from the state is no part of it: views
 * compute it.
 */

import { render } from "./vendor/htm-preact.js";

/** @template {object} S */
export class Store {
  #state;
  /** @type {Set<() => void>} */ #listeners = new Set();

  constructor(/** @type {S} */ state) {
    this.#state = state;
  }

  get state() { return this.#state; }

  /** Replaces these parts. */
  update(/** @type {Partial<S>} */ parts) {
    this.#state = { ...this.#state, ...parts };
    for (const listener of this.#listeners) listener();
  }

  /**
   * Calls `use` now, and whenever one of these parts has changed.
   * @param {readonly (keyof S)[]} names
   * @param {(state: S) => void} use
   */
  watch(names, use) {
    /** @type {S | null} */ let used = null;
    const listener = () => {
      const state = this.#state;
      if (used && names.every((name) => state[name] === used?.[name])) return;
      used = state;
      use(state);
    };
    this.#listeners.add(listener);
    listener();
  }

  /**
   * Draws what `view` makes of these parts into an element.
   * @param {Element} node
   * @param {readonly (keyof S)[]} names
   * @param {(state: S) => import("./vendor/htm-preact.js").Child} view
   */
  mount(node, names, view) {
    this.watch(names, (state) => render(view(state), node));
  }
}
