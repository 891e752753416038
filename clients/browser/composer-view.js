/**
 * What stands around the text of the next message: its images and files; the model, how much it thinks, its tools, and how
 * full its context is; the button that sends or stops; and below it why something was not sent, or how the answer gets on.
 */

import { attachmentElement } from "./attachments.js";
import { byId } from "./dom.js";
import { isEmpty } from "./drafts.js";
import { icon } from "./elements.js";
import { keyName } from "./shortcuts.js";
import { html } from "./vendor/htm-preact.js";

/** @typedef {import("./page-state.js").State} State */

/** @typedef {import("./conversations.js").Part} Part */
/**
 * What a reader may want of it.
 * @typedef {object} Deeds
 * @property {(name: "model" | "think" | "tools", value: string) => void} choose
 * @property {(part: Part) => void} remove  from the message
 */

const EFFORTS = [["", "No thinking"], ["low", "Thinks a little"], ["high", "Thinks a lot"]];

const BROKEN = "Not connected; your answer will go on.";
const hasKeys = matchMedia("(hover: hover)"); // as in the style sheet

/** Draws all of it. */
export function mountComposer(
  /** @type {ReturnType<typeof import("./page-state.js").newStore>} */ store, /** @type {Deeds} */ deeds,
) {
  const tray = byId("tray");
  store.mount(tray, ["message"], ({ message }) => html`<${Tray} parts=${message.attachments} remove=${deeds.remove} />`);
  store.watch(["message"], ({ message }) => { tray.hidden = message.attachments.length === 0; });
  store.mount(byId("controls"), ["choices", "context"], ({ choices, context }) =>
    html`<${Controls} choices=${choices} context=${context} set=${deeds.choose} />`);
  store.mount(byId("send-place"), ["sending", "message", "settings"], (state) => html`<${Send} ...${state} />`);
  store.mount(byId("notes"), ["sending", "notes", "link", "settings"], (state) => html`<${Notes} ...${state} />`);
}

/** @type {WeakMap<Part, number>} */ const numbers = new WeakMap();
let numParts = 0;

/** Tells parts apart, of which two may be equal. */
function numberOf(/** @type {Part} */ part) {
  const number = numbers.get(part) ?? ++numParts;
  numbers.set(part, number);
  return number;
}

/** @param {{ parts: readonly Part[], remove: (part: Part) => void }} given */
function Tray({ parts, remove }) {
  return parts.map((part) => {
    const label = `Remove ${part.name || "image"}`;
    const fill = (/** @type {Element | null} */ node) => { if (node && !node.firstChild) node.append(attachmentElement(part)); };
    return html`
      <span class="tray-image" key=${numberOf(part)}>
        <span class="contents" ref=${fill}></span>
        <button type="button" class="icon" title=${label} aria-label=${label} onClick=${() => remove(part)}>${icon("close")}</button>
      </span>`;
  });
}

/** Sends the message, which interrupts an answer that is coming; where there is none, stops that. */
function Send(/** @type {State} */ { sending: { canAsk, canSteer, isAnswering, isStopping }, message, settings: { values } }) {
  const sendKeys = values.ctrlEnter ? `${keyName("Ctrl")}+Enter` : "Enter";
  const hasNothing = isEmpty(message);
  const stops = isAnswering && hasNothing;
  const isOff = stops ? isStopping : isAnswering ? !canSteer : !canAsk || hasNothing;
  const title = stops ? "Stop (Esc)" : isAnswering ? `Interrupt the answer with this message (${sendKeys})` : `Send (${sendKeys})`;
  return html`
    <button type="submit" class=${stops ? "send stops" : "send"} id="send" disabled=${isOff} title=${title} aria-label=${stops ? "Stop" : "Send"}>${icon(stops ? "stop" : "send")}</button>`;
}

/** One of four. */
function Notes(/** @type {State} */ { sending: { isAnswering }, notes: { obstacle, refusal, progress }, link, settings: { values } }) {
  // Without a connection, nothing is known of the answer.
  const live = link.state === "open" || link.state === "restarting" ? progress : progress && BROKEN;
  const shown = live && hasKeys.matches ? `${live} · Esc stops` : live;
  const isRefused = !obstacle && !isAnswering && refusal !== "";
  // One text, and another one for each change: nothing moves with its width.
  return html`
    <p class="hint refusal" id="obstacle" hidden=${!obstacle}>${obstacle}</p>
    <p class="hint refusal" id="refusal" hidden=${!isRefused}>${refusal}</p>
    <p class="hint" id="live" hidden=${!isAnswering || obstacle !== ""}><span key=${shown}>${shown}</span></p>
    <p class="hint" id="hint" hidden=${isAnswering || obstacle !== "" || isRefused}>${values.ctrlEnter ? html`<kbd>${keyName("Ctrl")}</kbd>+<kbd>Enter</kbd> sends · <kbd>Enter</kbd> new line` : html`<kbd>Enter</kbd> sends · <kbd>Shift</kbd>+<kbd>Enter</kbd> new line`} · <kbd>Esc</kbd> stops · <kbd>↑</kbd> edits</p>`;
}

/**
 * @param {object} given
 * @param {State["choices"]} given.choices
 * @param {State["context"]} given.context
 * @param {Deeds["choose"]} given.set
 */
function Controls({ choices, context, set }) {
  const { models, model, think, tools } = choices;
  return html`
    ${models.length > 1 && html`
      <select class="control" aria-label="Model of this chat" title="Model" value=${model} onChange=${(/** @type {any} */ { target }) => set("model", target.value)}>
        ${models.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select>`}
    <select class="control" aria-label="Thinking" title="Thinking" value=${think} onChange=${(/** @type {any} */ { target }) => set("think", target.value)}>
      ${EFFORTS.map(([effort, label]) => html`<option key=${effort} value=${effort}>${label}</option>`)}
    </select>
    <button type="button" class="control" aria-pressed=${String(Boolean(tools))} title="The model may call a calculator, a clock and a note keeper" onClick=${() => set("tools", tools ? "" : "on")}>${icon("tool")}<span>Tools</span></button>
    ${context && html`<${Gauge} ...${context} />`}`;
}

/** How much of the model's context this conversation takes. */
function Gauge(/** @type {{ used: number, limit: number }} */ { used, limit }) {
  const share = Math.min(1, used / limit);
  const text = `${used.toLocaleString()} of ${limit.toLocaleString()} tokens of context`;
  return html`
    <span class=${`gauge ${share > .9 ? "is-full" : ""}`} role="img" aria-label=${text} title=${text}>
      <svg viewBox="0 0 20 20" aria-hidden="true">
        <circle cx="10" cy="10" r="7" fill="none" stroke="currentColor" stroke-width="2.5" opacity=".22" />
        <circle cx="10" cy="10" r="7" fill="none" stroke="currentColor" stroke-width="2.5" stroke-dasharray=${`${44 * share} 44`} transform="rotate(-90 10 10)" />
      </svg>
      ${Math.ceil(100 * share)} %
    </span>`;
}
