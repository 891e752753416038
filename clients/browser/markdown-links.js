/**
 * Links of a text that nobody has checked. One leads to the web or to a mailbox, and says where: whatever
 * else calls itself one stays text. A picture is a link to it, as nothing is loaded from elsewhere.
 */

import { element, GrowingText } from "./markdown-text.js";

const PROTOCOLS = new Set(["http:", "https:", "mailto:"]);

/**
 * A link that opens in another tab, without referrer and opener; null: it leads nowhere.
 * @param {string} address
 * @param {string} title
 * @param {(node: HTMLElement) => void} fill  puts in what is clicked
 */
export function linkTo(address, title, fill) {
  if (!/^[a-z]+:/i.test(address) || !URL.canParse(address)) return null;
  const url = new URL(address);
  if (!PROTOCOLS.has(url.protocol)) return null;
  const node = /** @type {HTMLAnchorElement} */ (element("a"));
  node.href = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  if (title) node.title = title;
  fill(node);
  const destination = destinationOf(url, node.textContent?.trim().toLowerCase() ?? "");
  if (destination) {
    const place = element("span");
    place.className = "destination";
    place.dir = "ltr";
    new GrowingText(place).appendVisibly(` (${destination})`);
    node.append(place);
  }
  return node;
}

/** A picture, by its description. @returns {HTMLElement | null} */
export function pictureAt(/** @type {string} */ address, /** @type {string} */ title, /** @type {string} */ text) {
  return linkTo(address, title, (node) => new GrowingText(node).appendVisibly(text || address));
}

/**
 * The host or mailbox that a link leads to, as the browser will ask for it: `xn--…` for a host in
 * other letters, without the user's name. Empty if the text of the link begins with it.
 */
function destinationOf(/** @type {URL} */ { protocol, pathname, host }, /** @type {string} */ label) {
  const destination = protocol === "mailto:" ? pathname : host;
  const named = label.startsWith(`${protocol}//`) ? label.slice(protocol.length + 2) : label;
  const isNamed = named.startsWith(destination.toLowerCase()) && /^(?:[/?#]|$)/.test(named.slice(destination.length));
  return isNamed ? "" : destination;
}
