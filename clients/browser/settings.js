/**
 * The user's settings: model, system prompt, sampling, theme. Kept in this browser, and, but for the theme,
 * with each conversation, in its metadata.
 */

import { byId } from "./dom.js";
import { TOOLS } from "./tools.js";

const ITEM = "penstock.settings";
const SAMPLING = ["temperature", "top_p", "min_p"];
const NUMBERS = [...SAMPLING, "max_output_tokens"];
const SWITCHES = ["tools", "think"];
/** What is kept with a conversation. */
const OF_CONVERSATION = ["model", "instructions", ...NUMBERS, ...SWITCHES];
const MAX_VALUE = 500; // characters of a value of metadata; the server takes 512
const MAX_VALUES = 8;
/** An answer ends when it ends with a pattern of so many tokens for the fourth time. */
const LOOPS = { min_pattern_size: 16, max_pattern_size: 64, min_count: 4 };
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
      repetition_detection: LOOPS,
      ...this.#sampling[this.model],
    };
    if (this.#values.instructions?.trim()) found.instructions = this.#values.instructions;
    for (const name of NUMBERS) if (this.#values[name]) found[name] = Number(this.#values[name]);
    if (this.hasTools) found.tools = TOOLS;
    // Said either way: left to themselves, some models think.
    found.reasoning = { effort: this.choices.think || "none" };
    return found;
  }

  get choices() {
    const { think = "", tools = "" } = this.#values;
    const effort = think && think !== "high" ? "low" : think;
    return { models: [...models.options].map(({ value }) => value), model: this.model, think: effort, tools };
  }

  /** Changes one of them. */
  set(/** @type {string} */ name, /** @type {string} */ value) {
    this.#values[name] = value;
    this.#keep();
  }

  /** Those of a conversation; null: what was chosen last. */
  adopt(/** @type {Record<string, string> | null} */ metadata) {
    const own = metadata && fromMetadata(metadata);
    const { theme = "auto" } = this.#values;
    this.#values = { ...(own ?? read()), theme };
    if (models.options.length > 0 && ![...models.options].some(({ value }) => value === this.#values.model)) delete this.#values.model;
    for (const name of NUMBERS) if (!isValid(name, this.#values[name])) delete this.#values[name];
    if (dialog.open) this.#fill();
  }

  /** As a conversation's metadata. @returns {Record<string, string>} */
  get metadata() {
    const kept = Object.fromEntries(OF_CONVERSATION.flatMap((name) => (this.#values[name] ? [[name, this.#values[name]]] : [])));
    kept.model = this.model;
    const text = JSON.stringify(kept).replace(/[^ -~]/g, (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`);
    if (text.length > MAX_VALUE * MAX_VALUES) return {}; // a system prompt of many pages stays in this browser
    const parts = text.match(new RegExp(`.{1,${MAX_VALUE}}`, "g")) ?? [];
    return Object.fromEntries(parts.map((part, index) => [`settings_${index}`, part]));
  }

  /** Whether the model may call the page's tools. */
  get hasTools() {
    return Boolean(this.#values.tools);
  }

  #take() {
    for (const [name, value] of new FormData(form)) {
      if (SWITCHES.includes(name)) continue;
      const field = fieldOf(name);
      // A radio group has no validity of its own; a number that is out of range is not taken.
      if (field instanceof RadioNodeList || field.validity.valid) this.#values[name] = String(value);
    }
    for (const name of SWITCHES) this.#values[name] = fieldOf(name).checked ? this.#values[name] || "on" : "";
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

/** The settings in a conversation's metadata; null: it has none. @returns {Record<string, string> | null} */
function fromMetadata(/** @type {Record<string, string>} */ metadata) {
  let text = "";
  for (let index = 0; metadata[`settings_${index}`]; index += 1) text += metadata[`settings_${index}`];
  return text ? stringsOf(text) : null;
}

/** What was kept, as far as it can be one of ours. @returns {Record<string, string>} */
function read() {
  try {
    return stringsOf(localStorage.getItem(ITEM) ?? "{}");
  } catch {
    return {};
  }
}

/** @returns {Record<string, string>} */
function stringsOf(/** @type {string} */ text) {
  try {
    const kept = Object.entries(JSON.parse(text) ?? {});
    return Object.fromEntries(kept.filter(([, value]) => typeof value === "string"));
  } catch {
    return {};
  }
}
