// The `openai` package for Node: `npm install openai`, then `node openai_node.mjs`.

import OpenAI from "openai";

const baseURL = `${process.env.PENSTOCK_URL ?? "http://127.0.0.1:8000"}/v1`;
const client = new OpenAI({ baseURL, apiKey: process.env.PENSTOCK_API_KEY ?? "none" });

const stream = client.responses.stream({ model: "demo", input: "What is paged attention?" });
for await (const event of stream) {
  if (event.type === "response.output_text.delta") process.stdout.write(event.delta);
}
const first = await stream.finalResponse();

const second = await client.responses.create({
  model: "demo",
  input: "Thank you!",
  previous_response_id: first.id,
});
console.log(`\n${second.output_text}`);
