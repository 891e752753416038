/**
 * How answers end, in words.
 */

import { PenstockError } from "./penstock-client.js";

/** @typedef {import("./answer.js").Outcome} Outcome */

export const TAKEN = "Somebody else is being answered in this conversation.";
export const NOT_SENT = "Your message was not sent; it is in the message box of its conversation.";
export const NOT_LOADED = "This conversation could not be loaded.";
const GONE = "The server no longer has this conversation. Nothing above will be remembered.";
const GONE_CODES = ["conversation_not_found", "previous_response_not_found"];
const LOST = "The connection broke here, and the server no longer has the rest of this answer.";

/** Whether the turn is there to be gone on from. */
export function wasKept(/** @type {Outcome} */ { kind }) {
  return ["completed", "cancelled", "incomplete"].includes(kind);
}

/** Why an answer ends in the middle; nothing where it does not. */
export function cutText(/** @type {string} */ kind, /** @type {string | null} */ reason) {
  if (kind === "cancelled") return "Stopped.";
  if (reason === "steered") return "Interrupted.";
  if (kind !== "incomplete") return "";
  if (reason === "repetition") return "Cut short: the answer repeated itself.";
  if (reason && reason !== "max_output_tokens") return `Cut short (${reason}).`;
  return "Cut short: the answer reached its length limit.";
}

/** Whether with a lost answer its conversation is lost, too. */
async function isGone(
  /** @type {import("./penstock-client.js").PenstockClient} */ client,
  /** @type {string | null} */ id,
  /** @type {Outcome} */ { kind },
) {
  if (kind !== "lost" || !id) return false;
  return client.conversations.get(id).then(() => false, (error) => error.status === 404);
}

/**
 * Why there is no answer, and what is worth trying: the same again, an edited message, the message
 * without its images, or in a new conversation.
 * @param {import("./penstock-client.js").PenstockClient} client
 * @param {Outcome} outcome
 * @param {{ id: string | null, isFirst: boolean, model: string, message: import("./drafts.js").Message }} question
 * @returns {Promise<{ text: string, remedies: ("again" | "edit" | "bare" | "anew")[] }>}
 */
export async function problemOf(client, outcome, { id, isFirst, model, message }) {
  const { kind, problem } = outcome;
  const code = problem?.code ?? "";
  if (GONE_CODES.includes(code) || await isGone(client, id, outcome)) return { text: GONE, remedies: ["anew"] };
  const text = kind === "lost" ? LOST : problem?.message || "The server gave no reason.";
  if (code === "request_too_large") return { text, remedies: ["edit"] };
  if (code !== "context_length_exceeded") return { text, remedies: remediesOf(problem, message) };
  const size = await client.countTokens(model, [...message.attachments.map((part) => part.text ?? ""), message.text].join("\n")).catch(() => null);
  if (!size?.max_model_len) return { text: `Too long: ${text}`, remedies: ["edit"] };
  const { count, max_model_len: limit } = size;
  if (isFirst || count >= limit) {
    return {
      text: `This message is too long: it has ${count} tokens, and the model's context, which also holds ` +
        `the system prompt and the answer, has ${limit}.`,
      remedies: ["edit"],
    };
  }
  return {
    text: `This conversation has filled the model's context of ${limit} tokens: the ${count} tokens of ` +
      "this message do not fit.",
    remedies: ["anew", "edit"],
  };
}

/**
 * What is worth trying: what is wrong with the message itself is so when it is sent again, too.
 * @returns {("again" | "edit" | "bare")[]}
 */
function remediesOf(/** @type {Outcome["problem"]} */ problem, /** @type {import("./drafts.js").Message} */ message) {
  const param = problem?.param ?? "";
  if (param.endsWith("image_url")) return message.text ? ["bare"] : [];
  return [param.startsWith("input") ? "edit" : "again"];
}

/** Why a message was not taken at all. */
export function refusalText(/** @type {unknown} */ problem) {
  return problem instanceof PenstockError && problem.code !== "conversation_locked" ? problem.message : TAKEN;
}
