// Code with colours.
import { copyButton, element } from "./dom.js";

// Colours of more would take too long while it grows.
const LONGEST = 50_000;

// Loaded with the first code.
let library;
let loading;

async function load() {
  loading ??= import("./highlight.js");
  library ??= (await loading).default;
}

// Code in a box that names its language and has a button to copy it.
export function codeBlock(text, language) {
  const header = element("header", {}, element("span", {}, language || "text"), copyButton(() => text));
  const pre = element("pre", { tabIndex: 0 }, code(text, language));
  return element("div", { className: "code" }, header, pre);
}

// Text in the colours of its language, at once or as soon as they are there.
export function code(text, language) {
  const node = element("code", {}, text);
  if (!language || text.length > LONGEST) return node;
  if (library) paint(node, text, language);
  else load().then(() => paint(node, text, language));
  return node;
}

function paint(node, text, language) {
  if (!library.getLanguage(language)) return;
  const { _emitter: emitter } = library.highlight(text, { language, ignoreIllegals: true });
  node.replaceChildren(...emitter.root.children.map(span));
}

// The library's tree of scopes as nodes.
function span(part) {
  if (typeof part === "string") return part;
  const kind = part.scope?.startsWith("language:") ? "" : `hl-${(part.scope ?? "").split(".")[0]}`;
  return element("span", { className: kind }, ...part.children.map(span));
}
