/**
 * The dashboard: shows the server's stats in tiles, pictures and a table.
 */

import { byId } from "../dom.js";
import { PenstockError } from "../http.js";
import { KeyDialog, storedKey } from "../key-dialog.js";
import { BlocksPicture } from "./blocks.js";
import { faultsOf, showFaults } from "./errors.js";
import { Feed } from "./feed.js";
import { requestFigures, speedFigures } from "./figures.js";
import { History, SPAN_S } from "./history.js";
import { RunningTable } from "./running.js";
import { TenantTable, tenantsOf } from "./tenants.js";
import { UsageTable } from "./usage.js";
import { bytes, count } from "./texts.js";
import { Tile } from "./tile.js";

/** @typedef {import("./history.js").View} View */

const page = {
  connection: byId("connection"),
  connectionText: byId("connection-text"),
  model: byId("model"),
  engine: byId("engine"),
  banner: byId("banner"),
  bannerText: byId("banner-text"),
  bannerAction: byId("banner-action"),
  window: /** @type {HTMLSelectElement} */ (byId("window")),
  span: /** @type {HTMLSelectElement} */ (byId("span")),
  main: byId("main"),
};

// The page lies one folder below the server's address.
const feed = new Feed({ baseUrl: new URL("../", document.baseURI).href, apiKey: storedKey() });
const keyDialog = new KeyDialog((key) => feed.setApiKey(key));
const history = new History();
/** The engine; null: there is none. @type {import("./feed.js").Engine | null | undefined} */ let engine;
/** @type {Tile[]} */ const tiles = [];
const pictures = {
  device: new BlocksPicture(byId("device-blocks"), "KV on the device"),
  host: new BlocksPicture(byId("host-blocks"), "KV in host memory"),
};
const tenants = new TenantTable({ body: byId("tenants"), more: byId("more-tenants") });
const usage = new UsageTable({ body: byId("usage"), note: byId("usage-note"), http: feed.http });
const running = new RunningTable({ body: byId("running"), note: byId("running-note"), http: feed.http });
let isDrawPending = false;
let hasHistory = false;

const windowS = () => Number(page.window.value);

// ---- numbers -------------------------------------------------------------------------------

function onMessage(/** @type {import("./feed.js").Message} */ message) {
  if ("engine" in message) {
    engine = message.engine;
    showState();
  }
  if (history.add(message) && history.newest) {
    const view = history.view(windowS());
    for (const tile of tiles) if (view) tile.keep(view, history.newest.time);
  }
  drawSoon();
}

/** At most once per frame, and not while the page is hidden. */
function drawSoon() {
  if (isDrawPending) return;
  isDrawPending = true;
  requestAnimationFrame(() => {
    isDrawPending = false;
    const view = history.view(windowS());
    if (view && history.newest) draw(view, history.newest.time);
  });
}

function draw(/** @type {View} */ view, /** @type {number} */ now) {
  for (const tile of tiles) tile.show(view, now);
  const bytesPerBlock = engine?.bytes_per_block ?? 0;
  const numSlots = view.value('kv_slots{state="allocated"}');
  const emptyShare = numSlots ? (view.value('kv_slots{state="empty"}') ?? 0) / numSlots : 0;
  for (const tier of /** @type {const} */ (["device", "host"])) {
    const state = (/** @type {string} */ name) => view.value(`kv_blocks{state="${name}",tier="${tier}"}`) ?? 0;
    pictures[tier].show({
      used: state("used"),
      cached: state("cached"),
      free: state("free"),
      emptyShare: tier === "device" ? emptyShare : null,
      bytesPerBlock,
    });
  }
  tenants.show(tenantsOf(view), (view.value("generation_tokens_total") ?? 0) > 0);
  showFaults(byId("errors"), byId("errors-note"), faultsOf(view));
}

/** What the server has kept of the last hour; charts begin with it. */
async function loadHistory() {
  if (hasHistory) return; // of another connection: this page has seen the rest itself
  try {
    const kept = await feed.http.request("GET", "v1/stats/history");
    history.beginWith(kept);
    hasHistory = true;
    recompute();
  } catch (error) {
    if (!(error instanceof PenstockError)) throw error; // without it, charts begin now
  }
}

