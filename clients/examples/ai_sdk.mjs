// Vercel's AI SDK: `npm install ai @ai-sdk/openai-compatible`, then `node ai_sdk.mjs`.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";

const penstock = createOpenAICompatible({
  name: "penstock",
  baseURL: `${process.env.PENSTOCK_URL ?? "http://127.0.0.1:8000"}/v1`,
  apiKey: process.env.PENSTOCK_API_KEY,
  includeUsage: true,
});

const { textStream, usage } = streamText({
  model: penstock("demo"),
  prompt: "What is paged attention?",
});
for await (const piece of textStream) process.stdout.write(piece);
console.log(`\n(${(await usage).outputTokens} tokens)`);
