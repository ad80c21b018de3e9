// Draws: elements, keyed lists, small plots, the pool's map and the timeline's strip. Knows nothing of the server.

const BRIDGED = 6;
const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children. Text is always text, never markup. */
export function el(tag, attributes = {}, ...children) {
  return put(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return put(document.createElementNS(SVG, tag), attributes, children);
}

function put(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

/** Change a text only where it differs, so that nothing is drawn or read out anew without need. */
export function say(node, text) {
  if (node.textContent !== String(text)) node.textContent = text;
}

/** Make a parent's children those of `items`, in order; who stays keeps its element, its focus and its scroll. */
export function fill(parent, items, keyOf, make, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const focused = document.activeElement;
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    const node = known.get(key) ?? make(item);
    known.delete(key);
    node.dataset.key = key;
    update?.(node, item);
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
  }
  for (const node of known.values()) node.remove();
  if (focused !== document.activeElement && focused?.isConnected) focused.focus({ preventScroll: true });
}

/** A row of a table from cells: each a text, or a node that is made once. */
export function rows(body, items, keyOf, columns, empty) {
  if (!items.length) return body.replaceChildren(el("tr", {}, el("td", { class: "empty", colspan: columns.length }, empty)));
  if (body.querySelector(".empty")) body.replaceChildren();
  fill(body, items, keyOf, () => el("tr", {}, ...columns.map((column) => el("td", { class: column.kind ?? "" }))), (row, item) => {
    columns.forEach((column, index) => {
      const cell = row.cells[index];
      if (column.node) column.node(cell, item);
      else say(cell, column.text(item));
    });
  });
}

export const count = (n) => Number(n).toLocaleString("en");

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (n >= 1024 && at < units.length - 1) [n, at] = [n / 1024, at + 1];
  return `${at && n < 100 ? n.toFixed(1) : Math.round(n)} ${units[at]}`;
}

export function span(seconds) {
  if (seconds < 10) return `${Math.max(0, seconds).toFixed(1)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

export function millis(ms) {
  if (ms == null) return "–";
  return ms >= 10000 ? `${(ms / 1000).toFixed(0)} s` : ms >= 1000 ? `${(ms / 1000).toFixed(1)} s` : `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
}

/** A round number at or above a value. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((n) => n * power).find((n) => n >= value) ?? 10 * power;
}

/** Runs of points that are joined: a gap of a few seconds is bridged, a longer one stays a gap. */
function runs(values) {
  const found = [];
  let before = -Infinity;
  values.forEach((v, i) => {
    if (v == null) return;
    if (i - before > BRIDGED) found.push([]);
    found.at(-1).push([i, v]);
    before = i;
  });
  return found;
}

/** One small plot. series: lists of numbers or null, one a second, oldest first; the first one is filled. */
export function plot(parent, title, value, unit, series, format) {
  let card = parent.querySelector(`[data-plot="${title}"]`);
  if (!card) {
    card = el("div", { class: "plot", "data-plot": title }, el("h2", {}, title), el("p", { class: "value" }, el("span"), " ", el("small")),
      svg("svg", { viewBox: "0 0 120 40", preserveAspectRatio: "none", role: "img" }), el("p", { class: "scale", "aria-hidden": "true" }, el("span", {}, "2 min ago"), el("span")));
    parent.append(card);
  }
  const top = ceiling(Math.max(...series.flat().filter((v) => v != null), 0));
  const drawing = card.querySelector("svg");
  const width = 120 / Math.max(1, series[0].length - 1);
  const paths = [svg("line", { class: "base", x1: 0, x2: 120, y1: 40, y2: 40, "vector-effect": "non-scaling-stroke" })];
  series.forEach((values, index) => {
    const lines = runs(values).map((run) => run.map(([i, v]) => `${(i * width).toFixed(2)} ${(40 - (v / top) * 38).toFixed(2)}`));
    const area = lines.map((line) => `M${line[0].split(" ")[0]} 40L${line.join("L")}V40Z`).join("");
    if (!index && area) paths.push(svg("path", { class: "area", d: area }));
    const drawn = lines.map((line) => `M${line.join("L")}${line.length === 1 ? "h.4" : ""}`).join("");
    if (drawn) paths.push(svg("path", { class: index ? "line second" : "line", d: drawn }));
  });
  drawing.replaceChildren(...paths);
  drawing.setAttribute("aria-label", `${title}: ${value} ${unit}; the last two minutes reach up to ${format(top)}`);
  say(card.querySelector(".value span"), value);
  say(card.querySelector("small"), unit);
  say(card.querySelector(".scale").lastChild, `top ${format(top)}`);
}

/** The pool as squares of equal worth, in runs by owner. parts: {kind, name, pages}. */
export function map(parent, parts, total) {
  const narrow = parent.clientWidth < 460;
  const [across, down] = narrow ? [30, 12] : [40, 10];
  const cells = Math.min(across * down, total);
  const per = total / (cells || 1);
  let edge = 0, from = 0;
  const drawn = [];
  parts.forEach((part, index) => {
    edge += part.pages;
    const to = Math.round(edge / per);
    if (to <= from) return;
    const group = svg("g", { class: `of-${part.kind}${part.odd ? " odd" : ""}` }, svg("title", {}, `${part.name}: ${count(part.pages)} pages`));
    for (let at = from; at < to; at++) {
      group.append(svg("rect", { class: "cell", x: (at % across) * 10, y: Math.floor(at / across) * 10, width: 8.6, height: 8.6, rx: 1.4 }));
    }
    drawn.push(group);
    from = to;
  });
  const label = parts.filter((part) => part.pages).map((part) => `${part.name} ${count(part.pages)}`).join(", ");
  const height = Math.ceil(cells / across) * 10;
  parent.replaceChildren(svg("svg", { viewBox: `0 0 ${across * 10 - 1.4} ${Math.max(height - 1.4, 8.6)}`, role: "img", "aria-label": `Pages of the pool: ${label}` }, ...drawn));
  return per;
}

/** Ticks of what happened, now at the right. items: {age_s, level}. */
export function strip(parent, items, spanS) {
  const ticks = items.map((item) => {
    const x = 300 * (1 - item.age_s / spanS);
    return svg("line", { class: `tick-${item.level}`, x1: x, x2: x, y1: item.level === "info" ? 14 : 4, y2: 24, "stroke-width": 1.5, "vector-effect": "non-scaling-stroke" });
  });
  const base = svg("line", { class: "tick-info", x1: 0, x2: 300, y1: 24, y2: 24, "vector-effect": "non-scaling-stroke" });
  parent.replaceChildren(svg("svg", { viewBox: "0 0 300 26", preserveAspectRatio: "none", "aria-hidden": "true" }, base, ...ticks));
}
