/**
 * The chat page: its parts, and what happens when the user acts.
 */

import { ConversationList } from "./conversation-list.js";
import { ConversationPane } from "./conversation-pane.js";
import { byId, confirmOn, copyText, make } from "./dom.js";
import { draftOf, keepDraft } from "./drafts.js";
import { liveText, queueText } from "./figures.js";
import { ImageTray, imagesIn } from "./images.js";
import { askForKey, closeKeyDialog, listenForKey, openKeyDialog, storedKey } from "./key-dialog.js";
import { PenstockClient, PenstockError } from "./penstock-client.js";
import { quietly } from "./quietly.js";
import { Settings } from "./settings.js";
import { listenForShortcuts } from "./shortcuts.js";
import { Sidebar } from "./sidebar.js";
import { StickyScroll } from "./sticky-scroll.js";

const SUGGESTIONS = [
  ["Say hello", "Hello! Who are you?"],
  ["Look behind the page", "What is penstock?"],
  ["Learn an idea", "How does paged attention work?"],
  ["See if it remembers", "My name is Ada. Please remember it."],
  ["Let it count", "Count from 1 to 20."],
  ["Watch a long stream", "Tell me a long story."],
];
const LIVE_INTERVAL_MS = 250;
// An answer that has been silent for so long: is there an engine?
const SILENT_MS = 1_500;
const ASK_INTERVAL_MS = 500;
const RESTARTING = "The model is restarting; your answer will go on.";

const page = {
  connection: byId("connection"),
  connectionText: byId("connection-text"),
  model: byId("model"),
  banner: byId("banner"),
  bannerText: byId("banner-text"),
  bannerAction: byId("banner-action"),
  welcome: byId("welcome"),
  transcript: byId("transcript"),
  messagesTitle: byId("messages-title"),
  toLatest: byId("to-latest"),
  composer: /** @type {HTMLFormElement} */ (byId("composer")),
  text: /** @type {HTMLTextAreaElement} */ (byId("composer-text")),
  send: /** @type {HTMLButtonElement} */ (byId("send")),
  hint: byId("hint"),
  live: byId("live"),
  obstacle: byId("obstacle"),
  attach: byId("attach"),
  files: /** @type {HTMLInputElement} */ (byId("files")),
  refusal: byId("refusal"),
  announcer: byId("announcer"),
};

const client = new PenstockClient({ baseUrl: document.baseURI, apiKey: storedKey() });
const settings = new Settings(refresh);
const list = new ConversationList(client.conversations);
const sidebar = new Sidebar();
const scroll = new StickyScroll(byId("scroller"), byId("content"), (isFollowing) => {
  page.toLatest.hidden = isFollowing || !page.welcome.hidden;
});
const pane = new ConversationPane({
  client,
  transcript: page.transcript,
  parameters: () => settings.parameters(),
  hasTools: () => settings.hasTools,
  announce,
  mayAsk,
  write: () => page.text.focus(),
  onLost: (id, text, reason) => {
    page.refusal.textContent = reason;
    const draft = draftOf(id);
    keepDraft(id, draft && draft !== text ? `${text}\n\n${draft}` : text);
    if (id === draftId) showDraft();
    refresh();
  },
  onRefused: (text) => { if (!page.text.value) keepDraft(draftId, text); },
});
/** The images of the next message. */
const tray = new ImageTray(byId("tray"));
/** The conversation that the text in the message box is for. */
let draftId = location.hash.slice(1) || null;
/** Notifies the other tabs of this browser when a conversation has changed, with its id. */
const tabs = new BroadcastChannel("penstock");

// ---- conversations -------------------------------------------------------------------------

/** Opens what the address names. */
async function openAddressed() {
  const id = location.hash.slice(1) || null;
  if (id === pane.id && (id || pane.isEmpty)) return;
  try {
    await pane.open(id);
  } catch (error) {
    if (!(error instanceof PenstockError)) throw error;
    if (error.status === 404) {
      keepDraft(null, draftOf(null) || page.text.value);
      showNewChat("This conversation is not on the server any more.");
    }
  }
  list.mark(pane.id);
  if (pane.id) scroll.follow();
}

