/**
 * Dialogs that are loaded when one of them is first opened: the settings, and another title for a conversation.
 */

import { byId } from "./dom.js";
import { mountDialog } from "./elements.js";
import { titleOf } from "./page-state.js";
import { mountSettings } from "./settings-dialog.js";
import { html, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";

/** @typedef {import("./conversations.js").Conversation} Conversation */
/**
 * @typedef {object} RenameDeeds
 * @property {(conversation: Conversation, title: string) => void} rename
 * @property {(conversation: Conversation) => Promise<string>} suggest  a title, by the model; empty: it has none
 */
/** @typedef {RenameDeeds & import("./settings-dialog.js").Deeds} Deeds */

const ASKING = "Asking the model…";

/** Draws them, and opens and closes them. */
export function mountDialogs(
  /** @type {ReturnType<typeof import("./page-state.js").newStore>} */ store,
  /** @type {import("./settings.js").Settings} */ settings,
  /** @type {Deeds} */ deeds,
) {
  mountSettings(store, settings, deeds);
  const close = () => store.update({ renamed: null });
  mountDialog(store, {
    dialog: /** @type {HTMLDialogElement} */ (byId("rename-dialog")),
    part: "renamed",
    isOpen: (state) => state.renamed !== null,
    view: ({ renamed }) => html`<${Rename} key=${renamed?.id} conversation=${renamed} deeds=${deeds} close=${close} />`,
    close,
  });
}

/** @param {{ conversation: Conversation, deeds: RenameDeeds, close: () => void }} given */
function Rename({ conversation, deeds, close }) {
  const field = useRef(/** @type {HTMLInputElement | null} */ (null));
  const [title, setTitle] = useState(titleOf(conversation));
  const [numProposed, setNumProposed] = useState(0);
  const [said, setSaid] = useState("");
  const isAsking = said === ASKING;
  useLayoutEffect(() => field.current?.select(), [numProposed]);
  const rename = (/** @type {Event} */ event) => {
    event.preventDefault();
    if (title.trim()) deeds.rename(conversation, title.trim());
    close();
  };
  const suggest = async () => {
    setSaid(ASKING);
    const proposed = await deeds.suggest(conversation).catch(() => "");
    setSaid(proposed ? "" : "The model has not given one.");
    if (proposed) setTitle(proposed);
    setNumProposed((before) => before + 1);
  };
  return html`
    <form id="rename-form" autocomplete="off" onSubmit=${rename}>
      <h2 id="rename-title">Rename this conversation</h2>
      <label class="field-label" for="rename-input">Title</label>
      <input class="field" id="rename-input" dir="auto" maxlength="200" required ref=${field} value=${title} onInput=${(/** @type {any} */ { target }) => setTitle(target.value)} />
      <p role="status">${said}</p>
      <div class="dialog-buttons">
        <button type="button" class="quiet" id="rename-suggest" disabled=${isAsking} onClick=${suggest}>Ask the model for one</button>
        <button type="button" class="quiet" onClick=${close}>Cancel</button>
        <button type="submit" class="primary">Rename</button>
      </div>
    </form>`;
}
