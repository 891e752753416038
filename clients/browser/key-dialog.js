/**
 * Asking for the API key. It is kept in this tab's session storage and nowhere else.
 */

import { byId } from "./dom.js";
import { mountDialog } from "./elements.js";
import { isSendableKey } from "./penstock-client.js";
import { Store } from "./store.js";
import { html, useLayoutEffect, useRef } from "./vendor/htm-preact.js";

const ITEM = "penstock.apiKey";
const UNSENDABLE = "This key cannot be sent: it may hold no spaces, and plain letters, digits and signs only.";
const CLOSED = { isOpen: false, complaint: "", numAsked: 0 };

export function storedKey() {
  try {
    return sessionStorage.getItem(ITEM);
  } catch {
    return null;
  }
}

/** Null: forgets it. Without session storage, the page asks again after a reload. */
function keep(/** @type {string | null} */ key) {
  try {
    if (key) sessionStorage.setItem(ITEM, key);
    else sessionStorage.removeItem(ITEM);
  } catch {}
}

/** The dialog of a page that has an element for it. */
export class KeyDialog {
  #store = new Store({ asked: CLOSED });

  constructor(/** @type {(key: string) => void} */ onKey) {
    const take = (/** @type {string} */ key) => {
      if (!isSendableKey(key)) return this.#complain(UNSENDABLE);
      this.#complain("");
      keep(key);
      onKey(key);
    };
    mountDialog(this.#store, {
      dialog: /** @type {HTMLDialogElement} */ (byId("key-dialog")),
      part: "asked",
      isOpen: ({ asked }) => asked.isOpen,
      view: ({ asked }) => html`<${Form} ...${asked} take=${take} close=${() => this.close()} />`,
      close: () => this.close(),
    });
  }

  /** Asks for a key; one that was kept was not accepted. */
  ask() {
    const rejected = storedKey();
    keep(null);
    this.#ask(rejected ? "The server did not accept this key." : "");
  }

  /** Lets the reader use another one. */
  open() {
    this.#ask("");
  }

  close() {
    this.#store.update({ asked: CLOSED });
  }

  #ask(/** @type {string} */ complaint) {
    this.#store.update({ asked: { isOpen: true, complaint, numAsked: this.#store.state.asked.numAsked + 1 } });
  }

  #complain(/** @type {string} */ complaint) {
    this.#store.update({ asked: { ...this.#store.state.asked, complaint } });
  }
}

/** @param {typeof CLOSED & { take: (key: string) => void, close: () => void }} given */
function Form({ complaint, numAsked, take, close }) {
  const field = useRef(/** @type {HTMLInputElement | null} */ (null));
  useLayoutEffect(() => field.current?.select(), [numAsked]);
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    const key = field.current?.value.trim();
    if (key) take(key);
  };
  return html`
    <form method="dialog" id="key-form" autocomplete="off" onSubmit=${submit}>
      <h2 id="key-title">The server’s API key</h2>
      <p id="key-help">This server requires an API key. It is kept in this tab only, and forgotten when you close it.</p>
      <label class="field-label" for="key-input">API key</label>
      <input class="field" id="key-input" type="password" autocomplete="off" spellcheck="false" aria-describedby="key-help key-error" required ref=${field} />
      <p class="key-error" id="key-error" role="alert">${complaint}</p>
      <div class="dialog-buttons">
        <button type="button" class="quiet" onClick=${close}>Not now</button>
        <button type="submit" class="primary">Connect</button>
      </div>
    </form>`;
}
