// A panel at a side of the page: beside the chat where there is room, else over it.
const drawers = [];

export class Drawer {
  constructor(panel, toggle, wide) {
    Object.assign(this, { panel, toggle, wide: matchMedia(wide) });
    drawers.push(this);
    toggle.addEventListener("click", () => {
      this.show(!this.isOpen);
      if (this.covers) panel.querySelector("button, input")?.focus();
    });
    this.wide.addEventListener("change", () => this.show(this.wide.matches));
    this.show(this.wide.matches);
  }

  get isOpen() {
    return this.panel.classList.contains("open");
  }

  // Whether it lies over the chat.
  get covers() {
    return this.isOpen && !this.wide.matches;
  }

  show(open) {
    if (open) drawers.filter((other) => other !== this && other.covers).forEach((other) => other.show(false));
    this.panel.classList.toggle("open", open);
    this.toggle.setAttribute("aria-expanded", String(open));
  }
}

// Closes what lies over the chat; false if nothing does.
export function closeDrawers() {
  const open = drawers.filter((drawer) => drawer.covers);
  for (const drawer of open) {
    drawer.show(false);
    drawer.toggle.focus();
  }
  return open.length > 0;
}
