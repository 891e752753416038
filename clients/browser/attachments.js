/**
 * Images and files of messages: images made smaller, texts read, and both shown.
 *
 * What it does not know: servers, and what becomes of the message.
 */

import { button, make } from "./dom.js";

export const MAX_ATTACHMENTS = 4;
const MAX_FILE_BYTES = 200_000; // four fit a WebSocket message of 1 MiB
const MAX_SIDE = 1024; // pixels; models scale what is larger down themselves
const MAX_CHARACTERS = 220_000; // of a data URL: four fit a WebSocket message of 1 MiB
const QUALITIES = [0.85, 0.7, 0.5, 0.3];

/** @typedef {import("./conversations.js").Part} Part */

/** An image or a file of a message. */
export function attachmentElement(/** @type {Part} */ part) {
  return part.image_url ? largerPicture(part) : fileElement(part);
}

/** A file by its name; it opens to what is in it. */
function fileElement(/** @type {Part} */ { name = "", text = "" }) {
  const file = make("details", "file");
  const summary = make("summary");
  const pre = make("pre", "", text);
  pre.tabIndex = 0;
  pre.dir = "auto";
  summary.append(make("b", "", name), make("span", "", sizeText(text)));
  file.append(summary, pre);
  return file;
}

function sizeText(/** @type {string} */ text) {
  const lines = text.split("\n").length;
  return `${lines} ${lines === 1 ? "line" : "lines"}`;
}

/** An image of a message; it is shown as large as the page when it is clicked. */
function largerPicture(/** @type {Part} */ image) {
  const picture = pictureOf(image);
  const enlarge = /** @type {HTMLButtonElement} */ (make("button", "enlarge"));
  enlarge.type = "button";
  enlarge.title = "Enlarge";
  enlarge.append(picture);
  enlarge.addEventListener("click", () => showLarge(image));
  return enlarge;
}

function pictureOf(/** @type {Part} */ { image_url = "", name }) {
  const picture = /** @type {HTMLImageElement} */ (make("img", "picture"));
  picture.src = image_url;
  picture.alt = name || "Picture";
  return picture;
}

/** Over the page, until it is clicked or Escape is pressed. */
function showLarge(/** @type {Part} */ image) {
  const dialog = /** @type {HTMLDialogElement} */ (make("dialog", "large-picture"));
  const close = button({ label: "Close", picture: "close", run: () => dialog.close() });
  dialog.setAttribute("aria-label", image.name || "Picture");
  dialog.append(pictureOf(image), close);
  dialog.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

/** The files of a paste or a drop. */
export function filesOf(/** @type {DataTransfer | null} */ data) {
  return Array.from(data?.files ?? []);
}

export function isImage(/** @type {File} */ file) {
  return file.type.startsWith("image/");
}

/**
 * The text of a file as a part of a message; null if it is none, or why it cannot be one.
 * @returns {Promise<Part | string | null>}
 */
export async function fileFrom(/** @type {File} */ file) {
  if (file.size > MAX_FILE_BYTES) return `“${file.name}” is larger than ${MAX_FILE_BYTES / 1000} KB.`;
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (/[\0-\x08\x0e-\x1a]/.test(text)) return null;
    return { type: "input_text", name: file.name, text: text.replace(/\r\n?/g, "\n").replace(/\n$/, "") };
  } catch {
    return null;
  }
}

/**
 * The image in a file as a part of a message; null if this browser cannot open it.
 * @returns {Promise<Part | null>}
 */
export async function imageFrom(/** @type {File} */ file) {
  const url = await smaller(file).catch(() => "");
  return url ? { type: "input_image", image_url: url, name: file.name } : null;
}

/** A file of SVG, which the page may load as a data URL alone. */
async function drawing(/** @type {File} */ file) {
  const picture = new Image();
  picture.src = `data:image/svg+xml,${encodeURIComponent(await file.text())}`;
  await picture.decode();
  if (!picture.width) picture.width = picture.height = MAX_SIDE / 2; // it says none
  return picture;
}

/** An image file as a data URL that is small enough to be sent. */
async function smaller(/** @type {File} */ file) {
  const picture = file.type === "image/svg+xml" ? await drawing(file) : await createImageBitmap(file); // upright, as EXIF says
  for (let side = MAX_SIDE; side >= 64; side /= 2) {
    const scale = Math.min(1, side / Math.max(picture.width, picture.height));
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, Math.round(picture.width * scale));
    canvas.height = Math.max(1, Math.round(picture.height * scale));
    const context = canvas.getContext("2d");
    if (!context) break;
    context.fillStyle = "white"; // under what is transparent
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(picture, 0, 0, canvas.width, canvas.height);
    for (const quality of QUALITIES) {
      const url = canvas.toDataURL("image/jpeg", quality);
      if (url.length <= MAX_CHARACTERS) return url;
    }
  }
  return "";
}
