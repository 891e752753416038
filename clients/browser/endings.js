/**
 * How answers end, in words.
 */

import { PenstockError } from "./penstock-client.js";

/** @typedef {import("./answer.js").Outcome} Outcome */

export const TAKEN = "Somebody else is being answered in this conversation.";
export const NOT_LOADED = "This conversation could not be loaded.";
const GONE = "The server no longer has this conversation. Nothing above will be remembered.";
/** Errors after which a conversation cannot continue. @type {Record<string, string>} */
const ENDS_OF_CONVERSATIONS = {
  conversation_not_found: GONE,
  previous_response_not_found: GONE,
  context_length_exceeded: "This conversation has filled the model's context and cannot go on.",
};
const TOO_LONG = "This message is longer than the model's context.";
const LOST = "The connection broke here, and the server no longer has the rest of this answer.";

/** Whether the turn is there to be gone on from. */
export function wasKept(/** @type {Outcome} */ { kind }) {
  return ["completed", "cancelled", "incomplete"].includes(kind);
}

/** Why an answer ends in the middle; nothing where it does not. */
export function cutText(/** @type {string} */ kind, /** @type {string | null} */ reason) {
  if (kind === "cancelled") return "Stopped.";
  if (kind !== "incomplete") return "";
  if (reason && reason !== "max_output_tokens") return `Cut short (${reason}).`;
  return "Cut short: the answer reached its length limit.";
}

/** Whether with a lost answer its conversation is lost, too. */
export async function isGone(
  /** @type {import("./penstock-client.js").PenstockClient} */ client,
  /** @type {string | null} */ id,
  /** @type {Outcome} */ { kind },
) {
  if (kind !== "lost" || !id) return false;
  return client.conversations.get(id).then(() => false, (error) => error.status === 404);
}

/** Why there is no answer, and whether it is worth asking in this conversation again. */
export function problemText(
  /** @type {Outcome} */ { kind, problem }, /** @type {{ isGone: boolean, isFirst: boolean }} */ { isGone, isFirst },
) {
  if (isFirst && problem?.code === "context_length_exceeded") return { text: TOO_LONG, endsConversation: false };
  const lasting = isGone ? GONE : ENDS_OF_CONVERSATIONS[problem?.code ?? ""];
  const text = lasting ?? (kind === "lost" ? LOST : problem?.message || "The server gave no reason.");
  return { text, endsConversation: lasting !== undefined };
}

/** Why a message was not taken at all. */
export function refusalText(/** @type {unknown} */ problem) {
  return problem instanceof PenstockError && problem.code !== "conversation_locked" ? problem.message : TAKEN;
}
