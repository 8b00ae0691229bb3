// The list of contents, and the filter that finds operations, schemas and their fields.
import { $, element } from "./dom.js";

// Fields shown of one operation or schema.
const MOST_FIELDS = 30;

// An entry for the section `node`, found by `words` and by the names of its fields.
export function entry(node, text, words) {
  const link = element("a", { href: `#${node.id}` }, text);
  const fields = [...node.querySelectorAll("[data-field]")].map(({ id, dataset }) => ({ id, name: dataset.field }));
  const found = element("div", { className: "fields" });
  return { node: element("div", {}, link, found), words: `${text} ${words}`.toLowerCase(), fields, found };
}

// Shows the groups `{ title, entries }` as the contents, and filters them.
export function drawContents(groups) {
  const sections = groups.map(({ title, entries }) => {
    const node = element("section", {}, element("h2", {}, title), ...entries.map((one) => one.node));
    return { node, entries };
  });
  $("list").replaceChildren(...sections.map(({ node }) => node));
  const filter = () => {
    const wanted = $("filter").value.trim().toLowerCase();
    let matches = 0;
    for (const { node, entries } of sections) {
      const shown = entries.map((one) => match(one, wanted)).reduce((sum, found) => sum + found, 0);
      node.hidden = shown === 0;
      matches += shown;
    }
    $("matches").textContent = wanted === "" ? "" : matches === 0 ? "Nothing has this name." : `${matches} found`;
  };
  $("filter").addEventListener("input", filter);
  filter();
}

// Shows an entry, with the fields that have the word in their names, if there is something to show; how many matches.
function match({ node, words, fields, found }, wanted) {
  const own = words.includes(wanted);
  const names = wanted === "" ? [] : fields.filter(({ name }) => name.toLowerCase().includes(wanted));
  found.replaceChildren(...names.slice(0, MOST_FIELDS).map(({ id, name }) => element("a", { href: `#${id}` }, name)));
  node.hidden = !own && names.length === 0;
  return Number(own) + names.length;
}
