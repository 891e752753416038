/**
 * The answers of several branches beside each other, in a dialog.
 */

import { button, make } from "./dom.js";
import { MarkdownStream } from "./markdown.js";
import { Colours, setFormula } from "./markdown-extras.js";
import { showWideDialog } from "./wide-dialog.js";

/**
 * @typedef {object} Version
 * @property {string} question  what it answers
 * @property {string} answer
 * @property {string} figures  how long it is
 * @property {boolean} isShown  in the conversation
 * @property {() => void} use  shows it there
 */

/** Shows them until the reader has had enough. */
export function showVersions(/** @type {Version[]} */ versions) {
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
