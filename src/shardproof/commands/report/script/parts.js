// The parts of every page: text, nodes, hints, tables, bars.

const facts = JSON.parse(document.getElementById("facts").textContent);
const main = document.createElement("main");
const SVG = "http://www.w3.org/2000/svg";

// All text of the page passes through `shown`, and becomes text nodes and attributes, never markup.

const code = char => {
  const at = char.codePointAt(0);
  return at < 256 ? `\\x${at.toString(16).padStart(2, "0")}` : `\\u${at.toString(16).padStart(4, "0")}`;
};
const shown = text => String(text).replace(/[\p{C}\p{Z}]/gu, char => char === " " ? char : code(char));

function node(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : shown(child));
  }
  return made;
}
const el = (tag, attributes, ...children) => node(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => node(document.createElementNS(SVG, tag), attributes, children);

const count = number => Number(number).toLocaleString("en");
const counted = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
function bytes(number) {
  let unit = 0;
  for (; number >= 999.5 && unit < 4; unit += 1) number /= 1000;
  const digits = unit === 0 || number >= 99.95 ? 0 : number >= 9.995 ? 1 : 2;
  return `${number.toFixed(digits)} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
}
function span(seconds) {
  if (seconds < 0.1) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
}
const when = time => `${new Date(time * 1000).toISOString().slice(0, 16).replace("T", " ")} UTC`;
const share = (part, whole) => whole ? `${(100 * part / whole).toFixed(1)} %` : "-";
const short = number => number === null ? "beyond float64" : number === 0 ? "0" : Number(number).toPrecision(3);
const list = numbers => `[${numbers.join(", ")}]`;
const most = (rows, get) => rows.reduce((best, row) => Math.max(best, get(row) || 0), 0);
const sum = (rows, get) => rows.reduce((total, row) => total + (get(row) || 0), 0);

// Hues a golden angle apart: neighbours differ, for any number of ranks.
function colour(at) {
  return at < 0 ? "var(--line)" : `oklch(calc(var(--fill) - ${at % 3 * 0.05}) 0.11 ${(250 + at * 137.5) % 360})`;
}
function paint(shape, fill) {
  shape.style.fill = fill;
  return shape;
}

// A hint is a text beside the pointer or the focus, and the name of the shape for screen readers.

const hints = new WeakMap();
const tip = el("div", {id: "tip", hidden: true, "aria-hidden": "true"});
function hint(shape, text) {
  hints.set(shape, shown(text));
  shape.setAttribute("aria-label", shown(text));
  return shape;
}
function showHint(target, x, y) {
  const text = target instanceof Element ? hints.get(target.closest("[aria-label]")) : undefined;
  tip.hidden = text === undefined;
  if (text === undefined) return;
  tip.textContent = text;
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 8 : y + 18}px`;
}
document.addEventListener("pointermove", event => showHint(event.target, event.clientX, event.clientY));
document.addEventListener("focusin", event => {
  const at = event.target.getBoundingClientRect();
  showHint(event.target, at.left, at.bottom - 14);
});
document.addEventListener("focusout", () => { tip.hidden = true; });

const meant = new WeakMap();  // the row of a line of a table, the part of a rectangle of the map

// One Tab stop for all items of a container; arrows, Home and End move inside, Enter chooses.
function roving(container, selector, choose) {
  container.addEventListener("keydown", event => {
    const items = [...container.querySelectorAll(selector)], at = items.indexOf(document.activeElement);
    if (at < 0) return;
    const by = {ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1}[event.key];
    if ((event.key === "Enter" || event.key === " ") && choose) {
      event.preventDefault();
      choose(items[at]);
    } else if (by || event.key === "Home" || event.key === "End") {
      event.preventDefault();
      const to = by ? at + by : event.key === "Home" ? 0 : items.length - 1;
      items[at].tabIndex = -1;
      const next = items[Math.max(0, Math.min(items.length - 1, to))];
      next.tabIndex = 0;
      next.focus();
    }
  });
}

function section(title, ...children) {
  main.append(el("section", {}, el("h2", {}, title), children));
}
const note = (...words) => el("p", {class: "note"}, words);
const mono = text => el("code", {}, text);
const badge = (text, kind) => el("span", {class: `badge k-${kind}`}, text);
const lines = text => text.split("\n").map((part, at) => [at > 0 && el("br"), part]);
const named = ([name, value]) => value !== null && el("div", {}, el("dt", {}, name), el("dd", {}, value));
const figures = pairs => el("dl", {class: "figures"}, pairs.map(named));
function chart(width, height, name, ...children) {
  return svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": name}, children);
}
const text = (x, y, words, anchor) => svg("text", {x, y, "text-anchor": anchor}, words);
const line = (x1, y1, x2, y2) => svg("line", {x1, y1, x2, y2});

// Rows with a bar each: [label, [[size, fill], ...], text, hint].
function bars(caption, rows) {
  const whole = most(rows, row => sum(row[1], part => part[0])) || 1;
  return el("table", {class: "bars"}, el("caption", {}, caption), rows.map(([label, parts, value, about]) => {
    let x = 0;
    const shapes = parts.map(([size, fill]) => {
      const width = 100 * size / whole;
      x += width;
      return paint(svg("rect", {x: x - width, y: 0, width, height: 10}), fill);
    });
    const bar = svg("svg", {viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img"}, shapes);
    return el("tr", {}, el("th", {scope: "row"}, label),
      el("td", {}, hint(bar, about || `${label}: ${value}`)), el("td", {class: "number"}, value));
  }));
}

// The columns of a table: `get(row)` is the value that sorts, `show(value, row)` the cell.

const column = (title, get, show = value => value, kind = "") => ({title, get, show, kind});
const number = (title, get, show = count) => column(title, get, show, "number");
const key = (get = row => row.key, title = "key") => column(title, get, mono);
function cell({get, show}, row) {
  const value = get(row);
  return value === null || value === undefined ? "-" : show(value, row);
}

const collator = new Intl.Collator("en", {numeric: true});
function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return typeof a === "number" && typeof b === "number" ? a - b : collator.compare(String(a), String(b));
}

// A table that is sorted and turned by pages, and searched if it has more than a few rows.
function table(caption, columns, rows, {size = 50, choose = null} = {}) {
  let found = rows, page = 0, order = null, chosen = null, texts = null;
  const body = el("tbody"), place = el("span", {"aria-live": "polite"});
  const heads = columns.map(({title, kind}, at) => el("th", {scope: "col", class: kind, "aria-sort": "none"},
    el("button", {type: "button", onclick: () => sort(at)}, title)));
  const turn = (title, by) => el("button", {type: "button", onclick: () => { page += by; draw(); }}, title);
  const back = turn("previous", -1), forth = turn("next", 1);
  const field = el("input", {type: "search", placeholder: "words, all of which a row has", oninput: search,
    "data-rows": rows.length});
  const controls = el("div", {class: "controls"}, el("label", {}, "Search ", field),
    rows.length > size && [back, forth], place);

  function search() {
    texts ||= rows.map(row => el("p", {}, columns.map(one => [cell(one, row), " "])).textContent.toLowerCase());
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    found = rows.filter((_, at) => words.every(word => texts[at].includes(word)));
    page = 0;
    draw();
  }
  function sort(at) {
    const down = order && order.at === at ? !order.down : columns[at].kind === "number";
    order = {at, down};
    heads.forEach((head, other) =>
      head.setAttribute("aria-sort", other !== at ? "none" : down ? "descending" : "ascending"));
    page = 0;
    draw();
  }
  function draw() {
    let sorted = found;
    if (order) {
      const get = columns[order.at].get, sign = order.down ? -1 : 1;
      sorted = [...found].sort((a, b) => sign * compare(get(a), get(b)));
    }
    const visible = sorted.slice(page * size, (page + 1) * size), first = page * size;
    body.replaceChildren(...visible.map((row, at) => {
      const tr = el("tr", {tabindex: at ? -1 : 0, "aria-selected": choose && String(row === chosen)},
        columns.map(one => el("td", {class: one.kind}, cell(one, row))));
      meant.set(tr, row);
      return tr;
    }));
    place.textContent = `${count(visible.length && first + 1)} to ${count(first + visible.length)} of ` +
      count(sorted.length) + (found.length < rows.length ? ` found, ${count(rows.length)} in all` : "");
    back.disabled = page === 0;
    forth.disabled = first + size >= sorted.length;
  }
  function select(tr) {
    chosen = meant.get(tr);
    for (const other of body.rows) other.setAttribute("aria-selected", String(other === tr));
    choose(chosen);
  }
  if (choose) body.addEventListener("click", event => {
    const tr = event.target.closest("tr");
    if (tr && !String(getSelection())) select(tr);
  });
  roving(body, "tr", choose && select);
  draw();
  return el("div", {class: "scroll"}, rows.length > 5 && controls,
    el("table", {class: "rows"}, el("caption", {}, caption), el("thead", {}, el("tr", {}, heads)), body));
}
document.addEventListener("keydown", event => {
  if (event.key !== "/" || event.target instanceof HTMLInputElement) return;
  const fields = [...document.querySelectorAll("input[type=search]")];
  event.preventDefault();
  fields.sort((a, b) => b.dataset.rows - a.dataset.rows)[0]?.focus();  // that of the longest table
});
