// The page of the fleet: asks the gateway every two seconds and shows its last answer.
//
// What it shows are other programs' words: all of it goes in as textContent, never as markup. Items
// keep their place in the document and are changed where they differ, so that a large fleet costs
// little and a reader's focus and open details stay.
"use strict";

import { Charts } from "./charts.js";
import { KeyedList, at, count, setData, setHidden, setText } from "./elements.js";
import { Tenants } from "./tenants.js";

const POLL_MS = 2000;
const ANSWER_MS = 5000; // a gateway that takes longer is said not to answer
const KEY_ITEM = "slicewise.api-key";
const NUM_ENDED_SHOWN = 12;
const STATES = ["requested", "provisioning", "reserved", "probing", "loading", "ready", "draining"];
const WAITING = new Set(["requested", "provisioning"]);

const inOrder = new Intl.Collator("en", { numeric: true }).compare;

// -- words --

function duration(seconds) {
  if (seconds === null) return "";
  const s = Math.floor(seconds);
  const two = (number) => String(number).padStart(2, "0");
  if (s < 60) return `${s}s`;
  if (s < 3600) return `${Math.floor(s / 60)}m${two(s % 60)}s`;
  if (s < 86400) return `${Math.floor(s / 3600)}h${two(Math.floor((s % 3600) / 60))}m`;
  return `${Math.floor(s / 86400)}d${two(Math.floor((s % 86400) / 3600))}h`;
}

const lifetime = (row) => Object.values(row.seconds_by_state).reduce((sum, s) => sum + s, 0);
const keyOf = (row) => row.replica_id ?? row.engine_id;

function nameOf(row) {
  if (row.name !== null) return row.name;
  return WAITING.has(row.state) ? "no slice yet" : keyOf(row);
}

function shapeOf(row) {
  const shape = [row.generation, row.topology].filter((word) => word !== null).join(" ");
  if (row.hosts.length === 0) return shape || "no slice: this machine";
  const chips = [...new Set(row.hosts.map((host) => host.num_chips))];
  const each = chips.length === 1 ? ` × ${count(chips[0], "chip")}` : `, ${row.num_chips} chips`;
  return [shape, count(row.hosts.length, "host") + each].filter(Boolean).join(" · ");
}

// -- one slice --

function fillSlice(item, row) {
  const { root, parts } = item;
  const isWaiting = WAITING.has(row.state);
  setData(root, "state", row.state);
  root.classList.toggle("waiting", isWaiting);
  setText(parts.name, nameOf(row));
  parts.name.title = row.replica_id ?? "";
  setText(parts.state, row.state);
  const age = duration(isWaiting ? lifetime(row) : row.since_s);
  setText(parts.since, age && `for ${age}`);
  setText(parts.deadline, deadlineWords(row));
  setText(parts.shape, isWaiting ? `wants ${shapeOf(row)}` : shapeOf(row));
  setText(parts.model, row.model);
  setText(parts.in_flight, row.in_flight === null ? "–" : String(row.in_flight));
  const usage = row.kv_usage_ratio;
  setText(parts.kv, usage === null ? "–" : `${Math.round(usage * 100)}%`);
  parts.gauge.classList.toggle("unknown", usage === null);
  parts.usage.style.width = `${Math.min(1, usage ?? 0) * 100}%`;
  setText(parts.reason, row.reason);
  fillHosts(item, row.hosts);
  fillLife(item, row);
}

function deadlineWords(row) {
  if (row.state !== "draining") return "";
  return row.drain_deadline_s === null ? "" : `gone in ${duration(row.drain_deadline_s)}`;
}

// One element per host; its chips are drawn by the style sheet.
function fillHosts(item, hosts) {
  const wanted = hosts.map((host) => host.num_chips).join();
  if (item.hosts === wanted) return;
  item.hosts = wanted;
  item.parts.hosts.replaceChildren(
    ...hosts.map((host) => {
      const node = document.createElement("span");
      node.style.setProperty("--chips", String(host.num_chips));
      return node;
    }),
  );
}

// The summary's bar, and the list below it as far as a reader has opened it.
function fillLife(item, row) {
  const { parts } = item;
  item.row = row;
  setHidden(parts.details, row.history.length === 0);
  setText(parts.lived, `history, ${duration(lifetime(row))}`);
  const phases = row.history.filter((phase) => phase.state !== "gone");
  while (parts.bar.children.length > phases.length) parts.bar.lastElementChild.remove();
  while (parts.bar.children.length < phases.length) parts.bar.append(document.createElement("i"));
  phases.forEach((phase, position) => {
    setData(parts.bar.children[position], "state", phase.state);
    // Below 1 in all, the bar would not be filled.
    parts.bar.children[position].style.flexGrow = Math.max(1, phase.for_s);
  });
  if (item.phases === undefined) {
    item.phases = new KeyedList(parts.history, "phase-template", fillPhase);
    parts.details.addEventListener("toggle", () => fillDetails(item));
  }
  fillDetails(item);
}

