/**
 * The user's settings: model, system prompt, sampling, theme. Kept in this browser; conversations are
 * not.
 */

import { byId } from "./dom.js";
import { TOOLS } from "./tools.js";

const ITEM = "penstock.settings";
const NUMBERS = ["temperature", "top_p", "max_output_tokens"];
const SWITCHES = ["tools", "think"];
const dialog = /** @type {HTMLDialogElement} */ (byId("settings-dialog"));
const form = /** @type {HTMLFormElement} */ (byId("settings-form"));
const models = /** @type {HTMLSelectElement} */ (byId("setting-model"));

export class Settings {
  /** @type {Record<string, string>} */ #values;
  #onChange;

  constructor(/** @type {() => void} */ onChange) {
    this.#values = read();
    for (const name of NUMBERS) if (!isValid(name, this.#values[name])) delete this.#values[name];
    this.#onChange = onChange;
    this.#applyTheme();
    form.addEventListener("input", () => this.#take());
    byId("settings-reset").addEventListener("click", () => this.#reset());
    byId("settings-close").addEventListener("click", () => { if (form.reportValidity()) dialog.close(); });
    form.addEventListener("submit", (event) => { event.preventDefault(); dialog.close(); });
  }

  close() {
    dialog.close();
  }

  open() {
    this.#fill();
    dialog.showModal();
  }

  /** Offers these models; one that was chosen and is gone is forgotten. */
  offer(/** @type {string[]} */ offered) {
    models.replaceChildren(...offered.map((name) => new Option(name, name)));
    if (!offered.includes(this.#values.model)) delete this.#values.model;
    models.value = this.model;
  }

  get model() {
    return this.#values.model ?? models.options[0]?.value ?? "";
  }

  /** What a request is to carry of it. @returns {Record<string, any> & { model: string }} */
  parameters() {
    /** @type {Record<string, any> & { model: string }} */ const found = { model: this.model };
    if (this.#values.instructions?.trim()) found.instructions = this.#values.instructions;
    for (const name of NUMBERS) if (this.#values[name]) found[name] = Number(this.#values[name]);
    if (this.hasTools) found.tools = TOOLS;
    // Said either way: left to themselves, some models think.
    found.reasoning = { effort: this.#values.think ? "low" : "none" };
    return found;
  }

  /** Whether the model may call the page's tools. */
  get hasTools() {
    return Boolean(this.#values.tools);
  }

  #take() {
    for (const [name, value] of new FormData(form)) {
      const field = /** @type {HTMLInputElement} */ (form.elements.namedItem(name));
      // A radio group has no validity of its own; a number that is out of range is not taken.
      if (field instanceof RadioNodeList || field.validity.valid) this.#values[name] = String(value);
    }
    for (const name of SWITCHES) this.#values[name] = switchOf(name).checked ? "on" : "";
    this.#keep();
  }

  #reset() {
    const { theme = "auto" } = this.#values;
    this.#values = { theme };
    this.#fill();
    this.#keep();
  }

  #fill() {
    for (const name of ["instructions", ...NUMBERS]) {
      /** @type {HTMLInputElement} */ (form.elements.namedItem(name)).value = this.#values[name] ?? "";
    }
    for (const name of SWITCHES) switchOf(name).checked = Boolean(this.#values[name]);
    models.value = this.model;
    /** @type {RadioNodeList} */ (form.elements.namedItem("theme")).value = this.#values.theme ?? "auto";
  }

  #keep() {
    this.#applyTheme();
    try {
      localStorage.setItem(ITEM, JSON.stringify(this.#values));
    } catch {} // a browser that keeps nothing: good until the page is left
    this.#onChange();
  }

  #applyTheme() {
    document.documentElement.dataset.theme = this.#values.theme ?? "auto";
  }
}

function switchOf(/** @type {string} */ name) {
  return /** @type {HTMLInputElement} */ (form.elements.namedItem(name));
}

/** Whether a number that was kept is one that its field would take. */
function isValid(/** @type {string} */ name, /** @type {string | undefined} */ value) {
  const field = /** @type {HTMLInputElement} */ (form.elements.namedItem(name));
  field.value = value ?? "";
  return field.value !== "" && field.validity.valid;
}

/** What was kept, as far as it can be one of ours. @returns {Record<string, string>} */
function read() {
  try {
    const kept = Object.entries(JSON.parse(localStorage.getItem(ITEM) ?? "{}") ?? {});
    return Object.fromEntries(kept.filter(([, value]) => typeof value === "string"));
  } catch {
    return {};
  }
}
