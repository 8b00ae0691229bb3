// The device's memory as a ship's hull: what it holds, and the load line measured at start.
import { element } from "./dom.js";

const KNOWN = ["weights", "kv", "arena", "staging", "encoder", "communication", "graphs", "runtime", "canary"];
const NAMES = { kv: "KV cache", peers: "other processes", arena: "activations" };

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i += 1) n /= 1024;
  return `${i === 0 || n >= 100 ? Math.round(n) : n.toFixed(n >= 10 ? 1 : 2)} ${units[i]}`;
}

export function drawMemory(section, { now }) {
  const find = (id) => section.querySelector(`#${id}`);
  const parts = Object.entries(now.components).filter(([, size]) => size > 0);
  const attributed = parts.reduce((sum, [, size]) => sum + size, 0);
  if (now.reserved > attributed) parts.push(["other", now.reserved - attributed]);
  if (now.peers > 0) parts.push(["peers", now.peers]);
  parts.push(["free", Math.max(0, now.total - parts.reduce((sum, [, size]) => sum + size, 0))]);

  const colour = (name) => `c-${KNOWN.includes(name) || name === "peers" || name === "free" ? name : "other"}`;
  const share = (size) => `${((100 * size) / now.total).toFixed(3)}%`;
  const label = (name) => NAMES[name] ?? name;

  find("segments").replaceChildren(
    ...parts.map(([name, size]) => {
      const part = element("span", { className: colour(name), title: `${label(name)}: ${bytes(size)}` });
      part.style.width = share(size);
      return part;
    }),
  );
  find("legend").replaceChildren(
    ...parts.map(([name, size]) =>
      element(
        "tr",
        {},
        element("td", {}, element("i", { className: colour(name) })),
        element("td", {}, label(name)),
        element("td", { className: "number" }, bytes(size)),
      ),
    ),
  );
  find("memory-total").textContent = bytes(now.total);
  find("line").style.left = share(Math.min(now.proved_peak, now.total));
  find("line-note").textContent = `Load line: worst-case steps peaked at ${bytes(now.proved_peak)} when the KV cache size was validated.`;
  const spoken = parts.map(([name, size]) => `${label(name)} ${bytes(size)}`).join(", ");
  find("hull").setAttribute("aria-label", `Memory of the device, ${bytes(now.total)}: ${spoken}`);
  section.hidden = false;
}
