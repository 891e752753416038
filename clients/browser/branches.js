/**
 * Changing the tree of turns behind what is shown: the head is moved to another branch, an answer is replaced in a new
 * branch, turns and answers are deleted.
 */

import { leafOf } from "./penstock-client.js";
import { addedOf, outputOf, partsOf, placeOf } from "./turns.js";

/** @typedef {import("./penstock-client.js").PenstockClient["conversations"]} Conversations */
/** @typedef {import("./conversations.js").Item} Item */

/**
 * Moves the head to before a turn, where the next one is requested as its sibling.
 * @returns what was the head, and what is now
 */
export async function stepBefore(
  /** @type {Conversations} */ conversations, /** @type {string} */ id, /** @type {string | undefined} */ turnId,
) {
  const tree = await conversations.tree(id);
  const parent = tree.data.find((turn) => turn.turn === turnId)?.parent ?? null;
  await conversations.setHead(id, parent, tree.head);
  return { head: tree.head, parent };
}

/** Moves the head to the end of the branch `step` siblings away from `view`'s, if there is one. */
export async function stepBeside(
  /** @type {Conversations} */ conversations, /** @type {string} */ id,
  /** @type {{ turnIds: string[] }} */ view, /** @type {number} */ step,
) {
  const tree = await conversations.tree(id);
  const { siblings, index } = placeOf(tree, view);
  const next = siblings[index + step];
  if (next) await conversations.setHead(id, leafOf(tree, next.turn), tree.head);
}

/**
 * Adds a turn beside these, which are one answer on the page: with what came in, what was thought and called, and
 * another text at the end. It is the new head.
 */
export async function replaceAnswer(
  /** @type {Conversations} */ conversations, /** @type {string} */ id,
  /** @type {string[]} */ turnIds, /** @type {string} */ text,
) {
  const { data } = await conversations.tree(id, { items: true });
  const said = data.filter(({ turn }) => turnIds.includes(turn)).flatMap((turn) => [...(turn.items ?? []), ...outputOf(turn)]);
  // An answer that was continued has several messages, which are one to the model.
  const end = said.findLastIndex((/** @type {Item} */ { role }) => role !== "assistant") + 1;
  const message = { type: "message", role: "assistant", content: [{ type: "output_text", text }] };
  const { head, parent } = await stepBefore(conversations, id, turnIds[0]);
  try {
    await conversations.add(id, [...said.slice(0, end).map((item) => addedOf(item)), message]);
  } catch (error) {
    await conversations.setHead(id, head, parent).catch(() => {}); // the reader is told of the first error
    throw error;
  }
}

/** Deletes turns that are shown as one: those after them continue what was before. */
export async function deleteTurns(
  /** @type {Conversations} */ conversations, /** @type {string} */ id, /** @type {readonly string[]} */ turnIds,
) {
  for (const turn of turnIds.toReversed()) await conversations.deleteTurn(id, turn);
}

/** Deletes the answer of turns that are shown as one, and leaves what they answer. */
export async function deleteAnswer(
  /** @type {Conversations} */ conversations, /** @type {string} */ id, /** @type {readonly string[]} */ turnIds,
) {
  const [first, ...later] = turnIds;
  await deleteTurns(conversations, id, later);
  const { data } = await conversations.tree(id, { items: true });
  const turn = data.find((each) => each.turn === first);
  for (const item of turn ? partsOf(turn).output : []) await conversations.deleteItem(id, item.id);
}
