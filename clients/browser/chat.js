/**
 * The chat page: its parts, and what happens when the user acts.
 */

import { Composer } from "./composer.js";
import { mountComposer } from "./composer-view.js";
import { ConversationList } from "./conversation-list.js";
import { ConversationPane } from "./conversation-pane.js";
import { byId, confirmOn, copyText } from "./dom.js";
import { keepDraft, NOTHING } from "./drafts.js";
import { NOT_LOADED } from "./endings.js";
import { liveText, prefillText, preparingText, QueueEstimate, queueText, restartText } from "./figures.js";
import { mountFrame } from "./frame.js";
import { KeyDialog, storedKey } from "./key-dialog.js";
import { conversationOf, newStore, titleOf } from "./page-state.js";
import { PenstockClient, PenstockError } from "./penstock-client.js";
import { quietly } from "./quietly.js";
import { Settings } from "./settings.js";
import { listenForShortcuts } from "./shortcuts.js";
import { Sidebar } from "./sidebar.js";
import { StickyScroll } from "./sticky-scroll.js";
import { titleSaid } from "./turns.js";

const LIVE_INTERVAL_MS = 250;
const KEEP_MS = 400;
/** So much of a conversation is enough for its title. */
const MAX_TITLED = 4_000;
// An answer that has been silent for so long: is there an engine?
const SILENT_MS = 1_500;
const ASK_INTERVAL_MS = 500;

const welcome = byId("welcome"), transcript = byId("transcript"), toLatest = byId("to-latest"), announcer = byId("announcer");

const client = new PenstockClient({ baseUrl: document.baseURI, apiKey: storedKey() });
const keyDialog = new KeyDialog((key) => client.setApiKey(key));
const store = newStore();
const settings = new Settings(store, () => { notice(); keepChoices(); });
const list = new ConversationList(client.conversations, store);
const sidebar = new Sidebar(store, {
  newChat: () => showNewChat(),
  open: (id, turn) => { if (id === pane.id && turn) reveal(turn); else wanted = turn; },
  pin: (id, isPinned) => void list.pin(id, isPinned),
  rename: (id) => list.askForName(id),
  duplicate: (id) => void duplicate(id),
  save: (id, format) => void save(id, format),
  remove: (id) => list.remove(id),
  undo: () => list.undo(),
  deleteNow: () => list.deleteNow(),
  loadMore: () => void list.loadMore(),
  find: (query) => void list.find(query),
  findMore: () => void list.findMore(),
});
const scroll = new StickyScroll(byId("scroller"), byId("content"), (isFollowing) => {
  toLatest.hidden = isFollowing || !welcome.hidden;
});
const pane = new ConversationPane({
  client,
  transcript,
  parameters: () => settings.parameters(),
  metadata: () => settings.metadata,
  hasTools: () => settings.hasTools,
  announce,
  mayAsk,
  sends,
  readsMarkdown: () => settings.readsMarkdown,
  write: () => composer.focus(),
  onLost: (id, message, reason) => {
    composer.giveBack(id, message);
    note({ refusal: reason });
  },
  onRefused: (message) => composer.keepCopy(message),
});
const composer = new Composer(store, location.hash.slice(1) || null, () => client.takesImages);
/** The turn at which the next conversation is to be opened. @type {string | null} */
let wanted = null;
/** The open conversation, if it could not be loaded. @type {string | null} */
let unopened = null;
/** The conversation that was open when it was removed. @type {string | null} */
let left = null;
/** Notifies the other tabs of this browser when a conversation has changed, with its id. */
const tabs = new BroadcastChannel("penstock");

// ---- conversations -------------------------------------------------------------------------

let keepTimer = 0;

/** Uses the settings of the open conversation. */
async function adoptSettings(/** @type {string | null} */ id) {
  clearTimeout(keepTimer);
  settings.adopt(null);
  if (id) await quietly(async () => {
    const { metadata } = await client.conversations.get(id);
    if (pane.id === id) settings.adopt(metadata);
  });
  notice();
}

/** Keeps what was chosen with the open conversation, too. */
function keepChoices() {
  clearTimeout(keepTimer);
  const { id } = pane;
  if (!id) return;
  keepTimer = setTimeout(() => void quietly(async () => {
    const now = (await client.conversations.get(id)).metadata;
    const others = Object.entries(now).filter(([name]) => !name.startsWith("settings_"));
    await client.conversations.update(id, { ...Object.fromEntries(others), ...settings.metadata });
    await list.refresh();
  }), KEEP_MS);
}

