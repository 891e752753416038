/**
 * The chat page: what the reader does, and what follows from it.
 *
 * One conversation at a time. Its memory is the server's: each turn names the response before it
 * (`previous_response_id`), and the page keeps only that id. Nothing but an API key is stored, and
 * that in this tab's session storage.
 */

import { PenstockClient, isSendableKey } from "./penstock-client.js";
import { StickyScroll } from "./sticky-scroll.js";
import { TurnView } from "./transcript.js";

/** @typedef {import("./penstock-client.js").Answer} Answer */
/** @typedef {import("./penstock-client.js").Outcome} Outcome */

const KEY_ITEM = "penstock.apiKey";
const MAX_ANNOUNCED_CHARACTERS = 1_000;
/** Refusals after which this conversation cannot go on, by their code. @type {Record<string, string>} */
const ENDS_OF_CONVERSATIONS = {
  previous_response_not_found:
    "The server no longer has this conversation; it may have been restarted. Nothing above will be remembered.",
  context_length_exceeded:
    "This conversation has filled the model's context and cannot go on.",
};
const SUGGESTIONS = [
  ["Say hello", "Hello! Who are you?"],
  ["Look behind the page", "What is penstock?"],
  ["Learn an idea", "How does paged attention work?"],
  ["See if it remembers", "My name is Ada. Please remember it."],
  ["Let it count", "Count from 1 to 20."],
  ["Watch a long stream", "Tell me a long story."],
];

const byId = (/** @type {string} */ id) => /** @type {HTMLElement} */ (document.getElementById(id));
const page = {
  connection: byId("connection"),
  connectionText: byId("connection-text"),
  model: byId("model"),
  newChat: byId("new-chat"),
  banner: byId("banner"),
  bannerText: byId("banner-text"),
  bannerAction: byId("banner-action"),
  welcome: byId("welcome"),
  suggestions: byId("suggestions"),
  transcript: byId("transcript"),
  toLatest: byId("to-latest"),
  composer: /** @type {HTMLFormElement} */ (byId("composer")),
  text: /** @type {HTMLTextAreaElement} */ (byId("composer-text")),
  send: /** @type {HTMLButtonElement} */ (byId("send")),
  announcer: byId("announcer"),
  keyDialog: /** @type {HTMLDialogElement} */ (byId("key-dialog")),
  keyForm: byId("key-form"),
  keyInput: /** @type {HTMLInputElement} */ (byId("key-input")),
  keyError: byId("key-error"),
  keyCancel: byId("key-cancel"),
};

const client = new PenstockClient({ baseUrl: document.baseURI, apiKey: sessionStorage.getItem(KEY_ITEM) });
const scroll = new StickyScroll(byId("scroller"), byId("content"), (isFollowing) => {
  page.toLatest.hidden = isFollowing;
});

/** The conversation on the page. A new chat is a new object, so late events find the old one. */
let chat = newConversation();

function newConversation() {
  return {
    /** @type {string | null} */ lastResponseId: null,
    /** The answer under way. @type {Answer | null} */ answer: null,
    /** @type {TurnView | null} */ lastTurn: null,
  };
}

// ---- turns ---------------------------------------------------------------------------------

function submit() {
  const text = page.text.value.trim();
  if (!text || chat.answer || client.state !== "open") return;
  page.text.value = "";
  fitComposer();
  ask(text);
}

function ask(/** @type {string} */ text) {
  const conversation = chat;
  conversation.lastTurn?.retire();
  const turn = new TurnView(page.transcript, text);
  const answer = client.respond({
    model: client.models[0],
    input: text,
    previousResponseId: conversation.lastResponseId,
  });
  conversation.answer = answer;
  conversation.lastTurn = turn;
  answer.addEventListener("delta", (event) => {
    turn.append(/** @type {CustomEvent<string>} */ (event).detail);
    turn.showLiveRate(answer);
  });
  answer.addEventListener("pause", (event) => {
    turn.showPause(/** @type {CustomEvent<boolean>} */ (event).detail);
  });
  void answer.done.then((outcome) => {
    if (conversation === chat) settle({ turn, answer, outcome, question: text });
  });
  page.welcome.hidden = true;
  announce("Answering…");
  scroll.follow();
  refresh();
}

/** @param {{ turn: TurnView, answer: Answer, outcome: Outcome, question: string }} ended */
function settle({ turn, answer, outcome, question }) {
  chat.answer = null;
  turn.finish(answer, outcome.usage);
  const again = () => {
    turn.remove();
    ask(question);
  };
  switch (outcome.kind) {
    case "completed":
      if (!answer.text) turn.addNote("The model ended its answer without a word.");
      break;
    case "cancelled":
      turn.addNote("Stopped.");
      break;
    case "incomplete":
      turn.addNote(incompleteText(outcome.reason));
      break;
    case "disconnected":
      turn.addNote("The connection broke here. The rest of this answer is lost, and the model will not remember it.", {
        isError: true,
        action: { label: "Ask again", run: whenOpen(again) },
      });
      break;
    default:
      noteProblem(turn, outcome, { question, again });
  }
  const isRemembered = ["completed", "cancelled", "incomplete"].includes(outcome.kind);
  if (isRemembered && outcome.responseId) chat.lastResponseId = outcome.responseId;
  announce([answer.text.slice(0, MAX_ANNOUNCED_CHARACTERS), turn.noteText].filter(Boolean).join("\n"));
  refresh();
}

