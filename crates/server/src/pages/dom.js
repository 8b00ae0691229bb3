// Small helpers for nodes.

export const $ = (id) => document.getElementById(id);

export function element(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

export function button(label, act, properties = {}) {
  const node = element("button", { type: "button", className: "quiet", ...properties }, label);
  node.addEventListener("click", act);
  return node;
}

// A button that copies what `text()` returns.
export function copyButton(text) {
  const node = button("Copy", async () => {
    node.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => (node.textContent = "Copy"), 1500);
  });
  return node;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers give the clipboard only to pages of this machine or behind TLS; others may copy a selection.
    const field = element("textarea", { value: text, className: "sr" });
    document.body.append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    return copied;
  }
}

// Offers `text` as a download.
export function download(name, type, text) {
  const link = element("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export const seconds = (ms) => `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
