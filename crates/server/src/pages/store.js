// What this browser keeps: chats in IndexedDB, settings in localStorage. A browser that keeps nothing still has the chat.
import { clear, createStore, del, set, values } from "./idb-keyval.js";

const SETTINGS = "plimsoll-settings";

// Opened with the first use: browsers may refuse.
let opened;
const chats = () => (opened ??= createStore("plimsoll", "chats"));

// All chats, the latest first: `{ id, title, model, created, changed, messages }`.
export async function allChats() {
  return (await values(chats())).sort((a, b) => b.changed - a.changed);
}

export const saveChat = (chat) => set(chat.id, chat, chats());
export const deleteChat = (id) => del(id, chats());
export const deleteChats = () => clear(chats());

// The settings of a model, by the names of their fields.
export function settingsOf(model) {
  return allSettings()[model] ?? {};
}

export function saveSettings(model, settings) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify({ ...allSettings(), [model]: settings }));
  } catch {
    // They last as long as the page.
  }
}

function allSettings() {
  try {
    return JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
  } catch {
    return {};
  }
}
