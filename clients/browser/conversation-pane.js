/**
 * The conversation on the page: opening one, asking, stopping, continuing, and its branches.
 *
 * The server keeps everything: the tree of turns, its head, the texts. The page shows it, and notifies
 * the other tabs of this browser of changes. To answer an earlier message again, it moves the head to
 * before that message and asks there; head and lock keep two users of one conversation from
 * interfering.
 */

import { cutText, NOT_LOADED, NOT_SENT, problemOf, refusalText, TAKEN, wasKept } from "./endings.js";
import { cacheText } from "./figures.js";
import { PenstockError } from "./penstock-client.js";
import { quietly } from "./quietly.js";
import { TurnView } from "./transcript.js";
import { outputsOf } from "./tools.js";
import { grouped, hasSameStart, messageOf, messageText, openCalls, inputOf, numShown, partsOf, pathShown, placeOf, responseOf, runningOf, titleFrom, userItem } from "./turns.js";

/** @typedef {import("./penstock-client.js").Answer} Answer */
/** @typedef {import("./answer.js").Outcome} Outcome */
/** @typedef {import("./conversations.js").Tree} Tree */
/** @typedef {import("./conversations.js").Turn} Turn */
/** @typedef {import("./drafts.js").Message} Message */
/**
 * A message for which the answer under way is to end.
 * @typedef {object} Steered
 * @property {TurnView} view
 * @property {string | null} id  of the steer, once the server has it
 * @property {Promise<void>} told  that it has, or not
 */
/**
 * @typedef {object} Surroundings
 * @property {import("./penstock-client.js").PenstockClient} client
 * @property {HTMLElement} transcript
 * @property {() => Record<string, any> & { model: string }} parameters  of the next request
 * @property {() => Record<string, string>} metadata  of the next conversation, beside its title
 * @property {() => boolean} hasTools  whether the page runs the tools that the model calls
 * @property {(text: string) => void} announce
 * @property {(id: string | null, message: Message, reason: string) => void} onLost  a message of this conversation
 *     could not be sent: the writer has it back
 * @property {(message: Message) => void} onRefused  the page alone has this message, in the transcript
 * @property {import("./transcript.js").Wishes["mayAsk"]} mayAsk
 * @property {import("./transcript.js").Wishes["sends"]} sends
 * @property {import("./transcript.js").Wishes["readsMarkdown"]} readsMarkdown
 * @property {() => void} write  moves the focus to the message box
 */

const MAX_ANNOUNCED_CHARACTERS = 1_000;

/** Loaded when a tree is first changed. */
const branching = () => import("./branches.js");

