/**
 * Which figures the dashboard shows, and how they come from the server's numbers.
 */

import { amount, bytes, count, duration, percent } from "./texts.js";

/** @typedef {import("./tile.js").Figure} Figure */
/** @typedef {import("./history.js").View} View */

const rate = (/** @type {string} */ name) => (/** @type {View} */ view) => view.perSecond(name);
const value = (/** @type {string} */ name) => (/** @type {View} */ view) => view.value(name);
const quantiles = (/** @type {string} */ name) => [0.5, 0.99].map((share) => ({
  name: `p${100 * share}`,
  read: (/** @type {View} */ view) => view.quantile(name, share),
}));
const average = (/** @type {View} */ view, /** @type {string} */ histogram) =>
  `mean ${duration(view.ratio(`${histogram}_sum`, `${histogram}_count`))} · total: ${count(view.value(`${histogram}_count`))}`;

/** What is looked at first. @returns {Figure[]} */
export const requestFigures = () => [
  {
    id: "tokens-out",
    title: "Tokens out / s",
    lines: [{ name: "", read: rate("generation_tokens_total") }],
    text: amount,
    least: 1,
    note: (view) => `total: ${count(view.value("generation_tokens_total"))}`,
  },
  {
    id: "running",
    title: "Running",
    lines: [{ name: "", read: value("num_requests_running") }],
    text: count,
    least: 1,
    note: (view) => `${amount(view.perSecond("engine_steps_total"))} steps/s`,
  },
  {
    id: "waiting",
    title: "Waiting",
    lines: [{ name: "", read: value("num_requests_waiting") }],
    text: count,
    least: 1,
    note: (view) => `${count(view.value("num_tokens_waiting"))} prompt tokens in the queue`,
  },
  {
    id: "ttft",
    title: "Time to first token",
    lines: quantiles("time_to_first_token_seconds"),
    text: duration,
    note: (view) => average(view, "time_to_first_token_seconds"),
  },
];

/** The rest. @returns {Figure[]} */
export const speedFigures = () => [
  {
    id: "itl",
    title: "Inter-token latency",
    lines: quantiles("inter_token_latency_seconds"),
    text: duration,
    note: (view) => average(view, "inter_token_latency_seconds"),
  },
  {
    id: "tokens-in",
    title: "Tokens in / s",
    lines: [
      { name: "", read: rate("prompt_tokens_total") },
      { name: "not cached", read: (view) => uncached((name) => view.perSecond(name)) },
    ],
    text: amount,
    least: 1,
    note: (view) => `total: ${count(view.value("prompt_tokens_total"))}`,
  },
  {
    id: "hits",
    title: "Prefix cache hits",
    lines: [{ name: "", read: (view) => view.ratio("prefix_cache_hits_total", "prefix_cache_queries_total") }],
    text: percent,
    least: 1,
    note: (view) => {
      const hits = view.value("prefix_cache_hits_total");
      const queries = view.value("prefix_cache_queries_total");
      const host = view.value("prefix_cache_host_hits_total");
      const total = percent(hits !== null && queries ? hits / queries : null);
      return `total: ${total} · ${percent(hits ? (host ?? 0) / hits : null)} of them from host${misses(view)}`;
    },
  },
  {
    id: "step",
    title: "Tokens per step",
    lines: [
      { name: "", read: perStep },
      { name: "decoded", read: (view) => view.ratio("engine_generation_tokens_total", "engine_steps_total") },
    ],
    text: amount,
    least: 1,
    note: (view) => `total: ${count(view.value("engine_steps_total"))} steps`,
  },
  {
    id: "drafts",
    title: "Drafts right",
    lines: [
      { name: "", read: (view) => view.ratio("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total") },
    ],
    text: percent,
    least: 1,
    isUsed: (view) => (view.value("spec_decode_num_draft_tokens_total") ?? 0) > 0,
    note: (view) => `${amount(view.ratio("spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total"))} a step · total: ${count(view.value("spec_decode_num_draft_tokens_total"))}, ${count(view.value("spec_decode_num_accepted_tokens_total"))} right`,
  },
  {
    id: "swaps",
    title: "KV swapped / s",
    lines: [
      { name: "out", read: rate('swapped_bytes_total{direction="out"}') },
      { name: "in", read: rate('swapped_bytes_total{direction="in"}') },
    ],
    text: bytes,
    least: 1,
    note: (view) => `total: ${bytes(view.value('swapped_bytes_total{direction="out"}'))} out, ${bytes(view.value('swapped_bytes_total{direction="in"}'))} in`,
  },
  {
    id: "evictions",
    title: "Blocks evicted / s",
    lines: [
      { name: "device", read: rate('kv_blocks_evicted_total{tier="device"}') },
      { name: "host", read: rate('kv_blocks_evicted_total{tier="host"}') },
    ],
    text: amount,
    least: 1,
    note: (view) => `total: ${count(view.value('kv_blocks_evicted_total{tier="device"}'))} device, ${count(view.value('kv_blocks_evicted_total{tier="host"}'))} host`,
  },
  {
    id: "swapped",
    title: "Swapped out",
    lines: [{ name: "", read: value("num_requests_swapped") }],
    text: count,
    least: 1,
    note: (view) => `KV in host memory · ${count(view.value("swap_fallbacks_total"))} found no room`,
  },
  {
    id: "preemptions",
    title: "Preemptions / s",
    lines: [{ name: "", read: rate("num_preemptions_total") }],
    text: amount,
    least: 1,
    note: (view) => [
      `total: ${count(view.value("num_preemptions_total"))}`,
      `${count(view.value('preemptions_by_kind_total{kind="swap"}'))} swapped`,
      `${count(view.value('preemptions_by_kind_total{kind="recompute"}'))} recomputed`,
    ].join(" · "),
  },
];

function perStep(/** @type {View} */ view) {
  if ((view.growth("engine_steps_total") ?? 0) < 10) return null; // prompts are counted before their steps
  const decoded = view.ratio("engine_generation_tokens_total", "engine_steps_total");
  const prefilled = uncached((name) => view.ratio(name, "engine_steps_total"));
  return decoded === null || prefilled === null ? null : decoded + prefilled;
}

/** The most frequent reasons for which prompts that were there before were not found again. */
function misses(/** @type {View} */ view) {
  const reasons = view
    .labelled("prefix_cache_comparisons_total", "reason")
    .map(([reason, name]) => ({ reason: reason.replaceAll("_", " "), times: view.value(name) ?? 0 }))
    .filter(({ reason, times }) => reason !== "hit" && times > 0)
    .sort((one, other) => other.times - one.times)
    .slice(0, 3);
  return reasons.length === 0 ? "" : ` · missed: ${reasons.map(({ reason, times }) => `${reason} ${count(times)}`).join(", ")}`;
}

/** Prompt tokens that had to be computed. */
function uncached(/** @type {(name: string) => number | null} */ measure) {
  const all = measure("engine_prompt_tokens_total");
  const hits = measure("prefix_cache_hits_total");
  return all === null || hits === null ? null : Math.max(0, all - hits);
}
