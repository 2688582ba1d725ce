// What waits of each tenant at this gateway, and what it has used of its quotas over all gateways.
"use strict";

import { KeyedList, at, count, setData, setHidden, setText } from "./elements.js";

const NUM_SHOWN = 6;
const NUM_QUOTAS_SHOWN = 4;
const CLASSES = ["interactive", "standard", "batch"]; // in the order in which engines get them
const NEAR_RATIO = 0.8;

const inOrder = new Intl.Collator("en", { numeric: true }).compare;
const digits = new Intl.NumberFormat("en", { maximumFractionDigits: 4 });
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const ratioOf = (row) => row.used / row.limit;
const isUsed = (row) => row.used > 0 || row.refused > 0;

// Everything that is told of each tenant. An older gateway tells nothing of some of it.
function byTenant(models, quotas) {
  const tenants = new Map();
  const of = (name) => {
    if (!tenants.has(name)) tenants.set(name, { name, lines: new Map(), quotas: [] });
    return tenants.get(name);
  };
  for (const line of models.flatMap((model) => model.line_tenants ?? [])) {
    const { lines } = of(line.tenant);
    lines.set(line.service_class, (lines.get(line.service_class) ?? 0) + line.waiting);
  }
  for (const row of quotas) of(row.tenant).quotas.push(row);
  return [...tenants.values()].map((tenant) => ({ ...tenant, waiting: sum([...tenant.lines.values()]) }));
}

// First those that have used most of a quota, or are most of what waits.
function inTurn(tenants) {
  const waiting = Math.max(1, sum(tenants.map((tenant) => tenant.waiting)));
  const weight = (tenant) => Math.max(tenant.waiting / waiting, ...tenant.quotas.map(ratioOf));
  return tenants.sort((a, b) => weight(b) - weight(a) || inOrder(a.name, b.name));
}

function lineWords({ lines, waiting }) {
  const place = (name) => (CLASSES.includes(name) ? CLASSES.indexOf(name) : CLASSES.length);
  const classes = [...lines].sort((a, b) => place(a[0]) - place(b[0]));
  return waiting > 0 ? `${classes.map(([name, number]) => `${digits.format(number)} ${name}`).join(", ")} waiting` : "";
}

function fillQuota({ root, parts }, row) {
  const ratio = ratioOf(row);
  setData(root, "level", ratio >= 1 ? "over" : ratio >= NEAR_RATIO ? "near" : "below");
  setText(parts.words, `${digits.format(row.used)} of ${row.quota}`);
  setText(parts.share, `${Math.floor((100 * row.used) / row.limit)}%`);
  setText(parts.refused, row.refused > 0 ? `${digits.format(row.refused)} refused` : "");
  parts.used.style.width = `${Math.min(1, ratio) * 100}%`;
}

export class Tenants {
  constructor() {
    this.areAllShown = false;
    this.last = null; // what was shown last
    this.list = new KeyedList(at("tenants"), "tenant-template", (item, tenant) => this.fill(item, tenant));
    at("more-tenants").addEventListener("click", () => {
      this.areAllShown = true;
      this.show(...this.last);
    });
  }

  // Lines are those of `model`, or of all if it is empty. A quota may be on several models.
  show(fleet, model) {
    this.last = [fleet, model];
    const models = fleet.models.filter(({ name }) => model === "" || name === model);
    const tenants = inTurn(byTenant(models, fleet.quotas ?? []));
    const shown = this.areAllShown ? tenants : tenants.slice(0, NUM_SHOWN);
    this.list.show(shown, ({ name }) => name);
    setText(at("tenants-note"), noteOf(models, fleet.quotas_left_out ?? 0));
    setText(at("more-tenants"), `show all ${tenants.length}`);
    setHidden(at("more-tenants"), shown.length === tenants.length);
    setHidden(at("tenants-section"), tenants.length === 0);
  }

  fill(item, tenant) {
    const { parts } = item;
    setText(parts.name, tenant.name);
    setText(parts.line, lineWords(tenant));
    const quotas = this.areAllShown ? tenant.quotas : tenant.quotas.slice(0, NUM_QUOTAS_SHOWN);
    item.quotas ??= new KeyedList(parts.quotas, "quota-template", fillQuota);
    item.quotas.show(quotas, ({ quota }) => quota);
    const numMore = tenant.quotas.length - quotas.length;
    setText(parts.more, numMore > 0 ? `${count(numMore, "quota")} more, less used` : "");
    setData(item.root, "use", tenant.waiting > 0 || tenant.quotas.some(isUsed) ? "some" : "none");
  }
}

// What the tenants leave unsaid. Only those are told of that have the longest lines.
function noteOf(models, numQuotasLeftOut) {
  const waiting = sum(models.flatMap((model) => Object.values(model.line ?? {})));
  const told = sum(models.flatMap((model) => model.line_tenants ?? []).map((line) => line.waiting));
  const notes = waiting > 0 ? [`${digits.format(waiting)} in line at this gateway`] : [];
  if (waiting > told) notes.push(`${digits.format(waiting - told)} of them in lines that are not shown`);
  if (numQuotasLeftOut > 0) notes.push(`${count(numQuotasLeftOut, "more quota")} further from the limit`);
  return notes.join(" · ");
}
