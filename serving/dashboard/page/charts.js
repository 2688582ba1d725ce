// The charts above the slices: the last minutes of the fleet, and what happened to slices.
//
// All charts share one cursor: pointing at a time in one shows the values of that time in all.
"use strict";

import { Chart, RANGES, bounds, keep, say } from "./chart.js";
import { CHARTS, clock } from "./kinds.js";
import { Past } from "./history.js";

const MAX_EVENTS = 3;
const NUM_COLORS = 6;

const LOSSES = new Set(["preempted", "unhealthy", "boot_failed", "replica_lost", "expired"]);

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
    this.past = this.history; // as it is drawn
    this.position = null; // of the cursor, from the left; null: none
    this.events = [];
    this.colors = new Map();
    this.tag = null;
    this.isKept = false; // whether there is a history of this model
    this.problem = ""; // why there is none now
    const template = document.getElementById("chart-template").content.firstElementChild;
    this.charts = CHARTS.map((kind) => new Chart(kind, this.part("charts").appendChild(template.cloneNode(true)), this));
    for (const input of root.querySelectorAll("input[name=range]"))
      input.addEventListener("change", () => {
        this.choose(input.value, this.model);
        changed();
      });
    this.part("numbers").addEventListener("toggle", () => this.fillNumbers());
    new ResizeObserver(() => this.resize()).observe(this.part("charts"));
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => this.charts.forEach((chart) => chart.drawn?.redraw(false)));
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
    this.problem = "";
    if (answer !== null) history.take(answer);
  }

  // No gateway has reported of this model.
  lack({ history }) {
    if (history === this.history) this.isKept = false;
  }

  // The dashboard does not answer; what is drawn is what it said before.
  fail({ history }, problem) {
    if (history === this.history) this.problem = problem;
  }

  show(fleet) {
    this.root.hidden = !this.isOff && (!this.isKept || this.history.isEmpty);
    // Of another range or model the charts stay as they are until it has been told.
    if (this.root.hidden || this.isOff || this.history.isEmpty) return;
    const past = (this.past = this.history);
    // The cursor stays on its time.
    if (this.position !== null) {
      this.position -= past.until - this.until;
      if (this.position < 0) this.position = null;
    }
    this.until = past.until;
    const [fromS, untilS] = [past.from * past.stepS, past.until * past.stepS];
    this.events = eventsOf(fleet, this.model, fromS, untilS);
    for (const chart of this.charts) chart.show(past);
    this.tell();
    this.fillNumbers();
  }

  resize() {
    if (this.isOff || this.past.size === 0) return;
    for (const chart of this.charts) chart.resize();
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
    const { gateways, numLeftOut, startedAtS } = this.past;
    const whose = gateways.length === 1 ? `Of gateway ${gateways[0]}` : `Of ${gateways.length} gateways together (${gateways.join(", ")})`;
    const left = numLeftOut ? ` ${numLeftOut} series are not kept: too many models and compute classes.` : "";
    say(this.part("gateways"), this.problem || `${whose}, kept since ${clock(startedAtS, true)}.${left}`);
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
