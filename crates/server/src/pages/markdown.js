// Markdown as DOM nodes. markdown-it only parses: its tokens become elements and text nodes here, never a string of markup, so
// nothing in a text can be markup, script or a request.
import { codeBlock } from "./code.js";
import { element } from "./dom.js";
import MarkdownIt from "./markdown-it.js";
import { tex } from "./markdown-it-tex.js";
import { formula } from "./math.js";

// Emphasis and links of longer paragraphs are shown as they were written: it takes the square of their length to find them.
const LONGEST = 20_000;
const LINK = /^(https?:\/\/|mailto:)/i;

const parser = new MarkdownIt({ html: false, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
parser.validateLink = (target) => LINK.test(target.trim());
// Its own rendering is not used.
parser.use(tex, { delimiters: "all", render: () => "" });
parser.core.ruler.at("inline", ({ tokens, md, env, Token }) => {
  for (const token of tokens.filter(({ type }) => type === "inline")) {
    if (token.content.length <= LONGEST) md.inline.parse(token.content, md, env, token.children);
    else token.children.push(Object.assign(new Token("text", "", 0), { content: token.content }));
  }
});
// Models write displayed formulas within a line, too.
parser.inline.ruler.before("math_inline_bracket", "math_display", (state, silent) => {
  const open = state.src.slice(state.pos, state.pos + 2);
  const close = { "$$": "$$", "\\[": "\\]" }[open];
  const end = close ? state.src.indexOf(close, state.pos + 2) : -1;
  if (end <= state.pos + 2) return false;
  if (!silent) {
    const token = state.push("math_block", "math", 0);
    token.markup = open;
    token.content = state.src.slice(state.pos + 2, end);
  }
  state.pos = end + 2;
  return true;
});

// The nodes of tokens, which open and close elements.
function render(tokens) {
  const root = document.createDocumentFragment();
  const open = [root];
  for (const token of tokens) {
    if (token.nesting < 0) open.pop();
    else if (token.nesting > 0) open.push(start(token, open.at(-1)));
    else open.at(-1).append(...leaf(token));
  }
  return root;
}

function start(token, parent) {
  // Paragraphs of a tight list.
  if (token.hidden) return parent;
  const node = element(token.tag === "h5" || token.tag === "h6" ? "h4" : token.tag);
  if (token.tag === "a") link(node, token.attrGet("href"));
  if (token.tag === "ol") node.start = token.attrGet("start") ?? 1;
  const align = /text-align:(left|center|right)/.exec(token.attrGet("style") ?? "");
  if (align) node.style.textAlign = align[1];
  parent.append(token.tag === "table" ? element("div", { className: "table", tabIndex: 0 }, node) : node);
  return node;
}

function leaf(token) {
  switch (token.type) {
    case "inline":
      return [render(token.children)];
    case "code_inline":
      return [element("code", {}, token.content)];
    case "code_block":
    case "fence":
      return [codeBlock(token.content.replace(/\n$/, ""), token.info.trim().split(/\s/)[0])];
    case "math_inline":
    case "math_block":
      return [formula(token.content, token.type === "math_block", token.markup)];
    case "image":
      return [link(element("a", {}, token.content || token.attrGet("src")), token.attrGet("src"))];
    case "softbreak":
      return ["\n"];
    case "hardbreak":
      return [element("br")];
    case "hr":
      return [element("hr")];
    default:
      return [token.content];
  }
}

function link(node, target) {
  return Object.assign(node, { href: target, target: "_blank", rel: "noopener noreferrer" });
}

// A line of Markdown, without paragraphs or lists.
export const inline = (text) => render(parser.parseInline(text, {}));

// A text that grows, shown in `root`: only blocks that have changed are drawn again.
export class Markdown {
  #root;
  #sources = [];
  #references = "";

  constructor(root) {
    this.#root = root;
  }

  show(text) {
    const env = {};
    const blocks = split(parser.parse(text, env), text);
    // Links may refer to a later definition.
    const references = JSON.stringify(env.references ?? {});
    if (references !== this.#references) this.#sources = [];
    this.#references = references;
    blocks.forEach(({ tokens, source }, i) => {
      if (this.#sources[i] === source) return;
      const node = render(tokens).firstElementChild;
      if (i < this.#root.children.length) this.#root.children[i].replaceWith(node);
      else this.#root.append(node);
    });
    while (this.#root.children.length > blocks.length) this.#root.lastElementChild.remove();
    this.#sources = blocks.map(({ source }) => source);
  }
}

// The outermost blocks, each with its lines, which tell whether it has changed. Each becomes one element.
function split(tokens, text) {
  const lines = text.split(/\r\n?|\n/);
  const blocks = [];
  let begin = 0;
  tokens.forEach((token, i) => {
    if (token.level !== 0 || token.nesting > 0) return;
    const [from, to] = tokens[begin].map;
    blocks.push({ tokens: tokens.slice(begin, i + 1), source: `${token.type}\n${lines.slice(from, to).join("\n")}` });
    begin = i + 1;
  });
  return blocks;
}
