/**
 * Conversations as files: JSON, from which the same tree is made again, and Markdown to read.
 */

import { titleOf } from "./page-state.js";
import { messageText, outputOf, pathShown } from "./turns.js";
import { blockOf } from "./answer.js";

/** @typedef {import("./conversations.js").Conversation} Conversation */
/** @typedef {import("./conversations.js").Conversations} Conversations */
/** @typedef {import("./conversations.js").Turn} Turn */
/** @typedef {Conversation & { head: string | null, turns: Turn[] }} Kept */

const FORMAT = "penstock.conversations";
const VERSION = 1;
const MAX_ITEMS = 20; // of a request
const NAMES = { user: "You", assistant: "Assistant", system: "System", developer: "System" };

/** A file that does not hold conversations. */
export class NotConversations extends Error {}

/** All of a conversation: every branch with its texts. @returns {Promise<Kept>} */
async function whole(/** @type {Conversations} */ conversations, /** @type {Conversation} */ conversation) {
  const { head, data } = await conversations.tree(conversation.id, { items: "all" });
  return { ...conversation, head, turns: data };
}

/** Conversations as JSON. Throws PenstockError. */
export async function asJson(/** @type {Conversations} */ conversations, /** @type {readonly Conversation[]} */ chosen) {
  const kept = [];
  for (const one of chosen) kept.push(await whole(conversations, one));
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations: kept }, null, 1);
}

/** All conversations as JSON. Throws PenstockError. */
export async function allAsJson(/** @type {Conversations} */ conversations) {
  /** @type {Conversation[]} */ const all = [];
  for (let hasMore = true; hasMore;) {
    const page = await conversations.list({ limit: 100, after: all.at(-1)?.id });
    all.push(...page.data);
    hasMore = page.has_more && page.data.length > 0;
  }
  return asJson(conversations, all);
}

/** What a conversation shows, as Markdown. Throws PenstockError. */
export async function asMarkdown(/** @type {Conversations} */ conversations, /** @type {Conversation} */ conversation) {
  const tree = await conversations.tree(conversation.id, { items: true });
  const parts = [`# ${titleOf(conversation).replace(/\s+/g, " ")}`];
  for (const turn of pathShown(tree)) {
    for (const item of [...(turn.items ?? []), ...outputOf(turn)]) parts.push(...said(item));
  }
  return `${parts.join("\n\n")}\n`;
}

/** @returns {string[]} */
function said(/** @type {any} */ item) {
  if (item.type === "message") {
    const pictures = item.content.filter((/** @type {any} */ part) => part.image_url).map(() => "*(a picture)*");
    return [`## ${NAMES[/** @type {keyof NAMES} */ (item.role)] ?? item.role}`, ...pictures, messageText(item)];
  }
  if (item.type === "function_call_output") return [fenced(String(item.output))];
  const block = blockOf(item);
  if (!block) return [];
  return block.kind === "call" ? [`**Called ${block.name}**`, fenced(block.text)] : [`> ${block.text.replace(/\n/g, "\n> ")}`];
}

function fenced(/** @type {string} */ text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((ticks) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text}\n${fence}`;
}

/**
 * Makes the conversations of a file again, with new ids. Throws NotConversations and PenstockError.
 * @param {Conversations} conversations
 * @param {string} text
 * @returns {Promise<string[]>} their ids
 */
export async function fromJson(conversations, text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new NotConversations("This file is not JSON.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new NotConversations("This file has no conversations of penstock.");
  }
  if (file.version !== VERSION) throw new NotConversations(`This file is of version ${file.version}, and not of ${VERSION}.`);
  const made = [];
  // The last used of them is to be used last here, too.
  for (const one of file.conversations.toReversed()) made.push(await again(conversations, one));
  return made;
}

async function again(/** @type {Conversations} */ conversations, /** @type {Kept} */ { metadata, pinned, head, turns }) {
  const { id } = await conversations.create({ metadata });
  /** The new turns by the old ones' ids. @type {Map<string, string>} */ const names = new Map();
  /** Old ids of those that have been made, and that are not in `names` yet. */
  let end = /** @type {string | null} */ (null);
  const named = async (/** @type {string | null} */ turn) => {
    if (turn === null) return null;
    if (!names.has(turn)) {
      const { head: now } = await conversations.tree(id);
      if (now && end) names.set(end, now);
    }
    return names.get(turn) ?? null;
  };
  const branching = new Set(turns.map(({ parent }) => parent).filter((parent, index, all) => all.indexOf(parent) !== index));
  for (const { turn, parent, items, output } of turns) {
    const said = [...(items ?? []), ...[output ?? []].flat()].map(inputOf);
    if (said.length === 0) continue;
    if (parent !== end) await conversations.setHead(id, await named(parent), await named(end));
    for (let start = 0; start < said.length; start += MAX_ITEMS) await conversations.add(id, said.slice(start, start + MAX_ITEMS));
    end = turn;
    if (branching.has(turn) || turn === head) await named(turn);
  }
  if (head !== null && head !== end) await conversations.setHead(id, await named(head), await named(end));
  if (pinned) await conversations.pin(id, true);
  return id;
}

/** An item as it may be added; pictures are sent with messages alone. */
function inputOf(/** @type {any} */ { id: _, status: __, ...item }) {
  if (item.type !== "message") return item;
  const content = item.content.map((/** @type {any} */ { type, text, image_url }) =>
    ({ type, text: image_url === undefined ? text ?? "" : "(a picture)" }));
  const kind = item.role === "assistant" ? "output_text" : "input_text";
  return { ...item, content: content.map((/** @type {any} */ { text }) => ({ type: kind, text })) };
}

/** Has the browser save a text as a file. */
export function saveFile(/** @type {string} */ name, /** @type {string} */ text, type = "text/plain") {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** A title as a file's name. */
export function fileName(/** @type {string} */ title, /** @type {string} */ ending) {
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60);
  return `${name || "conversation"}.${ending}`;
}

/** @type {Record<string, string>} */ const ENDINGS = {
  python: "py", javascript: "js", typescript: "ts", bash: "sh", shell: "sh", rust: "rs", ruby: "rb", csharp: "cs", "c++": "cpp", kotlin: "kt",
  markdown: "md", yaml: "yml", perl: "pl", plaintext: "txt", text: "txt", "": "txt", haskell: "hs", makefile: "mk", objectivec: "m",
};

/** What a file with code of this language is called. */
export function codeFileName(/** @type {string} */ language) {
  const name = language.toLowerCase();
  return `code.${ENDINGS[name] ?? (/^[a-z0-9]{1,8}$/.test(name) ? name : "txt")}`;
}