function fillDetails(item) {
  if (!item.parts.details.open) return;
  item.phases.show(item.row.history, (_, position) => position);
  const hosts = item.row.hosts.map(
    (host) => `host ${host.worker_id}: ${host.address}, ${count(host.num_chips, "chip")}, node ${host.node_id}`,
  );
  if (item.hostLines === hosts.join("\n")) return;
  item.hostLines = hosts.join("\n");
  item.parts.host_list.replaceChildren(
    ...hosts.map((line) => {
      const node = document.createElement("li");
      node.textContent = node.title = line;
      return node;
    }),
  );
}

function fillPhase({ root, parts }, phase) {
  const entered = new Date(phase.at_s * 1000);
  setData(root, "state", phase.state);
  setText(parts.state, phase.state);
  setText(parts.for, phase.state === "gone" ? "" : duration(phase.for_s));
  parts.at.dateTime = entered.toISOString();
  setText(parts.at, entered.toLocaleTimeString([], { hour12: false }));
  setText(parts.reason, phase.reason);
}

// -- the whole fleet --

const lists = {
  counts: new KeyedList(at("counts"), "count-template", ({ root, parts }, [state, number]) => {
    setData(root, "state", state);
    root.classList.toggle("none", number === 0);
    setText(parts.number, String(number));
    setText(parts.word, state);
  }),
  models: new KeyedList(at("models"), "model-template", ({ parts }, model) => {
    setText(parts.name, model.name);
    setText(parts.in_flight, `${count(model.in_flight, "request")} in flight`);
    setText(parts.waiting, model.waiting > 0 ? `, ${model.waiting} waiting for an engine` : "");
    parts.waiting.classList.toggle("wanting", model.waiting > 0);
  }),
  classes: new KeyedList(at("classes"), "class-template", fillClass),
  ended: new KeyedList(at("ended"), "ended-template", fillEnded),
  plans: new KeyedList(at("plans"), "plan-template", fillPlan),
  alerts: new KeyedList(at("plans-alerts"), "alert-template", fillAlert),
};

function fillAlert({ root }, words) {
  setText(root, words);
}

// The plan of one model: what is to be, why, what has just changed, what is wanted in vain.
function fillPlan(item, plan) {
  const { parts } = item;
  setText(parts.name, plan.model);
  const targets = Object.entries(plan.targets).sort((a, b) => inOrder(a[0], b[0]));
  setText(parts.targets, targets.map(([name, number]) => `${name} ${number}`).join(" · "));
  const note = [`decided ${duration(plan.age_s)} ago`];
  if (plan.demand_slices !== null) note.unshift(`need ${count(plan.demand_slices, "slice")}`);
  if (plan.next_slice_in_s !== null) note.push(`next slice in ${duration(plan.next_slice_in_s)}`);
  if (plan.changed_s !== null) note.push(`last change ${duration(plan.changed_s)} ago`);
  if (plan.num_failures > 0) note.push(count(plan.num_failures, "failed decision"));
  setText(parts.note, note.join(" · "));
  setText(parts.arithmetic, plan.arithmetic);
  item.alerts ??= new KeyedList(parts.alerts, "alert-template", fillAlert);
  item.alerts.show(plan.alerts, (_, position) => position);
  item.reasons ??= new KeyedList(parts.reasons, "reason-template", fillReason);
  const reasons = [...plan.changes.map((change) => ["", change]), ...plan.refusals.map((change) => ["refused: ", change])];
  item.reasons.show(reasons, (_, position) => position);
}

function fillReason({ parts }, [kind, change]) {
  const sign = change.delta > 0 ? "+" : "";
  setText(parts.what, `${kind}${change.compute_class || "all classes"} ${sign}${change.delta}`);
  setText(parts.why, change.reason);
}

function showPlans(autoscaling, model) {
  setHidden(at("plans-section"), autoscaling === null);
  if (autoscaling === null) return;
  setText(at("plans-note"), autoscaling.age_s === null ? "" : `as planned ${duration(autoscaling.age_s)} ago`);
  lists.alerts.show(autoscaling.alerts, (_, position) => position);
  lists.plans.show(autoscaling.models.filter((plan) => model === "" || plan.model === model), (plan) => plan.model);
}

function fillClass(item, [name, rows]) {
  const ready = rows.filter((row) => row.state === "ready").length;
  const chips = rows.reduce((sum, row) => sum + row.num_chips, 0);
  const held = chips > 0 ? `, ${count(chips, "chip")} held` : "";
  setText(item.parts.name, name);
  setText(item.parts.note, `${ready} of ${rows.length} ready${held}`);
  item.tiles ??= new KeyedList(item.parts.tiles, "slice-template", fillSlice);
  item.tiles.show(rows, keyOf);
}