/** Events: `change` (of anything); `created`, `used` (detail: an id) and `moved` (of the server's state). */
export class ConversationPane extends EventTarget {
  /** @type {string | null} */ id = null;
  /** The answer under way in this conversation. @type {Answer | null} */ answer = null;
  /** @type {TurnView[]} */ views = [];
  /** How many tokens the conversation has, as far as the server has said. */
  numTokens = 0;
  /** While something is being fetched or moved. */
  isBusy = false;
  /** @type {Tree | null} */ #tree = null;
  /** While it is being fetched. @type {Promise<void> | null} */ #loading = null;
  /** Counts opened conversations, so that a late answer is recognised as stale. */
  #epoch = 0;
  /** What the answer under way was steered with, and is not answered yet. @type {Steered[]} */ #steered = [];
  /** What turns answer, beside those that are shown; null: not known (yet). @type {Map<string, string | null>} */
  #questions = new Map();
  #around;
  /** @type {import("./transcript.js").Wishes} */
  #wishes = {
    regenerate: (view) => void this.#branch(view, view.items),
    edit: (view, text) => {
      this.#around.write();
      void this.#branch(view, [...view.items.slice(0, -1), userItem({ text, attachments: messageOf(asked(view)).attachments })]);
    },
    editAnswer: (view, text) => void this.#change(view, ({ replaceAnswer }, id) => replaceAnswer(this.#conversations, id, view.turnIds, text)),
    remove: (view) => void this.#change(view, ({ deleteTurns }, id) => deleteTurns(this.#conversations, id, view.turnIds)),
    removeAnswer: (view) => void this.#change(view, ({ deleteAnswer }, id) => deleteAnswer(this.#conversations, id, view.turnIds)),
    switchBranch: (view, step) => void this.#switch(view, step),
    compare: (view) => void this.#compareBranches(view),
    usage: (view) => this.#usageOf(view),
    mayAsk: () => this.#around.mayAsk(),
    sends: (event) => this.#around.sends(event),
    readsMarkdown: () => this.#around.readsMarkdown(),
  };

  constructor(/** @type {Surroundings} */ around) {
    super();
    this.#around = around;
  }

  get #conversations() { return this.#around.client.conversations; }

  get isEmpty() { return this.views.length === 0; }

  /** Whether the open conversation is on the page, as far as there is something of it. */
  get isLoaded() { return this.#tree !== null; }

  // ---- opening -------------------------------------------------------------------------------

  /** Shows a conversation; null: a new one. Throws PenstockError. */
  async open(/** @type {string | null} */ id) {
    this.#epoch += 1;
    this.#show([]);
    this.id = id;
    this.answer = null;
    this.#steered = [];
    this.isBusy = false;
    this.#tree = null;
    this.numTokens = 0;
    this.#changed();
    if (id) await this.refresh();
  }

  /** Shows changes made elsewhere, for example in another tab. Throws PenstockError. */
  refresh() {
    const loading = this.#load().finally(() => { if (this.#loading === loading) this.#loading = null; });
    this.#loading = loading;
    return loading;
  }

  async #load() {
    const { id } = this;
    const epoch = this.#epoch;
    if (!id || this.answer) return;
    const tree = await this.#conversations.tree(id, { items: true });
    if (epoch !== this.#epoch || this.answer) return;
    this.#tree = tree;
    const path = pathShown(tree);
    const refused = this.views.at(-1)?.turnIds.length === 0 ? this.views.at(-1) : undefined;
    // The problem stays, with its actions, until the conversation has another turn.
    if (!refused || path.at(-1)?.turn !== this.views.at(-2)?.turnIds.at(-1)) {
      this.#show(path);
      if (refused) this.#around.onLost(id, messageOf(asked(refused)), refused.noteText);
    }
    this.#followRunning(path.at(-1));
    if (!this.answer && this.numTokens === 0) {
      void responseOf(this.#around.client, path.at(-1)?.turn).then((response) => { if (epoch === this.#epoch) this.#count(response?.usage ?? null); });
    }
    this.#changed();
    const view = this.views.at(-1);
    const calls = openCalls(path);
    // A tab was closed, or this page reloaded, before the outputs were sent.
    if (view && calls.length > 0 && !this.answer && !runningOf(tree)) void this.#runTools(view, calls);
  }

  /** Makes the page show these turns, keeping what it shows of them already. */
  #show(/** @type {Turn[]} */ path) {
    const groups = grouped(path);
    const kept = numShown(this.views, groups);
    this.views.splice(kept).forEach((view) => view.remove());
    for (const group of groups.slice(kept)) this.views.push(this.#viewOf(group));
  }

  #viewOf(/** @type {Turn[]} */ group) {
    const view = new TurnView(this.#around.transcript, partsOf(group[0]).items, this.#wishes);
    view.turnIds = group.map((turn) => turn.turn);
    for (const turn of group) view.showTurn(turn);
    const { status, response_id, incomplete_details: details } = group[group.length - 1];
    const isLeft = response_id && view.items.length > 0 && !view.isAnswered && ["completed", "incomplete", "cancelled"].includes(status);
    if (!isLeft) this.#noteEnd(view, status, details?.reason ?? null);
    else {
      view.addNote("There is no answer to this.", { isAnswer: false, actions: [{ label: "Answer it", run: () => this.#wishes.regenerate(view) }] });
    }
    return view;
  }

  /** Follows a turn that another tab, or this page before a reload, has started. */
  #followRunning(/** @type {Turn | undefined} */ last) {
    const running = runningOf(/** @type {Tree} */ (this.#tree));
    if (!running) return;
    const answer = this.#around.client.follow(running);
    if (last?.turn === running) this.#watch(/** @type {TurnView} */ (this.views.at(-1)), answer);
    else {
      const { id } = this;
      void answer.done.then(() => { if (id === this.id) void quietly(() => this.refresh()); });
    }
  }

  // ---- asking --------------------------------------------------------------------------------

  /** Sends a message at the end of the conversation. */
  async ask(/** @type {Message} */ message) {
    const { id } = this;
    const epoch = this.#epoch;
    while (this.#loading) {
      this.isBusy = true;
      this.#changed();
      const isLoaded = await this.#loading.then(() => true, () => false);
      if (epoch !== this.#epoch) return this.#around.onLost(id, message, NOT_SENT);
      this.isBusy = false;
      if (!isLoaded || this.answer) return this.#handBack(message, isLoaded ? TAKEN : NOT_LOADED);
    }
    await this.#send([userItem(message)]);
  }

  /** Sends a message for which the answer under way ends; without one, at the end of the conversation. */
  async steer(/** @type {Message} */ message) {
    const { answer, id } = this;
    const epoch = this.#epoch;
    if (!answer) return this.ask(message);
    const item = userItem(message);
    const view = new TurnView(this.#around.transcript, [item], this.#wishes);
    this.views.push(view);
    /** @type {Steered} */ const steered = { view, id: null, told: Promise.resolve() };
    steered.told = this.#around.client.steer(answer, [inputOf(item)]).then((steer) => { steered.id = steer.id; });
    this.#steered.push(steered);
    this.#changed();
    try {
      await steered.told;
    } catch (error) {
      this.#steered = this.#steered.filter((other) => other !== steered);
      if (!(error instanceof PenstockError)) throw error;
      if (epoch !== this.#epoch) return this.#around.onLost(id, message, NOT_SENT);
      this.#drop(view);
      this.#changed();
      if (!["response_already_completed", "response_not_active"].includes(error.code ?? "")) return this.#handBack(message, error.message);
      // It had just ended: what comes after it is to end, or this is the next message.
      await answer.done;
      while (epoch === this.#epoch && this.answer === answer) await new Promise((resolve) => setTimeout(resolve));
      if (epoch === this.#epoch) await this.steer(message);
      else this.#around.onLost(id, message, NOT_SENT);
    }
  }

  /**
   * Takes messages out of those that are not answered yet, by the ids of their steers. The end of an
   * answer may come before the server's replies that tell these; those of other messages may come later.
   */
  async #takeSteered(/** @type {string[]} */ ids) {
    const isMeant = (/** @type {Steered} */ { id }) => id !== null && ids.includes(id);
    for (;;) {
      const open = this.#steered.filter(({ id }) => id === null);
      if (open.length === 0 || this.#steered.filter(isMeant).length === ids.length) break;
      await Promise.race(open.map(({ told }) => told)).catch(() => {});
    }
    const taken = this.#steered.filter(isMeant);
    this.#steered = this.#steered.filter((steered) => !isMeant(steered));
    return taken;
  }

  /** Shows what became of the messages that an answer was steered with; whether there is more to come. */
  async #succeed(/** @type {Answer} */ answer, /** @type {Outcome} */ outcome) {
    const epoch = this.#epoch;
    const { successor } = answer;
    const told = outcome.steers.filter(({ status }) => status === "failed" || (successor && status === "committed"));
    this.answer = successor; // it can be stopped and steered before it is shown
    const taken = await this.#takeSteered(told.map(({ id }) => id));
    if (epoch !== this.#epoch) return true;
    for (const { id, status, error } of told) {
      const view = taken.find((steered) => steered.id === id)?.view;
      if (status !== "failed" || !view) continue;
      taken.splice(taken.findIndex((steered) => steered.view === view), 1);
      this.#drop(view);
      this.#handBack(messageOf(asked(view)), error?.message ?? NOT_SENT);
    }
    if (!successor) return false;
    this.#watch(taken.at(-1)?.view ?? this.#laterView(), successor);
    return true;
  }

  /** For an answer whose message another tab has sent. */
  #laterView() {
    const view = new TurnView(this.#around.transcript, [], this.#wishes);
    this.views.push(view);
    return view;
  }

  stop() {
    this.answer?.cancel();
    this.#changed();
  }

  /** Brings a turn into view, if it is on the way to the head. */
  reveal(/** @type {string} */ turn) {
    this.views.find(({ turnIds }) => turnIds.includes(turn))?.reveal();
  }

  /** Answers the last message again. */
  regenerateLast() {
    const view = this.views.at(-1);
    if (view?.isAnswered && view.turnIds.length > 0) this.#wishes.regenerate(view);
  }

  async #send(
    /** @type {TurnView["items"]} */ items,
    /** @type {(outcome: Outcome) => Promise<void> | undefined} */ after = () => undefined,
  ) {
    const { client, transcript } = this.#around;
    const epoch = this.#epoch;
    this.views.at(-1)?.retire();
    const view = new TurnView(transcript, items, this.#wishes);
    this.views.push(view);
    this.isBusy = true;
    this.#changed();
    try {
      if (!this.id) await this.#create(titleOf(items[0]), epoch);
    } catch (error) {
      this.isBusy = false;
      if (epoch === this.#epoch) this.#giveBack(view, error);
      return;
    }
    this.isBusy = false;
    if (epoch !== this.#epoch) return;
    const request = { ...this.#around.parameters(), input: items.map(inputOf), conversation: this.id };
    this.#watch(view, client.respond(request), after);
  }

  async #create(/** @type {string} */ text, /** @type {number} */ epoch) {
    const { id } = await this.#conversations.create({
      metadata: { title: titleFrom(text), ...this.#around.metadata() },
    });
    if (epoch !== this.#epoch) return;
    this.id = id;
    this.dispatchEvent(new Event("created"));
  }

  /**
   * Shows an answer until it ends. `after` is done at its end, also if another conversation is on
   * the page by then.
   * @param {TurnView} view
   * @param {Answer} answer
   * @param {(outcome: Outcome) => Promise<void> | undefined} [after]
   */
  #watch(view, answer, after = () => undefined) {
    const epoch = this.#epoch;
    this.answer = answer;
    view.attach(answer);
    const { id } = this;
    const used = () => this.dispatchEvent(new CustomEvent("used", { detail: id }));
    answer.addEventListener("started", () => { used(); this.#moved(); });
    void answer.done.then(async (outcome) => {
      if (wasKept(outcome)) used(); // a list that came meanwhile does not know yet
      await after(outcome);
      if (epoch === this.#epoch && this.answer === answer) await this.#settle(view, answer, outcome);
      this.#moved();
    });
    this.#around.announce("Answering…");
    this.#changed();
  }

  async #settle(/** @type {TurnView} */ view, /** @type {Answer} */ answer, /** @type {Outcome} */ outcome) {
    view.finish(answer, outcome.usage);
    this.#count(outcome.usage);
    const { responseId } = outcome;
    const isKept = wasKept(outcome);
    if (isKept && responseId && !view.turnIds.includes(responseId)) view.turnIds.push(responseId);
    if (outcome.problem?.code === "conversation_locked") {
      if (view.turnIds.length > 0) return this.#leaveToOther(); // another tab has sent the outputs
      this.#giveBack(view, outcome.problem);
    } else if (isKept) this.#noteEnd(view, outcome.kind, outcome.reason);
    else await this.#noteProblem(view, outcome);
    if (this.answer !== answer) return; // another conversation was opened meanwhile
    if (isKept && !answer.text && answer.blocks.length === 0) view.addNote("The model ended its answer without a word.");
    if (await this.#succeed(answer, outcome)) return;
    this.#around.announce([answer.text.slice(0, MAX_ANNOUNCED_CHARACTERS), view.noteText].filter(Boolean).join("\n"));
    this.#changed();
    const calls = outcome.kind === "completed" ? answer.blocks.filter((block) => block.kind === "call") : [];
    const pending = outcome.steers.filter(({ status }) => status === "pending").map(({ id }) => id);
    if (calls.length > 0 && await this.#runTools(view, calls, pending)) return;
    await quietly(() => this.#compare());
  }

  #count(/** @type {import("./answer.js").Usage | null} */ usage) {
    if (!usage) return;
    this.numTokens = usage.input_tokens + usage.output_tokens;
    this.dispatchEvent(new Event("change"));
  }

  async #leaveToOther() {
    this.answer = null;
    this.#changed();
    await quietly(() => this.refresh());
  }

  /**
   * Runs the tools that an answer calls, and sends their outputs; whether it did.
   * @param {TurnView} view
   * @param {import("./answer.js").Block[]} calls
   * @param {string[]} [pending]  steers that the turn with the outputs answers, too
   */
  async #runTools(view, calls, pending = []) {
    const { id } = this;
    const epoch = this.#epoch;
    if (!id || !this.#around.hasTools()) return false;
    const outputs = await outputsOf(calls);
    const steered = await this.#takeSteered(pending);
    if (epoch !== this.#epoch || this.answer) return false;
    for (const { call_id, output } of outputs) view.showResult(call_id, output);
    const last = steered.at(-1)?.view ?? view;
    this.#watch(last, this.#around.client.respond({ ...this.#around.parameters(), input: outputs, conversation: id }));
    return true;
  }

  /** Fetches the tree, and updates the page where it differs. */
  async #compare() {
    const { id } = this;
    if (!id || this.answer) return;
    const tree = await this.#conversations.tree(id);
    if (id !== this.id || this.answer) return;
    this.#tree = tree;
    const shown = this.views.flatMap((view) => view.turnIds);
    if (pathShown(tree).map((turn) => turn.turn).join() !== shown.join()) await this.refresh();
    else this.#changed();
  }

  // ---- how answers end -----------------------------------------------------------------------

  #noteEnd(/** @type {TurnView} */ view, /** @type {string} */ kind, /** @type {string | null} */ reason) {
    const text = cutText(kind, reason);
    const actions = [{ label: "Continue", run: () => void this.#continue(view) }];
    if (text) view.addNote(text, reason === "steered" ? {} : { actions });
  }

  /** Says why there is no answer, and offers what can be done about it. */
  async #noteProblem(/** @type {TurnView} */ view, /** @type {Outcome} */ outcome) {
    const epoch = this.#epoch;
    const message = messageOf(asked(view));
    this.#around.onRefused(message);
    const { text, remedies } = await problemOf(this.#around.client, outcome, {
      id: this.id,
      isFirst: this.views[0] === view,
      model: this.#around.parameters().model,
      message,
    });
    if (epoch !== this.#epoch) return;
    const actions = {
      again: { label: "Try again", run: () => this.#sendInstead(view, view.items) },
      anew: { label: "Start anew with this message", run: () => this.#startAnew(view) },
      bare: { label: "Send without images", run: () => this.#sendInstead(view, [userItem({ ...message, attachments: message.attachments.filter((part) => !part.image_url) })]) },
      edit: { label: "Edit message", asks: false, run: () => view.startEditing() },
    };
    view.addNote(text, { isError: true, actions: remedies.map((remedy) => actions[remedy]) });
  }

  #startAnew(/** @type {TurnView} */ view) {
    this.dispatchEvent(new Event("left"));
    void this.open(null).then(() => this.#send(view.items));
  }

  /** Puts a message that the server refused back where it was written. */
  #giveBack(/** @type {TurnView} */ view, /** @type {unknown} */ problem) {
    this.#drop(view);
    this.#handBack(messageOf(asked(view)), refusalText(problem));
  }

  #handBack(/** @type {Message} */ message, /** @type {string} */ reason) {
    this.#around.onLost(this.id, message, this.isEmpty ? reason : ""); // else it is under the last turn
    this.#around.announce(reason);
    this.views.at(-1)?.addNote(reason, { isError: true });
    this.#changed();
  }

  #sendInstead(/** @type {TurnView} */ view, /** @type {TurnView["items"]} */ items) {
    this.#drop(view);
    void this.#send(items);
  }

  #drop(/** @type {TurnView} */ view) {
    view.remove();
    this.views = this.views.filter((other) => other !== view);
  }

  // ---- branches ------------------------------------------------------------------------------

  /** Goes on with an answer that was cut, from its very next token. */
  async #continue(/** @type {TurnView} */ view) {
    const cut = view.turnIds[view.turnIds.length - 1];
    const { id } = this;
    const answer = this.#around.client.respond({
      ...this.#around.parameters(),
      previous_response_id: cut,
      penstock: { continue: true },
    });
    // It takes no head while it runs.
    this.#watch(view, answer, (outcome) => {
      if (id && outcome.responseId && wasKept(outcome)) return this.#moveHead(id, outcome.responseId, cut);
    });
  }

  #moveHead(/** @type {string} */ id, /** @type {string | null} */ turn, /** @type {string | null} */ expected) {
    return quietly(async () => {
      await this.#conversations.setHead(id, turn, expected);
      this.#moved();
    });
  }

  /** Answers `items` in a new branch beside `view`'s. */
  async #branch(/** @type {TurnView} */ view, /** @type {TurnView["items"]} */ items) {
    const { id } = this;
    if (!id || this.answer || this.isBusy) return;
    if (view.turnIds.length === 0) return this.#sendInstead(view, items); // the server did not take it
    await this.#whileBusy(async () => {
      const { head, parent } = await (await branching()).stepBefore(this.#conversations, id, view.turnIds[0]);
      this.views.splice(this.views.indexOf(view)).forEach((later) => later.remove());
      void this.#send(items, (outcome) => {
        if (!wasKept(outcome)) return this.#moveHead(id, head, parent);
      });
    });
  }

  /** Changes the tree at a view; one that the server does not have is taken off the page. */
  async #change(
    /** @type {TurnView} */ view, /** @type {(module: typeof import("./branches.js"), id: string) => Promise<void>} */ work,
  ) {
    const { id } = this;
    if (!id || this.answer || this.isBusy) return;
    if (view.turnIds.length === 0) {
      this.#drop(view);
      return this.#changed();
    }
    this.#around.write(); // the buttons go
    await this.#whileBusy(async () => {
      await work(await branching(), id);
      this.numTokens = 0; // counted anew
      this.views.splice(this.views.indexOf(view)).forEach((later) => later.remove());
      await this.refresh();
      this.#moved();
    });
  }

  /** Shows the branch next to the one that starts with `view`. */
  async #switch(/** @type {TurnView} */ view, /** @type {number} */ step) {
    const { id } = this;
    if (!id || this.answer) return;
    await this.#whileBusy(async () => {
      await (await branching()).stepBeside(this.#conversations, id, view, step);
      await this.refresh();
      this.#moved();
    });
  }

  /** Shows the branches that begin where `view` does beside each other. */
  async #compareBranches(/** @type {TurnView} */ view) {
    const { id } = this;
    if (!id) return;
    await this.#whileBusy(async () => {
      const { compareBranches } = await import("./branch-comparison.js");
      await compareBranches(this.#around.client, id, view, (step) => { if (this.#around.mayAsk()) void this.#switch(view, step); });
    });
  }

  /** What a turn took, and why not more of its prompt was in the cache. */
  async #usageOf(/** @type {TurnView} */ view) {
    const { client } = this.#around;
    const response = await responseOf(client, view.turnIds.at(-1));
    if (!response?.usage) return null;
    const parent = response.previous_response_id ?? this.#parentOf(view.turnIds.at(-1));
    const before = await responseOf(client, parent);
    const known = before?.usage ? { usage: before.usage, isSame: hasSameStart(before, response) } : null;
    return { usage: response.usage, cache: cacheText(response.usage, known, parent === null), model: response.model };
  }

  #parentOf(/** @type {string | undefined} */ turnId) {
    return this.#tree?.data.find(({ turn }) => turn === turnId)?.parent ?? null;
  }

  async #whileBusy(/** @type {() => Promise<void>} */ work) {
    this.isBusy = true;
    this.#changed();
    try {
      await work();
    } catch (error) {
      await quietly(() => this.refresh());
      const text = error instanceof PenstockError ? error.message : String(error);
      this.views.at(-1)?.addNote(text, { isError: true });
    } finally {
      this.isBusy = false;
      this.#changed();
    }
  }

  #moved() { this.dispatchEvent(new Event("moved")); }

  #changed() {
    for (const view of this.views) {
      const { siblings, index } = placeOf(this.#tree, view);
      view.showBranches(index, siblings.length, siblings.length > 1 && this.#isEdited(view, siblings));
    }
    this.dispatchEvent(new Event("change"));
  }

  /** Whether some of a view's siblings answer another message, as far as it is known. */
  #isEdited(/** @type {TurnView} */ view, /** @type {Turn[]} */ siblings) {
    if (view.items.length === 0) return false;
    const question = messageText(asked(view));
    this.#questions.set(view.turnIds[0], question);
    return siblings.filter(({ turn, response_id }) => {
      if (response_id && !this.#questions.has(turn)) void this.#askFor(turn);
      return (this.#questions.get(turn) ?? question) !== question;
    }).length > 0;
  }

  async #askFor(/** @type {string} */ turn) {
    this.#questions.set(turn, null); // once
    await quietly(async () => {
      const { data } = await this.#around.client.inputItems(turn, { limit: 1 });
      if (data[0]?.content) this.#questions.set(turn, messageText(data[0]));
      this.#changed();
    });
  }
}

/** What a conversation is called that begins with this message. */
function titleOf(/** @type {TurnView["items"][number]} */ item) {
  const { text, attachments } = messageOf(item);
  return text || attachments.map(({ name }) => name ?? "").find(Boolean) || "";
}

/** The message that a turn answers. */
function asked(/** @type {TurnView} */ view) {
  return view.items[view.items.length - 1];
}