/** Opens what the address names. */
async function openAddressed() {
  const id = location.hash.slice(1) || null;
  if (id === pane.id && (id || pane.isEmpty)) return;
  const opened = pane.open(id);
  void adoptSettings(id);
  unopened = null;
  notice();
  try {
    await opened;
  } catch (error) {
    if (!(error instanceof PenstockError)) throw error;
    if (id === pane.id) notOpened(error);
  }
  if (id !== pane.id) return; // another one was opened meanwhile
  list.mark(pane.id);
  if (pane.id) scroll.follow();
  if (wanted) reveal(wanted);
  wanted = null;
}

/** Says why a conversation is not on the page. Without a connection, the banner does: it comes when there is one. */
function notOpened(/** @type {PenstockError} */ error) {
  if (error.status === 404) {
    composer.leaveToNew();
    showNewChat("This conversation is not on the server any more.");
  } else if (client.state === "open") {
    unopened = pane.id;
    announce(`${NOT_LOADED} The reason: ${error.message}`);
    note({ refusal: `${NOT_LOADED} The reason: ${error.message}` });
    notice();
  }
}

function reveal(/** @type {string} */ turn) {
  scroll.letGo();
  pane.reveal(turn);
}

function showNewChat(said = "New chat.") {
  history.pushState(null, "", location.pathname + location.search);
  void pane.open(null);
  void adoptSettings(null);
  wanted = null;
  list.mark(null);
  announce(said);
  sidebar.closeOverlay();
  scroll.toTop();
  composer.focus();
}

function submit() {
  if (!composer.isEmpty && canSteer()) return void pane.steer(composer.take());
  if (!composer.isEmpty && mayAsk()) ask(composer.take());
}

function ask(/** @type {import("./drafts.js").Message} */ message) {
  note({ refusal: "" });
  void pane.ask(message);
  scroll.follow();
}

/** Whether a message would interrupt the answer under way. */
function canSteer() {
  return client.state === "open" && pane.answer !== null && !pane.isBusy;
}

/** Whether a key sends what is being written. */
function sends(/** @type {KeyboardEvent} */ { key, shiftKey, ctrlKey, metaKey, isComposing }) {
  return key === "Enter" && !shiftKey && !isComposing && (!settings.sendsByCtrl || ctrlKey || metaKey);
}

function canAsk() {
  return client.state === "open" && !pane.answer && !pane.isBusy;
}

/** Whether a message can be sent. If not, the user is told why, or asked for what is missing. */
function mayAsk() {
  if (canAsk()) return true;
  if (client.state === "unauthorized") keyDialog.ask();
  else {
    const obstacle = pane.answer ? "Not sent: an answer is still coming. Wait for its end, or stop it (Esc)."
      : client.state === "open" ? "Not sent: this conversation is still being loaded or changed. Try again in a moment."
      : client.numFailures === 0 ? "Not sent: the page is still connecting. Try again in a moment."
      : "Not sent: the server cannot be reached. Your message stays here.";
    client.connect();
    announce(obstacle);
    note({ obstacle });
    notice();
  }
  return false;
}

function listenToPane() {
  pane.addEventListener("change", () => {
    if (composer.id !== pane.id) {
      note({ obstacle: "", refusal: "" });
      composer.open(pane.id);
    }
    follow(pane.answer);
    notice();
  });
  pane.addEventListener("created", () => {
    history.pushState(null, "", `#${pane.id}`);
    composer.rename(/** @type {string} */ (pane.id));
    list.mark(pane.id);
    scroll.follow();
  });
  pane.addEventListener("left", () => {
    composer.keep(); // without the message that leaves with the reader
    history.pushState(null, "", location.pathname);
  });
  pane.addEventListener("used", (event) => list.use(/** @type {CustomEvent} */ (event).detail));
  pane.addEventListener("moved", () => tabs.postMessage({ conversation: pane.id }));
  tabs.addEventListener("message", ({ data }) => {
    void list.refresh();
    if (data.conversation === pane.id) void catchUp();
    if (data.deleted && data.deleted === pane.id) leaveDeleted();
  });
  list.addEventListener("removed", (event) => {
    const { detail: id } = /** @type {CustomEvent<string>} */ (event);
    left = id === pane.id ? id : null;
    announce("Deleted.");
    if (left) leaveDeleted();
  });
  list.addEventListener("restored", (event) => {
    const { detail: id } = /** @type {CustomEvent<string>} */ (event);
    announce("It is back.");
    if (left === id) location.hash = `#${id}`;
  });
  list.addEventListener("deleted", (event) => {
    const { detail: id } = /** @type {CustomEvent<string>} */ (event);
    keepDraft(id, NOTHING);
    tabs.postMessage({ deleted: id });
    if (id === pane.id) leaveDeleted();
  });
}

