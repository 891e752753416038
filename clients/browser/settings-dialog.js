/**
 * The dialog of the settings.
 */

import { byId } from "./dom.js";
import { mountDialog } from "./elements.js";
import { furtherOf, NUMBERS } from "./settings.js";
import { keyName } from "./shortcuts.js";
import { html, useState } from "./vendor/htm-preact.js";

/** @typedef {import("./settings.js").Settings} Settings */
/** @typedef {typeof import("./settings.js").NO_SETTINGS} Shown */
/** @typedef {{ enterKey: () => void, saveChats: () => Promise<string>, loadChats: (file: File) => Promise<string> }} Deeds */

const THEMES = [["auto", "System"], ["light", "Light"], ["dark", "Dark"]];
const SWITCHES = [
  ["tools", "call a calculator, a clock and a note keeper"],
  ["think", "think before it answers"],
];
const KEYS = [
  [["Alt", "N"], "new chat"], [["Alt", "L"], "conversations"], [["Ctrl", "K"], "search chats"], [["Alt", "R"], "regenerate"],
  [["Alt", "C"], "copy the last answer"], [["Alt", "S"], "settings"], [["/"], "write a message"], [["↑"], "edit the last message"],
  [["Esc"], "stop"],
];
const MAX_NAME = 60;
/** What many readers choose. */
const FIRST = ["temperature", "top_p", "top_k", "max_output_tokens"];
const MORE = NUMBERS.map(({ name }) => name).filter((name) => !FIRST.includes(name));

/** Draws the dialog, and opens and closes it. */
export function mountSettings(
  /** @type {import("./store.js").Store<import("./page-state.js").State>} */ store,
  /** @type {Settings} */ settings,
  /** @type {Deeds} */ deeds,
) {
  mountDialog(store, {
    dialog: /** @type {HTMLDialogElement} */ (byId("settings-dialog")),
    part: "settings",
    isOpen: (state) => state.settings.isOpen,
    view: (state) => html`<${Form} shown=${state.settings} settings=${settings} deeds=${deeds} />`,
    close: () => settings.close(),
  });
}

/** @param {{ shown: Shown, settings: Settings, deeds: Deeds }} given */
function Form({ shown, settings, deeds }) {
  const { values, models, model, usual } = shown;
  const take = (/** @type {any} */ { target }) => settings.set(target.name, target.value);
  const takeFurther = (/** @type {any} */ event) => {
    event.target.setCustomValidity(furtherOf(event.target.value) ? "" : "This is a JSON object of parameters that have no field here.");
    take(event);
  };
  const done = (/** @type {any} */ event) => {
    event.preventDefault();
    const form = byId("settings-form");
    for (const part of form.querySelectorAll("details")) part.open ||= part.querySelector(":invalid") !== null;
    if (/** @type {HTMLFormElement} */ (form).reportValidity()) settings.close();
  };
  const numMore = [...MORE, "stop", "further"].filter((name) => values[name]).length;
  const [isMoreOpen] = useState(numMore > 0); // later it is the reader's choice
  const numbers = (/** @type {readonly string[]} */ names) => NUMBERS.filter(({ name }) => names.includes(name)).map(({ name, label, min, max, step, hint }) => html`
    <div key=${name}>
      <label class="field-label" for=${`setting-${name}`}>${label}</label>
      <input class="field" id=${`setting-${name}`} name=${name} type="number" min=${min} max=${max} step=${step}
        placeholder=${String(usual[name] ?? hint ?? "default")} value=${values[name] ?? ""} onInput=${take} />
    </div>`);
  return html`
    <form method="dialog" id="settings-form" autocomplete="off" onSubmit=${done}>
      <h2 id="settings-title">Settings</h2>
      <p>Kept with the open chat, and in this browser for new ones. Changes apply from your next message.</p>
      <label class="field-label" for="setting-model">Model</label>
      <select class="field" id="setting-model" name="model" value=${model} onChange=${take}>
        ${models.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select>
      <${Presets} shown=${shown} settings=${settings} />
      <label class="field-label" for="setting-instructions">System prompt</label>
      <textarea class="field" id="setting-instructions" dir="auto" name="instructions" rows="3" placeholder="None" value=${values.instructions ?? ""} onInput=${take}></textarea>
      <div class="numbers">${numbers(FIRST)}</div>
      <details class="more" open=${isMoreOpen}>
        <summary>More sampling${numMore > 0 && html` <span>· ${numMore} set</span>`}</summary>
        <div class="numbers">${numbers(MORE)}</div>
        <label class="field-label" for="setting-stop">Stop at</label>
        <textarea class="field" id="setting-stop" dir="auto" name="stop" rows="1" placeholder="texts, one per line" value=${values.stop ?? ""} onInput=${take}></textarea>
        <label class="field-label" for="setting-further">Further parameters</label>
        <textarea class="field" id="setting-further" name="further" rows="1" spellcheck="false" placeholder=${'JSON, as {"logit_bias": {"42": -5}}'} value=${values.further ?? ""} onInput=${takeFurther}></textarea>
      </details>
      <fieldset class="choices">
        <legend>The model may</legend>
        ${SWITCHES.map(([name, label]) => html`<${Switch} key=${name} name=${name} label=${label} values=${values} settings=${settings} />`)}
      </fieldset>
      <fieldset class="choices">
        <legend>Answers show</legend>
        <${Switch} name="logprobs" label="how likely each token was, where you point at it" values=${values} settings=${settings} />
      </fieldset>
      <fieldset class="choices">
        <legend>Your messages</legend>
        <${Switch} name="ctrlEnter" label=${`are sent with ${keyName("Ctrl")}+Enter`} values=${values} settings=${settings} />
        <${Switch} name="markdown" label="are shown as Markdown" values=${values} settings=${settings} />
      </fieldset>
      <fieldset class="choices">
        <legend>Appearance</legend>
        ${THEMES.map(([name, label]) => html`
          <label key=${name} class="choice"><input type="radio" name="theme" value=${name} checked=${(values.theme ?? "auto") === name} onChange=${take} /><span>${label}</span></label>`)}
      </fieldset>
      <${Chats} deeds=${deeds} />
      <fieldset class="choices">
        <legend>This server</legend>
        <button type="button" class="quiet" id="settings-key" onClick=${() => { settings.close(); deeds.enterKey(); }}>API key…</button>
      </fieldset>
      <h3>Keyboard</h3>
      <dl class="keys">
        ${KEYS.map(([keys, text]) => html`
          <div key=${text}><dt>${/** @type {string[]} */ (keys).map((key, index) => html`${index > 0 && "+"}<kbd>${keyName(key)}</kbd>`)}</dt><dd>${text}</dd></div>`)}
      </dl>
      <div class="dialog-buttons">
        <button type="button" class="quiet" id="settings-reset" onClick=${() => settings.reset()}>Reset to defaults</button>
        <button type="button" class="primary" id="settings-close" onClick=${done}>Done</button>
      </div>
    </form>`;
}

