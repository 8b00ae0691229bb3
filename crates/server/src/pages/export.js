// Chats as files.
import { download } from "./dom.js";

function fileName({ title, created }, end) {
  const words = title.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? ["chat"];
  return `${new Date(created).toISOString().slice(0, 10)}-${words.join("-").slice(0, 40)}.${end}`;
}

// As JSON, whose messages are those of the API.
export function exportJson(chat) {
  const { title, model, created, changed } = chat;
  const messages = chat.messages.map(({ role, content, images, reasoning, error }) => ({
    role,
    content,
    ...(images && { images }),
    ...(reasoning && { reasoning_content: reasoning }),
    ...(error && { error }),
  }));
  const dates = { created: new Date(created).toISOString(), changed: new Date(changed).toISOString() };
  const text = JSON.stringify({ title, model, ...dates, messages }, null, 2);
  download(fileName(chat, "json"), "application/json", `${text}\n`);
}

export function exportMarkdown(chat) {
  const parts = [`# ${chat.title}`, `${chat.model}, ${new Date(chat.created).toISOString().slice(0, 16).replace("T", " ")} UTC`];
  for (const { role, content, images, reasoning, error } of chat.messages) {
    parts.push(role === "user" ? "## You" : `## ${chat.model}`);
    if (reasoning) parts.push(reasoning.trim().replace(/^/gm, "> "));
    images?.forEach((url, i) => parts.push(`![Image ${i + 1}](${url})`));
    if (content) parts.push(content.trim());
    if (error) parts.push(`Error: ${error}`);
  }
  download(fileName(chat, "md"), "text/markdown", `${parts.join("\n\n")}\n`);
}
