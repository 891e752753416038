/**
 * The user's settings: model, system prompt, sampling, theme. Kept in this browser; conversations are
 * not.
 */

import { byId } from "./dom.js";
import { TOOLS } from "./tools.js";

const ITEM = "penstock.settings";
const SAMPLING = ["temperature", "top_p", "min_p"];
const NUMBERS = [...SAMPLING, "max_output_tokens"];
const SWITCHES = ["tools", "think"];
const dialog = /** @type {HTMLDialogElement} */ (byId("settings-dialog"));
const form = /** @type {HTMLFormElement} */ (byId("settings-form"));
const models = /** @type {HTMLSelectElement} */ (byId("setting-model"));

export class Settings {
  /** @type {Record<string, string>} */ #values;
  /** By model: what holds where the user says nothing. @type {Record<string, Record<string, number>>} */ #sampling = {};
  #onChange;

  constructor(/** @type {() => void} */ onChange) {
    this.#values = read();
    for (const name of NUMBERS) if (!isValid(name, this.#values[name])) delete this.#values[name];
    this.#onChange = onChange;
    this.#applyTheme();
    form.addEventListener("input", () => this.#take());
    models.addEventListener("change", () => this.#hint());
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

  /**
   * Offers these models; one that was chosen and is gone is forgotten.
   * @param {string[]} offered
   * @param {Record<string, Record<string, number>>} sampling  how each is sampled, unless the user says
   */
  offer(offered, sampling) {
    this.#sampling = sampling;
    models.replaceChildren(...offered.map((name) => new Option(name, name)));
    if (!offered.includes(this.#values.model)) delete this.#values.model;
    models.value = this.model;
    this.#hint();
  }

  get model() {
    return this.#values.model ?? models.options[0]?.value ?? "";
  }

  /** What a request is to carry of it. @returns {Record<string, any> & { model: string }} */
  parameters() {
    /** @type {Record<string, any> & { model: string }} */ const found = {
      model: this.model,
      ...this.#sampling[this.model],
    };
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
      const field = fieldOf(name);
      // A radio group has no validity of its own; a number that is out of range is not taken.
      if (field instanceof RadioNodeList || field.validity.valid) this.#values[name] = String(value);
    }
    for (const name of SWITCHES) this.#values[name] = fieldOf(name).checked ? "on" : "";
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
      fieldOf(name).value = this.#values[name] ?? "";
    }
    for (const name of SWITCHES) fieldOf(name).checked = Boolean(this.#values[name]);
    models.value = this.model;
    this.#hint();
    /** @type {RadioNodeList} */ (form.elements.namedItem("theme")).value = this.#values.theme ?? "auto";
  }

  /** Shows what is sent for a field that is empty. */
  #hint() {
    for (const name of SAMPLING) {
      const usual = this.#sampling[models.value]?.[name];
      fieldOf(name).placeholder = usual === undefined ? "default" : String(usual);
    }
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

function fieldOf(/** @type {string} */ name) {
  return /** @type {HTMLInputElement} */ (form.elements.namedItem(name));
}

/** Whether a number that was kept is one that its field would take. */
function isValid(/** @type {string} */ name, /** @type {string | undefined} */ value) {
  const field = fieldOf(name);
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