/** @param {{ name: string, label: string, values: Record<string, string>, settings: Settings }} given */
function Switch({ name, label, values, settings }) {
  const change = (/** @type {any} */ { target }) => settings.set(name, target.checked ? values[name] || "on" : "");
  return html`<label class="choice"><input type="checkbox" name=${name} checked=${Boolean(values[name])} onChange=${change} /><span>${label}</span></label>`;
}

/** System prompts and sampling under a name. @param {{ shown: Shown, settings: Settings }} given */
function Presets({ shown: { presets, preset, isOwnPreset }, settings }) {
  const [name, setName] = useState(/** @type {string | null} */ (null));
  const save = () => {
    if (name?.trim()) settings.savePreset(name.trim());
    setName(null);
  };
  const press = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault(); // which would end the dialog
    if (event.key === "Enter") save();
    else setName(null);
  };
  return html`
    <label class="field-label" for="setting-preset">Preset</label>
    <div class="presets">
      <select class="field" id="setting-preset" value=${preset} onChange=${(/** @type {any} */ { target }) => settings.usePreset(target.value)}>
        ${!preset && html`<option value="">Your own</option>`}
        ${presets.map((each) => html`<option key=${each.name} value=${each.name}>${each.name}</option>`)}
      </select>
      ${name === null && !preset && html`<button type="button" class="quiet" onClick=${() => setName("")}>Save as preset…</button>`}
      ${name === null && isOwnPreset && html`<button type="button" class="quiet" onClick=${() => settings.deletePreset(preset)}>Delete preset</button>`}
      ${name !== null && html`
        <input class="field" aria-label="Name of the preset" placeholder="Name" maxlength=${MAX_NAME} value=${name} ref=${focused}
          onInput=${(/** @type {any} */ { target }) => setName(target.value)} onKeyDown=${press} />
        <button type="button" class="quiet" onClick=${save}>Save preset</button>`}
    </div>`;
}

function focused(/** @type {HTMLElement | null} */ node) {
  if (node && !node.dataset.wasFocused) {
    node.dataset.wasFocused = "";
    node.focus();
  }
}

/** All conversations as a file, and from one. @param {{ deeds: Deeds }} given */
function Chats({ deeds }) {
  const [note, setNote] = useState("");
  const tell = async (/** @type {Promise<string>} */ work) => {
    setNote("One moment…");
    setNote(await work);
  };
  const load = (/** @type {any} */ { target }) => {
    const file = target.files?.[0];
    target.value = "";
    if (file) void tell(deeds.loadChats(file));
  };
  return html`
    <fieldset class="choices" id="chats">
      <legend>Your chats</legend>
      <button type="button" class="quiet" id="chats-save" onClick=${() => void tell(deeds.saveChats())}>Save all as a file</button>
      <button type="button" class="quiet" id="chats-load" onClick=${() => byId("chats-file").click()}>Load from a file…</button>
      <input type="file" id="chats-file" accept=".json,application/json" hidden onChange=${load} />
      <p id="chats-note" role="status">${note}</p>
    </fieldset>`;
}
