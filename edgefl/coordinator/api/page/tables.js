// A table that sorts by its headings, shows a hundred rows at first, changes cells in place, and hides a column that
// nobody fills.

import { button, h, replace } from "./dom.js";

const FIRST_ROWS = 100;

// `columns`: { key, title, value(row) to sort by, cell(row) to show, isNumber, isOptional, class }.
export class Table {
  constructor({ caption, columns, rowKey, order, empty = "None." }) {
    Object.assign(this, { columns, rowKey, order, emptyText: empty });
    this.rows = [];
    this.shown = new Map();
    this.limit = FIRST_ROWS;
    this.body = h("tbody");
    this.headings = columns.map((column) => this.heading(column));
    this.more = h("p", { class: "more" });
    this.table = h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, this.headings)), this.body);
    this.element = h("div", {}, scroller(this.table, caption), this.more);
  }

  heading(column) {
    const classes = [column.isNumber ? "number" : "", column.class ?? ""].join(" ").trim() || null;
    if (!column.value) return h("th", { scope: "col", class: classes }, column.title);
    return h("th", { scope: "col", class: classes }, button(column.title, () => this.sortBy(column.key), { class: "sort" }));
  }

  // Draws all rows anew at the next `show`.
  forget() {
    this.shown = new Map();
  }

  sortBy(key) {
    const isSame = this.order.key === key;
    this.order = { key, isDown: isSame ? !this.order.isDown : Boolean(this.columns.find((column) => column.key === key).isNumber) };
    this.show(this.rows);
  }

  show(rows) {
    this.rows = rows;
    const column = this.columns.find((candidate) => candidate.key === this.order.key);
    const sign = this.order.isDown ? -1 : 1;
    const sorted = [...rows].sort((a, b) => sign * compare(column.value(a), column.value(b)) || compare(this.rowKey(a), this.rowKey(b)));
    this.headings.forEach((heading, index) => {
      const isSorted = this.columns[index].key === this.order.key;
      if (isSorted) heading.setAttribute("aria-sort", this.order.isDown ? "descending" : "ascending");
      else heading.removeAttribute("aria-sort");
    });
    this.columns.forEach((column) => { column.isHidden = Boolean(column.isOptional) && rows.every((row) => isMissing(column.value(row))); });
    this.place(sorted.slice(0, this.limit));
    for (const line of [this.headings, ...[...this.shown.values()].map((known) => known.line.children)]) {
      this.columns.forEach((column, index) => { line[index].hidden = column.isHidden; });
    }
    this.tellMore(sorted.length);
  }

  place(rows) {
    const kept = new Map();
    let here = this.body.firstChild;
    if (!rows.length) {
      this.shown = kept;
      replace(this.body, h("tr", {}, h("td", { colspan: this.columns.length, class: "quiet" }, this.emptyText)));
      return;
    }
    if (!this.shown.size) replace(this.body), here = null;
    for (const row of rows) {
      const key = this.rowKey(row);
      let known = this.shown.get(key);
      if (!known) known = { line: h("tr", {}, this.columns.map((column) => this.cell(column, row))), row };
      else if (known.row !== row) this.refresh(known, row);
      kept.set(key, known);
      // Moved only where the order has changed, so that the focus stays where it is.
      if (known.line === here) here = here.nextSibling;
      else this.body.insertBefore(known.line, here);
    }
    for (const [key, known] of this.shown) if (!kept.has(key)) known.line.remove();
    this.shown = kept;
  }

  cell(column, row) {
    const classes = [column.isNumber ? "number" : "", column.class ?? ""].join(" ").trim() || null;
    return column.isHeading ? h("th", { scope: "row", class: classes }, column.cell(row)) : h("td", { class: classes }, column.cell(row));
  }

  refresh(known, row) {
    known.row = row;
    this.columns.forEach((column, index) => {
      const cell = known.line.children[index];
      if (cell.contains(document.activeElement)) return;
      const fresh = this.cell(column, row);
      if (!fresh.isEqualNode(cell)) cell.replaceChildren(...fresh.childNodes);
    });
  }

  tellMore(total) {
    this.more.hidden = total <= this.limit;
    if (this.more.hidden) return;
    replace(this.more, `${this.limit} of ${total} shown. `, button(`Show all ${total}`, () => {
      this.limit = Infinity;
      this.show(this.rows);
    }));
  }
}

function isMissing(value) {
  return value === null || value === undefined || value === "" || (Array.isArray(value) && !value.length);
}

// A column of check boxes: `picked` holds the keys of the rows that are chosen.
export function pickColumn(picked, rowKey, onChange) {
  return { key: "pick", title: h("span", { class: "unseen" }, "Choose"), class: "pick", cell: (row) => {
    if (row.built_in) return "";
    const box = h("input", { type: "checkbox", "aria-label": `Choose ${rowKey(row)}`, onchange: () => {
      if (box.checked) picked.add(rowKey(row));
      else picked.delete(rowKey(row));
      onChange();
    } });
    box.checked = picked.has(rowKey(row));
    return box;
  } };
}

function compare(a, b) {
  if (a === b) return 0;
  if (isMissing(a)) return 1;
  if (isMissing(b)) return -1;
  return typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
}

// What is wider than its place scrolls there, by keyboard too.
export function scroller(table, name) {
  return h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": name }, table);
}
