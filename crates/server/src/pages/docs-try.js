// A request of the reference: the command that sends it, and a form that does.
import { code } from "./code.js";
import { $, button, copyButton, element, seconds } from "./dom.js";
import { hideError, showError } from "./settings.js";

// More of a response would only slow the page.
const LONGEST = 200_000;

// `method` and `path` of an operation with its parameters; `content` describes its JSON body, if it has one.
export class Request {
  #fields = new Map();
  #body = null;
  #running = null;

  constructor(method, path, parameters, content, id) {
    Object.assign(this, { method: method.toUpperCase(), path, parameters, id });
    this.examples = Object.entries(content?.examples ?? {}).map(([name, { value }]) => [name, value]);
    if (content && this.examples.length === 0) this.examples = [["Example", content.example ?? {}]];
    this.#body = content && this.#textarea();
    this.command = element("pre", { tabIndex: 0 });
    this.#draw();
  }

  // The nodes: the command, and the form below a button.
  nodes() {
    const header = element("header", {}, element("span", {}, "curl"), copyButton(() => this.#curl()));
    const box = element("div", { className: "code" }, header, this.command);
    const form = element("details", { className: "try" }, element("summary", {}, "Try it"));
    form.addEventListener("toggle", () => form.append(this.#form()), { once: true });
    const nodes = [element("h4", {}, "Example"), box, form];
    if (this.examples.length > 1) nodes.splice(1, 0, this.#choice());
    return nodes;
  }

  #textarea() {
    const text = JSON.stringify(this.examples[0][1], null, 2);
    const rows = Math.min(20, text.split("\n").length + 1);
    const field = element("textarea", { id: `${this.id}-body`, value: text, rows, spellcheck: false });
    field.addEventListener("input", () => {
      hideError(field);
      this.#draw();
    });
    return field;
  }

  #choice() {
    const options = this.examples.map(([name], i) => element("option", { value: i }, name));
    const choice = element("select", { ariaLabel: "Example" }, ...options);
    choice.addEventListener("change", () => {
      this.#body.value = JSON.stringify(this.examples[choice.value][1], null, 2);
      hideError(this.#body);
      this.#draw();
    });
    return choice;
  }

  #form() {
    const form = element("form", { noValidate: true });
    for (const { name, required } of this.parameters) {
      const field = element("input", { id: `${this.id}-${name}`, required: Boolean(required), autocomplete: "off", spellcheck: false });
      field.addEventListener("input", () => {
        hideError(field);
        this.#draw();
      });
      this.#fields.set(name, field);
      form.append(element("label", { htmlFor: field.id }, name), field);
    }
    if (this.#body) form.append(element("label", { htmlFor: this.#body.id }, "Body"), this.#body);
    this.send = element("button", { type: "submit", className: "send" }, "Send");
    this.stop = button("Stop", () => this.#running?.abort(), { hidden: true });
    this.status = element("p", { className: "outcome", role: "status" });
    this.output = element("pre", { tabIndex: 0, hidden: true, ariaLabel: "Response" });
    form.append(element("div", { className: "actions" }, this.send, this.stop), this.status, this.output);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    return form;
  }

  // The path with the values of its parameters; what has no value keeps its name.
  #address() {
    const value = (name) => this.#fields.get(name)?.value.trim() ?? "";
    const path = this.path.replace(/\{(\w+)\}/g, (whole, name) => (value(name) ? encodeURIComponent(value(name)) : whole));
    const query = this.parameters.filter((parameter) => parameter.in === "query" && value(parameter.name));
    const words = new URLSearchParams(query.map(({ name }) => [name, value(name)])).toString();
    return words ? `${path}?${words}` : path;
  }

  #curl() {
    const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
    // The page may be below a prefix of a proxy.
    const address = new URL(`.${this.#address()}`, location.href).href.replaceAll("%7B", "{").replaceAll("%7D", "}");
    const words = [`curl ${this.method === "GET" || this.#body ? "" : `-X ${this.method} `}${/[?&{]/.test(address) ? quote(address) : address}`];
    if ($("key").value) words.push(`-H "authorization: Bearer $API_KEY"`);
    if (this.#body) words.push("-H 'content-type: application/json'", `-d ${quote(this.#compact())}`);
    return words.join(" \\\n  ");
  }

  // The body on one line, or as it is while it is no JSON.
  #compact() {
    try {
      return JSON.stringify(JSON.parse(this.#body.value));
    } catch {
      return this.#body.value;
    }
  }

  #draw() {
    this.command.replaceChildren(code(this.#curl(), "bash"));
  }

  // Whether all fields can be sent; those that cannot say why.
  #complete() {
    const missing = [...this.#fields.values()].filter((field) => field.required && !field.value.trim());
    missing.forEach((field) => showError(field, "This is required."));
    let problem = null;
    try {
      if (this.#body) JSON.parse(this.#body.value);
    } catch (error) {
      problem = error;
      showError(this.#body, `The body is not JSON: ${error.message}.`);
    }
    (missing[0] ?? (problem && this.#body))?.focus();
    return missing.length === 0 && !problem;
  }

  async #submit() {
    if (this.#running || !this.#complete()) return;
    this.#running = new AbortController();
    this.send.disabled = true;
    this.stop.hidden = false;
    this.status.textContent = "Waiting for the response…";
    this.output.hidden = true;
    const begin = performance.now();
    const report = (words) => (this.status.textContent = `${words}, ${seconds(performance.now() - begin)}`);
    try {
      const response = await this.#fetch();
      const words = `${response.status} ${response.statusText}`.trim();
      const text = await this.#read(response);
      report(`${words}, ${text.length.toLocaleString()} characters`);
      if (response.status === 401) this.#askForKey();
    } catch (error) {
      report(error.name === "AbortError" ? "Stopped" : `No response: ${error.message}`);
    }
    this.#running = null;
    this.send.disabled = false;
    this.stop.hidden = true;
  }

  #fetch() {
    const headers = {};
    if ($("key").value) headers.authorization = `Bearer ${$("key").value.trim()}`;
    if (this.#body) headers["content-type"] = "application/json";
    const body = this.#body?.value;
    return fetch(`.${this.#address()}`, { method: this.method, headers, body, signal: this.#running.signal });
  }

  // Shows the text of a response while it arrives.
  async #read(response) {
    const type = response.headers.get("content-type") ?? "";
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const shown = element("code");
    this.output.replaceChildren(shown);
    this.output.hidden = false;
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      if (text.length < LONGEST) shown.append(value.slice(0, LONGEST - text.length));
      text += value;
    }
    if (type.startsWith("application/json") && text.length < LONGEST) {
      this.output.replaceChildren(code(JSON.stringify(JSON.parse(text), null, 2), "json"));
    }
    return text;
  }

  #askForKey() {
    showError($("key"), $("key").value ? "The server does not accept this key." : "The server requires an API key.");
    $("key").focus();
  }
}
