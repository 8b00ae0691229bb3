// The API reference, made from openapi.json.
import { drawContents, entry } from "./docs-filter.js";
import { prose, row, setSchemas, shape, table, type } from "./docs-schema.js";
import { Request } from "./docs-try.js";
import { $, element } from "./dom.js";
import { inline } from "./markdown.js";
import { started } from "./start.js";

const METHODS = ["get", "post", "put", "patch", "delete"];
const JSON_TYPE = "application/json";

function response([status, { description, content = {} }]) {
  const words = [element("b", {}, status), " ", inline(description)];
  if (Object.keys(content).length === 0) return element("p", {}, ...words);
  const details = element("details", {}, element("summary", {}, ...words));
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
  return details;
}

function operation(method, path, what) {
  const id = `${method}${path.replaceAll(/\W+/g, "-")}`;
  const node = element("section", { className: "operation", id });
  const verb = element("span", { className: "method" }, method.toUpperCase());
  node.append(element("h3", {}, what.summary ?? path), element("div", { className: "path" }, verb, path));
  node.append(prose(what.description));
  const parameters = what.parameters ?? [];
  if (parameters.length > 0) {
    const rows = parameters.map((p) => row(p.name, p.schema, p.required, id, p.description ?? ""));
    node.append(element("h4", {}, "Parameters"), table(["Name", "Type", "Meaning"], rows));
  }
  const content = what.requestBody?.content;
  for (const [kind, { schema }] of Object.entries(content ?? {})) {
    node.append(element("h4", {}, kind === JSON_TYPE ? "Body" : `Body, ${kind}`), ...shape(schema, id));
  }
  // Other bodies are files, which a form of text cannot send.
  if (!content || content[JSON_TYPE]) node.append(...new Request(method, path, parameters, content?.[JSON_TYPE], id).nodes());
  node.append(element("h4", {}, "Responses"), ...Object.entries(what.responses).map(response));
  return node;
}

function draw(api) {
  const schemas = api.components?.schemas ?? {};
  setSchemas(schemas);
  const reference = [element("h1", {}, `${api.info.title} ${api.info.version}`), prose(api.info.description)];
  const groups = [];
  const all = Object.entries(api.paths).flatMap(([path, item]) =>
    METHODS.filter((method) => item[method]).map((method) => ({ method, path, what: item[method] })),
  );
  for (const tag of api.tags ?? []) {
    const group = all.filter(({ what }) => what.tags?.includes(tag.name));
    if (group.length === 0) continue;
    reference.push(element("h2", {}, tag.name), prose(tag.description));
    const entries = group.map(({ method, path, what }) => {
      const node = operation(method, path, what);
      reference.push(node);
      const shared = group.filter((other) => other.path === path).length > 1;
      return entry(node, shared ? `${method.toUpperCase()} ${path}` : path, `${method} ${what.summary}`);
    });
    groups.push({ title: tag.name, entries });
  }
  reference.push(element("h2", {}, "Schemas"));
  const entries = Object.entries(schemas).map(([name, schema]) => {
    const node = element("section", { className: "schema", id: `schema-${name}` }, element("h3", {}, name));
    node.append(prose(schema.description), ...shape(schema, `schema-${name}`));
    reference.push(node);
    return entry(node, name, "");
  });
  groups.push({ title: "Schemas", entries });
  $("reference").replaceChildren(...reference);
  drawContents(groups);
  // The element of the address's fragment exists only now.
  if (location.hash) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

try {
  await started();
  const answer = await fetch("openapi.json");
  if (!answer.ok) throw new Error(`openapi.json: status ${answer.status}`);
  draw(await answer.json());
} catch (error) {
  $("reference").replaceChildren(element("p", { className: "error", role: "alert" }, `The reference cannot be shown. ${error.message}`));
}
