/**
 * The page's own tools: a calculator, a clock and a note keeper. They run in this browser, each call
 * once: its output is kept, also over a reload and for the other tabs, until there are 50 newer ones.
 */

/** @typedef {import("./answer.js").Block} Block */

const OUTPUTS = "penstock.outputs";
const NOTES = "penstock.notes";
const MAX_KEPT = 50;
const MAX_CHARACTERS = 200;

const text = (/** @type {string} */ description) => ({ type: "string", description });
const define = (/** @type {string} */ name, /** @type {string} */ description, /** @type {Record<string, object>} */ properties) =>
  ({ type: "function", name, description, parameters: { type: "object", properties } });

export const TOOLS = [
  define("calculator", "Computes an arithmetic expression.", { expression: text("with + - * / and brackets") }),
  define("clock", "Tells the time on this computer.", { city: text("is not looked at") }),
  define("note", "Keeps a note in this browser.", { text: text("of the note") }),
];

/** @type {Record<string, (given: any) => string>} */
const RUN = {
  calculator: ({ expression }) => String(computed(String(expression))),
  clock: () => new Date().toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" }),
  note: (given) => {
    const notes = read(NOTES, /** @type {string[]} */ ([]));
    write(NOTES, [...notes, String(given.text)]);
    return `saved as note ${notes.length + 1}`;
  },
};

/**
 * The outputs of calls, as input items. Tabs that show the same answer share them.
 * @returns {Promise<{ type: string, call_id: string, output: string }[]>}
 */
export async function outputsOf(/** @type {Block[]} */ calls) {
  const run = async () => calls.map((call) => ({
    type: "function_call_output", call_id: call.callId, output: outputOf(call),
  }));
  return navigator.locks ? navigator.locks.request("penstock.tools", run) : run();
}

function outputOf(/** @type {Block} */ call) {
  const kept = read(OUTPUTS, /** @type {[string, string][]} */ ([]));
  const known = kept.find(([callId]) => callId === call.callId);
  if (known) return known[1];
  const output = result(call);
  write(OUTPUTS, [...kept, [call.callId, output]].slice(-MAX_KEPT));
  return output;
}

function result(/** @type {Block} */ call) {
  try {
    const run = Object.hasOwn(RUN, call.name) ? RUN[call.name] : null;
    if (!run) return `error: there is no tool ${call.name}`;
    return run(JSON.parse(call.text || "{}") ?? {});
  } catch (error) {
    return `error: ${error instanceof Error ? error.message : error}`;
  }
}

/**
 * The value of an arithmetic expression. Throws Error.
 *
 *     sum: product (("+" | "-") product)*    product: factor (("*" | "/") factor)*
 *     factor: number | "(" sum ")" | ("+" | "-") factor
 */
export function computed(/** @type {string} */ expression) {
  if (expression.length > MAX_CHARACTERS) throw new Error("the expression is too long");
  const tokens = expression.match(/\d+(?:\.\d+)?|[-+*/()]|\S/g) ?? [];
  /** @returns {number} */
  const factor = () => {
    const token = tokens.shift();
    if (token === "-") return -factor();
    if (token === "+") return factor();
    if (token === "(") {
      const value = sum();
      if (tokens.shift() !== ")") throw new Error("a bracket is not closed");
      return value;
    }
    if (!token || !/^\d/.test(token)) throw new Error(`a number was expected, not ${token ?? "the end"}`);
    return Number(token);
  };
  const product = () => {
    let value = factor();
    while (tokens[0] === "*" || tokens[0] === "/") value = tokens.shift() === "*" ? value * factor() : value / factor();
    return value;
  };
  /** @returns {number} */
  function sum() {
    let value = product();
    while (tokens[0] === "+" || tokens[0] === "-") value = tokens.shift() === "+" ? value + product() : value - product();
    return value;
  }
  const value = sum();
  if (tokens.length > 0) throw new Error(`the end was expected, not ${tokens[0]}`);
  return Number.isInteger(value) ? value : Number(value.toPrecision(12));
}

/** @template T @returns {T} */
function read(/** @type {string} */ name, /** @type {T} */ otherwise) {
  try {
    const kept = JSON.parse(localStorage.getItem(name) ?? "null");
    return Array.isArray(kept) ? /** @type {any} */ (kept) : otherwise;
  } catch {
    return otherwise;
  }
}

function write(/** @type {string} */ name, /** @type {unknown} */ value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {} // a browser that keeps nothing: good until the page is left
}
