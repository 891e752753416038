/**
 * What is chosen beside the message: the model, how much it thinks, its tools; and how full its context is.
 */

import { icon } from "./elements.js";
import { html } from "./vendor/htm-preact.js";

/** @typedef {import("./page-state.js").State} State */

const EFFORTS = [["", "No thinking"], ["low", "Thinks a little"], ["high", "Thinks a lot"]];

/**
 * @param {object} given
 * @param {State["choices"]} given.choices
 * @param {State["context"]} given.context
 * @param {(name: "model" | "think" | "tools", value: string) => void} given.set
 */
export function Controls({ choices, context, set }) {
  const { models, model, think, tools } = choices;
  return html`
    ${models.length > 1 && html`
      <select class="control" aria-label="Model of this chat" title="Model" value=${model} onChange=${(/** @type {any} */ { target }) => set("model", target.value)}>
        ${models.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select>`}
    <select class="control" aria-label="Thinking" title="Thinking" value=${think} onChange=${(/** @type {any} */ { target }) => set("think", target.value)}>
      ${EFFORTS.map(([effort, label]) => html`<option key=${effort} value=${effort}>${label}</option>`)}
    </select>
    <button type="button" class="control" aria-pressed=${String(Boolean(tools))} title="The model may call a calculator, a clock and a note keeper" onClick=${() => set("tools", tools ? "" : "on")}>${icon("tool")}Tools</button>
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
