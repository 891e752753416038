/**
 * What stands within a line of Markdown: bold, italic, struck, code, links.
 *
 * Text reaches the page through `textContent` alone. A link leads to the web or to a mailbox; whatever
 * else calls itself one stays text.
 */

const ADDRESS = String.raw`(?:https?:\/\/|mailto:)[^\s<>\x60]`;
// Every span is bounded, so that unclosed markers cannot make the search quadratic.
const INLINE = new RegExp(
  [
    String.raw`\\(?<escaped>[*_~\x60\[\]|>#])`,
    String.raw`(?<ticks>\x60{1,3})(?<code>[^\x60](?:[^\n]{0,400}?[^\x60])?)\k<ticks>(?!\x60)`,
    String.raw`\[(?<label>[^\[\]\n]{1,400})\]\((?<target>${ADDRESS}{1,1000}?)\)(?!\))`,
    String.raw`(?<![\p{L}\p{N}])(?<bare>https?:\/\/[^\s<>\x60"|*]{0,1000}[^\s<>\x60"|*.,;:!?'()\[\]])`,
    String.raw`\*\*\*(?<both>[^\s*](?:[^*]{0,400}?[^\s*])?)\*\*\*`,
    String.raw`\*\*(?<bold>[^\s*](?:[\s\S]{0,400}?\S)?)\*\*`,
    String.raw`\*(?<star>[^\s*](?:[^*]{0,400}?[^\s*])?)\*`,
    String.raw`~~(?<struck>[^\s~](?:[^~]{0,400}?[^\s~])?)~~`,
    String.raw`(?<![\p{L}\p{N}_])_(?<under>[^\s_](?:[^_]{0,400}?[^\s_])?)_(?![\p{L}\p{N}_])`,
  ].join("|"),
  "gu",
);

/**
 * Fills `parent` with text, its spans marked up; line breaks stay.
 * @template {HTMLElement} E
 * @returns {E}
 */
export function withInline(/** @type {E} */ parent, /** @type {string} */ text) {
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    parent.append(text.slice(end, match.index), span(match.groups ?? {}));
    end = match.index + match[0].length;
  }
  parent.append(text.slice(end));
  parent.normalize(); // one text node, whether it came with markers or not: `morph` counts them
  return parent;
}

/** @returns {Node | string} */
function span(/** @type {Record<string, string | undefined>} */ found) {
  const { escaped, code, label, target, bare, both, bold, struck } = found;
  if (escaped !== undefined) return escaped;
  if (code !== undefined) return element("code", code);
  if (label !== undefined && target !== undefined) return withInline(link(target), label);
  if (bare !== undefined) return link(bare, bare);
  if (both !== undefined) {
    const strong = element("strong");
    strong.append(withInline(element("em"), both));
    return strong;
  }
  if (bold !== undefined) return withInline(element("strong"), bold);
  if (struck !== undefined) return withInline(element("s"), struck);
  return withInline(element("em"), found.star ?? found.under ?? "");
}

/** A link that opens in another tab, without referrer and opener. */
function link(/** @type {string} */ address, text = "") {
  const node = /** @type {HTMLAnchorElement} */ (element("a", text));
  node.href = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

export function element(/** @type {string} */ name, text = "") {
  const node = document.createElement(name);
  if (text) node.textContent = text;
  return node;
}
