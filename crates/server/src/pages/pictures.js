// Images of a question: chosen, pasted or dropped, scaled down, and shown until they are sent.
import { $, button, element } from "./dom.js";

// Models scale larger ones down, too.
const MAX_SIDE = 1568;
const MAX_BYTES = 1 << 20;
const MOST = 8;
// Files that are sent as they are, if they are small.
const PLAIN = ["image/png", "image/jpeg", "image/webp"];

export class Pictures {
  // The images as data URLs.
  urls = [];
  #allowed = false;

  // `changed()` hears of each change.
  constructor(changed) {
    this.changed = changed;
    $("attach").addEventListener("click", () => $("files").click());
    $("files").addEventListener("change", () => {
      this.add($("files").files);
      // The same file may be chosen again.
      $("files").value = "";
    });
    document.addEventListener("paste", (event) => this.#take(event, event.clipboardData));
    const main = document.querySelector("main");
    main.addEventListener("dragover", (event) => this.#allowed && event.preventDefault());
    main.addEventListener("drop", (event) => this.#take(event, event.dataTransfer));
  }

  // Whether the model takes images.
  allow(is) {
    this.#allowed = is;
    $("attach").hidden = !is;
  }

  clear() {
    this.urls = [];
    this.#draw();
  }

  #take(event, data) {
    const files = [...(data?.files ?? [])].filter(({ type }) => type.startsWith("image/"));
    if (!this.#allowed || files.length === 0) return;
    event.preventDefault();
    this.add(files);
  }

  async add(files) {
    for (const file of files) {
      if (this.urls.length >= MOST) {
        $("status").textContent = `A message can have ${MOST} images.`;
        return;
      }
      try {
        this.urls.push(await scaled(file));
      } catch {
        $("status").textContent = `${file.name || "This"} is no image that this browser can read.`;
      }
      this.#draw();
    }
    $("message").focus();
  }

  #draw() {
    const item = (url, i) => {
      const remove = () => {
        this.urls.splice(i, 1);
        this.#draw();
        $("message").focus();
      };
      return element("li", {}, picture(url, i), button("Remove", remove, { ariaLabel: `Remove image ${i + 1}` }));
    };
    $("pictures").replaceChildren(...this.urls.map(item));
    $("pictures").hidden = this.urls.length === 0;
    this.changed();
  }
}

// A thumbnail.
export const picture = (url, i) => element("img", { src: url, alt: `Image ${i + 1}`, className: "picture" });

// A file as data URL, scaled down if it is large.
async function scaled(file) {
  const image = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(image.width, image.height));
  if (scale === 1 && file.size <= MAX_BYTES && PLAIN.includes(file.type)) return dataUrl(file);
  const width = Math.max(1, Math.round(image.width * scale));
  const height = Math.max(1, Math.round(image.height * scale));
  const canvas = element("canvas", { width, height });
  const context = canvas.getContext("2d");
  // JPEG has no transparency; servers lay it over white, too.
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, width, height);
  return canvas.toDataURL("image/jpeg", 0.92);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
