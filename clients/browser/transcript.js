/**
 * How turns look: what came in, the answer as it grows, and what can be done with either.
 *
 * What it does not know: servers, and what comes next in the conversation.
 */

import { blockOf, tokensOf } from "./answer.js";
import { Blocks } from "./blocks.js";
import { button, confirmOn, copyText, make } from "./dom.js";
import { attachmentElement } from "./attachments.js";
import { countsOf, figureElements, timesOf } from "./figures.js";
import { MarkdownStream } from "./markdown.js";
import { Colours, setFormula } from "./markdown-extras.js";
import { attachmentsOf, isResult, messageText, partsOf } from "./turns.js";

/** @typedef {import("./answer.js").Answer} Answer */
/** @typedef {import("./answer.js").Usage} Usage */
/** @typedef {import("./conversations.js").Item} Item */
/** @typedef {{ label: string, run: () => void, asks?: boolean }} Action */
/**
 * What a reader may want of a turn.
 * @typedef {object} Wishes
 * @property {(view: TurnView) => void} regenerate
 * @property {(view: TurnView, text: string) => void} edit  its message; it is answered anew
 * @property {(view: TurnView, text: string) => void} editAnswer  what comes after the last call or thought
 * @property {(view: TurnView) => void} remove  with its answer
 * @property {(view: TurnView) => void} removeAnswer
 * @property {(view: TurnView, step: number) => void} switchBranch
 * @property {(view: TurnView) => void} compare  its branches, beside each other
 * @property {(view: TurnView) => Promise<{ usage: Usage, cache: string, model: string } | null>} usage  why not more of it was cached, and whose it is
 * @property {() => boolean} mayAsk  whether a message can be sent; if not, the reader is told why
 * @property {(event: KeyboardEvent) => boolean} sends  whether this key sends what is written
 * @property {() => boolean} readsMarkdown  whether messages of the user are shown as Markdown
 */

const NAMES = { user: "You", assistant: "Assistant", system: "System", developer: "System" };

/** Shows under a long message that there is more of it, as long as that is hidden. */
const cuts = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const more = /** @type {HTMLElement} */ (target.nextElementSibling);
    if (target.classList.contains("is-cut")) more.hidden = target.scrollHeight <= target.clientHeight + 1;
  }
});
const MAX_UNCUT_CHARACTERS = 250; // twelve lines on a narrow screen

/** What came in, and the answer to it: one turn, and those that continue its answer. */
export class TurnView {
  /** The turns shown here, as the server names them. @type {string[]} */ turnIds = [];
  /** What the note under the answer says. */
  noteText = "";
  items;
  text = "";
  #wishes;
  #section = make("section", "turn");
  /** The last message that came in, and what can be done with it. @type {HTMLElement | null} */ #question = null;
  #article = make("article", "message assistant");
  #blocks = new Blocks();
  #foot = make("div", "foot");
  #notes = make("div", "notes");
  #tools = make("div", "tools");
  #branches = make("span", "branches");
  #stats = make("p", "stats");
  /** What is known of an answer that is waited for. */
  #status = make("div", "status");
  /** @type {import("./answer.js").Token[]} */ #tokens = [];
  /** @type {HTMLButtonElement} */ #tokensButton;
  /** @type {import("./token-view.js").TokenView | null} */ #tokenView = null;
  /** The text behind the newest blocks, and how much comes before it. */
  #markdown;
  #partStart = 0;
  #prose = make("div", "prose");
  #pending = "";
  #frame = 0;
  #watching = new AbortController();
  /** @type {import("./figures.js").Figure[]} */ #times = [];
  /** @type {Usage | null} */ #usage = null;

