// What the charts show: of which series, in which words, units and colours.
"use strict";

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
const CLOCKS = [[], ["second"]].map((more) =>
  new Intl.DateTimeFormat([], Object.fromEntries([["hourCycle", "h23"], ...["hour", "minute", ...more].map((part) => [part, "2-digit"])])));
export const clock = (atS, withSeconds = false) => CLOCKS[Number(withSeconds)].format(atS * 1000);

// `series` names one of the gateway's; `labels` are its lines from the bottom up, with their words and
// colours. Without `labels` each label is a compute class. Of `isCount` the numbers of all steps are
// added up. `top` is the least that an axis reaches, `isWhole` of what has no parts; `always` is a label that
// is shown though it is nothing, `isOptional` a chart that is not. The axis of `isSpiky` leaves out what is
// far above the rest: with the first tokens after a pause their price begins anywhere.

export const CHARTS = [
  {
    title: "Requests", unit: "per second, of the last 10 s", series: "requests_per_s", form: "stack", top: 1, axisUnit: "/s",
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
    title: "Resumes and losses", unit: "number; below: in all", series: "losses", form: "bars", top: 4, isWhole: true,
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
      compiling: ["compiling", "blue", "dotted"], loading: ["loading", "blue"], probing: ["probing", "sky"],
      lost: ["lost", "red"],
      booting: ["nobody's, booting", "sky", "dashed"], free: ["nobody's, free", "grey", "dashed"],
      leased: ["taken, not reported", "orange", "dashed"],
      quarantined: ["in quarantine", "red", "dotted"], condemned: ["condemned", "red", "dashed"],
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
    labels: { "": ["slices, by their price", "teal"] },
    format: dollars, axisFormat: (value) => `$${compact(value)}`, empty: "No compute class has a price.",
  },
  {
    title: "Price of output", unit: "USD per million tokens", series: "usd_per_million_tokens",
    form: "lines", top: 0.1, isSpiky: true, labels: { "": ["idle and starting chips too", "teal"] },
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
