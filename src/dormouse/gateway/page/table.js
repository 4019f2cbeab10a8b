// The table of functions. Only the rows that can be seen exist, however many functions there are.

import { draw, spark } from "./spark.js";
import { count, duration, element, money, pathBar, put, rate, size } from "./words.js";

const OVERSCAN = 4;
const ALWAYS = 8; // rows, wherever the page is scrolled to

export const COLUMNS = [
  { key: "trouble", name: "Trouble", hidden: true },
  { key: "name", name: "Name", text: true },
  { key: "tier", name: "Tier", text: true },
  { key: "paths", name: "Paths", unsorted: true },
  { key: "p50_ms", name: "P50", number: true },
  { key: "p98_ms", name: "P98", number: true },
  { key: "spark", name: "P98 against SLO", unsorted: true },
  { key: "slo", name: "SLO", down: true },
  { key: "requests_per_s", name: "Requests", number: true },
  { key: "queued", name: "Waiting", number: true },
  { key: "image_bytes", name: "Image", number: true },
  { key: "evictions", name: "Evicted", number: true },
  { key: "cost_nanos", name: "Cost", number: true, optional: true },
];

export class Table {
  constructor(parts, model, open) {
    Object.assign(this, parts);
    this.model = model;
    this.open = open;
    this.order = [];
    this.sorted = { key: "trouble", down: true };
    this.words = "";
    this.show = "all";
    this.active = null;
    this.pool = [];
    this.makeHead();
    this.rows.addEventListener("click", (event) => {
      const row = event.target.closest("[data-at]");
      if (row) {
        this.activate(this.order[Number(row.dataset.at)]);
        this.open(this.active);
      }
    });
    this.grid.addEventListener("keydown", (event) => this.keyed(event));
    window.addEventListener("scroll", () => this.place(), { passive: true });
    new ResizeObserver(() => this.place()).observe(this.grid);
  }

  makeHead() {
    this.heads = new Map();
    for (const column of COLUMNS.filter((each) => !each.hidden)) {
      const kind = `cell ${column.key}${column.number ? " number" : ""}`;
      const cell = element("div", { class: kind, role: "columnheader" });
      if (column.unsorted) cell.append(column.name);
      else {
        // Out of the way of Tab: the grid is one stop; the keys of sorting are those of the select, or a click.
        const button = element("button", { type: "button", class: "sorter" }, column.name);
        button.addEventListener("click", () => this.sortBy(column.key));
        cell.append(button);
      }
      this.head.append(cell);
      this.heads.set(column.key, cell);
    }
    for (const column of COLUMNS.filter((each) => !each.unsorted && !each.optional)) {
      this.sorts.append(element("option", { value: column.key }, column.name.toLowerCase()));
    }
    this.sorts.addEventListener("change", () => this.sortBy(this.sorts.value));
  }

  sortBy(key) {
    const column = COLUMNS.find((each) => each.key === key);
    const first = Boolean(column.number || key === "trouble" || column.down);
    const again = this.sorted.key === key;
    this.sorted = { key, down: again ? !this.sorted.down : first };
    this.sorts.value = key;
    this.render();
  }

  render() {
    for (const [key, cell] of this.heads) {
      const now = key !== this.sorted.key ? "none" : this.sorted.down ? "descending" : "ascending";
      if (cell.getAttribute("aria-sort") !== now) cell.setAttribute("aria-sort", now);
    }
    const all = this.model.functions;
    this.grid.classList.toggle("costs", this.model.currency !== "");
    const kept = [...all.values()].filter((row) => this.keeps(row));
    this.order = kept.sort((a, b) => this.compare(a, b)).map((row) => row.name);
    this.rowsAt = new Map(this.order.map((name, at) => [name, at]));
    if (this.active !== null && !this.rowsAt.has(this.active)) this.active = null;
    this.grid.setAttribute("aria-rowcount", String(this.order.length + 1));
    this.grid.hidden = this.order.length === 0;
    this.empty.hidden = !this.model.known || all.size > 0;
    this.noneMatch.hidden = all.size === 0 || this.order.length > 0;
    put(this.shown, all.size === 0 ? "" : this.order.length === all.size ? count(all.size) : `${count(this.order.length)} of ${count(all.size)}`);
    this.place();
  }

  keeps(row) {
    const words = this.words;
    if (words && !row.name.toLowerCase().includes(words) && !row.tenant.toLowerCase().includes(words)) return false;
    if (this.show === "late") return !row.compliant;
    if (this.show === "queued") return row.queued > 0;
    if (this.show === "device") return row.on.length > 0;
    if (this.show === "asleep") return row.on.length === 0;
    return true;
  }

  compare(a, b) {
    const { key, down } = this.sorted;
    const order = this.difference(a, b, key);
    if (order !== 0) return down ? -order : order;
    return a.name < b.name ? -1 : 1;
  }

  difference(a, b, key) {
    if (key === "trouble") {
      return (
        Number(!a.compliant) - Number(!b.compliant) ||
        Number(a.queued > 0) - Number(b.queued > 0) ||
        a.requests_per_s - b.requests_per_s ||
        a.requests - b.requests
      );
    }
    if (key === "slo") return a.in_time / (a.requests || 1) - b.in_time / (b.requests || 1) || Number(a.requests > 0) - Number(b.requests > 0);
    if (key === "name" || key === "tier") return a[key] < b[key] ? -1 : a[key] > b[key] ? 1 : 0;
    return (a[key] || 0) - (b[key] || 0);
  }

