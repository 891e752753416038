/**
 * The message box: text, images and files of the next message. Every conversation has a message of its own
 * here, which is kept as its draft.
 *
 * What it does not know: servers, and whether a message can be sent.
 */

import { byId } from "./dom.js";
import { draftOf, isEmpty, keepDraft, NOTHING } from "./drafts.js";
import { fileFrom, filesOf, imageFrom, isImage, MAX_ATTACHMENTS } from "./attachments.js";

/** @typedef {import("./drafts.js").Message} Message */

/** A text that is pasted and longer is a file: it would fill the box. */
const LONG_PASTE = 4_000;
const box = /** @type {HTMLTextAreaElement} */ (byId("composer-text"));
const chooser = /** @type {HTMLInputElement} */ (byId("files"));

/** Events: `refused` (detail: why a file is not part of the message). */
export class Composer extends EventTarget {
  /** The conversation that the message is for; late images find it by this object. */
  #place = { id: /** @type {string | null} */ (null) };
  #store;
  #takesImages;

  /**
   * @param {ReturnType<typeof import("./page-state.js").newStore>} store  has the message that is shown
   * @param {string | null} id
   * @param {() => boolean} takesImages  whether messages may have images
   */
  constructor(store, id, takesImages) {
    super();
    this.#store = store;
    this.#takesImages = takesImages;
    const early = box.value; // written before this script ran
    this.open(id);
    if (early) this.#put({ ...this.#message, text: early });
    box.addEventListener("input", () => this.#put({ ...this.#message, text: box.value }));
    box.addEventListener("paste", (event) => {
      const files = filesOf(event.clipboardData);
      const hasText = event.clipboardData?.types.includes("text/plain");
      const text = event.clipboardData?.getData("text/plain") ?? "";
      const isLong = files.length === 0 && text.length > LONG_PASTE;
      if (!isLong && (files.length === 0 || (hasText && !files.some(isImage)))) return;
      event.preventDefault();
      void this.add(isLong ? [new File([text], "Pasted text.txt", { type: "text/plain" })] : files);
    });
    byId("attach").addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", () => {
      void this.add([...(chooser.files ?? [])]);
      chooser.value = "";
    });
    // Anywhere on the page; what is no file is dropped into the box as text.
    const mark = (/** @type {boolean} */ isOver) => byId("composer").classList.toggle("is-over", isOver);
    for (const name of /** @type {const} */ (["dragover", "drop"])) {
      document.addEventListener(name, (event) => {
        if (!event.dataTransfer?.types.includes("Files")) return;
        event.preventDefault();
        mark(name === "dragover");
        if (name === "drop") void this.add(filesOf(event.dataTransfer));
      });
    }
    document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) mark(false); });
  }

  get id() { return this.#place.id; }

  get #message() { return this.#store.state.message; }

  get isEmpty() { return isEmpty(this.#message); }

  /** Shows the message of this conversation. */
  open(/** @type {string | null} */ id) {
    this.#place = { id };
    this.#show(draftOf(id));
  }

  /** The new conversation has got its id. */
  rename(/** @type {string} */ id) {
    keepDraft(null, NOTHING);
    this.#place.id = id;
    this.keep();
  }

  /** Takes the message out of the box. */
  take() {
    const { text, attachments } = this.#message;
    this.#put(NOTHING);
    return { text: text.trim(), attachments };
  }

  /** Puts a message back that could not be sent to its conversation; what was written since follows it. */
  giveBack(/** @type {string | null} */ id, /** @type {Message} */ message) {
    const draft = draftOf(id);
    const text = draft.text && draft.text !== message.text ? `${message.text}\n\n${draft.text}` : message.text;
    const attachments = [...message.attachments, ...draft.attachments.filter((part) =>
      !message.attachments.some((same) => same.image_url === part.image_url && same.text === part.text))];
    keepDraft(id, { text, attachments });
    if (id === this.id) this.open(id);
  }

  /** Keeps a message that only the transcript has in place of an empty box, over a reload. */
  keepCopy(/** @type {Message} */ message) {
    if (this.isEmpty) keepDraft(this.id, message);
  }

  /** Keeps what is in the box, and no copy of what was sent. */
  keep() {
    keepDraft(this.id, this.#message);
  }

  /** Leaves the message to a new conversation, unless that has one: its own is gone. */
  leaveToNew() {
    if (isEmpty(draftOf(null))) keepDraft(null, this.#message);
  }

  focus() {
    box.focus();
  }

  /** Takes an image or a file out of the message. */
  remove(/** @type {import("./conversations.js").Part} */ part) {
    const attachments = this.#message.attachments.filter((other) => other !== part);
    this.#put({ ...this.#message, attachments });
  }

  /** Adds images and texts; says of the first other file why it is neither. */
  async add(/** @type {File[]} */ files) {
    const place = this.#place;
    let refusal = "";
    for (const file of files) {
      refusal = await this.#addTo(place, file);
      if (refusal) break;
    }
    if (place.id === this.id) this.dispatchEvent(new CustomEvent("refused", { detail: refusal }));
  }

  /** What is wrong with a file that cannot be part of the message at `place`; empty once it is. */
  async #addTo(/** @type {{ id: string | null }} */ place, /** @type {File} */ file) {
    if (isImage(file) && !this.#takesImages()) return "This model takes no images.";
    const part = isImage(file) ? await imageFrom(file) : await fileFrom(file);
    if (!part && isImage(file)) return `“${file.name}” is not an image that this browser can open.`;
    if (typeof part === "string") return part;
    if (!part) {
      const accepted = this.#takesImages() ? "text and images" : "text";
      return `“${file.name}” cannot be added: a message takes ${accepted}.`;
    }
    const isOpen = place.id === this.id;
    const message = isOpen ? this.#message : draftOf(place.id);
    const isFull = message.attachments.length >= MAX_ATTACHMENTS;
    if (isFull) return `A message has ${MAX_ATTACHMENTS} images and files at most.`;
    const grown = { ...message, attachments: [...message.attachments, part] };
    if (isOpen) this.#put(grown);
    else keepDraft(place.id, grown);
    return "";
  }

  #put(/** @type {Message} */ message) {
    keepDraft(this.id, message);
    this.#show(message);
  }

  #show(/** @type {Message} */ message) {
    if (box.value !== message.text) box.value = message.text;
    // The box grows with its text, up to the height that the style sheet allows.
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight}px`;
    this.#store.update({ message });
  }
}
