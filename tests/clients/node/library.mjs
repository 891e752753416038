/**
 * The browser library in Node, against the server at the address in PENSTOCK_URL and, through a
 * proxy that cuts connections when told to, at PENSTOCK_CUT_URL.
 */

import assert from "node:assert/strict";
import { after, test } from "node:test";

import {
  AnswerError, backoffDelayMs, leafOf, pathTo, PenstockClient, PenstockError,
} from "../../../clients/browser/penstock-client.js";

const { PENSTOCK_URL, PENSTOCK_CUT_URL, PENSTOCK_CONTROL_URL } = process.env;
const STORY = { model: "demo", input: "Tell me a long story.", temperature: 0, ignore_eos: true, max_output_tokens: 1_200 };
/** Nobody waits for its end. */
const ENDLESS = { ...STORY, max_output_tokens: 30_000 };
const SHORT = { model: "demo", input: "My name is Ada.", temperature: 0 };
const NAMES = [
  "Ada", "Bela", "Carol", "Dora", "Emil", "Fred", "Grace", "Hugo", "Ida", "Jonas", "Karl", "Lena",
  "Max", "Nora", "Otto", "Paul", "Rosa", "Sam", "Tom", "Vera",
];
/** @type {PenstockClient[]} */ const clients = [];

function connect({ baseUrl = PENSTOCK_URL, transport = "websocket", ...options } = {}) {
  const client = new PenstockClient({ baseUrl, ...options, ...(transport === "sse" && { WebSocket: null }) });
  clients.push(client);
  return client;
}

after(() => clients.forEach((client) => client.close()));

/** Resets every connection through the proxy, and has it refuse new ones for a while. */
const cut = () => fetch(`${PENSTOCK_CONTROL_URL}/cut`, { method: "POST" });
/** What the server sends goes nowhere, and nobody is told; until a cut. */
const silence = () => fetch(`${PENSTOCK_CONTROL_URL}/silence`, { method: "POST" });

async function read(answer) {
  let text = "";
  for await (const piece of answer) text += piece;
  return text;
}

const undisturbed = await read(connect().respond(STORY));

test("embeddings and a ranking", async () => {
  const client = connect();
  const [one, other] = await client.embeddings({ model: "demo", input: ["Hello there", "A banana"] });
  assert.equal(one.length, other.length);
  const documents = ["A banana", "Hello there"];
  const [best] = await client.rerank({ model: "demo", query: "Hello", documents, top_n: 1 });
  assert.deepEqual([best.index, best.document.text], [1, "Hello there"]);
});

