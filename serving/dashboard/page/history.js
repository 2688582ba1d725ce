// What gateways saw in the last minutes: asked for piece by piece, kept in buffers of one size, and
// put together. Times are slots: whole numbers of steps since the epoch.
"use strict";

// A gateway that was not heard of for so long holds nothing up.
const LIVE_MS = 20_000;
// A gateway takes no longer list of what its reader has.
const MAX_GATEWAYS = 32;

// How the points of several gateways become one. Each gateway sees its own requests, and all see the
// same engines and slices. Of two latencies the higher is shown: that of all requests lies between
// them. Prices of the same dollars over different tokens add up as resistors in parallel do.
const sum = (a, b) => a + b;
const price = (a, b) => 1 / (1 / a + 1 / b);
const COMBINE = {
  requests_per_s: sum,
  output_tokens_per_s: sum,
  sequences: sum,
  losses: sum,
  usd_per_million_tokens: price,
};

// The history at one step, of one model or of all.
export class Past {
  constructor(stepS, model) {
    this.stepS = stepS;
    this.model = model;
    this.numPoints = 0;
    this.gateways = new Map();
  }

  // Whether gateways have answered, and have not looked at anything yet.
  get isEmpty() {
    const all = [...this.gateways.values()];
    return all.length > 0 && all.every(({ until }) => until === 0);
  }

  // Only what is new, of every gateway that may answer.
  get query() {
    const wanted = new URLSearchParams({ step: this.stepS });
    if (this.model) wanted.set("model", this.model);
    for (const [id, gateway] of this.gateways) wanted.append("since", `${id}.${gateway.until}`);
    return wanted.toString();
  }

  take(answer, nowMs) {
    this.numPoints = answer.num_points;
    const id = answer.gateway.id;
    let gateway = this.gateways.get(id);
    if (gateway === undefined) {
      gateway = { until: answer.from, series: new Map() };
      this.gateways.set(id, gateway);
    }
    gateway.heardAtMs = nowMs;
    gateway.startedAtS = answer.gateway.started_at_s;
    gateway.numLeftOut = answer.num_left_out;
    this.fill(gateway, answer);
    this.forget();
  }

  // The gateway said that there is nothing new.
  heard(id, nowMs) {
    const gateway = this.gateways.get(id);
    if (gateway !== undefined) gateway.heardAtMs = nowMs;
  }

  fill(gateway, answer) {
    const size = this.numPoints;
    const begin = Math.max(gateway.until, answer.until - size);
    for (const { points } of gateway.series.values())
      for (let slot = begin; slot < answer.until; slot++) points[slot % size] = NaN;
    for (const [name, labels] of Object.entries(answer.series)) {
      for (const [label, values] of Object.entries(labels)) {
        const key = `${name}/${label}`;
        if (!gateway.series.has(key)) {
          if (values.every((value) => value === null)) continue;
          gateway.series.set(key, { name, label, points: new Float64Array(size).fill(NaN), seen: 0 });
        }
        const series = gateway.series.get(key);
        values.forEach((value, position) => {
          if (value === null) return;
          series.seen = answer.from + position;
          series.points[series.seen % size] = value;
        });
      }
    }
    gateway.until = answer.until;
    for (const [key, { seen }] of gateway.series)
      if (seen < gateway.until - size) gateway.series.delete(key);
  }

  forget() {
    const newest = Math.max(...[...this.gateways.values()].map(({ until }) => until));
    for (const [id, { until }] of this.gateways)
      if (until < newest - this.numPoints) this.gateways.delete(id);
    while (this.gateways.size > MAX_GATEWAYS) {
      const byHeard = [...this.gateways].sort((a, b) => a[1].heardAtMs - b[1].heardAtMs);
      this.gateways.delete(byHeard[0][0]);
    }
  }

  // All gateways as one: `series` by name and label, each a Float64Array from slot `from` to `until`.
  // It ends where every gateway that is there has told.
  combined(nowMs) {
    const all = [...this.gateways.values()].filter(({ until }) => until > 0);
    const live = all.filter(({ heardAtMs }) => nowMs - heardAtMs < LIVE_MS);
    const size = this.numPoints;
    const until = all.length ? Math.min(...(live.length ? live : all).map((each) => each.until)) : 0;
    const series = {};
    for (const gateway of all) {
      for (const { name, label, points } of gateway.series.values()) {
        const labels = (series[name] ??= {});
        const into = (labels[label] ??= new Float64Array(size).fill(NaN));
        addTo(into, points, until, gateway.until, COMBINE[name] ?? Math.max);
      }
    }
    return { from: until - size, until, size, stepS: this.stepS, series, gateways: this.gateways };
  }
}

function addTo(into, points, until, known, combine) {
  const size = into.length;
  // Of a gateway that is ahead the oldest points are written over by those that are not shown yet.
  for (let slot = Math.max(until, known) - size; slot < Math.min(until, known); slot++) {
    const value = points[((slot % size) + size) % size];
    if (Number.isNaN(value)) continue;
    const position = slot - (until - size);
    into[position] = Number.isNaN(into[position]) ? value : combine(into[position], value);
  }
}