function fillEnded(item, row) {
  const { root, parts } = item;
  setData(root, "cause", row.cause);
  setText(parts.state, row.cause.replace("_", " "));
  setText(parts.name, row.name ?? `no slice (${row.replica_id})`);
  setText(parts.shape, [row.compute_class, row.generation, row.topology, row.model].filter(Boolean).join(" · "));
  setText(parts.since, `${duration(row.since_s)} ago`);
  setText(parts.reason, row.reason);
  fillLife(item, row);
}

// By compute class and name; what has no name yet comes last. A slice keeps its place on the map.
function byClass(slices) {
  const classes = new Map();
  const place = (row) => `${WAITING.has(row.state) ? 1 : 0}${row.name ?? keyOf(row)}`;
  for (const row of [...slices].sort((a, b) => inOrder(place(a), place(b)))) {
    if (!classes.has(row.compute_class)) classes.set(row.compute_class, []);
    classes.get(row.compute_class).push(row);
  }
  return [...classes].sort((a, b) => inOrder(a[0], b[0]));
}

function show(fleet) {
  const model = at("model").value;
  const ofModel = (row) => model === "" || row.model === model;
  const slices = fleet.slices.filter(ofModel);
  const ended = fleet.ended.filter(ofModel);
  const number = (state) => slices.filter((row) => row.state === state).length;
  lists.counts.show(STATES.map((state) => [state, number(state)]), ([state]) => state);
  const chips = slices.reduce((sum, row) => sum + row.num_chips, 0);
  setText(at("total"), `${count(slices.length, "replica")}, ${count(chips, "chip")} held`);
  lists.models.show(fleet.models.filter(({ name }) => model === "" || name === model), ({ name }) => name);
  showPlans(fleet.autoscaling, model);
  tenants.show(fleet, model);
  charts.show(fleet);
  lists.classes.show(byClass(slices), ([name]) => name);
  showEnded(ended);
  setHidden(at("empty"), slices.length > 0);
  setHidden(at("fleet"), false);
  setText(at("gateway"), `gateway ${fleet.gateway.id}, up ${duration(fleet.gateway.uptime_s)}`);
  document.title = `${number("ready")}/${slices.length} ready · Slicewise fleet`;
}

function showEnded(ended) {
  const numShown = page.areAllEndedShown ? ended.length : NUM_ENDED_SHOWN;
  lists.ended.show(ended.slice(0, numShown), (row) => `${keyOf(row)} ${row.history[0].at_s}`);
  setText(at("ended-note"), ended.length === 0 ? "None since the directory started." : "");
  setText(at("more"), `show all ${ended.length}`);
  setHidden(at("more"), ended.length <= numShown);
}

function offerModels(fleet) {
  const names = new Set([...fleet.models, ...fleet.slices].map((row) => row.model ?? row.name));
  if (page.wantedModel) names.add(page.wantedModel);
  const wanted = [...names].sort(inOrder);
  const select = at("model");
  if ([...select.options].slice(1).map((option) => option.value).join("\n") === wanted.join("\n")) return;
  select.replaceChildren(select.options[0], ...wanted.map((name) => new Option(name, name)));
  select.value = page.wantedModel;
}

// -- asking --

const page = {
  fleet: null, // the last answer
  answeredAtMs: 0,
  timer: 0,
  isAsking: false,
  isHurried: false, // something else is wanted than what was asked for
  isClosed: false, // a key is wanted: nothing is asked or shown before there is one
  areAllEndedShown: false,
  wantedModel: "",
};

const tenants = new Tenants();
const charts = new Charts(at("past"), () => {
  remember();
  if (page.fleet !== null) charts.show(page.fleet);
  ask();
});

class KeyWantedError extends Error {}
class NoAnswerError extends Error {}

async function get(path, moreHeaders) {
  const key = sessionStorage.getItem(KEY_ITEM);
  const headers = { accept: "application/json", ...moreHeaders };
  if (key !== null) headers.authorization = `Bearer ${key}`;
  const signal = AbortSignal.timeout(ANSWER_MS);
  try {
    const response = await fetch(path, { headers, signal, cache: "no-store", redirect: "error" });
    return { response, body: response.ok ? await response.json() : null };
  } catch (error) {
    const isLate = error.name === "TimeoutError";
    throw new NoAnswerError(isLate ? `none within ${ANSWER_MS / 1000} s` : "not reachable");
  }
}