function showNewChat(said = "New chat.") {
  history.pushState(null, "", location.pathname + location.search);
  void pane.open(null);
  list.mark(null);
  announce(said);
  sidebar.closeOverlay();
  scroll.toTop();
  page.text.focus();
}

function submit() {
  const text = page.text.value.trim();
  if ((!text && tray.isEmpty) || !mayAsk()) return;
  page.text.value = "";
  keepDraft(draftId, "");
  fitComposer();
  ask(text, tray.take());
}

/** Adds images to the next message, if the model takes any. */
async function attach(/** @type {Iterable<File>} */ files) {
  page.refusal.textContent = client.takesImages ? await tray.add(files) : "This model takes no images.";
  if (page.refusal.textContent) announce(page.refusal.textContent);
  refresh();
}

function ask(/** @type {string} */ text, /** @type {import("./images.js").ImagePart[]} */ images = []) {
  page.refusal.textContent = "";
  void pane.ask(text, images);
  scroll.follow();
}

function canAsk() {
  return client.state === "open" && !pane.answer && !pane.isBusy;
}

/** Why the last wish to send something had no effect; empty once it would have. */
let obstacle = "";

/** Whether a message can be sent. If not, the user is told why, or asked for what is missing. */
function mayAsk() {
  if (canAsk()) return true;
  if (client.state === "unauthorized") askForKey();
  else {
    obstacle = pane.answer ? "Not sent: an answer is still coming. Wait for its end, or stop it (Esc)."
      : client.state === "open" ? "Not sent: this conversation is still being loaded or changed. Try again in a moment."
      : client.numFailures === 0 ? "Not sent: the page is still connecting. Try again in a moment."
      : "Not sent: the server cannot be reached. Your message stays here.";
    client.connect();
    announce(obstacle);
    refresh();
  }
  return false;
}

/** Shows the draft of the open conversation in the message box. */
function showDraft() {
  page.text.value = draftOf(draftId);
  fitComposer();
  refresh();
}

function listenToPane() {
  pane.addEventListener("change", () => {
    if (draftId !== pane.id) {
      draftId = pane.id;
      obstacle = page.refusal.textContent = "";
      showDraft();
    }
    follow(pane.answer);
    refresh();
  });
  pane.addEventListener("created", () => {
    history.pushState(null, "", `#${pane.id}`);
    draftId = pane.id;
    keepDraft(null, "");
    keepDraft(draftId, page.text.value);
    list.mark(pane.id);
    scroll.follow();
  });
  pane.addEventListener("left", () => {
    keepDraft(pane.id, page.text.value); // without the message that leaves with the reader
    history.pushState(null, "", location.pathname);
  });
  pane.addEventListener("moved", () => tabs.postMessage({ conversation: pane.id }));
  tabs.addEventListener("message", ({ data }) => {
    void list.refresh();
    if (data.conversation === pane.id) void catchUp();
    if (data.deleted && data.deleted === pane.id) leaveDeleted();
  });
  list.addEventListener("deleted", (event) => {
    const id = /** @type {CustomEvent<string>} */ (event).detail;
    keepDraft(id, "");
    tabs.postMessage({ deleted: id });
    if (id === pane.id) leaveDeleted();
  });
}

function leaveDeleted() {
  pane.stop(); // the rest will not be read
  showNewChat("Deleted.");
}

/** Shows changes made elsewhere. Conversations deleted on the server stay on the page. */
async function catchUp() {
  if (client.state === "open") await quietly(() => pane.refresh());
}

// ---- the answer under way ------------------------------------------------------------------

/** @type {import("./answer.js").Answer | null} */ let followed = null;
const hasKeys = matchMedia("(hover: hover)"); // as in the style sheet
/** Whether its silence is due to an engine that is being restarted. */
let isRestarting = false;

