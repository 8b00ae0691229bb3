// The API reference, rendered from openapi.json. Its text only becomes text nodes.
import { element } from "./markdown.js";

const METHODS = ["get", "post", "put", "patch", "delete"];
const $ = (id) => document.getElementById(id);
let schemas = {};

const refName = (ref) => ref.split("/").at(-1);
const resolve = (schema) => (schema?.$ref ? schemas[refName(schema.$ref)] : schema);
const word = (value) => (typeof value === "string" ? value : JSON.stringify(value));

// Descriptions use only paragraphs and `code` of Markdown.
function prose(text = "") {
  return text
    .split(/\n\n+/)
    .filter(Boolean)
    .map((paragraph) => element("p", {}, ...marked(paragraph)));
}

function marked(text) {
  return text.split(/`([^`]+)`/).map((part, i) => (i % 2 === 1 ? element("code", {}, part) : part));
}

// A schema's type as text; other schemas are links.
function type(schema = {}) {
  if (schema.$ref) return [element("a", { href: `#schema-${refName(schema.$ref)}` }, refName(schema.$ref))];
  if (schema.enum) return [schema.enum.filter((value) => value !== null).map(word).join(" | ")];
  const several = schema.oneOf ?? schema.anyOf ?? schema.allOf;
  if (several) {
    const shown = several.filter((one) => one.type !== "null");
    return shown.flatMap((one, i) => (i > 0 ? [schema.allOf ? " and " : " or ", ...type(one)] : type(one)));
  }
  const kinds = [schema.type ?? []].flat().filter((kind) => kind !== "null");
  if (kinds.includes("array")) return ["array of ", ...type(schema.items)];
  if (kinds.includes("object") && typeof schema.additionalProperties === "object") {
    return ["map of ", ...type(schema.additionalProperties)];
  }
  return [kinds.join(" or ") || "any"];
}

function limits(schema = {}) {
  const known = [
    ["minimum", "at least"],
    ["exclusiveMinimum", "above"],
    ["maximum", "at most"],
    ["exclusiveMaximum", "below"],
    ["minItems", "items, at least:"],
    ["maxItems", "items, at most:"],
    ["minLength", "characters, at least:"],
    ["maxLength", "characters, at most:"],
    ["default", "default"],
  ];
  // Unsigned integers: a minimum of 0 is not shown.
  const said = known.filter(([name]) => schema[name] !== undefined && !(name === "minimum" && schema[name] === 0 && schema.format === undefined && schema.type !== "number"));
  return said.map(([name, words]) => `${words} ${word(schema[name])}`).join(", ");
}

function fields(schema) {
  const required = schema.required ?? [];
  const names = Object.keys(schema.properties ?? {});
  names.sort((a, b) => required.includes(b) - required.includes(a));
  if (names.length === 0) return element("p", {}, ...type(schema));
  const rows = names.map((name) => row(name, schema.properties[name], required.includes(name)));
  return table(["Field", "Type", "Meaning"], rows);
}

function row(name, schema, must, description = schema.description) {
  const first = element("td", {}, name);
  if (must) first.append(element("span", { className: "must" }, "required"));
  const meaning = element("td", {}, ...marked(description ?? ""));
  const bounds = limits(schema);
  if (bounds) meaning.append(description ? " " : "", element("span", { className: "limits" }, `(${bounds})`));
  return element("tr", {}, first, element("td", {}, ...type(schema)), meaning);
}

function table(titles, rows) {
  const head = element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)));
  const whole = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
  return element("div", { className: "scroll" }, whole);
}

// The fields of a schema, or of each of its alternatives.
function shape(schema) {
  const whole = resolve(schema) ?? {};
  const several = whole.oneOf ?? whole.anyOf;
  if (!several) return [fields(whole)];
  return several.flatMap((one, i) => {
    const part = resolve(one) ?? {};
    return [element("h4", {}, `${i + 1}. ${part.title ?? part.description ?? "one of these"}`), fields(part)];
  });
}

