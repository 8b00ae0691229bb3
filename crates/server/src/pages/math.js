// Formulas, typeset by KaTeX.
import { element } from "./dom.js";

const CLOSE = { "$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]" };

// Loaded with the first formula.
let library;
let loading;

async function load() {
  loading ??= import("./katex.js");
  await loading;
  // It is made for script elements, too: it leaves its name in the window.
  library ??= self.katex;
}

// A formula, at once or as soon as the library is there; until then, or if it is none, its source.
export function formula(source, display, open) {
  const node = element(display ? "div" : "span", { className: display ? "formula" : "" }, open, source, CLOSE[open]);
  if (library) typeset(node, source, display);
  else load().then(() => typeset(node, source, display));
  return node;
}

function typeset(node, source, display) {
  const typed = element("span");
  try {
    library.render(source, typed, { displayMode: display, throwOnError: true, strict: "ignore", maxSize: 20, maxExpand: 500 });
  } catch {
    return;
  }
  if (display) node.tabIndex = 0;
  node.replaceChildren(typed);
}
