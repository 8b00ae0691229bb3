// The settings of requests: a form whose values are kept for each model, with errors at their fields.
import { $, element } from "./dom.js";
import { saveSettings, settingsOf } from "./store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const FIELDS = [...NUMBERS, "system"];

// Where the field is empty, which shows it: small models may repeat themselves up to the end of their context.
const maxTokens = () => Number($("max_tokens").placeholder);

export class Settings {
  #model = null;
  #context = Infinity;

  constructor() {
    for (const name of FIELDS) {
      $(name).addEventListener("input", () => {
        hideError($(name));
        this.#save();
      });
    }
    $("reset").addEventListener("click", () => {
      this.#fill({});
      this.#save();
      $("temperature").focus();
    });
  }

  // Shows the settings that were last used with a model, an entry of /v1/models.
  load({ id, max_model_len }) {
    this.#model = id;
    this.#context = max_model_len;
    $("settings-note").textContent = `Stored in this browser for ${id}.`;
    this.#fill(settingsOf(id));
  }

  #fill(values) {
    for (const name of FIELDS) {
      $(name).value = values[name] ?? "";
      hideError($(name));
    }
    const { top_k, min_p, repetition_penalty } = values;
    if (top_k || min_p || repetition_penalty) $("more-sampling").open = true;
  }

  #save() {
    if (!this.#model) return;
    const filled = FIELDS.filter((name) => $(name).value.trim() !== "");
    saveSettings(this.#model, Object.fromEntries(filled.map((name) => [name, $(name).value])));
  }

  // The fields of a request; null if one is wrong, which then says so. `max_tokens` is the field's, or else the default if the context
  // can hold it.
  read() {
    const wrong = NUMBERS.filter((name) => $(name).validity.badInput);
    wrong.forEach((name) => showError($(name), "This is not a number."));
    if (wrong.length > 0) return null;
    const given = NUMBERS.filter((name) => $(name).value !== "");
    const byDefault = maxTokens() < this.#context ? { max_tokens: maxTokens() } : {};
    return { ...byDefault, ...Object.fromEntries(given.map((name) => [name, Number($(name).value)])) };
  }

  // The request to send in place of one that was refused: where the context holds less than the default, all that it holds.
  instead(request, { status, param }) {
    const isDefault = "max_tokens" in request && $("max_tokens").value === "";
    if (status !== 400 || param !== "max_tokens" || !isDefault) return null;
    const { max_tokens, ...rest } = request;
    return rest;
  }

  get system() {
    return $("system").value.trim();
  }

  // Shows an error of the server at its field; false if there is none for it.
  refuse({ param, message }) {
    const name = param === "max_completion_tokens" ? "max_tokens" : param;
    if (!NUMBERS.includes(name)) return false;
    showError($(name), message);
    return true;
  }
}

export function showError(field, message) {
  hideError(field);
  field.setAttribute("aria-invalid", "true");
  const node = element("p", { className: "field-error", id: `${field.id}-error` }, message);
  field.setAttribute("aria-errormessage", node.id);
  field.after(node);
  const group = field.closest("details");
  if (group) group.open = true;
}

export function hideError(field) {
  field.removeAttribute("aria-invalid");
  field.removeAttribute("aria-errormessage");
  $(`${field.id}-error`)?.remove();
}
