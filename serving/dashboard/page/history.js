// The points of the last minutes: asked for piece by piece and kept in buffers of one size. Times are
// slots: whole numbers of steps since the epoch.
"use strict";

// The history at one step, of one model or of all.
export class Past {
  constructor(stepS, model) {
    this.stepS = stepS;
    this.model = model;
    this.forget(null);
  }

  // Nothing is known of another dashboard: the one before has ended, and its points with it.
  forget(dashboardId) {
    this.dashboardId = dashboardId;
    this.gateways = [];
    this.until = 0;
    this.size = 0; // points that the dashboard keeps
    this.startedAtS = 0;
    this.numLeftOut = 0;
    this.series = {}; // by name and label, a number for each slot from `from` on; NaN: none
  }

  get from() {
    return this.until - this.size;
  }

  // Whether no gateway has reported yet.
  get isEmpty() {
    return this.until === 0;
  }

  // Only what is new.
  get query() {
    const wanted = new URLSearchParams({ step: this.stepS });
    if (this.model) wanted.set("model", this.model);
    if (this.until > 0) wanted.set("since", `${this.dashboardId}.${this.until}`);
    return wanted.toString();
  }

  take(answer) {
    if (answer.dashboard.id !== this.dashboardId) this.forget(answer.dashboard.id);
    this.startedAtS = answer.dashboard.started_at_s;
    this.gateways = answer.gateways;
    this.numLeftOut = answer.num_left_out;
    const moved = Math.min(answer.num_points, answer.until - this.until);
    this.size = answer.num_points;
    this.until = answer.until;
    const before = this.series;
    this.series = {};
    for (const name of new Set([...Object.keys(before), ...Object.keys(answer.series)]))
      for (const label of new Set([...Object.keys(before[name] ?? {}), ...Object.keys(answer.series[name] ?? {})]))
        this.append(name, label, before[name]?.[label], answer.series[name]?.[label] ?? [], moved);
  }

  append(name, label, known, values, moved) {
    const points = new Float64Array(this.size).fill(NaN);
    if (known !== undefined) points.set(known.subarray(moved));
    const begin = this.size - values.length;
    values.forEach((value, position) => {
      if (value !== null) points[begin + position] = value;
    });
    if (points.every(Number.isNaN)) return;
    (this.series[name] ??= {})[label] = points;
  }
}