/** Shows progress outside the answer, where it does not move with every line. */
function follow(/** @type {import("./answer.js").Answer | null} */ answer) {
  if (answer === followed) return;
  followed = answer;
  isRestarting = false;
  sayLive(answer ? "Answering…" : "");
  if (!answer) return;
  const id = draftId;
  let nextAt = 0;
  let isPaused = false;
  let heardAt = performance.now();
  const say = (/** @type {string} */ text) => { if (followed === answer) sayLive(text); };
  const hear = () => {
    heardAt = performance.now();
    if (isRestarting && followed === answer) showRestart(false);
  };
  for (const name of ["started", "delta", "queue", "pause"]) answer.addEventListener(name, hear);
  void askAfterEngine(answer, () => performance.now() - heardAt > SILENT_MS && !isPaused);
  // The server has the message: a copy that was kept of it is not needed any more.
  answer.addEventListener("started", () => { if (id === draftId) keepDraft(id, page.text.value); });
  answer.addEventListener("delta", () => {
    const now = performance.now();
    if (now < nextAt || isPaused) return;
    nextAt = now + LIVE_INTERVAL_MS;
    say(liveText(answer));
  });
  answer.addEventListener("queue", (event) => say(queueText(/** @type {CustomEvent} */ (event).detail)));
  answer.addEventListener("pause", (event) => {
    isPaused = /** @type {CustomEvent<boolean>} */ (event).detail;
    say(isPaused ? "Paused: the server is short of memory and will go on." : liveText(answer));
  });
}

function sayLive(/** @type {string} */ text) {
  // One text: a second one beside it would move with the width of the first.
  page.live.textContent = text && hasKeys.matches ? `${text} · Esc stops` : text;
}

/** Asks, while an answer is silent, whether it waits for an engine that is being restarted. */
async function askAfterEngine(
  /** @type {import("./answer.js").Answer} */ answer, /** @type {() => boolean} */ isSilent,
) {
  while (followed === answer && !answer.isEnded) {
    await new Promise((resolve) => setTimeout(resolve, ASK_INTERVAL_MS));
    if (followed !== answer || answer.isEnded || client.state !== "open" || !isSilent()) continue;
    const hasEngine = await client.hasEngine();
    if (followed === answer && isSilent() && hasEngine === isRestarting) showRestart(!hasEngine);
  }
}

function showRestart(/** @type {boolean} */ isNow) {
  isRestarting = isNow;
  sayLive(isNow ? RESTARTING : "Answering…");
  if (isNow) announce(RESTARTING);
  refresh();
}

// ---- connection ----------------------------------------------------------------------------

function refresh() {
  const label = { connecting: "Connecting…", open: "Connected", restarting: "Restarting…", waiting: "Reconnecting…", unauthorized: "Needs a key", closed: "Offline" };
  // Tries follow each other quickly; the page shows one steady message between them.
  const shown = client.state === "connecting" && client.numFailures > 0 ? "waiting"
    : client.state === "open" && isRestarting ? "restarting"
    : client.state;
  page.connection.dataset.state = shown;
  page.connectionText.textContent = shown === "open" && client.transport === "sse" ? "Connected (without WebSocket)" : label[shown];
  page.model.textContent = settings.model;
  showBanner(shown);
  showWelcome(pane.isEmpty && (location.hash === "" || pane.id === null));
  const isAnswering = pane.answer !== null;
  page.composer.classList.toggle("is-answering", isAnswering);
  if (canAsk()) obstacle = "";
  page.obstacle.textContent = obstacle;
  page.obstacle.hidden = !obstacle;
  page.refusal.hidden = isAnswering || obstacle !== "" || !page.refusal.textContent;
  page.live.hidden = !isAnswering || obstacle !== "";
  page.hint.hidden = isAnswering || obstacle !== "" || !page.refusal.hidden;
  page.send.disabled = isAnswering ? pane.answer?.isCancelling === true : !canAsk() || (!page.text.value.trim() && tray.isEmpty);
  page.attach.hidden = !client.takesImages;
  page.send.setAttribute("aria-label", isAnswering ? "Stop" : "Send");
  page.send.title = isAnswering ? "Stop (Esc)" : "Send (Enter)";
  for (const button of document.querySelectorAll("button[data-asks]")) {
    /** @type {HTMLButtonElement} */ (button).disabled = !canAsk();
  }
}

function showWelcome(/** @type {boolean} */ isShown) {
  const wasShown = !page.welcome.hidden;
  page.welcome.hidden = !isShown;
  page.messagesTitle.hidden = isShown;
  if (isShown && !wasShown) scroll.toTop();
}

