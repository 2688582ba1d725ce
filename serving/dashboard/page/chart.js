// One chart as SVG: made once, and changed in place. A point that nobody told is a gap, never zero.
"use strict";

import { axis, clock } from "./kinds.js";

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { top: 22, right: 10, bottom: 20, left: 42 };
const MAX_MARKS = 60;

export const RANGES = {
  "5m": { stepS: 1, words: "5 minutes", ticksS: [60, 120] },
  "1h": { stepS: 10, words: "hour", ticksS: [600, 1200] },
};

function make(name, parent, attributes = {}) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  parent.append(node);
  return node;
}

function set(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Nodes of one kind, as many as there are values.
export function keep(nodes, number, makeOne) {
  while (nodes.length > number) nodes.pop().remove();
  while (nodes.length < number) nodes.push(makeOne());
}

export class Chart {
  constructor(kind, root, charts) {
    this.kind = kind;
    root.classList.add(kind.form);
    this.charts = charts;
    this.root = root;
    this.part = (name) => root.querySelector(`[data-part="${name}"]`);
    this.plot = this.part("plot");
    this.legend = this.part("legend");
    this.items = new Map();
    this.lines = []; // drawn last: label, words, color, dash, points
    this.width = this.height = 0;
    this.top = 0;
    say(this.part("title"), kind.title);
    say(this.part("unit"), kind.unit);
    say(this.part("empty"), kind.empty);
    this.svg = make("svg", this.plot, { "aria-hidden": "true" });
    this.grid = make("g", this.svg, { class: "grid" });
    this.times = make("g", this.svg, { class: "times" });
    this.marks = make("g", this.svg, { class: "marks" });
    this.shapes = make("g", this.svg, { class: "shapes" });
    this.cursor = make("path", this.svg, { class: "cursor" });
    this.dots = make("g", this.svg, { class: "dots" });
    this.gridNodes = [];
    this.timeNodes = [];
    this.markNodes = [];
    this.dotNodes = [];
    this.listen();
  }

  listen() {
    const point = (event) => {
      const left = event.clientX - this.plot.getBoundingClientRect().left - MARGIN.left;
      this.charts.point(Math.floor((left / this.innerWidth) * this.charts.past.size));
    };
    this.plot.addEventListener("pointermove", point);
    this.plot.addEventListener("pointerdown", point);
    this.plot.addEventListener("pointerleave", (event) => {
      // A finger that is lifted leaves its reading.
      if (event.pointerType === "mouse") this.charts.point(null);
    });
    this.plot.addEventListener("keydown", (event) => {
      const last = this.charts.past.size - 1;
      const at = this.charts.position ?? last;
      const wanted = {
        ArrowLeft: at - 1, ArrowRight: at + 1, ArrowDown: at - 1, ArrowUp: at + 1,
        PageDown: at - Math.round(last / 10), PageUp: at + Math.round(last / 10), Home: 0, End: last, Escape: null,
      };
      if (!(event.key in wanted)) return;
      event.preventDefault();
      this.charts.point(wanted[event.key]);
    });
    this.plot.addEventListener("blur", () => this.charts.point(null));
  }

  get innerWidth() {
    return Math.max(1, this.width - MARGIN.left - MARGIN.right);
  }

  get bottom() {
    return this.height - MARGIN.bottom;
  }

  x(position) {
    return MARGIN.left + ((position + 0.5) / this.charts.past.size) * this.innerWidth;
  }

  y(value) {
    return this.bottom - (Math.min(value, this.top) / this.top) * (this.bottom - MARGIN.top);
  }

  // The labels of this chart that have points, from the bottom up.
  linesOf(past) {
    const told = this.kind.form === "stack" ? filled(past.series[this.kind.series]) : (past.series[this.kind.series] ?? {});
    const line = (label, [words, color, dash = ""]) => ({ label, words, color, dash, points: told[label] });
    if (this.kind.labels) {
      const known = Object.entries(this.kind.labels).filter(([label]) => told[label] !== undefined);
      const { always } = this.kind;
      return known.filter(([label]) => always === undefined || label === always || told[label].some((value) => value > 0))
        .map(([label, look]) => line(label, look));
    }
    const classes = Object.keys(told).sort();
    return classes.map((label) => line(label, [label, `class-${this.charts.colorOf(label)}`]));
  }

  show(past) {
    this.lines = this.linesOf(past);
    const isEmpty = !this.lines.some(({ points }) => points.some((value) => !Number.isNaN(value)));
    this.root.hidden = Boolean(this.kind.isOptional && isEmpty);
    if (this.root.hidden) return;
    this.part("empty").hidden = !isEmpty;
    this.sums = this.kind.form === "lines" ? null : stacked(this.lines, past.size);
    this.scale(past);
    this.draw(past);
    this.fillLegend();
    this.describe(past);
  }

  // An axis that fits stays as it is until there is far less to show: one that jumps cannot be read.
  scale() {
    const drawn = this.sums ?? this.lines.map(({ points }) => points);
    let highest = this.kind.top;
    for (const points of drawn) for (const value of points) if (value > highest) highest = value;
    if (this.kind.isSpiky) highest = Math.max(this.kind.top, Math.min(highest, 2 * usual(drawn[0] ?? [])));
    if (this.top === 0 || highest > this.top || highest < this.top * 0.4 || this.kind.top === this.top) {
      const { top, ticks } = axis(highest, this.kind);
      this.top = top;
      this.ticks = ticks;
    }
  }

  draw(past) {
    set(this.svg, "width", this.width);
    set(this.svg, "height", this.height);
    this.drawGrid();
    this.drawTimes(past);
    this.drawMarks(past);
    const wanted = new Set(this.lines.map(({ label }) => label));
    for (const [label, item] of this.items) {
      if (wanted.has(label)) continue;
      for (const node of [item.area, item.line, item.row]) node.remove();
      this.items.delete(label);
    }
    this.lines.forEach((line, order) => this.drawLine(line, order));
  }

  drawGrid() {
    keep(this.gridNodes, this.ticks.length, () => {
      const node = make("g", this.grid);
      make("path", node);
      make("text", node, { x: MARGIN.left - 6, "text-anchor": "end" });
      return node;
    });
    this.ticks.forEach(([value, words], position) => {
      const [path, text] = this.gridNodes[position].children;
      const y = Math.round(this.y(value)) + 0.5;
      set(path, "d", `M${MARGIN.left} ${y}H${this.width - MARGIN.right}`);
      set(text, "y", y + 4);
      say(text, words);
    });
  }

  drawTimes(past) {
    const { ticksS } = RANGES[this.charts.range];
    const tickS = ticksS.find((each) => (each / past.stepS / past.size) * this.innerWidth >= 46) ?? ticksS.at(-1);
    const first = Math.ceil((past.from * past.stepS) / tickS) * tickS;
    const ticks = [];
    for (let atS = first; atS < past.until * past.stepS; atS += tickS) {
      const x = this.x(atS / past.stepS - past.from - 0.5);
      if (x > MARGIN.left + 14 && x < this.width - 16) ticks.push([x, clock(atS)]);
    }
    keep(this.timeNodes, ticks.length, () => make("text", this.times, { "text-anchor": "middle" }));
    ticks.forEach(([x, words], position) => {
      set(this.timeNodes[position], "x", x.toFixed(1));
      set(this.timeNodes[position], "y", this.height - 4);
      say(this.timeNodes[position], words);
    });
  }

  // A line through the plot and a shape on top of it: what it was is told by the shape, not by colour.
  drawMarks(past) {
    const marks = marked(this.charts.events);
    keep(this.markNodes, marks.length, () => {
      const node = make("g", this.marks);
      make("path", node, { class: "rule" });
      make("path", node, { class: "shape" });
      return node;
    });
    marks.forEach(({ kind, atS }, position) => {
      const node = this.markNodes[position];
      const x = this.x(atS / past.stepS - past.from - 0.5).toFixed(1);
      set(node, "class", `mark-${kind}`);
      set(node.children[0], "d", `M${x} ${MARGIN.top}V${this.bottom}`);
      const y = MARGIN.top - 3;
      const shapes = { lost: `M${x} ${y}l-4.5 -8h9z`, leaving: `M${x} ${y}l-4 -4l4 -4l4 4z`, ready: `M${x} ${y - 8}l-4.5 8h9z` };
      set(node.children[1], "d", shapes[kind]);
    });
  }

  itemOf({ label, words }) {
    let item = this.items.get(label);
    if (item === undefined) {
      const row = document.createElement("li");
      const [key, name, value] = ["i", "span", "b"].map((tag) => row.appendChild(document.createElement(tag)));
      key.setAttribute("aria-hidden", "true");
      say(name, words);
      item = { area: make("path", this.shapes, { class: "area" }), line: make("path", this.shapes), row, key, value };
      this.items.set(label, item);
    }
    return item;
  }

  drawLine(line, order) {
    const item = this.itemOf(line);
    const upper = this.sums ? this.sums[order] : line.points;
    const lower = this.sums && order > 0 ? this.sums[order - 1] : null;
    for (const node of [item.area, item.line]) node.dataset.color = line.color;
    set(item.line, "class", `line ${line.dash}`);
    if (this.kind.form === "bars") {
      set(item.area, "class", "bar");
      set(item.area, "d", this.bars(upper, lower));
      set(item.line, "d", "");
      return;
    }
    set(item.line, "d", this.path(upper, line.points));
    set(item.area, "d", this.kind.form === "stack" ? this.area(upper, lower) : "");
    set(item.area, "class", `area ${line.dash}`);
  }

  // A line, broken where nothing was told; a point alone is a dot, by the round ends of strokes. Of a
  // stack only where its own part is more than nothing: lines on top of each other hide the lower one.
  path(upper, own) {
    const isStack = this.sums !== null;
    let text = "";
    let isDown = false;
    for (let position = 0; position < upper.length; position++) {
      const isDrawn = !Number.isNaN(upper[position]) && (!isStack || !(own[position] === 0) || this.lines.length === 1);
      if (!isDrawn || (isStack && Number.isNaN(own[position]))) {
        isDown = false;
        continue;
      }
      const [x, y] = [this.x(position).toFixed(1), this.y(upper[position]).toFixed(1)];
      text += isDown ? `L${x} ${y}` : `M${x} ${y}h0`;
      isDown = true;
    }
    return text;
  }

  area(upper, lower) {
    let text = "";
    let begin = 0;
    for (let position = 0; position <= upper.length; position++) {
      if (position < upper.length && !Number.isNaN(upper[position])) continue;
      if (position - begin > 1) text += this.patch(upper, lower, begin, position);
      begin = position + 1;
    }
    return text;
  }

  patch(upper, lower, begin, end) {
    const points = [];
    for (let each = begin; each < end; each++) points.push(`${this.x(each).toFixed(1)} ${this.y(upper[each]).toFixed(1)}`);
    for (let each = end - 1; each >= begin; each--) points.push(`${this.x(each).toFixed(1)} ${this.y(lower?.[each] || 0).toFixed(1)}`);
    return `M${points.join("L")}Z`;
  }

  bars(upper, lower) {
    const width = Math.max(4, (this.innerWidth / upper.length) * 0.8);
    let text = "";
    for (let position = 0; position < upper.length; position++) {
      const from = lower?.[position] || 0;
      if (!(upper[position] > from)) continue;
      const [top, bottom] = [this.y(upper[position]), this.y(from)];
      text += `M${(this.x(position) - width / 2).toFixed(1)} ${bottom.toFixed(1)}h${width.toFixed(1)}V${top.toFixed(1)}h${-width.toFixed(1)}Z`;
    }
    return text;
  }

  // From the top of a stack down, as it is drawn.
  fillLegend() {
    const order = this.sums ? [...this.lines].reverse() : this.lines;
    let next = this.legend.firstElementChild;
    for (const line of order) {
      const { row, key } = this.itemOf(line);
      key.dataset.color = line.color;
      if (key.className !== line.dash) key.className = line.dash;
      if (row === next) next = next.nextElementSibling;
      else this.legend.insertBefore(row, next);
    }
    this.read();
  }

  // The values at the cursor, or the last ones; counts without a cursor are of the whole range.
  read() {
    const position = this.charts.position;
    for (const line of this.lines) {
      const value = position !== null ? line.points[position] : this.kind.isCount ? total(line.points) : line.points.at(-1);
      say(this.items.get(line.label).value, Number.isNaN(value) ? "–" : this.kind.format(value));
    }
    this.drawCursor(position);
    const isPointed = position !== null;
    set(this.plot, "aria-valuenow", isPointed ? position : this.charts.past.size - 1);
    set(this.plot, "aria-valuetext", `${this.charts.timeAt(position)}: ${this.words()}`);
  }

  words() {
    return this.lines.map((line) => `${line.words} ${this.items.get(line.label).value.textContent}`).join(", ") || this.kind.empty;
  }

  drawCursor(position) {
    const points = position === null ? [] : this.lines.map((line, order) => [line, (this.sums?.[order] ?? line.points)[position]]);
    const isDrawn = ([line, value]) => !Number.isNaN(value) && !(this.sums && line.points[position] === 0);
    const shown = points.filter(isDrawn);
    const x = position === null ? 0 : this.x(position).toFixed(1);
    set(this.cursor, "d", position === null ? "" : `M${x} ${MARGIN.top}V${this.bottom}`);
    keep(this.dotNodes, this.kind.form === "bars" ? 0 : shown.length, () => make("circle", this.dots, { r: 3 }));
    this.dotNodes.forEach((node, order) => {
      const [line, value] = shown[order];
      node.dataset.color = line.color;
      set(node, "cx", x);
      set(node, "cy", this.y(value).toFixed(1));
    });
  }

  // What the chart shows, in words. Not while it has the focus: it would be read out again and again.
  describe(past) {
    if (document.activeElement === this.plot) return;
    const parts = this.lines.map(({ words, points }) => {
      const { lowest, highest } = bounds(points);
      return lowest === null ? `${words}: none` : `${words}: ${this.kind.format(lowest)} to ${this.kind.format(highest)}`;
    });
    const text = parts.length ? parts.join("; ") : this.kind.empty;
    set(this.plot, "aria-label", `${this.kind.title}, ${this.kind.unit}, last ${RANGES[this.charts.range].words}. ${text}`);
    set(this.plot, "aria-valuemin", 0);
    set(this.plot, "aria-valuemax", past.size - 1);
  }
}

// Parts of a whole: where some of them were told, the others were nothing.
function filled(labels = {}) {
  const all = Object.values(labels);
  const fill = (points) => points.map((value, each) => (Number.isNaN(value) && all.some((other) => !Number.isNaN(other[each])) ? 0 : value));
  return Object.fromEntries(Object.entries(labels).map(([label, points]) => [label, fill(points)]));
}

// What one in ten points is above.
function usual(points) {
  const sorted = [...points].filter((value) => !Number.isNaN(value)).sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length * 0.9)] ?? 0;
}

// Running sums from the bottom up; NaN where none of all is told.
function stacked(lines, size) {
  const sums = [];
  for (const { points } of lines) {
    const below = sums.at(-1);
    const sum = new Float64Array(size);
    for (let each = 0; each < size; each++) {
      const own = points[each];
      const under = below ? below[each] : NaN;
      sum[each] = Number.isNaN(own) ? under : Number.isNaN(under) ? own : own + under;
    }
    sums.push(sum);
  }
  return sums;
}

const total = (points) => points.reduce((sum, value) => (Number.isNaN(value) ? sum : sum + value), 0);

export function bounds(points) {
  let [lowest, highest, sum, number] = [null, null, 0, 0];
  for (const value of points) {
    if (Number.isNaN(value)) continue;
    lowest = lowest === null ? value : Math.min(lowest, value);
    highest = highest === null ? value : Math.max(highest, value);
    sum += value;
    number++;
  }
  return { lowest, highest, mean: number ? sum / number : null };
}

// Of very many events those that are losses, and of these the last.
function marked(events) {
  return events.length <= MAX_MARKS ? events : events.filter(({ kind }) => kind === "lost").slice(-MAX_MARKS);
}
