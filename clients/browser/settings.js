/**
 * The user's settings: model, system prompt, sampling, and how the page looks; and presets of them. Kept in this
 * browser, and, but for how the page looks, with each conversation, in its metadata.
 *
 * What it does not know: how they look (`settings-dialog.js`).
 */

import { TOOLS } from "./tools.js";

/** @typedef {Record<string, string>} Values */
/** @typedef {{ name: string, values: Values }} Preset */
/** @typedef {{ name: string, label: string, min: number, max: number, step: number, hint?: string }} NumberField */

const ITEM = "penstock.settings", PRESETS = "penstock.presets";
const MAX_INT = 2 ** 53 - 1;
/** Of sampling, as `POST /v1/responses` has it. @type {NumberField[]} */
export const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: .01 },
  { name: "top_p", label: "Top p", min: .01, max: 1, step: .01 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: .01 },
  { name: "top_k", label: "Top k", min: 0, max: 1_000_000, step: 1, hint: "all" },
  { name: "top_n_sigma", label: "Top n sigma", min: 0, max: 100, step: .01, hint: "off" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: .01, hint: "0" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: .01, hint: "0" },
  { name: "repetition_penalty", label: "Repetition penalty", min: .01, max: 10, step: .01, hint: "1" },
  { name: "seed", label: "Seed", min: 0, max: MAX_INT, step: 1, hint: "random" },
  { name: "max_output_tokens", label: "Max tokens", min: 1, max: MAX_INT, step: 1, hint: "no limit" },
  { name: "min_tokens", label: "Min tokens", min: 0, max: MAX_INT, step: 1, hint: "0" },
  { name: "thinking_token_budget", label: "Tokens of thoughts", min: 0, max: MAX_INT, step: 1, hint: "no limit" },
];
const SWITCHES = ["tools", "think", "logprobs"];
const MAX_STOPS = 16;
/** How many likely tokens are shown beside the one that was chosen. */
const NUM_LIKELY = 5;
/** What a preset has. */
const OF_PRESET = ["instructions", "stop", "further", ...NUMBERS.map(({ name }) => name)];
/** Of the reader, whatever is open. */
const OF_READER = ["theme", "ctrlEnter", "markdown"];
/** What is kept with a conversation. */
const OF_CONVERSATION = ["model", ...OF_PRESET, ...SWITCHES];
/** Of requests, what the page itself says. */
const RESERVED = ["model", "input", "conversation", "previous_response_id", "stream", "store", "background", "penstock"];
const MAX_VALUE = 500; // characters of a value of metadata; the server takes 512
const MAX_VALUES = 8;
/** An answer ends when it ends with a pattern of so many tokens for the fourth time. */
const LOOPS = { min_pattern_size: 16, max_pattern_size: 64, min_count: 4 };
/** Those that come with the page. @type {Preset[]} */
const OWN_PRESETS = [
  { name: "As the model suggests", values: {} },
  { name: "Exact", values: { temperature: "0" } },
  { name: "Inventive", values: { temperature: "1.1", top_p: "0.98", min_p: "0.05" } },
];

/** What the dialog shows. */
export const NO_SETTINGS = {
  isOpen: false,
  values: /** @type {Values} */ ({}),
  models: /** @type {string[]} */ ([]),
  model: "",
  /** What holds where the user says nothing. */
  usual: /** @type {Record<string, number>} */ ({}),
  presets: OWN_PRESETS,
  /** The name of the one that is chosen; empty: none is. */
  preset: OWN_PRESETS[0].name,
  isOwnPreset: false,
};

export class Settings {
  /** @type {Values} */ #values;
  /** @type {Preset[]} */ #presets = readPresets();
  /** @type {string[]} */ #models = [];
  /** By model: what holds where the user says nothing. @type {Record<string, Record<string, number>>} */ #sampling = {};
  #isOpen = false;
  #onChange;
  #store;

  /**
   * @param {import("./store.js").Store<import("./page-state.js").State>} store
   * @param {() => void} onChange
   */
  constructor(store, onChange) {
    this.#store = store;
    this.#values = valid(read());
    this.#onChange = onChange;
    this.#show();
  }

