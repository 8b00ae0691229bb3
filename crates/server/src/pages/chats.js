// The list of chats that this browser keeps.
import { $, button, element } from "./dom.js";
import { exportJson, exportMarkdown } from "./export.js";
import { allChats, deleteChat, deleteChats, saveChat } from "./store.js";

const UNDO_MS = 10_000;

export class Chats {
  #chats = [];
  #current = null;
  // An answer may end after its chat was deleted.
  #deleted = new Set();
  #saving = Promise.resolve();

  // `open(chat)` shows a chat, `fresh()` a new one.
  constructor({ open, fresh }) {
    this.open = open;
    this.fresh = fresh;
    this.menu = new Menu((chat) => this.#actions(chat));
    $("find").addEventListener("input", () => this.#draw());
    $("forget").addEventListener("click", () => this.#forget());
  }

  // Reads the chats, which other tabs may have changed; that with this id, if there is one.
  async load(id) {
    await this.#saving;
    try {
      const chats = await allChats();
      // The open one stays that of the conversation, whose answer may not be kept yet.
      const open = this.#current;
      this.#chats = chats.map((chat) => (chat.id === open?.id ? Object.assign(open, { title: chat.title }) : chat));
    } catch {
      $("chats-note").textContent = "This browser does not keep chats: they are lost when the page is closed.";
    }
    this.#draw();
    return this.#chats.find((chat) => chat.id === id);
  }

  // Marks the open chat.
  select(chat) {
    this.#current = chat;
    this.#draw();
  }

  // Keeps a chat that has changed.
  save(chat) {
    if (this.#deleted.has(chat.id)) return;
    this.#chats = [chat, ...this.#chats.filter(({ id }) => id !== chat.id)].sort((a, b) => b.changed - a.changed);
    this.#draw();
    this.#store(() => saveChat(chat));
  }

  // One after another, so that the last one counts.
  #store(change) {
    this.#saving = this.#saving.then(change).catch((error) => {
      $("chats-note").textContent = `The browser could not keep this: ${error.message}`;
    });
  }

  #draw() {
    // A title that is being changed stays.
    if ($("chat-list").querySelector("input")) return;
    const focused = document.activeElement?.dataset?.chat;
    const wanted = $("find").value.trim().toLowerCase();
    const has = (text) => text.toLowerCase().includes(wanted);
    const shown = this.#chats.filter(({ title, messages }) => has(title) || messages.some(({ content }) => has(content)));
    $("chat-list").replaceChildren(...shown.map((chat) => this.#item(chat)));
    $("no-chats").hidden = shown.length > 0;
    $("no-chats").textContent = wanted ? "No chat has these words." : "No chats yet.";
    $("forget").hidden = this.#chats.length === 0;
    if (focused) $("chat-list").querySelector(`[data-chat="${focused}"]`)?.focus();
  }

  #item(chat) {
    const open = button(chat.title, () => this.open(chat), { className: "open", title: chat.title });
    open.dataset.chat = chat.id;
    if (chat.id === this.#current?.id) open.setAttribute("aria-current", "true");
    const more = button($("dots").content.cloneNode(true), () => {}, { className: "quiet icon more", ariaLabel: `Actions for ${chat.title}` });
    this.menu.attach(more, chat);
    return element("li", {}, open, more);
  }

  #actions(chat) {
    return [
      ["Rename", () => this.#rename(chat)],
      ["Export as Markdown", () => exportMarkdown(chat)],
      ["Export as JSON", () => exportJson(chat)],
      ["Delete", () => this.#delete(chat)],
    ];
  }

  #rename(chat) {
    const open = $("chat-list").querySelector(`[data-chat="${chat.id}"]`);
    const field = element("input", { value: chat.title, ariaLabel: "Title of the chat", maxLength: 200 });
    let over = false;
    const done = (title) => {
      if (over) return;
      over = true;
      field.replaceWith(open);
      if (title && title !== chat.title) {
        chat.title = title;
        this.save(chat);
      }
      this.#draw();
      $("chat-list").querySelector(`[data-chat="${chat.id}"]`)?.focus();
    };
    field.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter" && !event.isComposing) done(field.value.trim());
      if (event.key === "Escape") done(null);
    });
    field.addEventListener("blur", () => done(field.value.trim()));
    open.replaceWith(field);
    field.select();
  }

  #delete(chat) {
    this.#remove([chat], () => deleteChat(chat.id), `Deleted “${chat.title}”.`);
  }

  #forget() {
    this.#remove(this.#chats, deleteChats, `Deleted ${this.#chats.length} chats.`);
  }

  #remove(chats, change, words) {
    const open = chats.some(({ id }) => id === this.#current?.id);
    this.#chats = this.#chats.filter((chat) => !chats.includes(chat));
    chats.forEach(({ id }) => this.#deleted.add(id));
    this.#store(change);
    this.#draw();
    if (open) this.fresh();
    toast(words, () => {
      chats.forEach(({ id }) => this.#deleted.delete(id));
      chats.forEach((chat) => this.save(chat));
    });
  }
}

// A menu beside the button that opens it.
class Menu {
  #node = $("menu");
  #owner = null;

  constructor(actions) {
    this.actions = actions;
    this.#node.addEventListener("toggle", ({ newState }) => newState === "open" && this.#place());
    this.#node.addEventListener("keydown", (event) => this.#move(event));
  }

  // Makes a button open and close the menu for a chat.
  attach(owner, chat) {
    owner.popoverTargetElement = this.#node;
    owner.addEventListener("click", () => {
      this.#owner = owner;
      const items = this.actions(chat).map(([label, act]) =>
        button(label, () => {
          this.#node.hidePopover();
          act();
        }),
      );
      this.#node.replaceChildren(...items);
    });
  }

  #place() {
    const { left, bottom } = this.#owner.getBoundingClientRect();
    const { offsetWidth, offsetHeight, style, firstElementChild } = this.#node;
    style.left = `${Math.max(8, Math.min(left, innerWidth - offsetWidth - 8))}px`;
    style.top = `${Math.max(8, Math.min(bottom, innerHeight - offsetHeight - 8))}px`;
    firstElementChild.focus();
  }

  #move(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const items = [...this.#node.children];
    items.at((items.indexOf(document.activeElement) + step) % items.length).focus();
  }
}

let timer;

function toast(words, undo) {
  clearTimeout(timer);
  const close = () => $("toast").replaceChildren();
  const act = () => {
    close();
    undo();
  };
  $("toast").replaceChildren(element("span", {}, words), button("Undo", act));
  timer = setTimeout(close, UNDO_MS);
}
