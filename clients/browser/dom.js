/**
 * Making elements. Text enters the page through `textContent` alone, never as HTML.
 */

const SVG = "http://www.w3.org/2000/svg";

export const byId = (/** @type {string} */ id) => /** @type {HTMLElement} */ (document.getElementById(id));

/** An element with a class and a text. */
export function make(/** @type {string} */ name, className = "", text = "") {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}

/** One of the page's icons: a symbol of `index.html`. */
export function icon(/** @type {string} */ name) {
  const picture = document.createElementNS(SVG, "svg");
  picture.setAttribute("viewBox", "0 0 20 20");
  picture.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#icon-${name}`);
  picture.append(use);
  return picture;
}

/**
 * A button. `asks`: it sends something to the model, so the page enables it only while it can.
 * @param {object} options
 * @param {string} options.label
 * @param {() => void} options.run
 * @param {string} [options.picture]  shown in place of the label
 * @param {boolean} [options.asks]
 */
export function button({ label, run, picture = "", asks = false }) {
  const node = /** @type {HTMLButtonElement} */ (make("button", picture ? "icon" : "quiet", picture ? "" : label));
  node.type = "button";
  if (picture) {
    node.append(icon(picture));
    node.title = label;
    node.setAttribute("aria-label", label);
  }
  if (asks) node.dataset.asks = "";
  node.addEventListener("click", run);
  return node;
}

/** Puts a text on the clipboard, also where the page was not loaded over TLS or may not use it by script. */
export async function copyText(/** @type {string} */ text) {
  try {
    return await navigator.clipboard.writeText(text);
  } catch {} // there is none, or it is not for us
  const area = /** @type {HTMLTextAreaElement} */ (make("textarea", "visually-hidden"));
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Shows on a button, for a moment, that it has done what it does. */
export function confirmOn(/** @type {Element} */ node) {
  node.classList.add("is-done");
  setTimeout(() => node.classList.remove("is-done"), 1_200);
}
