"use strict";

// Values of marks and cells below the pointer, or the finger.
const tip = document.body.appendChild(document.createElement("output"));
tip.className = "tip";
tip.hidden = true;
for (const title of document.querySelectorAll("svg title")) {
  title.parentNode.dataset.tip = title.textContent;
  title.remove();
}

function told(event) {
  const target = event.target instanceof Element ? event.target : document.body;
  const marked = target.closest("[data-tip]");
  if (marked) return marked.dataset.tip;
  const grid = target.closest("[data-cells]");
  if (!grid) return "";
  const { cells, names, row, column } = grid.dataset;
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(grid.getScreenCTM().inverse());
  const [across, down] = [Math.floor(at.x), Math.floor(at.y)];
  const value = cells.split(";")[down]?.split(" ")[across];
  return value ? `${names.split(";")[down] || `${row} ${down}`}, ${column} ${across}: ${value}` : "";
}

for (const kind of ["pointermove", "pointerdown"]) {
  document.addEventListener(kind, (event) => {
    tip.textContent = told(event);
    tip.hidden = !tip.textContent;
    tip.style.left = `${Math.max(0, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${event.clientY + 16}px`;
  });
}

// Commands are copied by a button.
for (const code of document.querySelectorAll("code")) {
  if (!code.textContent.startsWith("moectl ")) continue;
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "copy";
  button.setAttribute("aria-label", `copy ${code.textContent}`);
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy"), 1500);
  });
  code.after(button);
}

// A phone shows tables when they are asked for.
if (innerWidth < 544) for (const table of document.querySelectorAll(".table")) table.open = false;
