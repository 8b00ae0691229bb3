// Markdown as DOM nodes. What a model says becomes text nodes alone, so nothing in it can be markup, script or a request.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}>\s?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;
// Of a line without spaces at its ends.
const TABLE_RULE = /^(?:\|\s*)?:?-+:?\s*(?:\|\s*:?-+:?\s*)+\|?$|^\|\s*:?-+:?\s*\|$/;
// Deeper nesting is shown as it was written.
const DEEPEST = 8;
const LINK = /^(https?:\/\/|mailto:)/i;

// Every alternative is bounded, so that no text takes more than linear time.
const INLINE = new RegExp(
  [
    /(?<ticks>`{1,3})(?<code>[^`](?:.{0,2000}?[^`])?)\k<ticks>(?!`)/s,
    /!?\[(?<label>[^\[\]\n]{0,500})\]\((?<target>[^\s()]{1,2000})(?: "[^"\n]{0,200}")?\)/,
    /(?<bare>https?:\/\/[^\s<>()\[\]"'`*]{1,2000}[^\s<>()\[\]"'`*.,:;!?])/,
    /(?<strong>\*\*|__)(?=\S)(?<bold>.{1,2000}?\S|\S)\k<strong>/s,
    /(?<![\w*])(?<em>[*_])(?=[^\s*_])(?<italic>(?:.{0,1000}?[^\s*_])?)\k<em>(?![\w*])/s,
    /~~(?=\S)(?<struck>.{0,1000}?\S)~~/s,
    /\\(?<escaped>[\\`*_{}\[\]()#+\-.!|~>])/,
  ]
    .map((part) => part.source)
    .join("|"),
  "gs",
);

export function element(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

function inline(text, depth = 0) {
  const nodes = [];
  let end = 0;
  if (depth <= DEEPEST) {
    for (const match of text.matchAll(INLINE)) {
      if (match.index > end) nodes.push(text.slice(end, match.index));
      end = match.index + match[0].length;
      nodes.push(span(match, depth + 1));
    }
  }
  nodes.push(text.slice(end));
  return nodes;
}

function span(match, depth) {
  const { code, label, target, bare, bold, italic, struck, escaped } = match.groups;
  if (code !== undefined) return element("code", {}, code);
  if (target !== undefined) return link(target, inline(label || target, depth), match[0]);
  if (bare !== undefined) return link(bare, [bare], bare);
  if (bold !== undefined) return element("strong", {}, ...inline(bold, depth));
  if (italic !== undefined) return element("em", {}, ...inline(italic, depth));
  if (struck !== undefined) return element("s", {}, ...inline(struck, depth));
  return escaped;
}

// Other schemes, `javascript:` among them, stay text.
function link(target, children, source) {
  if (!LINK.test(target)) return source;
  return element("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

// Cuts a text into blocks: `{ kind, source, ... }`, whose sources tell whether one has changed.
function split(text) {
  const lines = text.split("\n");
  const blocks = [];
  const starts = (i) =>
    FENCE.test(lines[i]) || HEADING.test(lines[i]) || RULE.test(lines[i]) || QUOTE.test(lines[i]) || ITEM.test(lines[i]);
  let i = 0;
  const take = (kind, until, more = {}) => {
    const begin = i;
    i = until;
    blocks.push({ kind, lines: lines.slice(begin, until), source: kind + lines.slice(begin, until).join("\n"), ...more });
  };
  while (i < lines.length) {
    const line = lines[i];
    let end = i + 1;
    if (line.trim() === "") {
      i += 1;
    } else if (FENCE.test(line)) {
      const [, fence, language] = line.match(FENCE);
      const closes = (l) => l.trim().startsWith(fence) && /^[`~]+$/.test(l.trim());
      while (end < lines.length && !closes(lines[end])) end += 1;
      take("code", Math.min(end + 1, lines.length), { language, body: lines.slice(i + 1, end).join("\n") });
    } else if (HEADING.test(line)) {
      take("heading", end);
    } else if (RULE.test(line)) {
      take("rule", end);
    } else if (QUOTE.test(line)) {
      while (end < lines.length && QUOTE.test(lines[end])) end += 1;
      take("quote", end);
    } else if (ITEM.test(line)) {
      const goesOn = (l) => ITEM.test(l) || /^\s{2,}\S/.test(l);
      while (end < lines.length) {
        if (lines[end].trim() === "" && !(end + 1 < lines.length && goesOn(lines[end + 1]))) break;
        if (lines[end].trim() !== "" && !goesOn(lines[end]) && (lines[end - 1].trim() === "" || starts(end))) break;
        end += 1;
      }
      take("list", end);
    } else if (line.includes("|") && TABLE_RULE.test((lines[end] ?? "").trim())) {
      end += 1;
      while (end < lines.length && lines[end].includes("|")) end += 1;
      take("table", end);
    } else {
      while (end < lines.length && lines[end].trim() !== "" && !starts(end)) end += 1;
      take("paragraph", end);
    }
  }
  return blocks;
}

function render(block, depth) {
  switch (block.kind) {
    case "code":
      return codeBlock(block);
    case "heading": {
      const [, marks, text] = block.lines[0].match(HEADING);
      return element(`h${Math.min(marks.length, 4)}`, {}, ...inline(title(text)));
    }
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", {}, ...nodes(block.lines.map((line) => line.replace(QUOTE, "")).join("\n"), depth + 1));
    case "list":
      return list(block.lines, depth);
    case "table":
      return table(block.lines);
    default:
      return element("p", {}, ...inline(block.lines.join("\n")));
  }
}

// A heading's text without the marks that may close it. A regular expression would look for them at every space.
function title(text) {
  const trimmed = text.trimEnd();
  let end = trimmed.length;
  while (trimmed[end - 1] === "#") end -= 1;
  return end === 0 || /\s/.test(trimmed[end - 1]) ? trimmed.slice(0, end).trimEnd() : trimmed;
}

function nodes(text, depth) {
  return depth > DEEPEST ? [text] : split(text).map((block) => render(block, depth));
}

function list(lines, depth) {
  const [, indent, bullet] = lines[0].match(ITEM);
  const items = [];
  for (const line of lines) {
    const match = line.match(ITEM);
    if (match && match[1].length <= indent.length) {
      items.push({ width: match[0].length, lines: [line.slice(match[0].length)] });
    } else {
      const { width, lines: own } = items.at(-1);
      own.push(line.replace(new RegExp(`^\\s{0,${Math.min(width, 99)}}`), ""));
    }
  }
  const ordered = /\d/.test(bullet);
  const node = element(ordered ? "ol" : "ul");
  if (ordered) node.start = parseInt(bullet, 10);
  for (const { lines: own } of items) {
    const children = nodes(own.join("\n"), depth + 1);
    // A line alone needs no paragraph.
    const flat = children.flatMap((child, i) => (i === 0 && child.tagName === "P" ? [...child.childNodes] : [child]));
    node.append(element("li", {}, ...flat));
  }
  return node;
}

function table(lines) {
  const cells = (line) =>
    line
      .trim()
      .replace(/^\||\|$/g, "")
      .split(/(?<!\\)\|/)
      .map((cell) => cell.trim().replaceAll("\\|", "|"));
  const row = (line, name) => element("tr", {}, ...cells(line).map((cell) => element(name, {}, ...inline(cell))));
  const head = element("thead", {}, row(lines[0], "th"));
  const body = element("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  return element("div", { className: "table" }, element("table", {}, head, body));
}

function codeBlock({ language, body }) {
  const header = element("header", {}, element("span", {}, language || "text"));
  // Browsers give the clipboard to pages of this machine or behind TLS alone.
  if (navigator.clipboard) header.append(copyButton(() => body));
  return element("div", { className: "code" }, header, element("pre", { tabIndex: 0 }, element("code", {}, body)));
}

export function copyButton(text) {
  const button = element("button", { type: "button", className: "quiet" }, "Copy");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text());
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

// A text that grows, shown in `root`: only blocks that have changed are drawn again.
export class Markdown {
  #root;
  #sources = [];

  constructor(root) {
    this.#root = root;
  }

  show(text) {
    const blocks = split(text);
    blocks.forEach((block, i) => {
      if (this.#sources[i] === block.source) return;
      const node = render(block, 0);
      if (i < this.#root.children.length) this.#root.children[i].replaceWith(node);
      else this.#root.append(node);
    });
    while (this.#root.children.length > blocks.length) this.#root.lastElementChild.remove();
    this.#sources = blocks.map((block) => block.source);
  }
}
