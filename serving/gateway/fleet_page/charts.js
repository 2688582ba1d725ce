// The charts above the slices: what gateways saw in the last minutes, drawn as SVG.
//
// Everything is made once and changed in place. A point that nobody told is a gap, never zero. All
// charts share one cursor: pointing at a time in one shows the values of that time in all.
"use strict";

import { Past } from "./history.js";

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { top: 22, right: 10, bottom: 20, left: 42 };
const RANGES = {
  "5m": { stepS: 1, words: "5 minutes", ticksS: [60, 120] },
  "1h": { stepS: 10, words: "hour", ticksS: [600, 1200] },
};
const MAX_EVENTS = 3;
const MAX_MARKS = 60;
const NUM_COLORS = 6;

// -- numbers --

function compact(value) {
  const size = Math.abs(value);
  if (size >= 999_500) return `${trim(value / 1e6)}M`;
  if (size >= 9_995) return `${trim(value / 1e3)}k`;
  return trim(value);
}

function trim(value) {
  const size = Math.abs(value);
  const digits = size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  return String(Number(value.toFixed(digits)));
}

const seconds = (value) => (value < 0.9995 ? `${trim(value * 1000)} ms` : `${trim(value)} s`);
const percent = (value) => `${trim(value * 100)}%`;
const dollars = (value) => `$${value < 1000 ? value.toFixed(2) : compact(value)}`;
const clock = (atS, withSeconds) =>
  new Date(atS * 1000).toLocaleTimeString([], {
    hour12: false, hour: "2-digit", minute: "2-digit", ...(withSeconds ? { second: "2-digit" } : {}),
  });

// -- what is shown --
//
// `series` names one of the gateway's; `labels` are its lines from the bottom up, with their words and
// colours. Without `labels` each label is a compute class. `scale` turns values into what the axis
// counts; `top` is the least that an axis reaches, `isWhole` of what has no parts.

const CHARTS = [
  {
    title: "Requests", unit: "per second", series: "requests_per_s", form: "stack", top: 1, axisUnit: "/s",
    labels: {
      finished: ["finished", "blue"], aborted: ["aborted", "grey"],
      refused: ["refused", "orange"], failed: ["failed", "red"],
    },
    format: trim, empty: "No request has been counted yet.",
  },
  {
    title: "Output tokens", unit: "per second", series: "output_tokens_per_s", form: "stack", top: 10, axisUnit: "/s",
    format: compact, empty: "No engine has been linked yet.",
  },
  {
    title: "Time to first token", unit: "of the last 10 s", series: "ttft_s", form: "lines", top: 0.01,
    labels: { p50: ["p50", "blue"], p99: ["p99", "orange", "dashed"] },
    format: seconds, empty: "No first token in this time.",
  },
  {
    title: "Time per output token", unit: "of the last 10 s", series: "tpot_s", form: "lines", top: 0.01,
    labels: { p50: ["p50", "blue"], p99: ["p99", "orange", "dashed"] },
    format: seconds, empty: "No answer of several tokens ended in this time.",
  },
  {
    title: "Sequences", unit: "number", series: "sequences", form: "lines", top: 4, isWhole: true,
    labels: { in_flight: ["on engines", "blue"], waiting: ["waiting", "orange", "dashed"] },
    format: trim, empty: "Nothing is known of sequences.",
  },
  {
    title: "Resumes and losses", unit: "number; below: in all", series: "losses_per_s", form: "bars", top: 4, isWhole: true,
    labels: {
      moved_draining: ["moved, drained", "sky"], moved_lost: ["resumed, lost", "orange"],
      links_lost: ["links lost", "red"],
    },
    format: trim, isCount: true, empty: "Nothing is known of losses.",
  },
  {
    title: "KV cache in use", unit: "of all engines", series: "kv_usage_ratio", form: "lines", top: 1,
    labels: { mean: ["mean", "blue"], highest: ["highest", "orange", "dashed"] },
    format: percent, empty: "No engine has told its KV cache.",
  },
  {
    title: "Chips by state", unit: "chips", series: "chips", form: "stack", top: 4, isWhole: true,
    labels: {
      serving: ["serving", "teal"], idle: ["idle", "grey"], draining: ["draining", "orange"],
      loading: ["loading", "blue"], probing: ["probing", "sky"], lost: ["lost", "red"],
      provisioning: ["wanted, not held", "purple", "dashed"],
    },
    format: compact, always: "serving", empty: "No slice is listed.",
  },
  {
    title: "Chips by compute class", unit: "chips held", series: "chips_held", form: "stack", top: 4,
    isWhole: true, format: compact, empty: "No slice is held.",
  },
  {
    title: "Cost", unit: "USD per hour", series: "usd_per_hour", form: "stack", top: 1,
    labels: { "": ["slices held, by their price", "teal"] },
    format: dollars, axisFormat: (value) => `$${compact(value)}`, empty: "No compute class has a price.",
  },
  {
    title: "Price of output", unit: "USD per million tokens", series: "usd_per_million_tokens",
    form: "lines", top: 0.1, labels: { "": ["idle and starting chips too", "teal"] },
    format: dollars, axisFormat: (value) => `$${compact(value)}`, empty: "No price, or no tokens in this time.",
  },
  {
    title: "TPU", unit: "mean of all chips", series: "tpu_ratio", form: "lines", top: 1,
    labels: {
      duty_cycle: ["duty cycle", "teal"], tensorcore: ["TensorCore", "purple", "dashed"],
      hbm: ["HBM in use", "orange", "dotted"],
    },
    format: percent, isOptional: true, empty: "",
  },
];

