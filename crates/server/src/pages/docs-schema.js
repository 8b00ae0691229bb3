// Schemas of the OpenAPI document as tables of fields.
import { element } from "./dom.js";
import { Markdown, inline } from "./markdown.js";

let schemas = {};

// The schemas that references refer to.
export function setSchemas(all) {
  schemas = all;
}

const refName = (ref) => ref.split("/").at(-1);
const resolve = (schema) => (schema?.$ref ? schemas[refName(schema.$ref)] : schema);
const word = (value) => (typeof value === "string" ? value : JSON.stringify(value));

export function prose(text = "") {
  const node = element("div", { className: "text" });
  new Markdown(node).show(text);
  return node;
}

// A schema's type as text; other schemas are links.
export function type(schema = {}) {
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

// A range in words, of `unit` if there is one.
function range(least, most, unit) {
  if (least === undefined && most === undefined) return [];
  const bounds = least === most ? `${least}` : most === undefined ? `at least ${least}` : least === undefined ? `at most ${most}` : `${least} to ${most}`;
  return [unit ? `${bounds} ${(most ?? least) === 1 ? unit : `${unit}s`}` : bounds];
}

function limits(schema = {}) {
  // Unsigned integers: a minimum of 0 is not shown.
  const isUnsigned = schema.minimum === 0 && schema.format === undefined && schema.type !== "number";
  const least = isUnsigned && schema.maximum === undefined ? undefined : schema.minimum;
  const said = (name, words) => (schema[name] === undefined ? [] : [`${words} ${word(schema[name])}`]);
  return [
    ...said("exclusiveMinimum", "above"),
    ...range(least, schema.maximum),
    ...said("exclusiveMaximum", "below"),
    ...range(schema.minItems, schema.maxItems, "item"),
    ...range(schema.minLength, schema.maxLength, "character"),
    ...said("default", "default"),
  ].join(", ");
}

function fields(schema, owner) {
  const required = schema.required ?? [];
  const names = Object.keys(schema.properties ?? {});
  names.sort((a, b) => required.includes(b) - required.includes(a));
  if (names.length === 0) return element("p", {}, ...type(schema));
  return table(["Field", "Type", "Meaning"], names.map((name) => row(name, schema.properties[name], required.includes(name), owner)));
}

// A field of `owner`, an id; without one the row has no id.
export function row(name, schema, required, owner, description = schema.description) {
  const first = element("td", {}, name);
  if (required) first.append(element("span", { className: "required" }, "required"));
  const meaning = element("td", {}, inline(description ?? ""));
  const bounds = limits(schema);
  if (bounds) meaning.append(description ? " " : "", element("span", { className: "limits" }, `(${bounds})`));
  const node = element("tr", { className: "entry" }, first, element("td", {}, ...type(schema)), meaning);
  if (owner) Object.assign(node, { id: `${owner}.${name}` }).dataset.field = name;
  return node;
}

export function table(titles, rows) {
  const head = element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)));
  const whole = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
  return element("div", { className: "scroll", tabIndex: 0 }, whole);
}

// The fields of a schema, or of each of its alternatives.
export function shape(schema, owner) {
  const whole = resolve(schema) ?? {};
  const several = whole.oneOf ?? whole.anyOf;
  if (!several) return [fields(whole, owner)];
  return several.flatMap((one, i) => {
    const part = resolve(one) ?? {};
    const title = element("h4", {}, `${i + 1}. `, inline(part.title ?? part.description ?? "one of these"));
    return [title, fields(part, owner && `${owner}.${i + 1}`)];
  });
}
