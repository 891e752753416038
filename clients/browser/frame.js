/**
 * What stands around the open conversation: how the connection is, why it is not, what a new chat begins with, and news.
 */

import { byId } from "./dom.js";
import { mountDialog } from "./elements.js";
import { html } from "./vendor/htm-preact.js";

/** @typedef {import("./page-state.js").State} State */
/**
 * What a reader may want of it.
 * @typedef {object} Deeds
 * @property {() => void} connect
 * @property {() => void} enterKey
 * @property {(text: string) => void} ask
 */

// For the model that comes with the server, which knows no more than this.
const DEMO = "demo";
const SUGGESTIONS = [
  ["Say hello", "Hello! Who are you?"],
  ["Look behind the page", "What is penstock?"],
  ["Learn an idea", "How does paged attention work?"],
  ["See if it remembers", "My name is Ada. Please remember it."],
  ["Let it count", "Count from 1 to 20."],
  ["Watch a long stream", "Tell me a long story."],
];
const STATES = {
  connecting: "Connecting…", open: "Connected", restarting: "Restarting…", waiting: "Reconnecting…", unauthorized: "Needs a key", closed: "Offline",
};
/** @type {Record<string, string>} */ const FAILURES = {
  unreachable: "Cannot reach the server. Trying again…",
  "no websocket": "The server answers, but a WebSocket does not get through. Trying again…",
  dropped: "The connection to the server broke. Reconnecting…",
};

/** Draws all of it. */
export function mountFrame(
  /** @type {ReturnType<typeof import("./page-state.js").newStore>} */ store, /** @type {Deeds} */ deeds,
) {
  const connection = byId("connection"), banner = byId("banner"), welcome = byId("welcome");
  store.mount(connection, ["link", "choices"], (state) => html`<${Connection} ...${state} />`);
  store.mount(banner, ["link"], ({ link }) => html`<${Banner} link=${link} deeds=${deeds} />`);
  store.mount(welcome, ["choices", "sending"], (state) => html`<${Welcome} ...${state} ask=${deeds.ask} />`);
  const closeNews = () => store.update({ news: null });
  mountDialog(store, {
    dialog: /** @type {HTMLDialogElement} */ (byId("news-dialog")),
    part: "news",
    isOpen: (state) => state.news !== null,
    view: ({ news }) => html`
      <h2 id="news-title">${news?.title}</h2>
      <p id="news-text">${news?.text}</p>
      <div class="dialog-buttons"><button type="button" class="quiet" onClick=${closeNews}>Close</button></div>`,
    close: closeNews,
  });
  store.watch(["isLoading"], ({ isLoading }) => {
    byId("transcript").setAttribute("aria-busy", String(isLoading));
  });
  store.watch(["link", "isNew"], ({ link: { state }, isNew }) => {
    connection.dataset.state = state;
    banner.hidden = state !== "waiting" && state !== "unauthorized";
    welcome.hidden = !isNew;
    byId("messages-title").hidden = isNew;
    byId("pane").classList.toggle("is-empty", isNew);
  });
}

function Connection(/** @type {State} */ { link: { state, hasSocket }, choices: { model } }) {
  return html`
    <span class="dot" aria-hidden="true"></span>
    <span id="connection-text">${state === "open" && !hasSocket ? "Connected (without WebSocket)" : STATES[state]}</span>
    <span class="model" id="model">${model}</span>`;
}

/** @param {{ link: State["link"], deeds: Deeds }} given */
function Banner({ link: { state, failure }, deeds }) {
  const needsKey = state === "unauthorized";
  return html`
    <p id="banner-text">${needsKey ? "This server requires an API key." : FAILURES[failure]}</p>
    <button type="button" class="quiet" id="banner-action" onClick=${needsKey ? deeds.enterKey : deeds.connect}>${needsKey ? "Enter key" : "Try now"}</button>`;
}

/** @param {State & { ask: Deeds["ask"] }} given */
function Welcome({ choices: { model }, sending: { canAsk }, ask }) {
  const isDemo = model === DEMO;
  const text = !model ? "\u00a0"
    : isDemo ? "The demo model is small, and knows little but penstock. Try one of these, or write your own."
    : `You are talking to ${model}.`;
  return html`
    <h2 id="welcome-title">What shall we talk about?</h2>
    <p id="welcome-text">${text}</p>
    <ul class="suggestions" id="suggestions" hidden=${!isDemo}>
      ${SUGGESTIONS.map(([label, prompt]) => html`
        <li key=${label}><button type="button" disabled=${!canAsk} onClick=${() => ask(prompt)}><b>${label}</b><span>${prompt}</span></button></li>`)}
    </ul>`;
}
