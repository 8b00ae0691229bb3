// The chat page.
import { Chats } from "./chats.js";
import { ApiError, Client } from "./client.js";
import { Conversation, newChat } from "./conversation.js";
import { $ } from "./dom.js";
import { Drawer, closeDrawers } from "./drawer.js";
import { drawMemory } from "./memory.js";
import { Pictures } from "./pictures.js";
import { Settings, hideError, showError } from "./settings.js";
import { started } from "./start.js";

const MEMORY_EVERY_MS = 5000;
const TIMINGS = ["rate", "ttft", "tokens", "context"];

const client = new Client();
const settings = new Settings();
const panel = new Drawer($("panel"), $("toggle"), "(min-width: 60.01rem)");
const list = new Drawer($("chats"), $("chats-toggle"), "(min-width: 75.01rem)");
const pictures = new Pictures(() => ($("message").placeholder = pictures.urls.length > 0 ? "Message about the images" : "Message"));
let model = null;

// --- the server

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
  hideError($("key"));
  settings.load(model);
  $("send").disabled = false;
  pictures.allow(model.input_modalities?.includes("image") ?? false);
}

async function loadMemory() {
  try {
    drawMemory($("memory"), await client.get("memory"));
  } catch {
    // Optional: the conversation does not need it.
    $("memory").hidden = true;
  }
}

// Shows an error at the field that it is about, if there is one.
function failed(error) {
  if (!(error instanceof ApiError)) return;
  if (error.status === 401) askForKey();
  else if (settings.refuse(error)) panel.show(true);
}

function askForKey() {
  $("key-section").hidden = false;
  $("greeting").textContent = "This server requires an API key.";
  panel.show(true);
  if (client.key) showError($("key"), "The server does not accept this key.");
  $("key").focus();
}

// --- the conversation

const conversation = new Conversation({
  client,
  model: () => model.id,
  settings() {
    const fields = settings.read();
    if (!fields) {
      panel.show(true);
      return null;
    }
    const system = settings.system ? [{ role: "system", content: settings.system }] : [];
    return { model: model.id, ...fields, messages: system };
  },
  busy(is) {
    $("send").hidden = is;
    $("stop").hidden = !is;
    $("log").ariaBusy = String(is);
    if (is) $("status").textContent = "answering";
    if (is) mark(conversation.chat);
  },
  save: (chat) => chats.save(chat),
  instead: (request, error) => settings.instead(request, error),
  async restarted(signal) {
    const waited = await started(() => ($("status").textContent = "waiting for the server"), signal);
    $("status").textContent = "answering";
    // It may have another context length.
    if (waited) await loadModel();
    return waited;
  },
  ended(stream, problem) {
    const facts = stream.timings(model.max_model_len);
    TIMINGS.forEach((id) => ($(id).textContent = facts[id]));
    const parts = [`${facts.tokens} ${/(^| )1$/.test(facts.tokens) ? "token" : "tokens"}`, facts.rate, `first after ${facts.ttft}`];
    $("status").textContent = problem ? "" : parts.filter((part) => !part.includes("–")).join(" · ");
    if (problem) failed(problem);
    loadMemory();
  },
});

const chats = new Chats({ open, fresh: () => open(newChat()) });

function open(chat) {
  conversation.open(chat);
  mark(chat);
  $("status").textContent = "";
  TIMINGS.forEach((id) => ($(id).textContent = "–"));
  closeDrawers();
  $("message").focus();
}

// Marks the open chat in the list and in the address, so that it is open after a reload.
function mark(chat) {
  const { id, title, messages } = chat;
  chats.select(chat);
  $("title").textContent = title || "New chat";
  history.replaceState(null, "", messages.length > 0 ? `#${id}` : location.pathname + location.search);
}

// --- the page

function grow() {
  const field = $("message");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  const nothing = text === "" && pictures.urls.length === 0;
  if (conversation.running || !model || nothing || !conversation.ask(text, pictures.urls)) return;
  pictures.clear();
  $("message").value = "";
  grow();
});

$("message").addEventListener("input", grow);
$("message").addEventListener("keydown", (event) => {
  if (event.key === "ArrowUp" && $("message").value === "") {
    event.preventDefault();
    conversation.editLast();
  }
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});

$("stop").addEventListener("click", () => {
  conversation.stop();
  $("message").focus();
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented) return;
  if (conversation.running) conversation.stop();
  else closeDrawers();
});

$("new").addEventListener("click", () => open(newChat()));

$("key").addEventListener("change", () => {
  client.key = $("key").value.trim();
  hideError($("key"));
  loadModel();
  loadMemory();
});

// Other tabs may have changed the chats.
document.addEventListener("visibilitychange", () => !document.hidden && !conversation.running && chats.load());
setInterval(() => {
  if (!document.hidden && panel.isOpen && !$("memory").hidden) loadMemory();
}, MEMORY_EVERY_MS);

const kept = await chats.load(location.hash.slice(1));
await started(() => ($("greeting").textContent = "Starting…"));
await loadModel();
if (kept && conversation.chat.messages.length === 0) open(kept);
loadMemory();
