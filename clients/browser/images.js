/**
 * Images for the next message: chosen, dropped or pasted, made smaller, and shown until they are
 * sent.
 *
 * What it does not know: servers, and what becomes of the message.
 */

import { button, make } from "./dom.js";

const MAX_IMAGES = 4;
const MAX_SIDE = 1024; // pixels; models scale what is larger down themselves
const MAX_CHARACTERS = 220_000; // of a data URL: four fit a WebSocket message of 1 MiB
const QUALITIES = [0.85, 0.7, 0.5, 0.3];

/** @typedef {{ type: "input_image", image_url: string }} ImagePart */

/** The images that wait, in an element of their own. Dispatches `change`. */
export class ImageTray extends EventTarget {
  /** @type {ImagePart[]} */ #parts = [];
  #element;

  constructor(/** @type {HTMLElement} */ element) {
    super();
    this.#element = element;
  }

  get isEmpty() {
    return this.#parts.length === 0;
  }

  /** Takes the images for a message. */
  take() {
    const parts = this.#parts;
    this.put([]);
    return parts;
  }

  /** Shows these instead. */
  put(/** @type {ImagePart[]} */ parts) {
    this.#parts = parts;
    this.#element.replaceChildren(...parts.map((part) => this.#shown(part)));
    this.#element.hidden = this.isEmpty;
    this.dispatchEvent(new Event("change"));
  }

  /**
   * Adds the images among some files; what is wrong with those that cannot be sent.
   * @param {Iterable<File>} files
   */
  async add(files) {
    for (const file of files) {
      if (this.#parts.length >= MAX_IMAGES) return `A message has ${MAX_IMAGES} images at most.`;
      const url = await smaller(file).catch(() => "");
      if (!url) return `“${file.name}” is not an image that this browser can open.`;
      this.put([...this.#parts, { type: "input_image", image_url: url }]);
    }
    return "";
  }

  #shown(/** @type {ImagePart} */ part) {
    const item = make("span", "tray-image");
    const remove = button({
      label: "Remove image",
      picture: "close",
      run: () => this.put(this.#parts.filter((other) => other !== part)),
    });
    item.append(pictureOf(part.image_url), remove);
    return item;
  }
}

/** An image of a message, as an element. */
export function pictureOf(/** @type {string} */ url) {
  const picture = /** @type {HTMLImageElement} */ (make("img", "picture"));
  picture.src = url;
  picture.alt = "Image";
  return picture;
}

/** The files of a paste or a drop that are images. */
export function imagesIn(/** @type {DataTransfer | null} */ data) {
  return Array.from(data?.files ?? []).filter((file) => file.type.startsWith("image/"));
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
