/**
 * Reading a tree of turns as a transcript.
 */

import { blockOf } from "./answer.js";
import { childrenOf, pathTo } from "./penstock-client.js";

/** @typedef {import("./conversations.js").Tree} Tree */
/** @typedef {import("./conversations.js").Turn} Turn */
/** @typedef {import("./conversations.js").Item} Item */
/** @typedef {Pick<Item, "role" | "content">} Said */

const MAX_TITLE_CHARACTERS = 80;

/**
 * A message of the user.
 * @param {import("./drafts.js").Message} message
 * @returns {{ role: "user", content: import("./conversations.js").Part[] }}
 */
export function userItem({ text, attachments }) {
  return { role: "user", content: [...attachments.map(partOf), { type: "input_text", text }] };
}

/** The text of a file, as a part of a message; `attachmentsOf` finds it again. */
const FILE = /^\[File: ([^\n]{1,200})\]\n(`{3,})\n([^]*)\n\2$/;

/** @returns {import("./conversations.js").Part} */
function partOf(/** @type {import("./conversations.js").Part} */ part) {
  if (part.image_url) return part;
  const { name = "", text = "" } = part;
  const fence = "`".repeat(1 + Math.max(2, ...(text.match(/`+/g) ?? []).map((ticks) => ticks.length)));
  return { type: "input_text", text: `[File: ${name.replace(/\n/g, " ").slice(0, 200)}]\n${fence}\n${text}\n${fence}` };
}

function isFile(/** @type {import("./conversations.js").Part} */ { type, text = "" }) {
  return type === "input_text" && FILE.test(text);
}

/** What the user wrote. @returns {import("./drafts.js").Message} */
export function messageOf(/** @type {Said} */ item) {
  return { text: messageText(item), attachments: attachmentsOf(item) };
}

/** A message's text, without that of files. */
export function messageText(/** @type {Pick<Item, "content">} */ item) {
  return item.content.flatMap((part) => (isFile(part) ? [] : part.text ?? [])).join("\n");
}

/** Images and files of a message, in their order. @returns {import("./conversations.js").Part[]} */
export function attachmentsOf(/** @type {Pick<Item, "content">} */ { content }) {
  return content.flatMap((part) => {
    if (part.image_url) return part;
    const [, name, , text] = isFile(part) ? FILE.exec(part.text ?? "") ?? [] : [];
    return name === undefined ? [] : { type: "input_text", name, text };
  });
}

/** The turns that begin where a view begins, and which of them it shows. */
export function placeOf(/** @type {Tree | null} */ tree, /** @type {{ turnIds: string[] }} */ view) {
  const own = tree?.data.find((turn) => turn.turn === view.turnIds[0]);
  const siblings = tree && own ? childrenOf(tree, own.parent) : [];
  return { siblings, index: siblings.findIndex((turn) => turn === own) };
}

/** Turns as they are shown: one without input, or with nothing but tools' outputs, continues the answer before it. */
export function grouped(/** @type {Turn[]} */ path) {
  /** @type {Turn[][]} */ const groups = [];
  for (const turn of path) {
    const before = groups.at(-1)?.at(-1);
    const { items } = partsOf(turn);
    const isFollowUp = turn.response_id ? items.every(isResult) : items.length === 0 && turn.items?.slice(0, 1).some(isResult);
    if (isFollowUp && before && partsOf(before).output.length > 0) groups[groups.length - 1].push(turn);
    else groups.push([turn]);
  }
  return groups;
}

/** Whether an item is what a call returned. */
export function isResult(/** @type {Item} */ { type }) {
  return type === "function_call_output";
}

/** The items of a turn's answer. @returns {Item[]} */
export function outputOf(/** @type {Turn} */ { output }) {
  return [output ?? []].flat();
}

/**
 * What came in with a turn, and what answers it: of items that were added without a response, the assistant's last
 * message, with what it thought and called.
 * @returns {{ items: Item[], output: Item[] }}
 */