function leaveDeleted() {
  pane.stop(); // the rest will not be read
  showNewChat("Deleted.");
}

/** What few readers use is loaded when it is first used. */
const transfer = () => import("./transfer.js");

/** What the model would call a conversation. */
async function suggestTitle(/** @type {import("./conversations.js").Conversation} */ conversation) {
  const { asMarkdown } = await transfer();
  const text = (await asMarkdown(client.conversations, conversation)).slice(0, MAX_TITLED);
  const answer = client.respond({
    ...settings.parameters(), tools: undefined, instructions: undefined, reasoning: { effort: "none" }, max_output_tokens: 40, store: false,
    input: `${text}\n\n---\n\nWrite a title of three to six words for the conversation above. Write the title alone.`,
  });
  await answer.done;
  return titleSaid(answer.text);
}

/** Saves a conversation as a file. */
function save(/** @type {string} */ id, /** @type {"json" | "md"} */ format) {
  return withConversation(id, "saved", async (conversation, { asJson, asMarkdown, fileName, saveFile }) => {
    const text = format === "json" ? await asJson(client.conversations, [conversation])
      : await asMarkdown(client.conversations, conversation);
    saveFile(fileName(titleOf(conversation), format), text, format === "json" ? "application/json" : "text/markdown");
  });
}

/** Opens a copy of a conversation, to go on in it in another way. */
function duplicate(/** @type {string} */ id) {
  return withConversation(id, "duplicated", async (conversation, { copyOf }) => {
    location.hash = `#${await copyOf(client.conversations, conversation, client.takesImages)}`;
  });
}

/**
 * Does something with a conversation, or tells why it was not done.
 * @param {string} id
 * @param {string} what
 * @param {(conversation: import("./conversations.js").Conversation, module: typeof import("./transfer.js")) => Promise<void>} work
 */
async function withConversation(id, what, work) {
  const conversation = conversationOf(store.state, id);
  if (!conversation) return;
  try {
    await work(conversation, await transfer());
  } catch (error) {
    if (!(error instanceof PenstockError)) throw error;
    store.update({ news: { title: `This conversation was not ${what}`, text: `The reason: ${error.message}` } });
  }
}

/** Shows changes made elsewhere. Conversations deleted on the server stay on the page. */
async function catchUp() {
  if (client.state === "open") await quietly(() => pane.refresh());
}

// ---- the answer under way ------------------------------------------------------------------

/** @type {import("./answer.js").Answer | null} */ let followed = null;
/** Where it is shown. @type {import("./transcript.js").TurnView | undefined} */ let followedView;
/** Whether its silence is due to an engine that is being restarted. */
let isRestarting = false;

/** Shows progress outside the answer, where it does not move with every line. */
function follow(/** @type {import("./answer.js").Answer | null} */ answer) {
  if (answer === followed) return;
  followed = answer;
  isRestarting = false;
  note({ progress: answer ? "Answering…" : "" });
  if (!answer) return;
  const { id } = composer;
  const view = pane.views.at(-1);
  followedView = view;
  const estimate = new QueueEstimate();
  let nextAt = 0;
  let isPaused = false;
  let heardAt = performance.now();
  const say = (/** @type {string} */ text) => { if (followed === answer) note({ progress: text }); };
  const hear = () => {
    heardAt = performance.now();
    if (isRestarting && followed === answer) endRestart();
  };
  for (const name of ["started", "delta", "queue", "preparing", "prefill", "pause", "block"]) answer.addEventListener(name, hear);
  void askAfterEngine(answer, () => performance.now() - heardAt > SILENT_MS && !isPaused);
  // The server has the message: a copy that was kept of it is not needed any more.
  answer.addEventListener("started", () => { if (id === composer.id) composer.keep(); });
  for (const name of ["delta", "block"]) answer.addEventListener(name, () => view?.showStatus(""));
  answer.addEventListener("delta", () => {
    const now = performance.now();
    if (now < nextAt || isPaused) return;
    nextAt = now + LIVE_INTERVAL_MS;
    say(liveText(answer));
  });
  answer.addEventListener("queue", (event) => {
    const { detail } = /** @type {CustomEvent} */ (event);
    const text = queueText(detail, estimate.note(detail));
    say(text);
    view?.showStatus(text);
  });
  answer.addEventListener("preparing", (event) => {
    const text = preparingText(/** @type {CustomEvent<string>} */ (event).detail);
    say(text);
    view?.showStatus(text);
  });
  answer.addEventListener("prefill", (event) => {
    const { detail } = /** @type {CustomEvent} */ (event);
    say(prefillText(detail));
    view?.showStatus(prefillText(detail), detail.numComputed / detail.numTokens);
  });
  answer.addEventListener("pause", (event) => {
    isPaused = /** @type {CustomEvent<boolean>} */ (event).detail;
    say(isPaused ? "Paused: the server is short of memory and will go on." : liveText(answer));
  });
}