/** Says why there is no answer, and offers what can be done about it. */
function noteProblem(
  /** @type {TurnView} */ turn,
  /** @type {Outcome} */ { problem },
  /** @type {{ question: string, again: () => void }} */ { question, again },
) {
  const lasting = chat.lastResponseId ? ENDS_OF_CONVERSATIONS[problem?.code ?? ""] : undefined;
  const startAnew = () => {
    startNewChat();
    ask(question);
  };
  turn.addNote(lasting ?? (problem?.message || "The server gave no reason."), {
    isError: true,
    action: lasting
      ? { label: "Start anew with this message", run: whenOpen(startAnew) }
      : { label: "Try again", run: whenOpen(again) },
  });
}

function incompleteText(/** @type {string | null} */ reason) {
  if (reason === "max_output_tokens") return "Cut short: the answer reached its length limit.";
  return reason ? `Cut short (${reason}).` : "Cut short.";
}

function whenOpen(/** @type {() => void} */ run) {
  return () => {
    if (client.state === "open" && !chat.answer) run();
  };
}

function startNewChat() {
  chat.answer?.cancel();
  chat = newConversation();
  page.transcript.replaceChildren();
  page.welcome.hidden = false;
  announce("New chat.");
  scroll.follow();
  refresh();
  page.text.focus();
}

// ---- connection ----------------------------------------------------------------------------

function refresh() {
  const isOpen = client.state === "open";
  const label = { connecting: "Connecting…", open: "Connected", waiting: "Reconnecting…", unauthorized: "Needs a key", closed: "Offline" };
  // Tries follow each other quickly; between them the page stays calm and says one thing.
  const shown = client.state === "connecting" && client.numFailures > 0 ? "waiting" : client.state;
  page.connection.dataset.state = shown;
  page.connectionText.textContent = label[shown];
  page.model.textContent = client.models[0] ?? "";
  showBanner(shown);
  const isAnswering = chat.answer !== null;
  page.composer.classList.toggle("is-answering", isAnswering);
  page.send.disabled = isAnswering ? chat.answer?.isCancelling === true : !isOpen || !page.text.value.trim();
  page.send.setAttribute("aria-label", isAnswering ? "Stop" : "Send");
  page.send.title = isAnswering ? "Stop (Esc)" : "Send (Enter)";
  for (const button of document.querySelectorAll("button[data-asks]")) {
    /** @type {HTMLButtonElement} */ (button).disabled = !isOpen || isAnswering;
  }
}

function showBanner(/** @type {string} */ shown) {
  const reasons = {
    unreachable: "Cannot reach the server. Trying again…",
    "no websocket": "The server answers, but a WebSocket does not get through. Trying again…",
    dropped: "The connection to the server broke. Reconnecting…",
  };
  const needsKey = shown === "unauthorized";
  const text = needsKey ? "This server asks for an API key." : reasons[client.failure ?? "unreachable"];
  page.banner.hidden = shown !== "waiting" && !needsKey;
  if (page.banner.hidden || page.bannerText.textContent === text) return;
  page.bannerText.textContent = text;
  page.bannerAction.textContent = needsKey ? "Enter key" : "Try now";
}

function onStateChange() {
  refresh();
  if (client.state === "open") {
    if (page.keyDialog.open) page.keyDialog.close();
  } else if (client.state === "unauthorized") {
    askForKey();
  }
}

function askForKey() {
  const rejected = sessionStorage.getItem(KEY_ITEM);
  sessionStorage.removeItem(KEY_ITEM);
  page.keyError.textContent = rejected ? "The server did not accept this key." : "";
  if (!page.keyDialog.open) page.keyDialog.showModal();
  page.keyInput.select();
}

function submitKey() {
  const key = page.keyInput.value.trim();
  if (!key) return;
  if (!isSendableKey(key)) {
    page.keyError.textContent = "A browser cannot send this key: it may hold letters, digits and !#$%&'*+.^_`|~- only.";
    return;
  }
  page.keyError.textContent = "";
  sessionStorage.setItem(KEY_ITEM, key);
  client.setApiKey(key);
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

function stop() {
  chat.answer?.cancel();
  refresh();
}

function listenToPage() {
  page.composer.addEventListener("submit", (event) => {
    event.preventDefault();
    if (chat.answer) stop();
    else submit();
  });
  page.text.addEventListener("input", () => { fitComposer(); refresh(); });
  page.text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !page.keyDialog.open) stop();
  });
  page.newChat.addEventListener("click", startNewChat);
  page.toLatest.addEventListener("click", () => { scroll.follow(); page.text.focus(); });
  page.bannerAction.addEventListener("click", () => {
    if (client.state === "unauthorized") askForKey();
    else client.connect();
  });
  page.keyForm.addEventListener("submit", (event) => { event.preventDefault(); submitKey(); });
  page.keyCancel.addEventListener("click", () => page.keyDialog.close());
  window.addEventListener("online", () => client.connect());
}

function addSuggestions() {
  for (const [label, prompt] of SUGGESTIONS) {
    const item = document.createElement("li");
    const button = document.createElement("button");
    const [title, detail] = [document.createElement("b"), document.createElement("span")];
    title.textContent = label;
    detail.textContent = prompt;
    button.type = "button";
    button.dataset.asks = "";
    button.append(title, detail);
    button.addEventListener("click", whenOpen(() => { ask(prompt); page.text.focus(); }));
    item.append(button);
    page.suggestions.append(item);
  }
}

addSuggestions();
listenToPage();
client.addEventListener("state", onStateChange);
client.connect();
refresh();