  // ---------------------------------------------------------------- rows

  rowHeight() {
    return parseFloat(getComputedStyle(this.grid).getPropertyValue("--row")) || 40;
  }

  place() {
    if (this.grid.hidden) return;
    const height = this.rowHeight();
    const top = this.rows.getBoundingClientRect().top;
    const from = Math.max(0, Math.floor(-top / height) - OVERSCAN);
    const seen = Math.ceil((window.innerHeight - top) / height) + OVERSCAN;
    const until = Math.min(this.order.length, Math.max(seen, ALWAYS));
    this.rows.style.height = `${this.order.length * height}px`;
    const shown = [];
    for (let at = from; at < until; at += 1) shown.push(at);
    const active = this.active === null ? -1 : this.rowsAt.get(this.active);
    if (active >= 0 && (active < from || active >= until)) shown.push(active);
    while (this.pool.length < shown.length) {
      const row = new Row();
      this.pool.push(row);
      this.rows.append(row.root);
    }
    this.pool.forEach((row, number) => {
      const at = shown[number];
      row.root.hidden = at === undefined;
      if (at !== undefined) row.render(this.order[at], at, height, this.model, at === active);
    });
    const marked = this.pool.find((row) => !row.root.hidden && row.active);
    if (marked) this.grid.setAttribute("aria-activedescendant", marked.root.id);
    else this.grid.removeAttribute("aria-activedescendant");
  }

  activate(name) {
    this.active = name;
    this.place();
  }

  keyed(event) {
    if (event.target !== this.grid || event.altKey || event.ctrlKey || event.metaKey) return;
    const page = Math.max(1, Math.floor(window.innerHeight / this.rowHeight()) - 3);
    const now = this.active === null ? -1 : this.rowsAt.get(this.active);
    const last = this.order.length - 1;
    const moves = { ArrowDown: now + 1, ArrowUp: now - 1, PageDown: now + page, PageUp: now - page, Home: 0, End: last };
    if (event.key in moves) {
      event.preventDefault();
      this.go(Math.max(0, Math.min(moves[event.key], last)));
    } else if (event.key === "Enter" && this.active !== null) {
      event.preventDefault();
      this.open(this.active);
    }
  }

  go(at) {
    const height = this.rowHeight();
    const top = this.rows.getBoundingClientRect().top + at * height;
    const head = this.head.offsetHeight;
    if (top < head) window.scrollBy(0, top - head - 8);
    else if (top + height > window.innerHeight) window.scrollBy(0, top + height - window.innerHeight + 8);
    this.activate(this.order[at]);
  }
}

let rowNumber = 0;

class Row {
  constructor() {
    rowNumber += 1;
    this.root = element("div", { class: "row", role: "row", id: `row-${rowNumber}` });
    this.cells = {};
    for (const column of COLUMNS.filter((each) => !each.hidden)) {
      const cell = element("div", { class: `cell ${column.key}${column.number ? " number" : ""}`, role: "gridcell" });
      this.cells[column.key] = cell;
      this.root.append(cell);
    }
    this.bar = element("div", { class: "bar", role: "img" });
    this.cells.paths.append(this.bar);
    this.spark = spark(120, 24);
    this.cells.spark.append(this.spark);
    this.label = element("span", { class: "label" });
    this.tenant = element("span", { class: "tenant" });
    this.cells.name.append(this.label, this.tenant);
  }

  render(name, at, height, model, active) {
    const row = model.functions.get(name);
    const cells = this.cells;
    if (this.at !== at || this.height !== height) {
      this.at = at;
      this.height = height;
      this.root.dataset.at = String(at);
      this.root.setAttribute("aria-rowindex", String(at + 2));
      this.root.style.transform = `translateY(${at * height}px)`;
    }
    if (this.active !== active) {
      this.active = active;
      this.root.classList.toggle("active", active);
      this.root.setAttribute("aria-selected", String(active));
    }
    if (this.label.textContent !== row.name) {
      this.label.textContent = row.name;
      this.cells.name.title = row.name;
    }
    put(this.tenant, row.tenant);
    const tier = row.state === "READY" ? row.tier : row.state.toLowerCase();
    put(cells.tier, tier);
    const kind = row.on.length ? "awake" : "asleep";
    if (cells.tier.dataset.kind !== kind) cells.tier.dataset.kind = kind;
    put(cells.p50_ms, row.requests && row.p50_ms ? duration(row.p50_ms) : "–");
    put(cells.p98_ms, row.requests && row.p98_ms ? duration(row.p98_ms) : "–");
    const slo = row.requests === 0 ? "unasked" : row.compliant ? "inside" : "outside";
    if (cells.slo.dataset.slo !== slo) {
      cells.slo.dataset.slo = slo;
      cells.slo.textContent = { unasked: "–", inside: "✓ inside", outside: "✕ outside" }[slo];
    }
    put(cells.requests_per_s, rate(row.requests_per_s));
    put(cells.queued, row.queued ? count(row.queued) : "");
    put(cells.image_bytes, size(row.image_bytes));
    put(cells.evictions, row.evictions ? count(row.evictions) : "");
    put(cells.cost_nanos, row.cost_nanos === null ? "" : money(row.cost_nanos, ""));
    if (this.paths !== row.paths) {
      this.paths = row.paths;
      pathBar(this.bar, row.paths);
    }
    const points = model.histories.get(name) || [];
    draw(this.spark, points, row.deadline_ms);
  }
}