function curl(method, path, body) {
  const words = [`curl ${location.origin}${path}`];
  if (method !== "get") words[0] = `curl -X ${method.toUpperCase()} ${location.origin}${path}`;
  if (body !== undefined) {
    words[0] = `curl ${location.origin}${path}`;
    words.push("-H 'content-type: application/json'", `-d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`);
  }
  return element("pre", { tabIndex: 0 }, element("code", {}, words.join(" \\\n  ")));
}

function examples(method, path, content) {
  const several = Object.entries(content?.examples ?? {});
  if (several.length > 0) return several.flatMap(([name, { value }]) => [element("h4", {}, name), curl(method, path, value)]);
  return [element("h4", {}, "Example"), curl(method, path, content?.example)];
}

function response([status, { description, content = {} }]) {
  const words = [element("b", {}, status), " ", ...marked(description)];
  const title = element("summary", {}, ...words);
  const details = element("details", {}, title);
  // Rendered when opened: schemas are long.
  details.addEventListener(
    "toggle",
    () => {
      for (const [kind, { schema }] of Object.entries(content)) {
        details.append(element("h4", {}, kind), ...(schema ? [element("p", {}, ...type(schema)), ...shape(schema)] : []));
      }
    },
    { once: true },
  );
  return Object.keys(content).length > 0 ? details : element("p", {}, ...words);
}

function operation(method, path, what) {
  const node = element("section", { className: "operation", id: `${method}${path.replaceAll(/\W+/g, "-")}` });
  const method_ = element("span", { className: "method" }, method.toUpperCase());
  node.append(element("h3", {}, what.summary ?? path), element("div", { className: "path" }, method_, path));
  node.append(...prose(what.description));
  if (what.parameters?.length) {
    const rows = what.parameters.map((p) => row(p.name, p.schema, p.required, p.description));
    node.append(element("h4", {}, "Parameters"), table(["Name", "Type", "Meaning"], rows));
  }
  const content = what.requestBody?.content["application/json"];
  if (content) node.append(element("h4", {}, "Body"), ...shape(content.schema));
  node.append(...examples(method, path, content));
  node.append(element("h4", {}, "Responses"), ...Object.entries(what.responses).map(response));
  return node;
}

function draw(api) {
  schemas = api.components?.schemas ?? {};
  const reference = [element("h1", {}, `${api.info.title} ${api.info.version}`), ...prose(api.info.description)];
  const contents = [];
  const all = Object.entries(api.paths).flatMap(([path, item]) =>
    METHODS.filter((method) => item[method]).map((method) => ({ method, path, what: item[method] })),
  );
  for (const tag of api.tags ?? []) {
    const group = all.filter(({ what }) => what.tags?.includes(tag.name));
    if (group.length === 0) continue;
    reference.push(element("h2", {}, tag.name), ...prose(tag.description));
    contents.push(element("h2", {}, tag.name));
    for (const { method, path, what } of group) {
      const node = operation(method, path, what);
      reference.push(node);
      contents.push(entry(node, path, `${path} ${what.summary}`));
    }
  }
  reference.push(element("h2", {}, "Schemas"));
  contents.push(element("h2", {}, "Schemas"));
  for (const [name, schema] of Object.entries(schemas)) {
    const node = element("section", { className: "schema", id: `schema-${name}` }, element("h3", {}, name));
    node.append(...prose(schema.description), ...shape(schema));
    reference.push(node);
    contents.push(entry(node, name, name));
  }
  $("reference").replaceChildren(...reference);
  $("list").replaceChildren(...contents);
  // The element of the address's fragment exists only now.
  if (location.hash) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

function entry(node, text, words) {
  const link = element("a", { href: `#${node.id}` }, text);
  link.dataset.words = words.toLowerCase();
  return link;
}

$("filter").addEventListener("input", () => {
  const wanted = $("filter").value.trim().toLowerCase();
  for (const link of $("list").querySelectorAll("a")) link.hidden = !link.dataset.words.includes(wanted);
});

try {
  const answer = await fetch("openapi.json");
  if (!answer.ok) throw new Error(`openapi.json: status ${answer.status}`);
  draw(await answer.json());
} catch (error) {
  $("reference").replaceChildren(element("p", { className: "error", role: "alert" }, `The reference cannot be shown. ${error.message}`));
}