/** Asks, while an answer is silent, whether it waits for an engine that is being restarted. */
async function askAfterEngine(
  /** @type {import("./answer.js").Answer} */ answer, /** @type {() => boolean} */ isSilent,
) {
  while (followed === answer && !answer.isEnded) {
    await new Promise((resolve) => setTimeout(resolve, ASK_INTERVAL_MS));
    if (followed !== answer || answer.isEnded || client.state !== "open" || !isSilent()) continue;
    const { isUp, waitMs } = await client.engineState();
    if (followed !== answer || !isSilent()) continue;
    if (!isUp) showRestart(waitMs);
    else if (isRestarting) endRestart();
  }
}

/** Says in the answer when an engine is expected that is being restarted. */
function showRestart(/** @type {number | null} */ waitMs) {
  const isNew = !isRestarting;
  isRestarting = true;
  const text = restartText(waitMs);
  note({ progress: text });
  followedView?.showStatus(text);
  if (isNew) announce(text); // not again whenever a second has gone
  if (isNew) notice();
}

function endRestart() {
  isRestarting = false;
  followedView?.showStatus("");
  note({ progress: "Answering…" });
  notice();
}

// ---- connection ----------------------------------------------------------------------------

/** Takes into the state how the connection, the open conversation and its answer are now. */
function notice() {
  // Tries follow each other quickly; the page shows one steady message between them.
  const state = client.state === "connecting" && client.numFailures > 0 ? "waiting"
    : client.state === "open" && isRestarting ? "restarting"
    : client.state;
  const limit = client.contexts[settings.model] ?? 0;
  if (canAsk()) note({ obstacle: "" });
  store.update({
    link: { state, hasSocket: client.transport !== "sse", failure: client.failure ?? "unreachable" },
    choices: settings.choices,
    context: pane.numTokens > 0 && limit > 0 ? { used: pane.numTokens, limit } : null,
    sending: { canAsk: canAsk(), canSteer: canSteer(), isAnswering: pane.answer !== null, isStopping: pane.answer?.isCancelling === true },
    isLoading: pane.id !== null && pane.isEmpty && !pane.isLoaded && pane.id !== unopened,
    isNew: pane.isEmpty && (location.hash === "" || pane.id === null || pane.isLoaded),
  });
}

/** Says these below the message box. */
function note(/** @type {Partial<import("./page-state.js").Notes>} */ parts) {
  store.update({ notes: { ...store.state.notes, ...parts } });
}

function onStateChange() {
  if (client.state === "open") {
    settings.offer(client.models, client.sampling);
    keyDialog.close();
    void list.refresh();
    void (pane.id || !location.hash ? catchUp() : openAddressed());
  } else if (client.state === "unauthorized") keyDialog.ask();
  notice();
}

// ---- page ----------------------------------------------------------------------------------

function announce(/** @type {string} */ text) {
  announcer.textContent = text;
}

function listenToPage() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (pane.answer && composer.isEmpty) pane.stop();
    else submit();
  });
  composer.addEventListener("refused", (event) => {
    const { detail: refusal } = /** @type {CustomEvent<string>} */ (event);
    if (refusal) announce(refusal);
    note({ refusal });
  });
  byId("composer-text").addEventListener("keydown", (event) => {
    if (event.key === "ArrowUp" && composer.isEmpty && !pane.isEmpty) {
      event.preventDefault();
      if (mayAsk()) pane.views.at(-1)?.startEditing();
    }
    if (!sends(event)) return;
    event.preventDefault();
    submit();
  });
  transcript.addEventListener("click", (event) => {
    const button = /** @type {Element} */ (event.target).closest(".code-head button");
    const block = button?.closest(".code");
    if (button && block) void useCode(/** @type {HTMLElement} */ (button), block);
  });
  byId("open-settings").addEventListener("click", () => settings.open());
  toLatest.addEventListener("click", () => { scroll.follow(); composer.focus(); });
  window.addEventListener("hashchange", () => void openAddressed());
  window.addEventListener("popstate", () => void openAddressed());
  window.addEventListener("online", () => client.connect());
  window.addEventListener("offline", () => client.suspect());
  document.addEventListener("visibilitychange", () => { if (!document.hidden) void catchUp(); });
}

