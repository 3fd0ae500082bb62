// Helpers for elements. Text enters the page by textContent only, never as HTML.

/** Create an element: attributes, then children (nodes, strings, or null). */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

/** Return the value of a CSS variable, so that charts follow the colour scheme. */
function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const COLORS = ["c1", "c2", "c3", "c4", "c5", "c6"];

/** Return a number as a short text. */
function short(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

/** Return a count with its unit: 1 group, 2 groups. */
function counted(number, singular) {
  return `${short(number)} ${singular}${number === 1 ? "" : "s"}`;
}

/** Return seconds as a text: 420 ms, 12.3 s, 3 min 12 s, 2 h 05 min. */
function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Number((1000 * value).toPrecision(3))} ms`;
  if (value < 100) return `${Number(value.toPrecision(3))} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.floor(value % 60)).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

function clock(unix) {
  if (unix === null || unix === undefined) return "–";
  return new Date(unix * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC";
}

function mean(values) {
  const known = values.filter((value) => typeof value === "number");
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

/** Return a table. Cells are texts or nodes; columns with `number` are aligned to the right. */
function table(caption, columns, rows, attributes = {}) {
  const kinds = columns.map((column) => (column.number ? "number" : null));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el("table", attributes,
      el("caption", { class: "hidden" }, caption),
      el("thead", {}, el("tr", {}, columns.map((column, i) =>
        el("th", { scope: "col", class: kinds[i] }, column.title)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) =>
        i === 0 ? el("th", { scope: "row", class: kinds[i] }, cell)
          : el("td", { class: kinds[i] }, cell)))))));
}

/** Return a closed block that is filled when it is opened for the first time. */
function folded(title, fill, attributes = {}) {
  const block = el("details", attributes, el("summary", {}, title));
  block.addEventListener("toggle", () => {
    if (block.open && block.children.length === 1) block.append(fill());
  });
  return block;
}
