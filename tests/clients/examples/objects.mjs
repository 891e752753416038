// Vercel's AI SDK: objects that match a schema, from the server at PENSTOCK_URL.
//
// Writes one line of JSON: the name of each case, and what went wrong with it, or null.

import assert from "node:assert/strict";

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  generateObject, generateText, jsonSchema, NoObjectGeneratedError, Output, streamObject, streamText,
} from "ai";
import { z } from "zod";

const baseURL = `${process.env.PENSTOCK_URL}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = { name: "penstock", baseURL, includeUsage: true };
const models = {
  responses: openai.responses("demo"),
  chat: openai.chat("demo"),
  compatible: createOpenAICompatible({ ...compatible, supportsStructuredOutputs: true })("demo"),
};
const Place = z.object({ name: z.string().max(12), kind: z.enum(["town", "city"]) });
const Trip = z.object({
  begin: Place,
  stops: z.array(Place).max(2),
  days: z.int().min(1).max(30),
  note: z.string().max(20).nullable(),
});
const asked = { prompt: "Plan a trip.", maxOutputTokens: 400, maxRetries: 0, temperature: 0 };

async function refusal(call) {
  try {
    await call;
  } catch (error) {
    return error;
  }
  assert.fail("nothing was refused");
}

const cases = {};
for (const [name, model] of Object.entries(models)) {
  Object.assign(cases, {
    async [`${name}: generateObject`]() {
      const { object, finishReason, usage } = await generateObject({ ...asked, model, schema: Trip });
      assert.deepEqual(Trip.parse(object), object);
      assert.equal(finishReason, "stop");
      assert.ok(usage.outputTokens > 10);
    },

    async [`${name}: streamObject`]() {
      const whole = await generateObject({ ...asked, model, schema: Trip });
      const result = streamObject({ ...asked, model, schema: Trip });
      const partial = [];
      for await (const object of result.partialObjectStream) partial.push(object);
      assert.deepEqual(await result.object, whole.object);
      assert.ok(partial.length > 3);
      assert.deepEqual(partial.at(-1), whole.object);
    },

    async [`${name}: an array and an enum`]() {
      const list = await generateObject({ ...asked, model, output: "array", schema: Place.extend({ name: z.string().max(5) }) })
        .catch((error) => error);
      // Nothing bounds how many there are, so it may reach the limit.
      if (list instanceof NoObjectGeneratedError) assert.equal(list.finishReason, "length");
      else list.object.forEach((place) => Place.parse(place));
      const one = await generateObject({ ...asked, model, output: "enum", enum: ["sunny", "rainy"] });
      assert.ok(["sunny", "rainy"].includes(one.object));
    },

    async [`${name}: generateText and streamText with an output`]() {
      const output = Output.object({ schema: Trip });
      const whole = await generateText({ ...asked, model, output });
      Trip.parse(whole.output);
      const stream = streamText({ ...asked, model, output });
      for await (const _ of stream.partialOutputStream);
      assert.deepEqual(await stream.output, whole.output);
    },

    async [`${name}: what broke off says so`]() {
      const error = await refusal(generateObject({ ...asked, model, schema: Trip, maxOutputTokens: 5 }));
      assert.ok(NoObjectGeneratedError.isInstance(error), String(error));
      assert.equal(error.finishReason, "length");
    },

    async [`${name}: a schema that is refused says why`]() {
      const properties = { name: { not: { type: "string" } } };
      const schema = jsonSchema({ type: "object", properties, required: ["name"], additionalProperties: false });
      const error = await refusal(generateObject({ ...asked, model, schema }));
      assert.equal(error.statusCode, 400, String(error));
      assert.equal(error.data.error.code, "invalid_json_schema");
    },
  });
}

cases["compatible: without schemas, JSON"] = async () => {
  const model = createOpenAICompatible(compatible)("demo");
  const { object } = await generateObject({ ...asked, model, output: "no-schema" }).catch((error) => {
    assert.equal(error.finishReason, "length", String(error));
    return { object: {} };
  });
  assert.equal(typeof object, "object");
};

const outcomes = {};
for (const [name, run] of Object.entries(cases)) {
  try {
    await run();
    outcomes[name] = null;
  } catch (error) {
    outcomes[name] = `${error.stack}\n${error.responseBody ?? error.cause?.stack ?? ""}`;
  }
}
console.log(JSON.stringify(outcomes));
