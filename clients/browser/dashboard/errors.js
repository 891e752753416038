/**
 * What went wrong, by reason: requests that were refused, and answers that failed or were cut off.
 */

import { make } from "../dom.js";
import { count } from "./texts.js";

/** @typedef {import("./history.js").View} View */
/** @typedef {{ reason: string, lately: number, total: number }} Fault */

/** How generations end that do not end well. @type {Record<string, string>} */
const ENDINGS = { error: "the engine failed (error)", abort: "the caller left or cancelled (abort)" };

/** The reasons of a moment, those first that were most lately. @returns {Fault[]} */
export function faultsOf(/** @type {View} */ view) {
  const found = [
    ...view.labelled("refusals_total", "code").map(([code, name]) => ({ reason: `refused: ${code}`, name })),
    ...view.labelled("request_success_total", "finished_reason").flatMap(([ending, name]) =>
      (ENDINGS[ending] ? [{ reason: ENDINGS[ending], name }] : [])),
    ...view.labelledBy("http_requests_total").flatMap(([labels, name]) =>
      (Number(labels.status) >= 400 && !["429", "503"].includes(labels.status)
        ? [{ reason: `${labels.status} ${labels.method} ${labels.route}`, name }] : [])),
  ];
  return found
    .map(({ reason, name }) => ({ reason, lately: view.growth(name) ?? 0, total: view.value(name) ?? 0 }))
    .filter(({ total }) => total > 0)
    .sort((one, other) => other.lately - one.lately || other.total - one.total || one.reason.localeCompare(other.reason));
}

const MAX_ROWS = 12;

/** Shows them in a table's body. */
export function showFaults(/** @type {HTMLElement} */ body, /** @type {HTMLElement} */ note, /** @type {Fault[]} */ faults) {
  const shown = faults.slice(0, MAX_ROWS);
  while (body.children.length > shown.length) body.lastElementChild?.remove();
  shown.forEach(({ reason, lately, total }, index) => {
    const row = body.children[index] ?? body.appendChild(emptyRow());
    row.classList.toggle("is-new", lately > 0);
    [reason, count(lately), count(total)].forEach((text, column) => { row.children[column].textContent = text; });
  });
  const numMore = faults.length - shown.length;
  note.textContent = faults.length === 0 ? "None." : numMore > 0 ? `and ${numMore} more` : "";
}

function emptyRow() {
  const row = make("tr");
  const reason = make("th");
  reason.setAttribute("scope", "row");
  row.append(reason, make("td"), make("td"));
  return row;
}