/** The charts then show averages over another time, for the past too. */
function recompute() {
  for (const tile of tiles) tile.forget();
  const now = history.newest?.time ?? 0;
  for (const frame of [...history.old, ...history.frames]) {
    const view = history.view(windowS(), frame);
    if (view && frame.time >= now - SPAN_S) for (const tile of tiles) tile.keep(view, frame.time);
  }
  drawSoon();
}

// ---- connection ----------------------------------------------------------------------------

function showState() {
  const isOut = feed.state === "connecting" && feed.numFailures > 0;
  const shown = isOut ? "waiting" : feed.state === "open" && engine === null ? "no-engine" : feed.state;
  const labels = { connecting: "Connecting…", open: "Live", waiting: "Reconnecting…", unauthorized: "Needs a key", "no-engine": "No engine" };
  page.connection.dataset.state = shown;
  page.connectionText.textContent = labels[shown];
  page.main.classList.toggle("is-stale", shown !== "open");
  if (engine) {
    page.model.textContent = engine.model;
    const weights = engine.quantization === "none" ? engine.dtype : `${engine.dtype}, ${engine.quantization}`;
    page.engine.textContent = [
      ...(engine.num_engines ? [`${count(engine.num_engines)} engines, each:`] : []),
      `${engine.device}, ${weights}, weights of ${bytes(engine.weight_bytes)}`,
      `at most ${count(engine.max_num_seqs)} sequences`,
      `context of ${count(engine.max_model_len)} tokens`,
      `blocks of ${engine.block_size} tokens, ${bytes(engine.bytes_per_block)}`,
    ].join(" · ");
  }
  showBanner(shown);
}

function showBanner(/** @type {string} */ shown) {
  /** @type {Record<string, string>} */ const texts = {
    waiting: "The server does not answer. What you see is from before; trying again…",
    unauthorized: "This server asks for an API key.",
    "no-engine": "The gateway answers, but there is no engine. It is being started again.",
  };
  const text = texts[shown] ?? "";
  page.banner.hidden = text === "";
  if (page.bannerText.textContent !== text) page.bannerText.textContent = text;
  page.bannerAction.hidden = shown === "no-engine";
  page.bannerAction.textContent = shown === "unauthorized" ? "Enter key" : "Try now";
}

function onStateChange() {
  if (feed.state === "open") {
    keyDialog.close();
    void running.watch();
    void usage.watch();
    void loadHistory();
  } else if (feed.state === "unauthorized") keyDialog.ask();
  else if (feed.state === "connecting") history.begin();
  showState();
}

// ---- page ----------------------------------------------------------------------------------

/** The theme chosen on the chat page. */
function applyTheme() {
  try {
    document.documentElement.dataset.theme = JSON.parse(localStorage.getItem("penstock.settings") ?? "{}").theme ?? "auto";
  } catch {
    // not ours: the system's
  }
}

function addTiles() {
  const sections = { requests: requestFigures(), speed: speedFigures() };
  for (const [id, figures] of Object.entries(sections)) {
    for (const figure of figures) {
      const tile = new Tile(figure);
      tiles.push(tile);
      byId(id).append(tile.node);
    }
  }
}

/** Pointing at one chart shows the numbers of that moment on all of them. */
function listenForPointing() {
  const point = (/** @type {number | null} */ share) => {
    for (const tile of tiles) tile.pointAt(share);
  };
  page.main.addEventListener("pointermove", (event) => {
    const chart = /** @type {Element} */ (event.target).closest(".sparkline");
    const box = chart?.getBoundingClientRect();
    point(box ? Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) : null);
  });
  page.main.addEventListener("pointerleave", () => point(null));
}

applyTheme();
addTiles();
listenForPointing();
page.window.addEventListener("change", recompute);
page.span.addEventListener("change", () => {
  for (const tile of tiles) tile.maxSpanS = Number(page.span.value);
  drawSoon();
});
page.bannerAction.addEventListener("click", () => {
  if (feed.state === "unauthorized") keyDialog.ask();
  else feed.connect();
});
window.addEventListener("online", () => feed.connect());
feed.addEventListener("message", (event) => onMessage(/** @type {CustomEvent} */ (event).detail));
feed.addEventListener("state", onStateChange);
feed.connect();
showState();
