// Anthropic's API by stock clients: its own SDK, and the AI SDK over two turns, from the server at
// PENSTOCK_URL. The tools give what no model would say unasked.
//
// Writes one line of JSON: the name of each case, and what went wrong with it, or null.

import assert from "node:assert/strict";

import { createAnthropic } from "@ai-sdk/anthropic";
import Anthropic from "@anthropic-ai/sdk";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.env.PENSTOCK_URL;
const client = new Anthropic({ baseURL, apiKey: "none", maxRetries: 0 });
const model = createAnthropic({ baseURL: `${baseURL}/v1`, apiKey: "none" })("demo");
const CALCULATOR = {
  name: "calculator",
  description: "Computes.",
  input_schema: { type: "object", properties: { expression: { type: "string" } }, required: ["expression"] },
};
const QUESTION = { role: "user", content: "what is 12 plus 30?" };
const asked = { model: "demo", max_tokens: 500, temperature: 0 };
const PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";

const cases = {
  async "SDK: text, whole and streamed"() {
    const body = { ...asked, messages: [{ role: "user", content: "Hello!" }], thinking: { type: "disabled" } };
    const whole = await client.messages.create(body);
    assert.equal(whole.content[0].type, "text");
    assert.ok(whole.content[0].text);
    const texts = [];
    const stream = client.messages.stream(body).on("text", (text) => texts.push(text));
    const streamed = await stream.finalMessage();
    assert.deepEqual(streamed.content, whole.content);
    assert.equal(texts.join(""), whole.content[0].text);
    assert.equal(streamed.usage.output_tokens, whole.usage.output_tokens);
    assert.equal(streamed.stop_reason, "end_turn");
  },

  async "SDK: a tool loop with thoughts"() {
    for (const streams of [false, true]) {
      const messages = [QUESTION];
      const body = { ...asked, max_tokens: 2000, tools: [CALCULATOR], thinking: { type: "enabled", budget_tokens: 1024 } };
      const answer = async () => (streams
        ? client.messages.stream({ ...body, messages }).finalMessage()
        : client.messages.create({ ...body, messages }));
      const first = await answer();
      assert.equal(first.stop_reason, "tool_use");
      const thought = first.content.find((block) => block.type === "thinking");
      assert.ok(thought.thinking);
      assert.ok(thought.signature);
      const call = first.content.find((block) => block.type === "tool_use");
      assert.deepEqual(call.input, { expression: "12 + 30" });
      messages.push({ role: "assistant", content: first.content });
      messages.push({ role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "4711" }] });
      const last = await answer();
      assert.match(last.content.at(-1).text, /4711/);
    }
  },

  async "SDK: a tool that must be called"() {
    for (const tool_choice of [{ type: "any" }, { type: "tool", name: "calculator" }]) {
      const { content } = await client.messages.create({
        ...asked, tools: [CALCULATOR], tool_choice, messages: [{ role: "user", content: "Hello!" }],
      });
      assert.ok(content.some((block) => block.type === "tool_use"));
    }
  },

  async "SDK: tokens and models"() {
    const { input_tokens } = await client.messages.countTokens({ model: "demo", messages: [QUESTION] });
    const { usage } = await client.messages.create({ ...asked, messages: [QUESTION] });
    assert.equal(input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
    const names = [];
    for await (const each of client.models.list()) names.push(each.id);
    assert.deepEqual(names, ["demo"]);
  },

  async "SDK: errors"() {
    const image = { type: "image", source: { type: "base64", media_type: "image/png", data: PIXEL } };
    for (const [wrong, kind] of [
      [{ model: "other" }, Anthropic.NotFoundError],
      [{ max_tokens: -1 }, Anthropic.BadRequestError],
      [{ messages: [{ role: "user", content: [image] }] }, Anthropic.BadRequestError], // it takes none
    ]) {
      for (const stream of [false, true]) {
        const error = await client.messages.create({ ...asked, messages: [QUESTION], stream, ...wrong }).catch((each) => each);
        assert.ok(error instanceof kind, String(error));
        assert.ok(error.requestID);
      }
    }
  },

  async "AI SDK: generateText"() {
    const { tools, expressions } = made();
    const { text, steps } = await generateText({
      model, tools, stopWhen: stepCountIs(3), temperature: 0, maxRetries: 0, prompt: "what is 12 plus 30?",
    });
    assert.match(text, /4711/);
    assert.equal(steps.length, 2);
    assert.deepEqual(expressions, ["12 + 30"]);
  },

  async "AI SDK: streamText with thoughts"() {
    const { tools, expressions } = made();
    const result = streamText({
      model, tools, stopWhen: stepCountIs(3), maxRetries: 0, prompt: "what is 12 plus 30?",
      providerOptions: { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } },
    });
    let thoughts = "";
    for await (const part of result.fullStream) {
      if (part.type === "reasoning-delta") thoughts += part.text;
      assert.notEqual(part.type, "error", JSON.stringify(part));
    }
    assert.ok(thoughts);
    assert.match(await result.text, /4711/);
    assert.deepEqual(expressions, ["12 + 30"]);
  },

  async "AI SDK: errors"() {
    const other = createAnthropic({ baseURL: `${baseURL}/v1`, apiKey: "none" })("other");
    const image = { type: "image", image: Buffer.from(PIXEL, "base64"), mediaType: "image/png" };
    for (const [wrong, status, words] of [
      [{ model: other, prompt: "Hello!" }, 404, /does not exist/],
      [{ messages: [{ role: "user", content: [image] }] }, 400, /takes no images/], // nor does it
      [{ prompt: "Hello! ".repeat(100_000) }, 400, /^prompt is too long: /],
    ]) {
      const error = await generateText({ model, maxRetries: 0, ...wrong }).catch((each) => each);
      assert.equal(error.statusCode, status, String(error));
      assert.match(error.message, words);
    }
  },

  async "AI SDK: text and usage, whole and streamed"() {
    const asked = { model, maxRetries: 0, temperature: 0, prompt: "Hello!", system: "Be brief." };
    const whole = await generateText(asked);
    const streamed = streamText(asked);
    assert.equal(await streamed.text, whole.text);
    assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);
    assert.equal((await streamed.usage).inputTokens, whole.usage.inputTokens);
    assert.equal(whole.finishReason, "stop");
  },

  async "AI SDK: a tool that must be called"() {
    const { tools } = made();
    for (const toolChoice of ["required", { type: "tool", toolName: "calculator" }]) {
      const { toolCalls, finishReason } = await generateText({ model, tools, toolChoice, temperature: 0, maxRetries: 0, prompt: "Hello!" });
      assert.deepEqual(toolCalls.map((call) => call.toolName), ["calculator"]);
      assert.equal(finishReason, "tool-calls");
    }
  },
};

/** A tool, and what it was asked. */
function made() {
  const expressions = [];
  const calculator = tool({
    description: "Computes.",
    inputSchema: z.object({ expression: z.string() }),
    execute: async ({ expression }) => { expressions.push(expression); return "4711"; },
  });
  return { expressions, tools: { calculator } };
}

const outcomes = {};
for (const [name, run] of Object.entries(cases)) {
  outcomes[name] = await run().then(() => null, (error) => String(error?.stack ?? error).slice(0, 600));
}
console.log(JSON.stringify(outcomes));