// Round steps of an axis, at most four of them.
function axis(highest, { isWhole, format, axisFormat = format, axisUnit = "" }) {
  let step = 10 ** Math.floor(Math.log10(highest / 4));
  // Times are round in milliseconds, whichever they are.
  for (const factor of [2, 2.5, 2, 2, 2.5, 2]) {
    if (Math.ceil(highest / step - 1e-9) <= 4 && !(isWhole && step < 1)) break;
    step *= factor;
  }
  if (isWhole) step = Math.ceil(step);
  const number = Math.max(1, Math.ceil(highest / step - 1e-9));
  const ticks = Array.from({ length: number + 1 }, (_, position) => position * step);
  const words = (value, position) => axisFormat(value) + (position === number ? axisUnit : "");
  return { top: number * step, ticks: ticks.map((value, position) => [value, words(value, position)]) };
}

function make(name, parent, attributes = {}) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  parent.append(node);
  return node;
}

function set(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Nodes of one kind, as many as there are values.
function keep(nodes, number, makeOne) {
  while (nodes.length > number) nodes.pop().remove();
  while (nodes.length < number) nodes.push(makeOne());
}

// -- one chart --

class Chart {
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
    const scale = this.kind.isCount ? past.stepS : 1;
    const line = (label, [words, color, dash = ""]) => {
      const points = scale === 1 ? told[label] : told[label].map((value) => value * scale);
      return { label, words, color, dash, points };
    };
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

function bounds(points) {
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

// -- all of them --

const LOSSES = new Set(["preempted", "unhealthy", "boot_failed", "expired"]);

// Of very many events those that are losses, and of these the last.
function marked(events) {
  return events.length <= MAX_MARKS ? events : events.filter(({ kind }) => kind === "lost").slice(-MAX_MARKS);
}

// What happened to slices, oldest first, of what the fleet's own answer says.
function eventsOf(fleet, model, fromS, untilS) {
  const events = [];
  const add = (row, kind, atS, words, reason) => {
    if (atS >= fromS && atS < untilS) events.push({ kind, atS, name: row.name ?? "no slice", words, reason });
  };
  const isWanted = (row) => model === "" || row.model === model;
  for (const row of [...fleet.slices, ...fleet.ended].filter(isWanted)) {
    for (const { state, at_s: atS, reason } of row.history) {
      if (state === "ready") add(row, "ready", atS, "ready", "");
      else if (state === "draining") add(row, "leaving", atS, "draining", reason);
      else if (state === "gone" && LOSSES.has(row.cause)) add(row, "lost", atS, row.cause.replace("_", " "), reason);
    }
  }
  return events.sort((a, b) => a.atS - b.atS);
}

export class Charts {
  // `changed` is called when the reader has chosen another range.
  constructor(root, changed) {
    this.root = root;
    this.part = (name) => root.querySelector(`[data-part="${name}"]`);
    this.range = "5m";
    this.model = "";
    this.history = new Past(RANGES["5m"].stepS, "");
    this.past = this.history.combined(0);
    this.position = null; // of the cursor, from the left; null: none
    this.events = [];
    this.colors = new Map();
    this.tag = null;
    this.isKept = false; // whether the gateway keeps a history at all
    const template = document.getElementById("chart-template").content.firstElementChild;
    this.charts = CHARTS.map((kind) => new Chart(kind, this.part("charts").appendChild(template.cloneNode(true)), this));
    for (const input of root.querySelectorAll("input[name=range]"))
      input.addEventListener("change", () => {
        this.choose(input.value, this.model);
        changed();
      });
    this.part("numbers").addEventListener("toggle", () => this.fillNumbers());
    new ResizeObserver(() => this.resize()).observe(this.part("charts"));
  }

  get isOff() {
    return this.range === "off";
  }

  // A colour for each compute class, the same in every chart and as long as the page is open.
  colorOf(name) {
    if (!this.colors.has(name)) this.colors.set(name, this.colors.size % NUM_COLORS);
    return this.colors.get(name);
  }

  choose(range, model) {
    const isRange = range in RANGES || range === "off";
    this.range = isRange ? range : "5m";
    this.model = model;
    for (const input of this.root.querySelectorAll("input[name=range]")) input.checked = input.value === this.range;
    this.root.classList.toggle("off", this.isOff);
    this.tag = null;
    this.position = null;
    if (!this.isOff) this.history = new Past(RANGES[this.range].stepS, model);
  }

  // What to ask for; the answer goes to `take` with the same history, unless another is wanted by then.
  get question() {
    return { history: this.history, query: this.history.query, tag: this.tag };
  }

  take({ history }, answer, tag) {
    if (history !== this.history) return;
    this.isKept = true;
    this.tag = tag;
    if (answer === null) history.heard(tag.slice(1).split("-")[0], Date.now());
    else history.take(answer, Date.now());
  }

  // The gateway keeps no history, or not of this model.
  lack({ history }) {
    if (history === this.history) this.isKept = false;
  }

  show(fleet) {
    this.root.hidden = !this.isOff && (!this.isKept || this.history.isEmpty);
    // Of another range or model the charts stay as they are until it has been told.
    if (this.root.hidden || this.isOff || this.history.numPoints === 0) return;
    const before = this.past;
    const past = (this.past = this.history.combined(Date.now()));
    // The cursor stays on its time.
    if (this.position !== null) {
      this.position -= past.until - before.until;
      if (this.position < 0 || before.stepS !== past.stepS) this.position = null;
    }
    const [fromS, untilS] = [past.from * past.stepS, past.until * past.stepS];
    this.events = eventsOf(fleet, this.model, fromS, untilS);
    this.measure(); // before anything is written
    for (const chart of this.charts) chart.show(past);
    this.tell();
    this.fillNumbers();
  }

  measure() {
    for (const chart of this.charts) {
      if (chart.root.hidden) continue;
      chart.width = chart.plot.clientWidth;
      chart.height = chart.plot.clientHeight;
    }
  }

  resize() {
    if (this.isOff || this.past.size === 0) return;
    this.measure();
    for (const chart of this.charts) chart.show(this.past);
  }

  point(position) {
    const { size } = this.past;
    if (size === 0) return;
    const wanted = position === null ? null : Math.max(0, Math.min(size - 1, position));
    if (wanted === this.position) return;
    this.position = wanted;
    for (const chart of this.charts) if (!chart.root.hidden) chart.read();
    this.tell();
  }

  timeAt(position) {
    const slot = this.past.from + (position ?? this.past.size - 1);
    return clock(slot * this.past.stepS, true);
  }

  tell() {
    say(this.part("time"), this.past.size === 0 ? "" : this.position === null ? `now, ${this.timeAt(null)}` : `at ${this.timeAt(this.position)}`);
    this.root.classList.toggle("pointed", this.position !== null);
    const known = [...this.past.gateways];
    const names = known.map(([id]) => id).join(", ");
    const alone = `As gateway ${names} saw it, up since ${clock(known[0]?.[1].startedAtS ?? 0, true)}.`;
    const together = `Of ${known.length} gateways together (${names}); of latencies the highest among them.`;
    const numLeftOut = Math.max(0, ...known.map(([, { numLeftOut }]) => numLeftOut));
    const left = numLeftOut ? ` ${numLeftOut} series are not kept: too many models and compute classes.` : "";
    say(this.part("gateways"), known.length === 0 ? "" : (known.length === 1 ? alone : together) + left);
    this.tellEvents();
  }

  // The last ones, or those around the cursor.
  tellEvents() {
    let events = this.events;
    if (this.position !== null) {
      const atS = (this.past.from + this.position) * this.past.stepS;
      const reachS = this.past.size * this.past.stepS * 0.02;
      events = events.filter((event) => Math.abs(event.atS - atS) <= reachS);
    }
    const shown = events.slice(-MAX_EVENTS).reverse();
    this.eventNodes ??= [];
    keep(this.eventNodes, shown.length, () => {
      const node = document.createElement("li");
      for (const tag of ["time", "b", "span"]) node.append(document.createElement(tag), " ");
      this.part("events").append(node);
      return node;
    });
    shown.forEach((event, position) => {
      const node = this.eventNodes[position];
      if (node.className !== `mark-${event.kind}`) node.className = `mark-${event.kind}`;
      const [time, name, reason] = node.children;
      say(time, clock(event.atS, true));
      say(name, `${event.name} ${event.words}`);
      say(reason, event.reason);
      if (node.title !== event.reason) node.title = event.reason;
    });
    const quiet = this.position === null ? "No slice became ready, drained or was lost in this time." : "Nothing happened to a slice at this time.";
    say(this.part("no-events"), shown.length ? "" : quiet);
  }

  // The same as a table, for whoever does not read charts; filled only while it is open.
  fillNumbers() {
    if (!this.part("numbers").open || this.isOff) return;
    const rows = this.charts.filter(({ root }) => !root.hidden).flatMap(({ kind, lines }) =>
      lines.map(({ words, points }) => {
        const { lowest, highest, mean } = bounds(points);
        const cell = (value) => (value === null || Number.isNaN(value) ? "–" : kind.format(value));
        return [`${kind.title}, ${kind.unit}: ${words}`, ...[points.at(-1), lowest, mean, highest].map(cell)];
      }),
    );
    this.rowNodes ??= [];
    keep(this.rowNodes, rows.length, () => {
      const node = this.part("rows").insertRow();
      const head = node.appendChild(document.createElement("th"));
      head.scope = "row";
      for (let each = 0; each < 4; each++) node.insertCell();
      return node;
    });
    rows.forEach((cells, row) => cells.forEach((text, column) => say(this.rowNodes[row].cells[column], text)));
  }
}
