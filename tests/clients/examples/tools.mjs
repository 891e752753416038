// Tools by stock clients: openai's runTools, and the AI SDK over three turns, from the server at
// PENSTOCK_URL. The tools give what no model would say unasked.
//
// Writes one line of JSON: the name of each case, and what went wrong with it, or null.

import assert from "node:assert/strict";

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { convertToModelMessages, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const baseURL = `${process.env.PENSTOCK_URL}/v1`;
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const openai = createOpenAI({ baseURL, apiKey: "none" });
const models = {
  responses: openai("demo"), // the provider's default
  chat: openai.chat("demo"),
  compatible: createOpenAICompatible({ name: "penstock", baseURL, includeUsage: true })("demo"),
};

/** Tools, and what they were asked. */
function made() {
  const asked = [];
  const note = (name, given, value) => { asked.push([name, given]); return value; };
  return {
    asked,
    tools: {
      calculator: tool({
        description: "Computes.",
        inputSchema: z.object({ expression: z.string() }),
        execute: async ({ expression }) => note("calculator", expression, "4711"),
      }),
      clock: tool({
        description: "Tells the time.",
        inputSchema: z.object({ city: z.string().optional() }),
        execute: async ({ city }) => note("clock", city, "07:31"),
      }),
    },
  };
}

const cases = {
  async "openai: runTools"() {
    for (const stream of [false, true]) {
      const asked = [];
      const runner = client.chat.completions.runTools({
        model: "demo",
        stream,
        temperature: 0,
        messages: [{ role: "user", content: "what is 12 plus 30?" }],
        tools: [{
          type: "function",
          function: {
            name: "calculator",
            parse: JSON.parse,
            function: ({ expression }) => { asked.push(expression); return "4711"; },
            parameters: { type: "object", properties: { expression: { type: "string" } } },
          },
        }],
      });
      assert.match(await runner.finalContent(), /4711/);
      assert.deepEqual(asked, ["12 + 30"]);
    }
  },

  async "openai: a streamed response and its thoughts"() {
    const events = [];
    const stream = client.responses.stream({
      model: "demo",
      temperature: 0,
      input: "what time is it in Oslo?",
      reasoning: { effort: "low" },
      tools: [{ type: "function", name: "clock", strict: false, parameters: { type: "object", properties: { city: { type: "string" } } } }],
    });
    for await (const event of stream) events.push(event.type);
    const { output } = await stream.finalResponse();
    assert.deepEqual(output.map((item) => item.type), ["reasoning", "function_call"]);
    assert.deepEqual(JSON.parse(output[1].arguments), { city: "Oslo" });
    assert.ok(events.includes("response.reasoning_text.delta"));
    assert.ok(events.includes("response.function_call_arguments.delta"));
  },

  async "AI SDK: thoughts, of which it shows summaries only"() {
    const options = { forceReasoning: true, reasoningEffort: "low", reasoningSummary: "auto" };
    const asked = { model: models.responses, maxRetries: 0, prompt: "Hello!", providerOptions: { openai: options } };
    const { reasoningText, text } = await generateText(asked);
    assert.ok(reasoningText);
    assert.ok(text);
    const streamed = { text: "", reasoning: "" };
    for await (const part of streamText(asked).fullStream) {
      if (part.type === "reasoning-delta") streamed.reasoning += part.text;
      if (part.type === "text-delta") streamed.text += part.text;
      assert.notEqual(part.type, "error");
    }
    assert.ok(streamed.reasoning);
    assert.ok(streamed.text);
  },
};

for (const [name, model] of Object.entries(models)) {
  Object.assign(cases, {
    async [`${name}: generateText`]() {
      const { tools, asked } = made();
      const { text, steps } = await generateText({
        model, tools, stopWhen: stepCountIs(3), temperature: 0, maxRetries: 0, prompt: "what is 12 plus 30?",
      });
      assert.match(text, /4711/);
      assert.equal(steps.length, 2);
      assert.deepEqual(asked, [["calculator", "12 + 30"]]);
    },

    async [`${name}: streamText over three turns`]() {
      const { tools, asked } = made();
      let messages = [];
      const answers = [];
      for (const said of ["Hello!", "what is 12 plus 30?", "what time is it in Oslo?"]) {
        messages.push({ id: `u${messages.length}`, role: "user", parts: [{ type: "text", text: said }] });
        const result = streamText({
          model, tools, stopWhen: stepCountIs(3), temperature: 0, maxRetries: 0,
          messages: await convertToModelMessages(messages),
        });
        await new Promise((resolve, reject) => {
          const stream = result.toUIMessageStream({
            originalMessages: messages,
            onError: (error) => { reject(error); return String(error); },
            onFinish: ({ messages: all }) => { messages = all; resolve(); },
          });
          void (async () => { for await (const _ of stream); })();
        });
        answers.push(await result.text);
      }
      assert.ok(answers[0]);
      assert.match(answers[1], /4711/);
      assert.match(answers[2], /07:31/);
      assert.deepEqual(asked, [["calculator", "12 + 30"], ["clock", "Oslo"]]);
    },

    async [`${name}: a tool that must be called`]() {
      const { tools } = made();
      for (const toolChoice of ["required", { type: "tool", toolName: "clock" }]) {
        const { toolCalls, finishReason } = await generateText({
          model, tools: { clock: tools.clock }, toolChoice, temperature: 0, maxRetries: 0, prompt: "Hello!",
        });
        assert.deepEqual(toolCalls.map((call) => call.toolName), ["clock"]);
        assert.equal(finishReason, "tool-calls");
      }
    },
  });
}

const outcomes = {};
for (const [name, run] of Object.entries(cases)) {
  outcomes[name] = await run().then(() => null, (error) => String(error?.stack ?? error).slice(0, 600));
}
console.log(JSON.stringify(outcomes));
