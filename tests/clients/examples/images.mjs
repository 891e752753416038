// Vercel's AI SDK: a picture in a message, from the server at PENSTOCK_URL.
//
// Writes one line of JSON: by model, what it says about a picture, about another one, and about the
// first in a stream.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const baseURL = `${process.env.PENSTOCK_URL}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const models = {
  responses: openai.responses("llava"),
  chat: openai.chat("llava"),
  compatible: createOpenAICompatible({ name: "penstock", baseURL, includeUsage: true })("llava"),
};
const { PICTURE, OTHER_PICTURE } = process.env; // PNG files in base64

function asked(model, image) {
  const content = [{ type: "text", text: "what is this?" }, { type: "image", image }];
  return { model, messages: [{ role: "user", content }], maxOutputTokens: 16, maxRetries: 0, temperature: 0 };
}

const said = {};
for (const [name, model] of Object.entries(models)) {
  const { text: one } = await generateText(asked(model, Buffer.from(PICTURE, "base64")));
  const { text: other } = await generateText(asked(model, OTHER_PICTURE));
  const { text: streamed } = streamText(asked(model, `data:image/png;base64,${PICTURE}`));
  said[name] = [one, other, await streamed];
}
console.log(JSON.stringify(said));