function showBanner(/** @type {string} */ shown) {
  const reasons = {
    unreachable: "Cannot reach the server. Trying again…",
    "no websocket": "The server answers, but a WebSocket does not get through. Trying again…",
    dropped: "The connection to the server broke. Reconnecting…",
  };
  const needsKey = shown === "unauthorized";
  const text = needsKey ? "This server requires an API key." : reasons[client.failure ?? "unreachable"];
  page.banner.hidden = shown !== "waiting" && !needsKey;
  if (page.banner.hidden || page.bannerText.textContent === text) return;
  page.bannerText.textContent = text;
  page.bannerAction.textContent = needsKey ? "Enter key" : "Try now";
}

function onStateChange() {
  if (client.state === "open") {
    settings.offer(client.models);
    closeKeyDialog();
    void list.refresh();
    void (pane.id || !location.hash ? catchUp() : openAddressed());
  } else if (client.state === "unauthorized") askForKey();
  refresh();
}

// ---- page ----------------------------------------------------------------------------------

function announce(/** @type {string} */ text) {
  page.announcer.textContent = text;
}

/** Lets the message box grow with its text, up to the height that the style sheet allows. */
function fitComposer() {
  page.text.style.height = "auto";
  page.text.style.height = `${page.text.scrollHeight}px`;
}

function listenToPage() {
  page.composer.addEventListener("submit", (event) => {
    event.preventDefault();
    if (pane.answer) pane.stop();
    else submit();
  });
  page.text.addEventListener("input", () => {
    keepDraft(draftId, page.text.value);
    obstacle = "";
    fitComposer();
    refresh();
  });
  tray.addEventListener("change", () => refresh());
  page.attach.addEventListener("click", () => page.files.click());
  page.files.addEventListener("change", () => {
    void attach([...(page.files.files ?? [])]);
    page.files.value = "";
  });
  page.text.addEventListener("paste", (event) => {
    const files = imagesIn(event.clipboardData);
    if (files.length === 0) return;
    event.preventDefault();
    void attach(files);
  });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    void attach(imagesIn(event.dataTransfer));
  });
  page.text.addEventListener("keydown", (event) => {
    if (event.key === "ArrowUp" && !page.text.value && !pane.isEmpty) {
      event.preventDefault();
      if (mayAsk()) pane.views.at(-1)?.startEditing();
    }
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  page.transcript.addEventListener("click", (event) => {
    const button = /** @type {Element} */ (event.target).closest("button[data-copies]");
    const code = button?.parentElement?.parentElement?.querySelector("pre");
    if (button && code) void copyText(code.textContent ?? "").then(() => confirmOn(button));
  });
  byId("new-chat").addEventListener("click", () => showNewChat());
  byId("open-settings").addEventListener("click", () => settings.open());
  byId("settings-key").addEventListener("click", () => { settings.close(); openKeyDialog(); });
  page.toLatest.addEventListener("click", () => { scroll.follow(); page.text.focus(); });
  page.bannerAction.addEventListener("click", () => {
    if (client.state === "unauthorized") askForKey();
    else client.connect();
  });
  window.addEventListener("hashchange", () => void openAddressed());
  window.addEventListener("popstate", () => void openAddressed());
  window.addEventListener("online", () => client.connect());
  window.addEventListener("offline", () => client.suspect());
  document.addEventListener("visibilitychange", () => { if (!document.hidden) void catchUp(); });
}

function addSuggestions() {
  for (const [label, prompt] of SUGGESTIONS) {
    const item = make("li");
    const button = /** @type {HTMLButtonElement} */ (make("button"));
    button.type = "button";
    button.dataset.asks = "";
    button.append(make("b", "", label), make("span", "", prompt));
    button.addEventListener("click", () => {
      if (canAsk()) ask(prompt);
      page.text.focus();
    });
    item.append(button);
    byId("suggestions").append(item);
  }
}

addSuggestions();
listenToPane();
listenToPage();
listenForKey((key) => client.setApiKey(key));
listenForShortcuts({
  stop: () => pane.stop(),
  newChat: () => showNewChat(),
  regenerate: () => { if (!pane.isEmpty && mayAsk()) pane.regenerateLast(); },
  copy: () => pane.views.at(-1)?.copy(),
  toggleList: () => sidebar.toggle(),
  settings: () => settings.open(),
  write: () => page.text.focus(),
});
client.addEventListener("state", onStateChange);
client.connect();
if (page.text.value) keepDraft(draftId, page.text.value); // written before this script ran
showDraft();
