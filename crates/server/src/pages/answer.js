// One answer: its view, and the timings while it is streamed.
import { button, copyButton, element, seconds } from "./dom.js";
import { Markdown } from "./markdown.js";

// Drawing may take this part of the time.
const DRAWING = 1 / 4;
const ENDS = { length: "cut off at the maximum number of tokens", stopped: "stopped" };

const speed = (rate) => (rate < 100 ? rate.toFixed(1) : Math.round(rate).toLocaleString());

// The view of an answer's message: `{ content, reasoning, finish, error }`.
export class AnswerView {
  #thought = null;
  #summary = null;

  constructor(message) {
    this.message = message;
    this.text = element("div", { className: "text" });
    this.node = element("article", { className: "turn assistant", ariaLabel: "Answer" }, this.text);
    this.markdown = new Markdown(this.text);
  }

  draw() {
    if (this.message.reasoning) this.#think();
    this.markdown.show(this.message.content);
  }

  #think() {
    if (!this.#thought) {
      this.#thought = element("div", { className: "thought" });
      this.#summary = element("summary", {}, "Thinking…");
      const details = element("details", { className: "reasoning", open: true }, this.#summary, this.#thought);
      this.node.prepend(details);
    }
    this.#thought.textContent = this.message.reasoning;
  }

  // Folds the reasoning away.
  thoughtOver(summary) {
    if (!this.#thought) return;
    this.#summary.textContent = summary;
    this.#thought.parentElement.open = false;
  }

  // Shows how the answer ended, and what can be done with it.
  end(regenerate) {
    const { content, reasoning, error, finish } = this.message;
    if (error) {
      this.node.append(element("div", { className: "error", role: "alert" }, element("b", {}, "Error. "), error));
    }
    const after = element("div", { className: "after" });
    if (content) after.append(copyButton(() => content));
    after.append(button(error ? "Try again" : "Regenerate", regenerate));
    const note = ENDS[finish] ?? (content || reasoning || error ? null : "empty answer");
    if (note) after.append(element("span", {}, note));
    this.node.append(after);
  }
}

// An answer that is being streamed.
export class Stream {
  chunks = 0;
  usage = null;
  #begun = performance.now();
  #first = null;
  #last = null;
  #thought = null;
  // Of the chunks, those that came first, together.
  #together = 0;
  #drawing = null;
  #cost = 0;

  constructor(view, ondraw) {
    this.view = view;
    this.ondraw = ondraw;
    view.node.classList.add("busy");
  }

  // The time until the first token counts from here.
  begin() {
    this.#begun = performance.now();
  }

  take({ chunk, time }) {
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const { message } = this.view;
    const { content, reasoning_content: reasoning } = choice.delta;
    if (content || reasoning) {
      this.#first ??= time;
      this.#last = time;
      this.chunks += 1;
      if (time === this.#first) this.#together += 1;
    }
    if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
    if (content) {
      if (message.reasoning && !message.content) this.#thoughtOver(time);
      message.content += content;
    }
    message.finish = choice.finish_reason ?? message.finish;
    this.#draw();
  }

  #thoughtOver(time) {
    this.#thought = seconds(time - this.#begun);
    this.view.draw();
    this.view.thoughtOver(`Thought for ${this.#thought}`);
  }

  // Once per frame, and less often where it takes long.
  #draw() {
    this.#drawing ??= setTimeout(() => requestAnimationFrame(() => this.#drawing !== null && this.show()), this.#cost / DRAWING);
  }

  show() {
    clearTimeout(this.#drawing);
    this.#drawing = null;
    const begin = performance.now();
    this.ondraw(() => this.view.draw());
    this.#cost = performance.now() - begin;
  }

  end() {
    this.show();
    if (!this.view.message.content && this.#last !== null) this.#thoughtOver(this.#last);
    this.view.node.classList.remove("busy");
  }

  // The timings as text, by the ids of the fields that show them.
  timings(contextLength) {
    // The usage has the number of tokens; a stopped answer has no usage, its chunks are about as many.
    const tokens = this.usage?.completion_tokens ?? this.chunks;
    const about = this.usage ? "" : "about ";
    // Tokens after the first ones; if all came together, they took as long as the wait for them.
    const [began, timed] = this.#last > this.#first ? [this.#first, Math.max(1, tokens - this.#together)] : [this.#begun, tokens];
    const span = this.#last - began;
    const facts = { rate: "–", ttft: "–", tokens: tokens > 0 ? `${about}${tokens.toLocaleString()}` : "–", context: "–" };
    if (this.#first !== null) facts.ttft = seconds(this.#first - this.#begun);
    if (this.chunks > 0 && span > 0) facts.rate = `${about}${speed((1000 * timed) / span)} tokens/s`;
    if (this.usage && contextLength) {
      facts.context = `${this.usage.total_tokens.toLocaleString()} of ${contextLength.toLocaleString()}`;
    }
    return facts;
  }
}