for (const transport of ["websocket", "sse"]) {
  test(`${transport}: an answer, its events and its outcome`, async () => {
    const client = connect({ transport });
    const answer = client.respond(SHORT);
    const heard = [];
    for (const name of ["started", "delta", "end"]) answer.addEventListener(name, () => heard.push(name));
    const text = await read(answer);
    const outcome = await answer.done;
    assert.match(text, /Ada/);
    assert.equal(client.transport, transport);
    assert.equal(outcome.kind, "completed");
    assert.ok(outcome.usage.output_tokens > 2);
    assert.equal(heard[0], "started");
    assert.equal(heard.at(-1), "end");
    assert.equal((await client.response(outcome.responseId)).id, outcome.responseId);
    assert.equal(await read(answer), text, "a loop begins at the first word whenever it is started");
  });

  test(`${transport}: many at a time`, async () => {
    const client = connect({ transport });
    const names = NAMES.slice(0, transport === "sse" ? 5 : 20); // a WebSocket takes 16 at once
    const texts = await Promise.all(names.map((name) => read(client.respond({ ...SHORT, input: `My name is ${name}.` }))));
    names.forEach((name, index) => assert.match(texts[index], new RegExp(name)));
  });

  test(`${transport}: cancel, and go on from there`, async () => {
    const client = connect({ transport });
    const answer = client.respond(ENDLESS);
    let half = "";
    for await (const piece of answer) {
      half += piece;
      if (half.length > 100) answer.cancel();
    }
    const { kind, responseId } = await answer.done;
    assert.equal(kind, "cancelled");
    const { input: _, ...same } = STORY;
    const rest = client.respond({ ...same, max_output_tokens: 100, previous_response_id: responseId, penstock: { continue: true } });
    assert.ok((half + (await read(rest))).startsWith(undisturbed.slice(0, half.length + 50)));
  });

  test(`${transport}: a connection cut again and again loses nothing and repeats nothing`, async () => {
    const client = connect({ baseUrl: PENSTOCK_CUT_URL, transport });
    const answer = client.respond(STORY);
    const numbers = [];
    const feed = answer.feed.bind(answer);
    answer.feed = (event) => {
      const before = answer.lastSequenceNumber;
      feed(event);
      if (answer.lastSequenceNumber > before) numbers.push(answer.lastSequenceNumber);
    };
    let text = "";
    let nextCut = 150;
    let numCuts = 0;
    for await (const piece of answer) {
      text += piece;
      if (text.length < nextCut || numCuts === 4) continue;
      nextCut = text.length + 150;
      numCuts += 1;
      await cut();
    }
    assert.ok(numCuts >= 2, `${numCuts} cuts`);
    assert.equal(text, undisturbed);
    assert.deepEqual(numbers, numbers.map((_, index) => index));
  });

  test(`${transport}: a turn whose beginning was cut off is asked for once`, async () => {
    const client = connect({ baseUrl: PENSTOCK_CUT_URL, transport });
    const { id } = await connect().conversations.create();
    const answer = client.respond({ ...SHORT, conversation: id });
    await until(() => answer.wasSent);
    await cut();
    assert.match(await read(answer), /Ada/);
    const tree = await connect().conversations.tree(id);
    assert.equal(tree.data.length, 1);
    assert.equal(tree.head, answer.responseId);
  });

  for (const store of [true, false]) {
    test(`${transport}: a tool is run once${store ? ", with cuts" : " without storage"}`, async () => {
      const client = connect({ transport, ...(store && { baseUrl: PENSTOCK_CUT_URL }) });
      const given = [];
      const calculator = {
        name: "calculator",
        parameters: { type: "object", properties: { expression: { type: "string" } } },
        run: async ({ expression }) => { given.push(expression); return 4711; },
      };
      const texts = [];
      const asked = { model: "demo", input: "what is 12 plus 30?", temperature: 0, store, tool_choice: "required" };
      for await (const answer of client.runTools({ ...asked, tools: [calculator] })) {
        if (store) await until(() => answer.lastSequenceNumber > 3).then(cut);
        texts.push(await read(answer));
      }
      assert.deepEqual(given, ["12 + 30"]);
      assert.equal(texts.length, 2);
      assert.match(texts[1], /4711/);
    });
  }
}

test("a line that is dead and does not say so is found out", { timeout: 60_000 }, async () => {
  const client = connect({ baseUrl: PENSTOCK_CUT_URL, quietMs: 500 });
  const answer = client.respond(STORY);
  let isSilenced = false;
  let text = "";
  for await (const piece of answer) {
    text += piece;
    if (isSilenced || text.length < 100) continue;
    isSilenced = true;
    await silence();
    await until(() => client.state !== "open");
    await cut();
  }
  assert.ok(isSilenced);
  assert.equal(text, undisturbed);
});

test("what the server refuses", async () => {
  const client = connect();
  const answer = client.respond({ ...SHORT, temperature: -1 });
  await assert.rejects(read(answer), (error) => error instanceof AnswerError && error.outcome.problem.param === "temperature");
  await assert.rejects(client.response("resp_none"), (error) => error instanceof PenstockError && error.status === 404);
  const large = client.respond({ ...SHORT, input: "word ".repeat(300_000) });
  await assert.rejects(read(large), (error) => error.outcome.problem.code === "request_too_large");
  assert.ok(await read(client.respond({ ...SHORT, input: `${SHORT.input} \ud83d` })));
  assert.equal(client.numFailures, 0);
  const lost = client.follow("resp_none");
  assert.equal((await lost.done).kind, "lost");
});

