/**
 * Images of messages: made smaller, and shown.
 *
 * What it does not know: servers, and what becomes of the message.
 */

import { button, make } from "./dom.js";

export const MAX_IMAGES = 4;
const MAX_SIDE = 1024; // pixels; models scale what is larger down themselves
const MAX_CHARACTERS = 220_000; // of a data URL: four fit a WebSocket message of 1 MiB
const QUALITIES = [0.85, 0.7, 0.5, 0.3];

/** @typedef {import("./conversations.js").Part} Part */

/** The images of a message that is being written, in an element of their own. */
export class ImageTray {
  /** @type {readonly Part[]} */ #images = [];
  #element;
  #onChange;

  /**
   * @param {HTMLElement} element
   * @param {(images: Part[]) => void} onChange  with those that are left after one was removed
   */
  constructor(element, onChange) {
    this.#element = element;
    this.#onChange = onChange;
  }

  /** Shows these. */
  show(/** @type {readonly Part[]} */ images) {
    if (images === this.#images) return;
    this.#images = images;
    this.#element.replaceChildren(...images.map((image) => this.#shown(image)));
    this.#element.hidden = images.length === 0;
  }

  #shown(/** @type {Part} */ image) {
    const item = make("span", "tray-image");
    const remove = button({
      label: `Remove ${image.name || "image"}`,
      picture: "close",
      run: () => this.#onChange(this.#images.filter((other) => other !== image)),
    });
    item.append(largerPicture(image), remove);
    return item;
  }
}

/** An image of a message; it is shown as large as the page when it is clicked. */
export function largerPicture(/** @type {Part} */ image) {
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
 * The image in a file as a part of a message; null if this browser cannot open it.
 * @returns {Promise<Part | null>}
 */
export async function imageFrom(/** @type {File} */ file) {
  const url = await smaller(file).catch(() => "");
  return url ? { type: "input_image", image_url: url, name: file.name } : null;
}

/** An image file as a data URL that is small enough to be sent. */
async function smaller(/** @type {File} */ file) {
  const picture = await createImageBitmap(file); // upright, as EXIF says
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
