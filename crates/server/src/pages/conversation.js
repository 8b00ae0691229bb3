// The open chat: its messages and their views, questions that can be changed, and the answer being streamed.
import { AnswerView, Stream } from "./answer.js";
import { $, button, copyButton, element } from "./dom.js";
import { picture } from "./pictures.js";

const SAVE_EVERY_MS = 3000;
// Most images that are sent with one request, the latest: earlier answers speak of the others.
const MOST_IMAGES = 16;
const UNFINISHED = "The page was closed before the answer ended.";

// A chat without messages.
export function newChat() {
  return { id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "", created: Date.now(), changed: Date.now(), messages: [] };
}

// What is sent of a chat's messages: a question without an answer is left out.
function sent(messages) {
  const keeps = ({ role, content }, i) => (role === "user" ? messages[i + 1]?.content !== "" : content !== "");
  let left = MOST_IMAGES;
  const one = ({ role, content, images = [] }) => {
    const kept = images.slice(0, left);
    left -= kept.length;
    if (kept.length === 0) return { role, content: content || "(an image)" };
    const parts = kept.map((url) => ({ type: "image_url", image_url: { url } }));
    return { role, content: content ? [...parts, { type: "text", text: content }] : parts };
  };
  const latestFirst = messages.filter(keeps).reverse().map(one);
  return latestFirst.reverse();
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

export class Conversation {
  chat = newChat();
  #running = null;

  // `on` has the client, the request's other fields, and what happens with a chat that changes or an answer that ends.
  constructor(on) {
    this.on = on;
  }

  get running() {
    return this.#running !== null;
  }

  stop() {
    this.#running?.abort();
  }

  // Shows a chat in place of the present one, whose answer ends.
  open(chat) {
    this.stop();
    this.chat = chat;
    $("log").replaceChildren();
    const { messages } = chat;
    const last = messages.at(-1);
    if (last && !last.finish && !last.error) last.error = UNFINISHED;
    for (const message of messages) {
      if (message.role === "user") this.#question(message);
      else this.#answered(message);
    }
    $("welcome").hidden = messages.length > 0;
    $("scroll").scrollTop = $("scroll").scrollHeight;
  }

  // Asks a question, with images as data URLs, and streams the answer.
  ask(content, images = []) {
    const fields = this.on.settings();
    if (!fields) return false;
    const message = { role: "user", content, ...(images.length > 0 && { images }) };
    this.chat.title ||= titleOf(content || "Image");
    this.chat.messages.push(message);
    $("welcome").hidden = true;
    this.#question(message);
    this.#answer(fields);
    return true;
  }

  // Changes the last question.
  editLast() {
    const last = [...$("log").children].findLast((node) => node.classList.contains("user"));
    last?.querySelector(".edit")?.click();
  }

  #question(message) {
    const text = element("div", { className: "text" }, message.content);
    const node = element("article", { className: "turn user", ariaLabel: "You" }, text);
    if (message.images) node.prepend(element("div", { className: "pictures" }, ...message.images.map(picture)));
    text.hidden = message.content === "";
    const edit = button("Edit", () => this.#edit(node, message), { className: "quiet edit" });
    node.append(element("div", { className: "after" }, copyButton(() => message.content), edit));
    $("log").append(node);
  }

  #answered(message) {
    const view = new AnswerView(message);
    $("log").append(view.node);
    view.draw();
    view.thoughtOver("Thought");
    view.end(() => this.#again(view.node));
  }

  // Shows a field in place of a question; what follows the question is lost once it is sent.
  #edit(node, message) {
    if (this.running) return;
    const field = element("textarea", { value: message.content, ariaLabel: "Edit message" });
    const send = element("button", { type: "submit", className: "send" }, "Send");
    const cancel = () => {
      form.replaceWith(...before);
      before.at(-1).querySelector(".edit").focus();
    };
    const form = element("form", { className: "editor" }, field, element("div", {}, button("Cancel", cancel), send));
    const before = [...node.childNodes];
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = field.value.trim();
      if ((!text && !message.images) || this.running) return;
      this.#cut(node);
      this.ask(text, message.images);
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        cancel();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    node.replaceChildren(form);
    field.style.height = `${field.scrollHeight + 2}px`;
    field.focus();
  }

  #again(node) {
    const fields = !this.running && this.on.settings();
    if (!fields) return;
    this.#cut(node);
    this.#answer(fields);
  }

  // Removes a turn and all that follow.
  #cut(node) {
    const turns = [...$("log").children];
    const index = turns.indexOf(node);
    turns.slice(index).forEach((turn) => turn.remove());
    this.chat.messages.splice(index);
  }

  async #answer(fields) {
    const { chat } = this;
    const { messages } = chat;
    const request = { ...fields, messages: [...fields.messages, ...sent(messages)] };
    const message = { role: "assistant", content: "" };
    messages.push(message);
    const view = new AnswerView(message);
    $("log").append(view.node);
    $("scroll").scrollTop = $("scroll").scrollHeight;
    const stream = new Stream(view, follow);
    const running = new AbortController();
    this.#running = running;
    this.on.busy(true);
    this.#save(chat);
    let saved = performance.now();
    let problem = null;
    try {
      for await (const received of this.#received(request, running.signal, stream)) {
        stream.take(received);
        if (received.time - saved > SAVE_EVERY_MS) {
          saved = received.time;
          this.on.save(chat);
        }
      }
      message.finish ??= "stop";
    } catch (error) {
      if (error.name === "AbortError") message.finish = "stopped";
      else problem = error;
    }
    if (problem) message.error = problem.message;
    this.#save(chat);
    // By now another chat may be open, and its answer be running.
    if (this.#running === running) {
      this.#running = null;
      this.on.busy(false);
    }
    if (chat !== this.chat) return;
    follow(() => {
      stream.end();
      view.end(() => this.#again(view.node));
    });
    this.on.ended(stream, problem);
  }

  // What the server sends. While it restarts it is waited for; a request that it refuses may have another in its place.
  async *#received(request, signal, stream) {
    let again = false;
    for (;;) {
      try {
        yield* this.on.client.chat(request, signal);
        return;
      } catch (error) {
        const instead = this.on.instead(request, error);
        if (!error.restarts && !instead) throw error;
        if (error.restarts) {
          const waited = await this.on.restarted(signal);
          // The server answers others: once may be chance.
          if (again && !waited) throw error;
          again = !waited;
        }
        request = instead ?? request;
        stream.begin();
      }
    }
  }

  #save(chat) {
    chat.changed = Date.now();
    chat.model = this.on.model();
    this.on.save(chat);
  }
}

// Draws, and stays at the end where that was in view.
function follow(draw) {
  const scroll = $("scroll");
  const following = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 90;
  draw();
  if (following) scroll.scrollTop = scroll.scrollHeight;
}
