// The chat page: one conversation, kept in memory.
import { ApiError, Client } from "./client.js";
import { Markdown, copyButton, element } from "./markdown.js";
import { drawMemory } from "./memory.js";

const MEMORY_EVERY_MS = 5000;
const $ = (id) => document.getElementById(id);
const SAMPLING = ["temperature", "top_p", "max_tokens", "seed"];

const client = new Client();
let model = null;
// The messages: `{ role, content, left }`; a question without an answer is left out of later requests.
let conversation = [];
let running = null;

// --- the server

function failed(error) {
  if (error instanceof ApiError && error.status === 401) askForKey();
}

function askForKey() {
  $("key-section").hidden = false;
  $("greeting").textContent = "This server requires an API key.";
  showPanel(true);
  $("key").focus();
}

async function loadModel() {
  try {
    model = (await client.get("v1/models")).data[0];
  } catch (error) {
    $("greeting").textContent = error.message;
    failed(error);
    return;
  }
  $("model").textContent = model.id;
  $("model").title = model.id;
  $("greeting").textContent = "Ready.";
  $("capacity").textContent = `${model.id}, up to ${model.max_model_len.toLocaleString()} tokens`;
  document.title = `${model.id} – Plimsoll`;
}

async function loadMemory() {
  try {
    drawMemory($("memory"), await client.get("memory"));
  } catch {
    // Optional: the conversation does not need it.
    $("memory").hidden = true;
  }
}

// --- the conversation

function request() {
  const body = { model: model?.id, messages: [] };
  const system = $("system").value.trim();
  if (system) body.messages.push({ role: "system", content: system });
  body.messages.push(...conversation.filter(({ left }) => !left).map(({ role, content }) => ({ role, content })));
  for (const name of SAMPLING) {
    const value = $(name).value.trim();
    if (value !== "") body[name] = Number(value);
  }
  return body;
}

function turn(role) {
  const text = element("div", { className: "text" });
  const node = element("article", { className: `turn ${role}`, ariaLabel: role === "user" ? "You" : "Answer" }, text);
  $("welcome").hidden = true;
  $("log").append(node);
  return { node, text };
}

function say(content) {
  conversation.push({ role: "user", content });
  turn("user").text.textContent = content;
  answer();
}

// An answer while it is streamed, with its timings.
class Answer {
  content = "";
  reasoning = "";
  chunks = 0;
  usage = null;
  finish = null;
  begun = performance.now();
  first = null;
  last = null;

  constructor() {
    Object.assign(this, turn("assistant"));
    this.node.classList.add("busy");
    this.markdown = new Markdown(this.text);
  }

  take(chunk) {
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning } = choice.delta;
    if (content || reasoning) {
      this.last = performance.now();
      this.first ??= this.last;
      this.chunks += 1;
    }
    if (reasoning) this.#think(reasoning);
    if (content) {
      if (this.thought?.parentElement.open && !this.content) this.#thoughtOver();
      this.content += content;
    }
    this.finish = choice.finish_reason ?? this.finish;
    this.#draw();
  }

  #think(text) {
    if (!this.thought) {
      this.thought = element("div", { className: "thought" });
      this.summary = element("summary", {}, "Thinking…");
      const details = element("details", { className: "reasoning", open: true }, this.summary, this.thought);
      this.node.prepend(details);
    }
    this.reasoning += text;
  }

  #thoughtOver() {
    this.summary.textContent = `Thought for ${seconds(performance.now() - this.first)}`;
    this.thought.parentElement.open = false;
  }

  // At most once per frame.
  #draw() {
    this.frame ??= requestAnimationFrame(() => this.show());
  }

  show() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const { scrollTop, scrollHeight, clientHeight } = $("scroll");
    const following = scrollHeight - scrollTop - clientHeight < 90;
    if (this.thought) this.thought.textContent = this.reasoning;
    this.markdown.show(this.content);
    if (following) $("scroll").scrollTop = $("scroll").scrollHeight;
  }

  end(error) {
    if (this.thought && !this.content) this.#thoughtOver();
    this.show();
    this.node.classList.remove("busy");
    if (error) {
      this.node.append(element("div", { className: "error", role: "alert" }, element("b", {}, "Error. "), error.message));
    }
    const after = element("div", { className: "after" });
    if (navigator.clipboard && this.content) after.append(copyButton(() => this.content));
    const again = element("button", { type: "button", className: "quiet again" }, error ? "Try again" : "Again");
    again.addEventListener("click", () => this.again());
    after.append(again);
    if (this.finish === "length") after.append(element("span", {}, "cut off at the maximum number of tokens"));
    if (this.finish === "stopped") after.append(element("span", {}, "stopped"));
    this.node.append(after);
  }

  // Regenerates this answer; later messages are removed.
  again() {
    if (running) return;
    const turns = [...$("log").children];
    const index = turns.indexOf(this.node);
    conversation = conversation.slice(0, index);
    conversation.at(-1).left = false;
    turns.slice(index).forEach((node) => node.remove());
    answer();
  }

  // The usage has the number of tokens; a stopped answer has no usage, its chunks are about as many.
  speed() {
    const tokens = this.usage?.completion_tokens ?? this.chunks;
    const about = this.usage ? "" : "about ";
    // A single chunk took as long as the wait for it.
    const [began, timed] = this.chunks > 1 ? [this.first, tokens - 1] : [this.begun, tokens];
    const span = this.last - began;
    $("ttft").textContent = this.first === null ? "–" : seconds(this.first - this.begun);
    $("rate").textContent = this.chunks > 0 && span > 0 ? `${about}${((1000 * timed) / span).toFixed(1)} tokens/s` : "–";
    $("tokens").textContent = `${about}${tokens.toLocaleString()}`;
    if (this.usage && model) {
      $("context").textContent = `${this.usage.total_tokens.toLocaleString()} of ${model.max_model_len.toLocaleString()}`;
    }
    const parts = [$("tokens").textContent + " tokens", $("rate").textContent, `first after ${$("ttft").textContent}`];
    return parts.filter((part) => !part.endsWith("–")).join(" · ");
  }
}