export function partsOf(/** @type {Turn} */ turn) {
  const items = turn.items ?? [];
  if (turn.response_id) return { items, output: outputOf(turn) };
  const isSaid = (/** @type {Item} */ { type, role }) => type === "message" && role === "assistant";
  const asked = items.findLastIndex((item) => item.type === "message" && !isSaid(item)) + 1;
  const numSaid = items.slice(asked).filter(isSaid).length;
  // Of several messages, only the last one is the answer.
  const start = numSaid < 2 ? asked : items.slice(0, items.findLastIndex(isSaid)).findLastIndex(isSaid) + 1;
  return { items: items.slice(0, start), output: items.slice(start) };
}

/** The calls that the last of these turns waits for. */
export function openCalls(/** @type {Turn[]} */ path) {
  const last = path.at(-1);
  const items = last?.status === "completed" ? outputOf(last) : [];
  return items.flatMap((item) => blockOf(item) ?? []).filter((block) => block.kind === "call");
}

/** How many of the views, from the first on, show just these turns. */
export function numShown(/** @type {{ turnIds: string[] }[]} */ views, /** @type {Turn[][]} */ groups) {
  const first = views.findIndex(({ turnIds }, index) =>
    turnIds.length === 0 || turnIds.join() !== groups[index]?.map((turn) => turn.turn).join());
  return first < 0 ? views.length : first;
}

/** The turns that are on the page: down to the one that is being answered below the head, or to it. */
export function pathShown(/** @type {Tree} */ tree) {
  return pathTo(tree, tree.running ?? tree.head);
}

/** The turn that is being answered: on the head, or going on with it. */
export function runningOf(/** @type {Tree} */ { data, head, running }) {
  return running ?? data.find((turn) => turn.parent === head && turn.status === "in_progress")?.turn;
}

/** An item as sent to the server. */
export function inputOf(/** @type {Said} */ item) {
  const text = messageText(item);
  const parts = attachmentsOf(item).map(partOf).map(({ type, image_url, text: said }) =>
    (image_url ? { type, image_url } : { type, text: said }));
  if (parts.length === 0) return { role: item.role, content: text };
  return { role: item.role, content: text ? [...parts, { type: "input_text", text }] : parts };
}

/** A stored item as it may be added again; `takesImages`: with its pictures. */
export function addedOf(/** @type {any} */ { id: _, status: __, ...item }, takesImages = true) {
  if (item.type !== "message") return item;
  const kind = item.role === "assistant" ? "output_text" : "input_text";
  const content = item.content.map((/** @type {any} */ { image_url, text }) =>
    (image_url && takesImages ? { type: "input_image", image_url } : { type: kind, text: image_url ? "(a picture)" : text ?? "" }));
  return { ...item, content };
}

/** What a conversation is called by its first message. */
export function titleFrom(/** @type {string} */ text) {
  const start = text.replace(/\s+/g, " ").slice(0, 2 * MAX_TITLE_CHARACTERS);
  return Array.from(start).slice(0, MAX_TITLE_CHARACTERS).join(""); // no character in halves
}

/** The title in what a model says that was asked for one: its first line with letters, without marks around it. */
export function titleSaid(/** @type {string} */ text) {
  const lines = text.split("\n").filter((line) => !/^\s*(?:```|~~~)/.test(line)).map((line) => line.replace(/^[#"“*`\s]+|["”*`.\s]+$/g, ""));
  return titleFrom(lines.find((line) => /[\p{L}\p{N}]/u.test(line)) ?? "");
}

/** A turn's response, as far as the server has it. @returns {Promise<any>} */
export async function responseOf(
  /** @type {import("./penstock-client.js").PenstockClient} */ client, /** @type {string | undefined | null} */ turnId,
) {
  if (!turnId?.startsWith("resp_")) return null;
  return client.response(turnId).catch(() => null);
}

/** Whether two responses were asked for with the same beginning of their prompts. */
export function hasSameStart(/** @type {any} */ one, /** @type {any} */ other) {
  return ["model", "instructions", "tools"].every((name) => JSON.stringify(one[name]) === JSON.stringify(other[name]));
}
