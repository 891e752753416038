/**
 * Conversations as files: JSON, from which the same tree is made again, and Markdown to read.
 */

import { titleOf } from "./page-state.js";
import { addedOf, messageText, outputOf, pathShown } from "./turns.js";
import { blockOf } from "./answer.js";

/** @typedef {import("./conversations.js").Conversation} Conversation */
/** @typedef {import("./conversations.js").Conversations} Conversations */
/** @typedef {import("./conversations.js").Turn} Turn */
/** @typedef {Conversation & { head: string | null, turns: Turn[] }} Kept */

const FORMAT = "penstock.conversations";
const VERSION = 1;
const MAX_ITEMS = 20; // of a request
const MAX_TITLE = 200;
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
 * @param {boolean} takesImages  whether conversations of this server's model may have pictures
 * @returns {Promise<string[]>} their ids
 */
export async function fromJson(conversations, text, takesImages) {
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
  for (const one of file.conversations.toReversed()) made.push(await again(conversations, one, takesImages));
  return made;
}

/** Makes a copy of a conversation with all its branches. Throws PenstockError. @returns {Promise<string>} its id */
export async function copyOf(
  /** @type {Conversations} */ conversations, /** @type {Conversation} */ conversation, /** @type {boolean} */ takesImages,
) {
  const kept = await whole(conversations, conversation);
  const metadata = { ...kept.metadata, title: `Copy of ${titleOf(conversation)}`.slice(0, MAX_TITLE) };
  return again(conversations, { ...kept, metadata, pinned: false }, takesImages);
}

/** Makes one again; turns without items are left out, and what is after them continues what is before. */
async function again(
  /** @type {Conversations} */ conversations, /** @type {Kept} */ { metadata, pinned, head, turns }, /** @type {boolean} */ takesImages,
) {
  const { id } = await conversations.create({ metadata });
  const parents = new Map(turns.map(({ turn, parent }) => [turn, parent]));
  const saidIn = new Map(turns.map(({ turn, items, output }) =>
    [turn, [...(items ?? []), ...[output ?? []].flat()].map((item) => addedOf(item, takesImages))]));
  const withItems = (/** @type {string | null} */ turn) => {
    while (turn !== null && saidIn.get(turn)?.length === 0) turn = parents.get(turn) ?? null;
    return turn;
  };
  const made = turns.filter(({ turn }) => saidIn.get(turn)?.length).map(({ turn, parent }) => ({ turn, parent: withItems(parent) }));
  /** Those that are gone back to. */
  const wanted = new Set([withItems(head), ...made.filter(({ parent }, index) => parent !== (made[index - 1]?.turn ?? null)).map(({ parent }) => parent)]);
  /** The new turns by the old ones' ids. @type {Map<string | null, string | null>} */ const names = new Map([[null, null]]);
  /** The old id of what is the head now. */
  let end = /** @type {string | null} */ (null);
  const move = async (/** @type {string | null} */ turn) => {
    if (turn === end) return;
    const { head: last } = await conversations.tree(id);
    await conversations.setHead(id, names.get(turn) ?? null, last);
    end = turn;
  };
  for (const { turn, parent } of made) {
    await move(parent);
    const said = saidIn.get(turn) ?? [];
    for (let start = 0; start < said.length; start += MAX_ITEMS) await conversations.add(id, said.slice(start, start + MAX_ITEMS));
    end = turn;
    if (wanted.has(turn)) names.set(turn, (await conversations.tree(id)).head);
  }
  await move(withItems(head));
  if (pinned) await conversations.pin(id, true);
  return id;
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