  /**
   * @param {HTMLElement} parent
   * @param {Pick<Item, "role" | "content">[]} items  what came in
   * @param {Wishes} wishes
   */
  constructor(parent, items, wishes) {
    this.items = items.filter((item) => item.content);
    this.#wishes = wishes;
    this.#article.append(make("h3", "visually-hidden", NAMES.assistant), this.#status, this.#foot);
    this.#markdown = this.#newPart();
    this.#stats.hidden = this.#status.hidden = true;
    this.#tokensButton = button({ label: "Tokens and their probabilities", picture: "tokens", run: () => void this.#toggleTokens() });
    this.#tokensButton.setAttribute("aria-pressed", "false");
    this.#tokensButton.hidden = true;
    this.#foot.append(this.#notes, this.#tools, this.#stats);
    this.#section.append(...this.items.map((item) => this.#itemElement(item)));
    parent.append(this.#section);
    this.#addTools();
  }

  get isAnswered() {
    return this.#article.isConnected;
  }

  // ---- the answer ----------------------------------------------------------------------------

  /** Shows text that is there already. */
  show(/** @type {string} */ text) {
    this.#section.append(this.#article);
    this.#article.setAttribute("aria-busy", "false");
    this.#take(text);
    this.#flush();
  }

  /** Shows what a turn has answered, and what its calls returned. */
  showTurn(/** @type {import("./conversations.js").Turn} */ turn) {
    const { items, output } = partsOf(turn);
    for (const item of /** @type {any[]} */ ([...items.filter(isResult), ...output])) {
      const block = blockOf(item);
      if (block) this.showBlock(block);
      else if (isResult(item)) this.showResult(item.call_id, item.output);
      else {
        this.show(messageText(item));
        this.keepTokens(tokensOf(item));
      }
    }
  }

  /** Shows a thought or a tool call as it is now. */
  showBlock(/** @type {import("./answer.js").Block} */ block) {
    this.#section.append(this.#article);
    if (!this.#blocks.has(block)) {
      this.#flush();
      if (this.text.length > this.#partStart) this.#markdown = this.#newPart();
    }
    this.#blocks.show(block);
  }

  /**
   * Says what is known of an answer that is waited for; empty: nothing.
   * @param {string} text
   * @param {number | null} [share]  how much of it is done
   */
  showStatus(text, share = null) {
    this.#status.hidden = !text;
    if (this.#status.firstChild?.textContent !== text || !text) this.#status.replaceChildren(...(text ? [make("span", "", text)] : []));
    if (share === null) return;
    const bar = /** @type {HTMLProgressElement} */ (make("progress"));
    bar.value = share;
    bar.setAttribute("aria-label", text);
    this.#status.append(bar);
  }

  /** Takes tokens of its text, which the reader can look at. */
  keepTokens(/** @type {import("./answer.js").Token[]} */ tokens) {
    this.#tokens = [...this.#tokens, ...tokens];
    this.#tokensButton.hidden = this.#tokens.length === 0;
  }

  showResult(/** @type {string} */ callId, /** @type {string} */ output) {
    this.#blocks.showResult(callId, output);
  }

  /** Shows an answer as it comes, behind what is there. */
  attach(/** @type {Answer} */ answer) {
    const { signal } = this.#watching;
    this.#section.append(this.#article);
    this.#article.classList.add("is-waiting");
    this.#article.setAttribute("aria-busy", "true");
    this.#foot.hidden = true; // it would move with every line
    this.#notes.replaceChildren();
    this.noteText = "";
    if (this.#tokenView) void this.#toggleTokens();
    let taken = 0;
    for (const block of answer.blocks) {
      this.#take(answer.text.slice(taken, block.textBefore));
      taken = block.textBefore;
      this.showBlock(block);
    }
    this.#take(answer.text.slice(taken));
    answer.addEventListener("block", (event) => this.showBlock(/** @type {CustomEvent} */ (event).detail), { signal });
    answer.addEventListener("delta", (event) => this.#take(/** @type {CustomEvent<string>} */ (event).detail), { signal });
  }

  /** Ends the answer. */
  finish(/** @type {Answer} */ answer, /** @type {Usage | null} */ usage) {
    this.#flush();
    this.showStatus("");
    this.keepTokens(answer.tokens);
    this.#article.classList.remove("is-waiting", "is-streaming");
    this.#article.setAttribute("aria-busy", "false");
    this.#foot.hidden = false;
    this.#times = timesOf(answer, usage);
    this.#usage = usage;
    if (this.#times.length > 0) this.#showStats(this.#times);
  }

  /** A line under the answer, with what can be done about it; `isAnswer`: there is one. */
  addNote(/** @type {string} */ text, { isError = false, isAnswer = true, actions = /** @type {Action[]} */ ([]) } = {}) {
    this.#section.append(this.#article);
    this.noteText = text;
    this.#tools.hidden = !isAnswer || (isError && this.turnIds.length === 0 && !this.text); // they are an answer's
    const note = make("p", isError ? "note is-error" : "note");
    note.append(make("span", "", text));
    note.append(...actions.map((action) => button({ asks: true, ...action })));
    this.#notes.append(note);
  }

  /** Takes away what can be done about it: a later turn has made that meaningless. */
  retire() {
    for (const node of this.#notes.querySelectorAll("button")) node.remove();
  }

  /** Brings it into view, and shows for a moment which one it is. */
  reveal() {
    this.#section.scrollIntoView({ block: "start" });
    this.#section.classList.add("is-found");
    setTimeout(() => this.#section.classList.remove("is-found"), 2_000);
  }

  remove() {
    cancelAnimationFrame(this.#frame);
    this.#watching.abort();
    this.#section.remove();
  }

  /**
   * Where this turn stands among those with the same past: beside the message, if they answer
   * different ones, else under the answer.
   */
  showBranches(/** @type {number} */ index, /** @type {number} */ count, /** @type {boolean} */ isEdited) {
    this.#branches.hidden = count < 2;
    if (count < 2) return;
    const tools = (isEdited && this.#question?.querySelector(".tools")) || this.#tools;
    if (this.#branches.parentElement !== tools) tools.append(this.#branches);
    const step = (/** @type {number} */ by, /** @type {string} */ label, /** @type {string} */ picture) => {
      const node = button({ label, picture, asks: true, run: () => this.#wishes.switchBranch(this, by) });
      if (index + by < 0 || index + by >= count) delete node.dataset.asks, node.disabled = true;
      return node;
    };
    const beside = button({ label: "Versions beside each other", picture: "columns", run: () => this.#wishes.compare(this) });
    const place = make("span", "place", `${index + 1}/${count}`);
    place.setAttribute("aria-label", `version ${index + 1} of ${count}`);
    place.setAttribute("role", "img");
    this.#branches.replaceChildren(step(-1, "Previous version", "left"), place, step(1, "Next version", "right"), beside);
  }

  /** Lets the user edit the question in place. */
  startEditing() {
    const bubble = /** @type {HTMLElement | null} */ ((this.#question ?? this.#section).querySelector(".bubble"));
    const asked = this.items.at(-1);
    if (bubble && asked) this.#openEditor({ node: bubble, text: messageText(asked), label: "Edit your message", verb: "Send", save: (text) => this.#wishes.edit(this, text) });
  }

  /** Lets the user edit the answer's text in place, as it is written: what comes after the last call or thought. */
  #startEditingAnswer() {
    if (this.#tokenView) void this.#toggleTokens();
    const text = this.text.slice(this.#partStart);
    this.#openEditor({ node: this.#prose, text, label: "Edit the answer", verb: "Save", isLong: true, save: (edited) => this.#wishes.editAnswer(this, edited) });
  }

  /**
   * An editor in place of a part of the turn.
   * @param {object} given
   * @param {HTMLElement} given.node
   * @param {string} given.text
   * @param {string} given.label
   * @param {string} given.verb  what its button says
   * @param {boolean} [given.isLong]  Enter makes a new line, whatever it does elsewhere
   * @param {(text: string) => void} given.save
   */
  #openEditor({ node, text, label, verb, isLong = false, save }) {
    if (this.#section.querySelector(".editor")) return;
    const focused = /** @type {HTMLElement | null} */ (document.activeElement);
    const editor = /** @type {HTMLFormElement} */ (make("form", "editor"));
    const area = /** @type {HTMLTextAreaElement} */ (make("textarea"));
    area.value = text;
    area.dir = "auto";
    area.rows = Math.min(isLong ? 20 : 8, text.split("\n").length + 1);
    area.setAttribute("aria-label", label);
    const close = () => { editor.replaceWith(node); focused?.focus(); };
    const submit = button({ label: verb, asks: true, run: () => editor.requestSubmit() });
    submit.classList.add("primary");
    const buttons = make("div", "editor-buttons");
    buttons.append(button({ label: "Cancel", run: close }), submit);
    editor.append(area, buttons);
    editor.addEventListener("submit", (event) => {
      event.preventDefault();
      const edited = isLong ? area.value : area.value.trim();
      if (!edited.trim() || !this.#wishes.mayAsk()) return;
      close();
      if (!isLong || edited !== text) save(edited);
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); close(); }
      const submits = isLong ? event.key === "Enter" && (event.ctrlKey || event.metaKey) : this.#wishes.sends(event);
      if (!submits) return;
      event.preventDefault();
      editor.requestSubmit();
    });
    node.replaceWith(editor);
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  /** Asks below a part of the turn before something is done that cannot be taken back. */
  #confirm(/** @type {string} */ question, /** @type {HTMLElement} */ place, /** @type {() => void} */ run) {
    if (this.#section.querySelector(".confirm")) return;
    const focused = /** @type {HTMLElement | null} */ (document.activeElement);
    const note = make("div", "note confirm");
    const keep = () => { note.remove(); focused?.focus(); };
    const remove = button({ label: "Delete", asks: true, run: () => { note.remove(); run(); } });
    remove.classList.add("deletes");
    note.setAttribute("role", "group");
    note.setAttribute("aria-label", question);
    note.append(make("span", "", question), remove, button({ label: "Keep", run: keep }));
    note.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      keep();
    });
    place.after(note);
    note.scrollIntoView({ block: "nearest" });
    remove.focus();
  }

  copy() {
    const node = this.#tools.querySelector("button");
    void copyText(this.text).then(() => node && confirmOn(node));
  }

  #take(/** @type {string} */ text) {
    this.text += text;
    this.#pending += text;
    // However many pieces come, the page changes once per animation frame.
    this.#frame ||= requestAnimationFrame(() => this.#flush());
  }

  #flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    if (!this.#pending) return;
    this.#article.classList.replace("is-waiting", "is-streaming");
    this.#markdown.append(this.#pending);
    this.#pending = "";
  }

  /** Room for blocks, and for text behind them. */
  #newPart() {
    this.#prose = make("div", "prose");
    this.#status.before(this.#blocks.newGroup(), this.#prose); // below, where it moves no text when it goes
    if (this.text) this.text += "\n\n";
    this.#partStart = this.text.length;
    return new MarkdownStream(this.#prose, { Colours, setFormula });
  }

  // ---- around it -----------------------------------------------------------------------------

  #addTools() {
    this.#branches.hidden = true;
    this.#tools.append(
      button({ label: "Copy answer", picture: "copy", run: () => this.copy() }),
      button({ label: "Edit answer", picture: "edit", asks: true, run: () => this.#startEditingAnswer() }),
      button({ label: "Regenerate", picture: "again", asks: true, run: () => this.#wishes.regenerate(this) }),
      button({ label: "Delete answer", picture: "delete", asks: true, run: () => this.#confirmRemoval() }),
      button({ label: "Figures", picture: "figures", run: () => void this.#toggleStats() }),
      this.#tokensButton,
      this.#branches,
    );
  }

  #confirmRemoval() {
    const hasQuestion = this.items.length > 0;
    this.#confirm("Delete this answer for good?", this.#tools, () => (hasQuestion ? this.#wishes.removeAnswer(this) : this.#wishes.remove(this)));
  }

  /** Everything that is known of the answer; a second time: nothing. */
  async #toggleStats() {
    if (this.#stats.querySelector(".counts")) {
      this.#stats.hidden = true;
      this.#stats.replaceChildren();
      return;
    }
    const found = await this.#wishes.usage(this);
    this.#usage ??= found?.usage ?? null;
    this.#showStats([...this.#times, ...(this.#usage ? countsOf(this.#usage) : [])]);
    this.#stats.append(make("span", "counts", found?.cache));
    if (found) this.#stats.append(...figureElements([["by ", found.model, ""]]));
  }

  /** Tokens in place of the text, and back. */
  async #toggleTokens() {
    const isShown = this.#tokenView === null;
    const made = isShown ? new (await import("./token-view.js")).TokenView(this.#tokens) : null;
    if (isShown && this.#tokenView) return; // asked for twice
    this.#tokensButton.setAttribute("aria-pressed", String(isShown));
    this.#article.classList.toggle("shows-tokens", isShown);
    this.#tokenView?.node.remove();
    this.#tokenView = made;
    if (this.#tokenView) this.#foot.before(this.#tokenView.node);
  }

  #showStats(/** @type {import("./figures.js").Figure[]} */ figures) {
    this.#stats.hidden = false;
    this.#stats.replaceChildren(...figureElements(figures));
  }

  #itemElement(/** @type {Pick<Item, "role" | "content">} */ item) {
    const text = messageText(item);
    const message = make("article", `message ${item.role === "developer" ? "system" : item.role}`);
    message.append(make("h3", "visually-hidden", NAMES[item.role]));
    if (item.role === "assistant") {
      const prose = make("div", "prose");
      new MarkdownStream(prose, { Colours, setFormula }).append(text);
      message.append(prose);
    } else {
      const bubble = make("div", "bubble");
      bubble.dir = "auto";
      const isShort = text.length <= MAX_UNCUT_CHARACTERS && text.split("\n").length <= 12;
      if (item.role === "user" && this.#wishes.readsMarkdown()) {
        const prose = make("div", "prose");
        new MarkdownStream(prose, { Colours, setFormula }).append(text);
        bubble.append(...(isShort ? [prose] : cutting(prose)));
      } else if (isShort) bubble.textContent = text;
      else bubble.append(...cutting(text));
      const said = make("div", "said-by");
      const pictures = make("div", "pictures");
      pictures.append(...attachmentsOf(item).map(attachmentElement));
      if (pictures.hasChildNodes()) said.append(pictures);
      said.append(bubble);
      message.append(said);
    }
    if (item.role === "user") {
      const tools = make("div", "tools");
      const copy = button({ label: "Copy message", picture: "copy", run: () => void copyText(text).then(() => confirmOn(copy)) });
      tools.append(copy);
      if (item === this.items.at(-1)) {
        const asked = () => (this.isAnswered ? "Delete this message and its answer for good?" : "Delete this message for good?");
        const remove = () => this.#confirm(asked(), message, () => this.#wishes.remove(this));
        tools.append(
          button({ label: "Edit", picture: "edit", asks: true, run: () => this.startEditing() }),
          button({ label: "Delete", picture: "delete", asks: true, run: remove }),
        );
        this.#question = message;
      }
      message.append(tools);
    }
    return message;
  }
}

/** A long text, of which the first lines are shown, and the button that shows all of it. */
function cutting(/** @type {string | HTMLElement} */ text) {
  const shown = make("div", "bubble-text is-cut");
  shown.append(text);
  const more = make("button", "bubble-more", "Show all");
  /** @type {HTMLButtonElement} */ (more).type = "button";
  more.hidden = true;
  more.setAttribute("aria-expanded", "false");
  more.addEventListener("click", () => {
    const isCut = shown.classList.toggle("is-cut");
    more.textContent = isCut ? "Show all" : "Show less";
    more.setAttribute("aria-expanded", String(!isCut));
  });
  cuts.observe(shown);
  return [shown, more];
}
