"use strict";
// Reads one cell of the attention map to whoever points at it, taps it, or walks over it with the arrow keys.
for (const figure of document.querySelectorAll(".map")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const bytes = Uint8Array.from(atob(data.reads), (c) => c.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  const columns = data.pages.length;
  const rows = data.layers.length * data.heads;
  const grid = figure.querySelector(".cells");
  const across = figure.querySelector(".across");
  const down = figure.querySelector(".down");
  const readout = figure.querySelector(".readout");
  const count = (row, column) => view.getUint16(2 * (row * columns + column), true);
  let row = 0;
  let column = 0;

  function part(name, text) {
    const element = document.createElement(name === "current" ? "mark" : "span");
    element.className = name;
    // Lines would make the box jump from page to page.
    element.textContent = text.replace(/\s*\n\s*/g, " ↵ ");
    return element;
  }

  function show() {
    down.style.left = `${(100 * (column + 0.5)) / columns}%`;
    across.style.top = `${(100 * (row + 0.5)) / rows}%`;
    figure.classList.add("active");
    let all = 0;
    for (let other = 0; other < rows; other++) all += count(other, column);
    const held = data.held[column];
    const percent = Math.round((100 * all) / (rows * held));
    const layer = data.layers[Math.floor(row / data.heads)];
    const first = column * data.tokens;
    const where = part("where", `Layer ${layer}, KV head ${row % data.heads}, page ${column} (tokens ${first} to ${first + data.tokens - 1})`);
    const steps = held === 1 ? "1 step" : `${held} steps`;
    const how = part("how", `read in ${count(row, column)} of ${steps}; over all layers and heads in ${percent} %`);
    const text = document.createElement("p");
    text.append(
      part("around", data.pages[column - 1] ?? ""),
      part("current", data.pages[column]),
      part("around", data.pages[column + 1] ?? ""),
    );
    const head = document.createElement("p");
    head.append(where, " ", how);
    readout.replaceChildren(head, text);
    readout.dataset.row = row;
    readout.dataset.column = column;
  }

  function go(newRow, newColumn) {
    row = Math.min(Math.max(newRow, 0), rows - 1);
    column = Math.min(Math.max(newColumn, 0), columns - 1);
    show();
  }

  function point(event) {
    const box = grid.getBoundingClientRect();
    go(
      Math.floor(((event.clientY - box.top) / box.height) * rows),
      Math.floor(((event.clientX - box.left) / box.width) * columns),
    );
  }

  const far = () => Math.max(1, Math.round(columns / 20));
  const keys = {
    ArrowLeft: () => go(row, column - 1),
    ArrowRight: () => go(row, column + 1),
    ArrowUp: () => go(row - 1, column),
    ArrowDown: () => go(row + 1, column),
    PageUp: () => go(row, column - far()),
    PageDown: () => go(row, column + far()),
    Home: () => go(row, 0),
    End: () => go(row, columns - 1),
  };
  grid.addEventListener("pointermove", point);
  grid.addEventListener("pointerdown", point);
  grid.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  grid.addEventListener("focus", () => {
    if (grid.matches(":focus-visible")) show();
  });
  for (const button of figure.querySelectorAll("[data-key]")) {
    button.addEventListener("click", () => keys[button.dataset.key]());
  }
  for (const button of figure.querySelectorAll("[data-page]")) {
    button.addEventListener("click", () => go(row, Number(button.dataset.page)));
  }
}