/** Saves all conversations as a file. @returns {Promise<string>} what became of it */
function saveChats() {
  return told(async () => {
    const { allAsJson, saveFile } = await transfer();
    saveFile("penstock-chats.json", await allAsJson(client.conversations), "application/json");
    return "Saved.";
  });
}

/** Makes the conversations of a file again. @returns {Promise<string>} what became of it */
function loadChats(/** @type {File} */ file) {
  return told(async () => {
    const { fromJson } = await transfer();
    const { length } = await fromJson(client.conversations, await file.text(), client.takesImages);
    void list.refresh();
    return length === 1 ? "One chat was loaded." : `${length} chats were loaded.`;
  });
}

async function told(/** @type {() => Promise<string>} */ work) {
  try {
    return await work();
  } catch (error) {
    const { NotConversations } = await transfer();
    if (!(error instanceof PenstockError || error instanceof NotConversations)) throw error;
    return error.message;
  }
}

/** Does with a block of code what its button says. */
async function useCode(/** @type {HTMLElement} */ button, /** @type {Element} */ block) {
  const code = block.querySelector("pre")?.textContent ?? "";
  if ("copies" in button.dataset) void copyText(code).then(() => confirmOn(button));
  else if ("saves" in button.dataset) {
    const { codeFileName, saveFile } = await transfer();
    saveFile(codeFileName(block.querySelector(".code-head span")?.textContent ?? ""), `${code}\n`);
    confirmOn(button);
  } else if ("shows" in button.dataset) {
    const { showPage } = await import("./code-preview.js");
    showPage(code);
  } else button.setAttribute("aria-pressed", String(block.classList.toggle("is-wrapped")));
}

/** Loads what else there is, once somebody uses the page: it may be wanted when there is no connection. */
function loadTheRest() {
  void Promise.allSettled([
    transfer(), import("./dialogs.js"), import("./token-view.js"), import("./code-preview.js"), import("./branch-comparison.js"), import("./branches.js"),
  ]);
}

let hasDialogs = false;

/** Those that are loaded when one of them is first opened. */
async function loadDialogs() {
  if (hasDialogs) return;
  hasDialogs = true;
  try {
    const { mountDialogs } = await import("./dialogs.js");
    const rename = list.rename.bind(list);
    mountDialogs(store, settings, { enterKey: () => keyDialog.open(), saveChats, loadChats, rename, suggest: suggestTitle });
  } catch {
    hasDialogs = false;
    settings.close();
    store.update({ renamed: null });
    note({ obstacle: "Not opened: the server cannot be reached." });
  }
}

/** A prompt that is offered to those who have none yet. */
function askOffered(/** @type {string} */ text) {
  if (canAsk()) ask({ text, attachments: [] });
  composer.focus();
}

mountFrame(store, { connect: () => client.connect(), enterKey: () => keyDialog.ask(), ask: askOffered });
mountComposer(store, { choose: (name, value) => settings.set(name, value), remove: (part) => composer.remove(part) });
store.watch(["settings", "renamed"], ({ settings: { isOpen }, renamed }) => { if (isOpen || renamed) void loadDialogs(); });
store.watch(["message"], () => note({ obstacle: "" }));
store.watch(["isNew"], ({ isNew }) => { if (isNew) scroll.toTop(); });
store.watch(["sending"], ({ sending: { canAsk } }) => {
  for (const button of document.querySelectorAll("button[data-asks]")) /** @type {HTMLButtonElement} */ (button).disabled = !canAsk;
});
listenToPane();
listenToPage();
listenForShortcuts({
  stop: () => pane.stop(),
  newChat: () => showNewChat(),
  regenerate: () => { if (!pane.isEmpty && mayAsk()) pane.regenerateLast(); },
  copy: () => pane.views.at(-1)?.copy(),
  toggleList: () => sidebar.toggle(),
  search: () => sidebar.search(),
  settings: () => settings.open(),
  write: () => composer.focus(),
});
client.addEventListener("state", onStateChange);
for (const name of ["keydown", "pointerdown"]) document.addEventListener(name, loadTheRest, { once: true });
client.connect();
