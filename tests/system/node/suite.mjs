// The stock `openai` client for Node against a server: every call that applies to it.
//
//     node suite.mjs BASE_URL
//
// writes one line of JSON: the name of each case, and what went wrong with it, or null.

import assert from "node:assert/strict";

import OpenAI from "openai";
import { LengthFinishReasonError } from "openai/error";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none" });
const model = "demo";
const messages = [{ role: "user", content: "What is paged attention?" }];
const ENDLESS = { ignore_eos: true, max_output_tokens: 30_000 };
const Place = z.object({ name: z.string().max(12), kind: z.enum(["town", "city"]) });
const Trip = z.object({ begin: Place, stops: z.array(Place).max(2), days: z.int().min(1).max(30) });
const ENDS = ["response.completed", "response.incomplete", "response.failed"];

async function all(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

function textOf(events) {
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  return deltas.map((event) => event.delta).join("");
}

function assertNumbered(events) {
  assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
  assert.deepEqual(events.filter((event) => ENDS.includes(event.type)), events.slice(-1));
}

async function refusal(call) {
  try {
    await call;
  } catch (error) {
    return error;
  }
  assert.fail("nothing was refused");
}

const cases = {
  async "chat"() {
    const answer = await client.chat.completions.create({ model, messages, temperature: 0 });
    assert.ok(answer.choices[0].message.content.length > 20);
    assert.equal(answer.choices[0].finish_reason, "stop");
    assert.ok(answer.usage.completion_tokens > 5);
  },

  async "chat streams the same"() {
    const asked = { model, messages, temperature: 0 };
    const whole = await client.chat.completions.create(asked);
    const stream = await client.chat.completions.create({
      ...asked,
      stream: true,
      stream_options: { include_usage: true },
    });
    const chunks = await all(stream);
    const pieces = chunks.slice(0, -1).map((chunk) => chunk.choices[0].delta.content ?? "");
    assert.equal(pieces.join(""), whole.choices[0].message.content);
    assert.deepEqual(chunks.at(-1).usage, whole.usage);
  },

  async "chat with the stream helper"() {
    const runner = client.chat.completions.stream({ model, messages, temperature: 0 });
    let text = "";
    runner.on("content", (delta) => (text += delta));
    const final = await runner.finalChatCompletion();
    assert.equal(final.choices[0].message.content, text);
    const parsed = await client.chat.completions.parse({ model, messages, temperature: 0 });
    assert.equal(parsed.choices[0].message.content, text);
  },

  async "chat is parsed"() {
    const response_format = zodResponseFormat(Trip, "trip");
    const asked = { model, messages, temperature: 0, max_tokens: 400, response_format };
    const whole = await client.chat.completions.parse(asked);
    const trip = whole.choices[0].message.parsed;
    assert.deepEqual(Trip.parse(JSON.parse(whole.choices[0].message.content)), trip);
    const runner = client.chat.completions.stream(asked);
    const final = await runner.finalChatCompletion();
    assert.deepEqual(final.choices[0].message.parsed, trip);
    const short = await refusal(client.chat.completions.parse({ ...asked, max_tokens: 5 }));
    assert.ok(short instanceof LengthFinishReasonError, String(short));
  },

  async "a response is parsed"() {
    const text = { format: zodTextFormat(Trip, "trip") };
    const asked = { model, input: "Plan a trip.", temperature: 0, max_output_tokens: 400, text };
    const whole = await client.responses.parse(asked);
    assert.deepEqual(Trip.parse(JSON.parse(whole.output_text)), whole.output_parsed);
    const stream = client.responses.stream(asked);
    const final = await stream.finalResponse();
    assert.deepEqual(final.output_parsed, whole.output_parsed);
  },

  async "chat with choices and logprobs"() {
    const answer = await client.chat.completions.create({
      model,
      messages,
      n: 2,
      seed: 7,
      max_completion_tokens: 5,
      logprobs: true,
      top_logprobs: 2,
    });
    assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
    for (const choice of answer.choices) {
      assert.ok(choice.logprobs.content.length >= 4);
      for (const token of choice.logprobs.content) assert.equal(token.top_logprobs.length, 2);
    }
  },

  async "completions"() {
    const asked = { model, prompt: ["Hello", "Good"], max_tokens: 4, temperature: 0 };
    const whole = await client.completions.create({ ...asked, echo: true });
    assert.deepEqual(whole.choices.map((choice) => choice.text.slice(0, 4)), ["Hell", "Good"]);
    const chunks = await all(await client.completions.create({ ...asked, stream: true }));
    const texts = ["", ""];
    for (const chunk of chunks) {
      for (const choice of chunk.choices) texts[choice.index] += choice.text;
    }
    assert.deepEqual(
      whole.choices.map((choice) => choice.text),
      [`Hello${texts[0]}`, `Good${texts[1]}`],
    );
  },

  async "models"() {
    const listed = await all(client.models.list());
    assert.deepEqual(listed.map((item) => item.id), [model]);
    assert.equal((await client.models.retrieve(model)).id, model);
  },

  async "a response and what it was made from"() {
    const first = await client.responses.create({
      model,
      input: "Hi, my name is Quillon.",
      temperature: 0,
      metadata: { k: "v" },
    });
    assert.equal(first.status, "completed");
    assert.equal((await client.responses.retrieve(first.id)).output_text, first.output_text);
    const second = await client.responses.create({
      model,
      input: "What is my name?",
      previous_response_id: first.id,
      temperature: 0,
    });
    assert.match(second.output_text, /Quillon/);
    const items = await all(client.responses.inputItems.list(second.id, { limit: 1, order: "asc" }));
    assert.deepEqual(
      items.map((item) => item.content[0].text),
      ["Hi, my name is Quillon.", first.output_text, "What is my name?"],
    );
    await client.responses.delete(second.id);
    assert.ok((await refusal(client.responses.retrieve(second.id))) instanceof OpenAI.NotFoundError);
  },

  async "the events of a response"() {
    const asked = { model, input: "Count to 5.", temperature: 0 };
    const events = await all(await client.responses.create({ ...asked, stream: true }));
    assertNumbered(events);
    const { response } = events.at(-1);
    assert.equal(textOf(events), response.output[0].content[0].text);
    const again = await client.responses.retrieve(response.id, { stream: true, starting_after: 3 });
    assert.deepEqual(await all(again), events.slice(4));
  },

  async "the stream helper"() {
    const asked = { model, input: "Count to 5.", temperature: 0 };
    const stream = client.responses.stream(asked);
    const events = await all(stream);
    const final = await stream.finalResponse();
    assert.equal(final.status, "completed");
    assert.match(final.output_text, /5/);
    const followed = client.responses.stream({ response_id: final.id, starting_after: 5 });
    const numbers = (await all(followed)).map((event) => event.sequence_number);
    assert.deepEqual(numbers, events.map((event) => event.sequence_number).slice(6));
    assert.equal((await followed.finalResponse()).output_text, final.output_text);
  },

  async "a response in the background"() {
    const asked = { model, input: "Count to 5.", temperature: 0, background: true };
    let response = await client.responses.create(asked);
    assert.equal(response.background, true);
    while (["queued", "in_progress"].includes(response.status)) {
      await new Promise((resolve) => setTimeout(resolve, 50));
      response = await client.responses.retrieve(response.id);
    }
    assert.equal(response.status, "completed");
    assert.match(response.output_text, /5/);
  },

  async "a background stream is left and followed again"() {
    const asked = { model, input: "Count to 5.", temperature: 0, background: true, stream: true };
    const events = [];
    for await (const event of await client.responses.create(asked)) {
      if (events.push(event) === 7) break;
    }
    const { id } = events.find((event) => event.type === "response.created").response;
    const rest = await client.responses.retrieve(id, {
      stream: true,
      starting_after: events.at(-1).sequence_number,
    });
    events.push(...(await all(rest)));
    assertNumbered(events);
    assert.equal(textOf(events), events.at(-1).response.output[0].content[0].text);
  },

  async "a response is cancelled"() {
    const asked = { model, input: "Go on.", background: true, ...ENDLESS };
    const begun = await client.responses.create(asked);
    assert.equal((await client.responses.cancel(begun.id)).status, "cancelled");
    assert.equal((await client.responses.retrieve(begun.id)).status, "cancelled");
  },

  async "a conversation"() {
    const made = await client.conversations.create({
      items: [
        { type: "message", role: "user", content: "Hi, my name is Velora." },
        { type: "message", role: "assistant", content: "Nice to meet you, Velora!" },
      ],
      metadata: { title: "names" },
    });
    const response = await client.responses.create({
      model,
      input: "What is my name?",
      conversation: made.id,
      temperature: 0,
    });
    assert.match(response.output_text, /Velora/);
    assert.equal(response.conversation.id, made.id);
    const listed = await all(client.conversations.items.list(made.id, { limit: 2, order: "asc" }));
    assert.deepEqual(
      listed.map((item) => item.role),
      ["user", "assistant", "user", "assistant"],
    );
    const added = await client.conversations.items.create(made.id, {
      items: [{ type: "message", role: "user", content: "Bye." }],
    });
    const [{ id }] = added.data;
    const where = { conversation_id: made.id };
    assert.equal((await client.conversations.items.retrieve(id, where)).id, id);
    await client.conversations.items.delete(id, where);
    assert.ok(
      (await refusal(client.conversations.items.retrieve(id, where))) instanceof
        OpenAI.NotFoundError,
    );
    assert.deepEqual((await client.conversations.retrieve(made.id)).metadata, { title: "names" });
    const updated = await client.conversations.update(made.id, { metadata: { k: "v" } });
    assert.deepEqual(updated.metadata, { k: "v" });
    assert.equal((await client.conversations.delete(made.id)).deleted, true);
  },

  async "the loser of a race for the head is told once"() {
    const { id: conversation } = await client.conversations.create();
    const asked = { model, input: "Go on.", conversation };
    const running = await client.responses.create({ ...asked, background: true, ...ENDLESS });
    let requests = 0;
    const counting = client.withOptions({
      fetch: (...args) => {
        requests += 1;
        return fetch(...args);
      },
    });
    const lost = await refusal(counting.responses.create(asked));
    assert.ok(lost instanceof OpenAI.ConflictError);
    assert.equal(lost.code, "conversation_locked");
    assert.equal(requests, 1);
    await client.responses.cancel(running.id);
  },

  async "embeddings, as floats and as base64"() {
    const input = ["What is paged attention?", "Hello"];
    const packed = await client.embeddings.create({ model, input }); // the client asks for base64
    const plain = await client.embeddings.create({ model, input, encoding_format: "float" });
    assert.equal(packed.data.length, 2);
    for (const [index, { embedding }] of packed.data.entries()) {
      assert.deepEqual(Array.from(embedding), plain.data[index].embedding.map(Math.fround));
      assert.ok(Math.abs(Math.hypot(...embedding) - 1) < 1e-5);
    }
    const short = await client.embeddings.create({ model, input: input[0], dimensions: 8 });
    assert.equal(short.data[0].embedding.length, 8);
    assert.ok(plain.usage.prompt_tokens > 2);
    const long = await refusal(client.embeddings.create({ model, input: "x", dimensions: 9999 }));
    assert.deepEqual([long.code, long.param], ["invalid_value", "dimensions"]);
  },

  async "errors are typed"() {
    const missing = await refusal(client.chat.completions.create({ model: "gpt-9", messages }));
    assert.ok(missing instanceof OpenAI.NotFoundError);
    assert.equal(missing.code, "model_not_found");
    const asked = { model, messages, web_search_options: { search_context_size: "low" } };
    const refused = await refusal(client.chat.completions.create(asked));
    assert.ok(refused instanceof OpenAI.BadRequestError);
    assert.deepEqual([refused.code, refused.param], ["unsupported_parameter", "web_search_options"]);
    const unknown = await refusal(
      client.responses.create({ model, input: "a", previous_response_id: "resp_1" }),
    );
    assert.ok(unknown instanceof OpenAI.BadRequestError);
    assert.equal(unknown.code, "previous_response_not_found");
  },
};

const outcomes = {};
for (const [name, run] of Object.entries(cases)) {
  try {
    await run();
    outcomes[name] = null;
  } catch (error) {
    outcomes[name] = error.stack;
  }
}
console.log(JSON.stringify(outcomes));
