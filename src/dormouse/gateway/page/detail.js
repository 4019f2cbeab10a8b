// One function, all that is known of it. Numbers move on while it is open.

import { draw, spark } from "./spark.js";
import { PATHS, count, duration, element, money, pathBar, plural, put, rate, share, size } from "./words.js";

export class Detail {
  constructor(dialog, model, ask) {
    this.dialog = dialog;
    this.model = model;
    this.ask = ask; // for the row of one function
    this.name = null;
    this.row = null;
    dialog.addEventListener("close", () => {
      this.name = null;
    });
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) dialog.close(); // beside it
    });
  }

  open(name) {
    if (!this.model.functions.has(name)) return;
    this.name = name;
    this.row = null;
    this.bucket = -1;
    this.build();
    this.render();
    if (!this.dialog.open) this.dialog.showModal();
  }

  build() {
    this.title = element("h2", { id: "detail-title" });
    const close = element("button", { type: "button", class: "quiet" }, "Close");
    close.addEventListener("click", () => this.dialog.close());
    this.state = element("p", { class: "note" });
    this.chart = spark(600, 120, true);
    this.chart.setAttribute("role", "img");
    this.chart.setAttribute("aria-label", "98th percentile of latency over the last minutes, against the deadline");
    this.axis = element("p", { class: "note axis" });
    this.bar = element("div", { class: "bar", role: "img" });
    this.facts = element("dl", { class: "facts" });
    this.paths = element("div", { class: "scroll" });
    this.manifest = element("dl", { class: "facts" });
    this.fault = element("p", { class: "error", role: "alert" });
    this.dialog.replaceChildren(
      element("div", { class: "card-head" }, this.title, close),
      this.state,
      element("h3", {}, "P98 against its SLO"),
      element("div", { class: "chart" }, this.chart),
      this.axis,
      element("h3", {}, "How its answers found it"),
      this.bar,
      this.paths,
      element("h3", {}, "So far"),
      this.facts,
      element("h3", {}, "Manifest"),
      this.manifest,
      this.fault,
    );
  }

  render() {
    if (this.name === null) return;
    const row = this.model.functions.get(this.name);
    if (!row) {
      put(this.fault, "This function has been removed.");
      return;
    }
    put(this.title, row.name);
    put(this.state, describe(row, this.model));
    draw(this.chart, this.model.histories.get(this.name) || [], row.deadline_ms);
    const minutes = Math.round((60 * this.model.bucketMs) / 60000);
    put(this.axis, `The last ${plural(minutes, "minute")}. The dashed line is the deadline, ${duration(row.deadline_ms)}; the upper edge is twice that.`);
    pathBar(this.bar, row.paths);
    this.fill(this.facts, facts(row, this.model));
    if (this.bucket !== this.model.bucket) {
      this.bucket = this.model.bucket;
      this.fetch(this.name);
    }
    this.more(row);
  }

  async fetch(name) {
    const answer = await this.ask(name);
    if (this.name !== name) return;
    if (answer.error) put(this.fault, answer.error);
    else {
      this.row = answer;
      put(this.fault, "");
      this.more(this.model.functions.get(name) || {});
    }
  }

  more(row) {
    if (!this.row) return;
    this.table(row);
    this.fill(this.manifest, manifest(this.row));
  }

  table(row) {
    const answered = (this.row && this.row.paths) || {};
    const lines = PATHS.filter((path) => answered[path] || (row.loads || {})[path]);
    const key = JSON.stringify([answered, row.loads]);
    if (this.drawn === key && this.paths.firstChild) return;
    this.drawn = key;
    if (!lines.length) {
      this.paths.replaceChildren(element("p", { class: "note" }, "No answers yet."));
      return;
    }
    const head = ["Path", "Answers", "P50", "P95", "P98", "Loads"].map((text) => element("th", { scope: "col" }, text));
    const body = lines.map((path) => {
      const found = answered[path];
      const times = ["p50_ms", "p95_ms", "p98_ms"].map((each) => element("td", {}, found ? duration(found[each]) : "–"));
      const name = element("th", { scope: "row" }, element("span", { class: `dot ${path}` }), path);
      return element("tr", {}, name, element("td", {}, count(found ? found.requests : 0)), ...times, element("td", {}, count((row.loads || {})[path] || 0)));
    });
    this.paths.replaceChildren(element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body)));
  }

  fill(list, pairs) {
    const wanted = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
    while (list.children.length > wanted.length) list.lastChild.remove();
    wanted.forEach(([name, value], at) => {
      if (!list.children[at]) list.append(element("div", {}, element("dt"), element("dd")));
      put(list.children[at].children[0], name);
      put(list.children[at].children[1], String(value));
    });
  }
}

function describe(row, model) {
  const waits = model.queue.find((each) => each.function === row.name);
  const parts = [`Version ${row.version}`, row.state === "READY" ? where(row.tier) : row.state.toLowerCase()];
  if (row.tenant) parts.push(`of tenant ${row.tenant}`);
  if (row.public) parts.push("public");
  if (waits) parts.push(`${plural(waits.requests, "request")} waiting: ${waits.why}`);
  return `${parts.join(", ")}.`;
}

function where(tier) {
  const words = { host: "asleep in host memory", disk: "asleep on disk", loading: "on its way to a device", reading: "read from disk just now" };
  return Object.hasOwn(words, tier) ? words[tier] : `on ${tier.replaceAll("+", " and ")}`;
}

function listed(counts) {
  return Object.entries(counts)
    .map(([name, number]) => `${name.replaceAll("_", " ")} ${count(number)}`)
    .join(", ");
}

function facts(row, model) {
  return [
    ["SLO", `${row.percentile} % within ${duration(row.deadline_ms)}`],
    ["In time", row.requests ? `${share(row.in_time, row.requests)} of ${count(row.requests)}` : "not asked yet"],
    ["Inside its SLO", row.requests ? (row.compliant ? "yes" : "no") : ""],
    ["Requests now", rate(row.requests_per_s)],
    ["P50, P95, P98", row.p50_ms ? `${duration(row.p50_ms)}, ${duration(row.p95_ms)}, ${duration(row.p98_ms)}` : ""],
    ["Waiting", row.queued || ""],
    ["Cancelled", row.cancelled ? count(row.cancelled) : ""],
    ["Refused", listed(row.refusals) || "none"],
    ["Loads", listed(row.loads) || "none"],
    ["Evictions", count(row.evictions)],
    ["Image", size(row.image_bytes)],
    ["Runtime state", row.state_bytes ? size(row.state_bytes) : ""],
    ["Unused in last chunks", row.waste_bytes ? size(row.waste_bytes) : ""],
    ["Without CUDA graphs", row.eager_because],
    ["Cost", row.cost_nanos === null ? "" : money(row.cost_nanos, model.currency)],
    ["For each in time", row.cost_in_time && row.cost_nanos !== null ? money(row.cost_nanos / row.cost_in_time, model.currency) : ""],
  ];
}

function manifest(row) {
  const batch = row.batch || {};
  const disk = row.disk || {};
  return [
    ["Source", row.source],
    ["Pin", row.pin === "none" ? "none" : row.pin],
    ["Tenant", row.tenant || "the server's own"],
    ["Who may call it", row.public ? "every tenant" : "its tenant"],
    ["Batches", batch.rows > 1 ? `up to ${batch.rows} rows, waiting ${batch.wait_ms} ms` : "none"],
    ["Kept on disk", row.durable ? "yes" : "no"],
    ["From disk it takes", disk.extra_ms ? `${duration(disk.extra_ms)} longer` : ""],
  ];
}
