// One chart: a uPlot with the legend, the marks and the words around it. A point that nobody reported
// is a gap, never zero.
"use strict";

import { clock } from "./kinds.js";

const MAX_MARKS = 60;
const AXIS_FONT = '11px "Liberation Sans", Arial, sans-serif';
const LEFT_PX = 50; // of the axis of values
const WHOLE_STEPS = [1, 2, 5].flatMap((digit) => Array.from({ length: 9 }, (_, power) => digit * 10 ** power)).sort((a, b) => a - b);
const DASHES = { "": [], dashed: [5, 4], dotted: [1, 4] };

export const RANGES = {
  "5m": { stepS: 1, words: "5 minutes" },
  "1h": { stepS: 10, words: "hour" },
};

export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function set(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
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
    this.items = new Map(); // rows of the legend, by label
    this.lines = []; // drawn last, from the top down: label, words, color, dash, points
    this.top = kind.top;
    this.markNodes = [];
    say(this.part("title"), kind.title);
    say(this.part("unit"), kind.unit);
    say(this.part("empty"), kind.empty);
    this.listen();
  }

  listen() {
    const point = (event) => {
      if (this.drawn === undefined) return;
      const left = event.clientX - this.drawn.over.getBoundingClientRect().left;
      this.charts.point(Math.floor((left / this.drawn.over.clientWidth) * this.charts.past.size));
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

  // The labels of this chart that have points, from the top of a stack down.
  linesOf(past) {
    const isStack = this.kind.form === "stack";
    const known = isStack ? filled(past.series[this.kind.series]) : (past.series[this.kind.series] ?? {});
    const line = (label, [words, color, dash = ""]) => ({ label, words, color, dash, points: known[label] });
    if (!this.kind.labels) {
      const classes = Object.keys(known).sort();
      return classes.map((label) => line(label, [label, `class-${this.charts.colorOf(label)}`])).reverse();
    }
    const { always } = this.kind;
    const lines = Object.entries(this.kind.labels)
      .filter(([label]) => known[label] !== undefined)
      .filter(([label]) => always === undefined || label === always || known[label].some((value) => value > 0))
      .map(([label, look]) => line(label, look));
    return this.kind.form === "lines" ? lines : lines.reverse();
  }

  show(past) {
    this.lines = this.linesOf(past);
    const isEmpty = !this.lines.some(({ points }) => points.some((value) => !Number.isNaN(value)));
    this.root.hidden = Boolean(this.kind.isOptional && isEmpty);
    if (this.root.hidden) return;
    this.part("empty").hidden = !isEmpty;
    const heights = this.kind.form === "lines" ? this.lines.map(({ points }) => points) : stacked(this.lines, past.size);
    this.scale(heights);
    this.fillLegend();
    this.draw(past, heights);
    this.drawMarks(past);
    this.read();
    this.describe(past);
  }

  // An axis that fits stays as it is until there is far less to show: one that jumps cannot be read.
  scale(heights) {
    let highest = this.kind.top;
    for (const points of heights) for (const value of points) if (value > highest) highest = value;
    if (this.kind.isSpiky) highest = Math.max(this.kind.top, Math.min(highest, 2 * usual(heights[0] ?? [])));
    if (highest > this.top || highest < this.top * 0.4)
      this.top = highest === this.kind.top ? highest : uPlot.rangeNum(0, highest, 0.05, true)[1];
  }

  draw(past, heights) {
    const times = Array.from({ length: past.size }, (_, position) => (past.from + position + 0.5) * past.stepS);
    const gaps = (points) => Array.from(points, (value) => (Number.isNaN(value) ? null : value));
    const data = [times, ...heights.map(gaps)];
    const labels = this.lines.map(({ label }) => label).join("\n");
    if (this.drawn === undefined || this.labels !== labels) {
      this.drawn?.destroy();
      this.labels = labels;
      this.drawn = new uPlot(this.options(), data, this.plot);
      this.markNodes = [];
      this.resize();
    } else {
      this.drawn.setData(data);
    }
  }

  options() {
    const ink = (name) => () => getComputedStyle(this.root).getPropertyValue(name).trim();
    const { isWhole, format, axisFormat = format, axisUnit = "" } = this.kind;
    const words = (_, splits) => splits.map((value, at) => axisFormat(value) + (at === splits.length - 1 ? axisUnit : ""));
    // Of the times those that are not cut off at the edge.
    const times = ({ over, valToPos }, splits) => splits.map((atS) => (valToPos(atS, "x") < 14 || valToPos(atS, "x") > over.clientWidth - 8 ? "" : clock(atS)));
    const look = { stroke: ink("--quiet"), font: AXIS_FONT, ticks: { show: false } };
    return {
      width: 300,
      height: 160,
      padding: [22, 10, 0, 0],
      legend: { show: false },
      // The cursor is the page's: one for all charts, and for the keyboard.
      cursor: { y: false, drag: { setScale: false, x: false }, bind: ignored(), points: { size: 7 } },
      scales: {
        x: { time: true, range: () => [this.charts.past.from * this.charts.past.stepS, this.charts.past.until * this.charts.past.stepS] },
        y: { range: () => [0, this.top] },
      },
      axes: [
        { ...look, size: 20, gap: 4, space: 46, grid: { show: false }, values: times },
        { ...look, size: LEFT_PX, gap: 6, space: 26, grid: { stroke: ink("--grid"), width: 1 }, values: words, ...(isWhole && { incrs: WHOLE_STEPS }) },
      ],
      series: [{}, ...this.lines.map((line, order) => this.seriesOf(line, order))],
      bands: this.kind.form === "stack" ? this.lines.slice(1).map((_, order) => ({ series: [order + 1, order + 2] })) : [],
    };
  }

  seriesOf({ label, dash }) {
    const color = () => getComputedStyle(this.items.get(label).key).getPropertyValue("--c").trim();
    const tint = () => color() + (dash === "dashed" ? "1a" : "4d"); // a tenth, three tenths
    const line = { stroke: color, width: 1.75, dash: DASHES[dash], points: { size: 2.5, fill: color, filter: alone } };
    if (this.kind.form === "bars") return { ...line, width: 0, fill: color, points: { show: false }, paths: uPlot.paths.bars({ size: [0.8, Infinity, 4] }) };
    return this.kind.form === "stack" ? { ...line, width: 1.25, fill: tint } : line;
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.plot;
    if (this.drawn === undefined || width === 0 || (this.drawn.width === width && this.drawn.height === height)) return;
    this.drawn.setSize({ width, height });
  }

  // A line through the plot and a shape on top of it: the shape says what it was, not the colour alone.
  drawMarks(past) {
    const marks = marked(this.charts.events);
    keep(this.markNodes, marks.length, () => this.drawn.over.appendChild(document.createElement("i")));
    marks.forEach(({ kind, atS }, position) => {
      const node = this.markNodes[position];
      if (node.className !== `mark mark-${kind}`) node.className = `mark mark-${kind}`;
      node.style.left = `${((atS / past.stepS - past.from) / past.size) * 100}%`;
    });
  }

  // The rows of the legend, in the order in which the lines are drawn.
  fillLegend() {
    const wanted = new Set(this.lines.map(({ label }) => label));
    for (const [label, { row }] of this.items) {
      if (wanted.has(label)) continue;
      row.remove();
      this.items.delete(label);
    }
    let next = this.legend.firstElementChild;
    for (const line of this.lines) {
      const { row, key } = this.items.get(line.label) ?? this.makeItem(line);
      key.dataset.color = line.color;
      if (key.className !== line.dash) key.className = line.dash;
      if (row === next) next = next.nextElementSibling;
      else this.legend.insertBefore(row, next);
    }
  }

  makeItem({ label, words }) {
    const row = document.createElement("li");
    const [key, name, value] = ["i", "span", "b"].map((tag) => row.appendChild(document.createElement(tag)));
    key.setAttribute("aria-hidden", "true");
    say(name, words);
    this.items.set(label, { row, key, value });
    return this.items.get(label);
  }

  // The values at the cursor, or the last ones; counts without a cursor are of the whole range.
  read() {
    const position = this.charts.position;
    for (const line of this.lines) {
      const value = position !== null ? line.points[position] : this.kind.isCount ? total(line.points) : line.points.at(-1);
      say(this.items.get(line.label).value, Number.isNaN(value) ? "–" : this.kind.format(value));
    }
    const isPointed = position !== null;
    const left = isPointed ? this.drawn.valToPos(this.drawn.data[0][position], "x") : -10;
    this.drawn.setCursor({ left, top: isPointed ? 0 : -10 });
    set(this.plot, "aria-valuenow", isPointed ? position : this.charts.past.size - 1);
    set(this.plot, "aria-valuetext", `${this.charts.timeAt(position)}: ${this.words()}`);
  }

  words() {
    return this.lines.map((line) => `${line.words} ${this.items.get(line.label).value.textContent}`).join(", ") || this.kind.empty;
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

// uPlot's own reactions to a mouse.
function ignored() {
  const events = ["mousedown", "mouseup", "click", "dblclick", "mousemove", "mouseleave", "mouseenter"];
  return Object.fromEntries(events.map((name) => [name, () => null]));
}

// Points without a neighbour, which no line would show.
function alone(plot, series) {
  const points = plot.data[series];
  return points.flatMap((value, at) => (value !== null && (points[at - 1] ?? null) === null && (points[at + 1] ?? null) === null ? [at] : []));
}

// Parts of a whole: where some of them were reported, the others were nothing.
function filled(labels = {}) {
  const all = Object.values(labels);
  const fill = (points) => points.map((value, at) => (Number.isNaN(value) && all.some((other) => !Number.isNaN(other[at])) ? 0 : value));
  return Object.fromEntries(Object.entries(labels).map(([label, points]) => [label, fill(points)]));
}

// What one in ten points is above.
function usual(points) {
  const sorted = [...points].filter((value) => !Number.isNaN(value)).sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length * 0.9)] ?? 0;
}

// Running sums from the bottom, which is the last line, up; NaN where none of all was reported.
function stacked(lines, size) {
  const sums = [];
  for (const { points } of [...lines].reverse()) {
    const below = sums[0];
    const sum = new Float64Array(size);
    for (let at = 0; at < size; at++) {
      const own = points[at];
      const under = below ? below[at] : NaN;
      sum[at] = Number.isNaN(own) ? under : Number.isNaN(under) ? own : own + under;
    }
    sums.unshift(sum);
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