async function fetchFleet() {
  const { response, body } = await get("fleet");
  if (response.status === 401) throw new KeyWantedError();
  if (!response.ok) throw new NoAnswerError(`HTTP ${response.status}`);
  return body;
}

// What is new in the history. The map can do without: the dashboard may be away while the gateway
// serves. What is wrong with the gateway itself, the fleet's answer says.
async function fetchPast() {
  if (charts.isOff) return;
  const question = charts.question;
  try {
    const headers = question.tag === null ? {} : { "if-none-match": question.tag };
    const { response, body } = await get(`fleet/history?${question.query}`, headers);
    if (response.ok || response.status === 304) charts.take(question, body, response.headers.get("etag"));
    else if (response.status === 404) charts.lack(question);
    else if (response.status === 503) charts.fail(question, "The dashboard does not answer: the charts stand still.");
  } catch (error) {
    if (!(error instanceof NoAnswerError)) throw error;
  }
}

async function ask() {
  clearTimeout(page.timer);
  page.isHurried = page.isAsking;
  if (page.isAsking || document.hidden) return;
  page.isAsking = true;
  try {
    const [fleet] = await Promise.all([fetchFleet(), fetchPast()]);
    if (page.isClosed) return; // the key was taken away while the answer was on its way
    page.fleet = fleet;
    page.answeredAtMs = Date.now();
    openDoor();
    offerModels(fleet);
    show(fleet);
    tell("live", "live");
  } catch (error) {
    if (error instanceof KeyWantedError) {
      closeDoor();
      return;
    }
    if (!(error instanceof NoAnswerError)) console.error(error);
    const why = error instanceof NoAnswerError ? error.message : "not one that this page can read";
    tell("stale", `no answer from the gateway (${why})`);
  } finally {
    page.isAsking = false;
  }
  page.timer = setTimeout(ask, page.isHurried ? 0 : POLL_MS);
}

// Spoken by screen readers, so changed only when the link itself changes.
function tell(link, words) {
  setData(document.body, "link", link);
  setText(at("link"), words);
  showAge();
}

function showAge() {
  const seconds = (Date.now() - page.answeredAtMs) / 1000;
  const isOld = document.body.dataset.link === "stale" && page.answeredAtMs > 0;
  setText(at("age"), isOld ? `· shown is the fleet of ${duration(seconds)} ago` : "");
}

// -- the key --

function closeDoor() {
  const wasTried = sessionStorage.getItem(KEY_ITEM) !== null;
  sessionStorage.removeItem(KEY_ITEM);
  clearTimeout(page.timer);
  page.fleet = null;
  charts.choose(charts.range, charts.model);
  page.isClosed = true;
  setText(at("key-problem"), wasTried ? "The gateway does not accept this key." : "");
  setHidden(at("fleet"), true);
  setHidden(at("forget"), true);
  setHidden(at("door"), false);
  tell("closed", "waiting for a key");
  at("key").focus();
}

function openDoor() {
  setHidden(at("door"), true);
  setText(at("key-problem"), "");
  setHidden(at("forget"), sessionStorage.getItem(KEY_ITEM) === null);
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = at("key").value.trim();
  at("key").value = "";
  if (!/^[\x21-\x7e]+$/.test(key)) {
    setText(at("key-problem"), "A key has no spaces and no other than ASCII characters.");
    return;
  }
  sessionStorage.setItem(KEY_ITEM, key);
  page.isClosed = false;
  ask();
});

at("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY_ITEM);
  closeDoor();
});

// -- what is shown: kept in the address, so that it can be passed on --

function applyAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  page.wantedModel = wanted.get("model") ?? "";
  at("compact").checked = wanted.has("compact");
  charts.choose(wanted.get("range") ?? "5m", page.wantedModel);
  document.body.classList.toggle("compact", at("compact").checked);
}

function remember() {
  const wanted = new URLSearchParams();
  if (page.wantedModel) wanted.set("model", page.wantedModel);
  if (at("compact").checked) wanted.set("compact", "");
  if (charts.range !== "5m") wanted.set("range", charts.range);
  history.replaceState(null, "", wanted.size ? `#${wanted}` : location.pathname + location.search);
}

at("view").addEventListener("change", () => {
  page.wantedModel = at("model").value;
  if (charts.model !== page.wantedModel) charts.choose(charts.range, page.wantedModel);
  remember();
  document.body.classList.toggle("compact", at("compact").checked);
  if (page.fleet !== null) show(page.fleet);
  ask();
});
at("view").addEventListener("submit", (event) => event.preventDefault());

at("more").addEventListener("click", () => {
  page.areAllEndedShown = true;
  show(page.fleet);
});

document.addEventListener("visibilitychange", () => {
  if (!page.isClosed) ask();
});

applyAddress();
setInterval(showAge, 1000);
ask();