  open() {
    this.#isOpen = true;
    this.#show();
  }

  /** A number that is out of range is forgotten. */
  close() {
    this.#isOpen = false;
    this.#values = valid(this.#values);
    this.#show();
  }

  /**
   * Offers these models; one that was chosen and is gone is forgotten.
   * @param {string[]} offered
   * @param {Record<string, Record<string, number>>} sampling  how each is sampled, unless the user says
   */
  offer(offered, sampling) {
    this.#sampling = sampling;
    this.#models = offered;
    if (!offered.includes(this.#values.model)) delete this.#values.model;
    this.#show();
  }

  get model() {
    return this.#values.model ?? this.#models[0] ?? "";
  }

  /** What a request is to carry of it. @returns {Record<string, any> & { model: string }} */
  parameters() {
    const values = valid(this.#values);
    /** @type {Record<string, any> & { model: string }} */ const found = {
      model: this.model,
      repetition_detection: LOOPS,
      ...this.#sampling[this.model],
    };
    if (values.instructions?.trim()) found.instructions = values.instructions;
    for (const { name } of NUMBERS) if (values[name]) found[name] = Number(values[name]);
    const stops = (values.stop ?? "").split("\n").filter(Boolean).slice(0, MAX_STOPS);
    if (stops.length > 0) found.stop = stops;
    Object.assign(found, furtherOf(values.further));
    if (this.hasTools) found.tools = TOOLS;
    if (values.logprobs) {
      found.include = ["message.output_text.logprobs"];
      found.top_logprobs = NUM_LIKELY;
    }
    // Said either way: left to themselves, some models think.
    found.reasoning = { effort: this.choices.think || "none" };
    return found;
  }

  get choices() {
    const { think = "", tools = "" } = this.#values;
    const effort = think && think !== "high" ? "low" : think;
    return { models: this.#models, model: this.model, think: effort, tools };
  }

  /** Changes one of them. */
  set(/** @type {string} */ name, /** @type {string} */ value) {
    this.#values = { ...this.#values, [name]: value };
    this.#keep();
  }

  /** All but how the page looks as at first. */
  reset() {
    this.#values = this.#ofReader;
    this.#keep();
  }

  get #ofReader() {
    return Object.fromEntries(OF_READER.flatMap((name) => (this.#values[name] ? [[name, this.#values[name]]] : [])));
  }

  /** Whether a message is sent with Ctrl+Enter, and Enter makes a new line. */
  get sendsByCtrl() {
    return Boolean(this.#values.ctrlEnter);
  }

  /** Whether messages of the user are shown as Markdown. */
  get readsMarkdown() {
    return Boolean(this.#values.markdown);
  }

  // ---- presets -------------------------------------------------------------------------------

  /** Uses the system prompt and the sampling of a preset. */
  usePreset(/** @type {string} */ name) {
    const preset = this.#allPresets.find((each) => each.name === name);
    if (!preset) return;
    const others = Object.entries(this.#values).filter(([each]) => !OF_PRESET.includes(each));
    this.#values = { ...Object.fromEntries(others), ...preset.values };
    this.#keep();
  }

  /** Keeps what is chosen now as a preset of this name, in place of one that has it. */
  savePreset(/** @type {string} */ name) {
    if (OWN_PRESETS.some((each) => each.name === name)) return;
    const preset = { name, values: this.#ofPreset };
    this.#presets = [...this.#presets.filter((each) => each.name !== name), preset];
    this.#keepPresets();
  }

  deletePreset(/** @type {string} */ name) {
    this.#presets = this.#presets.filter((each) => each.name !== name);
    this.#keepPresets();
  }

  get #allPresets() {
    return [...OWN_PRESETS, ...this.#presets];
  }

  get #ofPreset() {
    const values = valid(this.#values);
    return Object.fromEntries(OF_PRESET.flatMap((name) => (values[name] ? [[name, values[name]]] : [])));
  }

  #keepPresets() {
    store(PRESETS, this.#presets);
    this.#show();
  }

  // ---- with a conversation -------------------------------------------------------------------

  /** Those of a conversation; null: what was chosen last. */
  adopt(/** @type {Record<string, string> | null} */ metadata) {
    const own = metadata && fromMetadata(metadata);
    this.#values = { ...valid(own ?? read()), ...this.#ofReader };
    if (this.#models.length > 0 && !this.#models.includes(this.#values.model)) delete this.#values.model;
    this.#show();
  }

  /** As a conversation's metadata. @returns {Record<string, string>} */
  get metadata() {
    const values = valid(this.#values);
    const kept = Object.fromEntries(OF_CONVERSATION.flatMap((name) => (values[name] ? [[name, values[name]]] : [])));
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

  #keep() {
    store(ITEM, valid(this.#values));
    this.#show();
    this.#onChange();
  }

  #show() {
    const chosen = JSON.stringify(this.#ofPreset);
    const preset = this.#allPresets.find(({ values }) => JSON.stringify(ordered(values)) === chosen)?.name ?? "";
    document.documentElement.dataset.theme = this.#values.theme ?? "auto";
    this.#store.update({
      settings: {
        isOpen: this.#isOpen,
        values: this.#values,
        models: this.#models,
        model: this.model,
        usual: this.#sampling[this.model] ?? {},
        presets: this.#allPresets,
        preset,
        isOwnPreset: this.#presets.some(({ name }) => name === preset),
      },
    });
  }
}

/** The values of a preset in the order of its fields. */
function ordered(/** @type {Values} */ values) {
  return Object.fromEntries(OF_PRESET.flatMap((name) => (values[name] ? [[name, values[name]]] : [])));
}

/** Parameters as JSON, which have no field; null: they are no object, or the page's own. @returns {Record<string, any> | null} */
export function furtherOf(text = "") {
  const found = text.trim() ? parsed(text) : {};
  const isObject = typeof found === "object" && found !== null && !Array.isArray(found);
  return isObject && !RESERVED.some((name) => name in found) ? found : null;
}

/** All but what their fields would not take. */
function valid(/** @type {Values} */ values) {
  const wrong = NUMBERS.filter(({ name, min, max, step }) => {
    const text = values[name] ?? "";
    const value = Number(text);
    return !text.trim() || !(value >= min && value <= max) || (step === 1 && !Number.isInteger(value));
  });
  const others = { ...values };
  for (const { name } of wrong) delete others[name];
  if (!furtherOf(others.further)) delete others.further;
  return others;
}

/** The settings in a conversation's metadata; null: it has none. @returns {Values | null} */
function fromMetadata(/** @type {Record<string, string>} */ metadata) {
  let text = "";
  for (let index = 0; metadata[`settings_${index}`]; index += 1) text += metadata[`settings_${index}`];
  return text ? stringsOf(parsed(text)) : null;
}

/** What was kept, as far as it can be one of ours. @returns {Values} */
function read() {
  return stringsOf(kept(ITEM));
}

/** @returns {Preset[]} */
function readPresets() {
  const found = kept(PRESETS);
  return (Array.isArray(found) ? found : []).flatMap((each) => {
    const { name, values } = each ?? {};
    if (typeof name !== "string" || OWN_PRESETS.some((own) => own.name === name)) return [];
    const strings = Object.entries(stringsOf(values)).filter(([field]) => OF_PRESET.includes(field));
    return { name, values: ordered(valid(Object.fromEntries(strings))) };
  });
}

function kept(/** @type {string} */ item) {
  try {
    return parsed(localStorage.getItem(item) ?? "null");
  } catch {
    return null;
  }
}

/** A browser that keeps nothing: good until the page is left. */
function store(/** @type {string} */ item, /** @type {unknown} */ value) {
  try {
    localStorage.setItem(item, JSON.stringify(value));
  } catch {}
}

function parsed(/** @type {string} */ text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** @returns {Values} */
function stringsOf(/** @type {unknown} */ value) {
  const entries = typeof value === "object" && value !== null ? Object.entries(value) : [];
  return Object.fromEntries(entries.filter(([, each]) => typeof each === "string"));
}
