/**
 * The answers of several branches beside each other, in a dialog.
 */

import { button, make } from "./dom.js";
import { MarkdownStream } from "./markdown.js";
import { Colours, setFormula } from "./markdown-extras.js";
import { messageText, partsOf, placeOf, responseOf } from "./turns.js";
import { showWideDialog } from "./wide-dialog.js";

/**
 * @typedef {object} Version
 * @property {string} question  what it answers
 * @property {string} answer
 * @property {string} figures  how long it is
 * @property {boolean} isShown  in the conversation
 * @property {() => void} use  shows it there
 */

/**
 * Shows the branches that begin where a turn does, until the reader has had enough. Throws PenstockError.
 * @param {import("./penstock-client.js").PenstockClient} client
 * @param {string} id  of the conversation
 * @param {{ turnIds: string[], text: string }} view  the turn, as the page shows it
 * @param {(step: number) => void} switchBranch  shows the branch so many siblings away
 */
export async function compareBranches(client, id, view, switchBranch) {
  const tree = await client.conversations.tree(id, { items: "all" });
  const { siblings, index } = placeOf(tree, view);
  showVersions(await Promise.all(siblings.map(async (turn, place) => {
    const { items, output } = partsOf(turn);
    const num = (await responseOf(client, turn.turn))?.usage?.output_tokens ?? null;
    const isMessage = (/** @type {import("./conversations.js").Item} */ { type }) => type === "message";
    return {
      question: items.filter(isMessage).slice(-1).map(messageText).join(""),
      answer: place === index ? view.text : output.filter(isMessage).map(messageText).join(""),
      figures: num === null ? "" : num === 1 ? "1 token" : `${num.toLocaleString()} tokens`,
      isShown: place === index,
      use: () => switchBranch(place - index),
    };
  })));
}

function showVersions(/** @type {Version[]} */ versions) {
  const isEdited = new Set(versions.map(({ question }) => question)).size > 1;
  const columns = make("div", "versions");
  columns.tabIndex = 0; // wider than the screen, it is scrolled
  columns.setAttribute("role", "group");
  columns.setAttribute("aria-labelledby", "comparison-title");
  versions.forEach(({ question, answer, figures, isShown, use }, index) => {
    const column = make("section", isShown ? "version is-shown" : "version");
    const name = make("h3", "", `Version ${index + 1}`);
    const prose = make("div", "prose");
    new MarkdownStream(prose, { Colours, setFormula }).append(answer || "*No answer.*");
    const foot = make("div", "version-foot");
    foot.append(make("span", "", figures));
    if (isShown) foot.append(make("span", "", "in the chat now"));
    else foot.append(button({ label: "Go on with this one", run: () => { dialog.close(); use(); } }));
    column.append(name, ...(isEdited ? [make("p", "version-question", question)] : []), prose, foot);
    columns.append(column);
  });
  const dialog = showWideDialog({ kind: "comparison", title: `${versions.length} versions`, body: columns });
}