for (const transport of ["websocket", "sse"]) {
  test(`${transport}: an output is parsed`, async () => {
    const schema = {
      type: "object",
      properties: { name: { type: "string", maxLength: 12 }, days: { type: "integer", minimum: 1, maximum: 30 } },
      required: ["name", "days"],
      additionalProperties: false,
    };
    /** Has what the library uses of a schema of zod. */
    const Trip = {
      toJSONSchema: () => schema,
      parse: ({ name, days }) => {
        if (days > 30) throw new RangeError("too long");
        return { name: [name], days };
      },
    };
    const ask = { ...SHORT, max_output_tokens: 100 };
    const client = connect({ transport, baseUrl: PENSTOCK_CUT_URL });
    const answer = client.respond({ ...ask, schema });
    let text = "";
    for await (const piece of answer) {
      if (!text) await cut();
      text += piece;
    }
    const value = await answer.parsed();
    assert.deepEqual(value, JSON.parse(text));
    assert.deepEqual(Object.keys(value), ["name", "days"]);
    const trip = { name: [value.name], days: value.days };
    assert.deepEqual(await client.parse({ ...ask, schema: Trip }), trip);
    const followed = connect({ transport }).follow(answer.responseId);
    assert.deepEqual(await followed.parsed(Trip), trip);

    const picky = { ...Trip, parse: () => { throw new RangeError("no good"); } };
    await assert.rejects(client.parse({ ...ask, schema: picky }), RangeError);
    const short = client.parse({ ...ask, schema, max_output_tokens: 3 });
    await assert.rejects(short, (error) =>
      error instanceof AnswerError && error.message === "the answer was incomplete: max_output_tokens");
    const refused = client.parse({ ...ask, schema: { ...schema, not: {} } });
    await assert.rejects(refused, (error) => error.outcome.problem.code === "invalid_json_schema");
  });
}

test("a response that another client began is followed from its first word", async () => {
  const [first, second] = [connect(), connect()];
  const answer = first.respond(STORY);
  await until(() => answer.responseId);
  const followed = second.follow(answer.responseId);
  assert.equal(second.follow(answer.responseId), followed);
  assert.equal(await read(followed), await read(answer));
});

test("conversations", async () => {
  const client = connect();
  const { conversations } = client;
  const { id } = await conversations.create({ metadata: { title: "Names" } });
  const first = await client.respond({ ...SHORT, conversation: id }).done;
  const ask = { model: "demo", input: "What is my name?", temperature: 0, conversation: id };
  const second = client.respond(ask);
  assert.match(await read(second), /Ada/);
  await conversations.setHead(id, first.responseId, second.responseId);
  await assert.rejects(conversations.setHead(id, null, second.responseId), { code: "conversation_locked" });
  const third = await client.respond(ask).done;
  const tree = await conversations.tree(id, { items: true });
  assert.deepEqual(pathTo(tree, tree.head).map((turn) => turn.turn), [first.responseId, third.responseId]);
  assert.equal(leafOf(tree, first.responseId), third.responseId);
  assert.equal(tree.data[0].items[0].content[0].text, "My name is Ada.");
  assert.equal(tree.data[1].items, undefined, "what is beside the path comes without its items");
  await conversations.update(id, { title: "Ada" });
  assert.equal((await conversations.list()).data.find((one) => one.id === id).metadata.title, "Ada");
  await conversations.delete(id);
  await assert.rejects(conversations.get(id), { status: 404 });
});

test("a WebSocket that does not get through gives way to server-sent events", async () => {
  class Blocked extends EventTarget {
    readyState = 3;
    constructor() {
      super();
      setTimeout(() => this.dispatchEvent(new Event("close")));
    }
    close() {}
  }
  const client = new PenstockClient({ baseUrl: PENSTOCK_URL, WebSocket: Blocked });
  clients.push(client);
  assert.match(await read(client.respond(SHORT)), /Ada/);
  assert.equal(client.transport, "sse");
});

test("the wait between tries grows, is capped, and is never the same for all", () => {
  const waits = [0, 1, 2, 3, 10].map((attempt) => backoffDelayMs(attempt, () => 1));
  assert.deepEqual(waits, [400, 800, 1600, 3200, 15_000]);
  assert.equal(backoffDelayMs(10, () => 0), 7_500);
});

async function until(condition) {
  while (!condition()) await new Promise((resolve) => setTimeout(resolve, 2));
}