async function answer() {
  const reply = new Answer();
  // A new chat has its own list: late chunks of this one do not touch it.
  const mine = conversation;
  running = new AbortController();
  busy(true);
  let problem = null;
  try {
    for await (const chunk of client.chat(request(), running.signal)) reply.take(chunk);
  } catch (error) {
    if (error.name === "AbortError") reply.finish = "stopped";
    else problem = error;
  }
  running = null;
  busy(false);
  if (mine !== conversation) return;
  reply.end(problem);
  // Kept in the list, so that list and page match.
  const left = reply.content === "";
  mine.at(-1).left = left;
  mine.push({ role: "assistant", content: reply.content, left });
  $("status").textContent = problem ? "" : reply.speed();
  if (problem) {
    failed(problem);
    const field = problem.param && document.getElementById(problem.param);
    if (field && SAMPLING.includes(problem.param)) {
      field.setAttribute("aria-invalid", "true");
      showPanel(true);
    }
  }
  $("scroll").scrollTop = $("scroll").scrollHeight;
  loadMemory();
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("log").ariaBusy = String(is);
  if (is) {
    $("status").textContent = "answering";
    SAMPLING.forEach((name) => $(name).removeAttribute("aria-invalid"));
  }
}

const seconds = (ms) => `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;

// --- the page

const wide = matchMedia("(min-width: 60.01rem)");

function showPanel(open) {
  document.body.classList.toggle("panel-open", open && !wide.matches);
  document.body.classList.toggle("panel-closed", !open && wide.matches);
  $("toggle").setAttribute("aria-expanded", String(open));
}

function grow() {
  const field = $("message");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (running || text === "") return;
  $("message").value = "";
  grow();
  say(text);
});

$("message").addEventListener("input", grow);
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});

const stop = () => running?.abort();
$("stop").addEventListener("click", () => {
  stop();
  $("message").focus();
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) stop();
  else if (document.body.classList.contains("panel-open")) {
    showPanel(false);
    $("toggle").focus();
  }
});

$("new").addEventListener("click", () => {
  stop();
  conversation = [];
  $("log").replaceChildren();
  $("welcome").hidden = false;
  $("status").textContent = "";
  ["rate", "ttft", "tokens", "context"].forEach((id) => ($(id).textContent = "–"));
  $("message").focus();
});

$("toggle").addEventListener("click", () => showPanel($("toggle").getAttribute("aria-expanded") !== "true"));

$("key").addEventListener("change", () => {
  client.key = $("key").value.trim();
  loadModel();
  loadMemory();
});

wide.addEventListener("change", () => showPanel(wide.matches));
showPanel(wide.matches);
setInterval(() => {
  const visible = !document.hidden && $("toggle").getAttribute("aria-expanded") === "true";
  if (visible && !$("memory").hidden) loadMemory();
}, MEMORY_EVERY_MS);
loadModel();
loadMemory();
