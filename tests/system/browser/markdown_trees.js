// What the page draws of Markdown, and what commonmark.js says it should: elements and text, as nested
// lists. Whitespace that Markdown does not keep is one space.

const BREAK = /^<br\s*\/?>$/i;
const BLOCKS = new Set(["blockquote", "ol", "ul", "li", "p", "pre", "hr", "h4", "h5", "h6", "table", "root"]);

/** Joins texts, and takes spaces away where none is seen. */
function tidied(name, children) {
  const joined = [];
  for (const child of children) {
    if (typeof child === "string" && typeof joined.at(-1) === "string") joined[joined.length - 1] += child;
    else joined.push(child);
  }
  const isEdge = (child) => child === undefined ? BLOCKS.has(name) : Array.isArray(child) && (child[0] === "br" || BLOCKS.has(child[0]));
  const shown = name === "pre" ? joined.map((text) => text.replace(/\n$/, "")) : joined.map((child, index) => {
    if (typeof child !== "string") return child;
    let text = child.replace(/\s+/g, " ");
    if (isEdge(joined[index - 1])) text = text.trimStart();
    if (isEdge(joined[index + 1])) text = text.trimEnd();
    return text;
  });
  return [name, ...shown.filter((child) => child !== "")];
}

/** The tree of commonmark.js; markup that the page shows as text is text. */
function wanted(node) {
  const children = [];
  for (let child = node.firstChild; child; child = child.next) children.push(child);
  const inner = () => children.flatMap((child) => {
    const isTight = child.type === "paragraph" && node.type === "item" && node.parent.listTight;
    return isTight ? wanted(child).slice(1) : [wanted(child)];
  });
  switch (node.type) {
    case "document": return tidied("root", inner());
    case "text": return node.literal;
    case "softbreak": return "\n";
    case "linebreak": return ["br"];
    case "code": return ["code", node.literal];
    case "html_inline": return BREAK.test(node.literal) ? ["br"] : node.literal;
    case "html_block": return tidied("p", [node.literal]);
    case "code_block": return tidied("pre", [node.literal]);
    case "thematic_break": return ["hr"];
    case "emph": return tidied("em", inner());
    case "strong": return tidied("strong", inner());
    case "link": return tidied("a", inner());
    case "image": return node.parent.type === "link" ? altOf(node) : ["img"]; // no link is within another
    case "paragraph": return tidied("p", inner());
    case "heading": return tidied(`h${Math.min(6, node.level + 3)}`, inner());
    case "block_quote": return tidied("blockquote", inner());
    case "list": return tidied(node.listType === "ordered" ? `ol${node.listStart}` : "ul", inner()).map((part, index) => index ? part : part.replace(/^ol1$/, "ol"));
    case "item": return tidied("li", inner());
    default: throw new Error(node.type);
  }
}

function altOf(node) {
  let text = node.literal ?? "";
  for (let child = node.firstChild; child; child = child.next) text += altOf(child);
  return text;
}

function drawn(node) {
  if (node.nodeType === Node.TEXT_NODE) return [node.data];
  const inner = () => [...node.childNodes].flatMap(drawn);
  const name = node.localName;
  if (name === "span" || name === "tbody") return inner();
  if (name === "code") return [["code", node.textContent]];
  if (name === "div" && node.className === "code") return [tidied("pre", [node.querySelector("pre").textContent])];
  if (name === "ol" && node.start !== 1) return [[`ol${node.start}`, ...tidied("ol", inner()).slice(1)]];
  return [tidied(name, inner())];
}

/** What is drawn of texts; `size`: they come in pieces. */
async function drawnOf(texts, size = 1e9) {
  const { MarkdownStream } = await import("./markdown.js");
  return texts.map((text) => {
    const root = document.createElement("div");
    const stream = new MarkdownStream(root);
    for (let at = 0; at < text.length; at += size) stream.append(text.slice(at, at + size));
    stream.flush();
    return tidied("root", [...root.childNodes].flatMap(drawn)).slice(1);
  });
}

/** What should be drawn, and whether commonmark.js, which says so, knows the example. */
function wantedOf(examples) {
  const { Parser, HtmlRenderer } = globalThis.commonmark;
  return examples.map(({ markdown, html }) => {
    const tree = new Parser().parse(markdown);
    return { tree: wanted(tree).slice(1), isExample: new HtmlRenderer().render(tree) === html };
  });
}
