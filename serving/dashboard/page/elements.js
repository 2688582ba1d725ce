// Keeping the document as told: nodes are found again by key and changed only where they differ.
"use strict";

export const at = (id) => document.getElementById(id);
export const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setHidden(node, isHidden) {
  if (node.hidden !== isHidden) node.hidden = isHidden;
}

export function setData(node, name, value) {
  if (node.dataset[name] !== value) node.dataset[name] = value;
}

// The children of `parent`, one per row and found again by key.
export class KeyedList {
  constructor(parent, templateId, fill) {
    this.parent = parent;
    this.template = at(templateId).content.firstElementChild;
    this.fill = fill;
    this.items = new Map();
  }

  show(rows, keyOfRow) {
    const keys = new Set(rows.map(keyOfRow));
    for (const [key, item] of this.items) {
      if (keys.has(key)) continue;
      item.root.remove();
      this.items.delete(key);
    }
    let next = this.parent.firstElementChild;
    rows.forEach((row, position) => {
      const key = keyOfRow(row, position);
      const item = this.items.get(key) ?? this.make(key);
      this.fill(item, row);
      if (item.root === next) next = next.nextElementSibling;
      else this.parent.insertBefore(item.root, next);
    });
  }

  make(key) {
    const root = this.template.cloneNode(true);
    const parts = {};
    for (const node of root.querySelectorAll("[data-part]")) parts[node.dataset.part] = node;
    const item = { root, parts };
    this.items.set(key, item);
    return item;
  }
}
