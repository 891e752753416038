/**
 * Moving the head of a conversation over its tree of turns.
 */

import { leafOf } from "./penstock-client.js";
import { placeOf } from "./turns.js";

/** @typedef {import("./penstock-client.js").PenstockClient["conversations"]} Conversations */

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
