// Puts the page together: the stream changes the model, and what the model says is drawn, once a frame at most.

import { Detail } from "./detail.js";
import { Devices } from "./devices.js";
import { Model } from "./model.js";
import { Stream } from "./stream.js";
import { Table } from "./table.js";
import { PATHS, count, duration, element, money, pathBar, plural, put, rate, share, size } from "./words.js";

const KEY = "dormouse-key";
const THEME = "dormouse-theme";
const MOST_MEASURES = 200;
const at = (id) => document.getElementById(id);

const model = new Model();
const detail = new Detail(at("detail"), model, askFor);
const open = (name) => detail.open(name);
const devices = new Devices(at("devices"), at("reads"), model, open);
const table = new Table(
  {
    grid: at("grid"),
    head: at("head"),
    rows: at("rows"),
    empty: at("empty"),
    noneMatch: at("none-match"),
    shown: at("shown"),
    sorts: at("sort"),
  },
  model,
  open,
);
const stream = new Stream("events", {
  picture: (data) => {
    model.picture(data);
    schedule();
  },
  changes: (data) => {
    model.changes(data);
    schedule();
  },
  state: tell,
  refused: askForKey,
});

// ------------------------------------------------------------------ drawing

const still = window.matchMedia("(prefers-reduced-motion: reduce)");
let dirty = false;
let frame = 0;

function schedule() {
  dirty = true;
  if (!frame) frame = requestAnimationFrame(draw);
}

function draw() {
  frame = 0;
  if (dirty) {
    dirty = false;
    const began = performance.now();
    document.body.classList.remove("unknown");
    drawTotals();
    if (model.node) devices.render();
    drawQueue();
    table.render();
    detail.render();
    performance.measure("render", { start: began, end: performance.now() });
    if (performance.getEntriesByName("render").length > MOST_MEASURES) performance.clearMeasures("render");
  } else devices.tick();
  if (model.loads.length && !still.matches) frame = requestAnimationFrame(draw);
}

function drawTotals() {
  const totals = model.totals;
  put(at("compliant"), count(totals.compliant));
  put(at("of"), `of ${plural(totals.functions, "function")}`);
  put(at("rate"), rate(totals.requests_per_s));
  put(at("in-time"), share(totals.in_time, totals.requests));
  put(at("waiting"), count(totals.queued));
  at("node").hidden = !model.node;
  at("to-devices").hidden = !model.node;
  at("host-figure").hidden = !model.host;
  if (model.host) put(at("host"), `${size(model.host.used_bytes)} of ${size(model.host.capacity_bytes)}, ${plural(model.host.images, "image")}`);
  const nanos = totals.nanos_per_request_in_time;
  at("cost-figure").hidden = nanos === null;
  if (nanos !== null) put(at("cost"), money(nanos, model.currency));
  drawPaths(totals.paths);
  document.title = model.functions.size ? `${totals.compliant}/${totals.functions} inside SLO – Dormouse` : "Dormouse";
}

function drawPaths(paths) {
  pathBar(at("path-bar"), paths);
  const legend = at("path-legend");
  const total = Object.values(paths).reduce((sum, each) => sum + each, 0);
  while (legend.children.length < PATHS.length) {
    const path = PATHS[legend.children.length];
    legend.append(element("li", {}, element("span", { class: `dot ${path}` }), path, " ", element("b")));
  }
  PATHS.forEach((path, number) => {
    legend.children[number].hidden = !paths[path];
    put(legend.children[number].querySelector("b"), share(paths[path] || 0, total));
  });
}

function drawQueue() {
  const list = at("queue");
  at("queue-empty").hidden = model.queue.length > 0;
  while (list.children.length > model.queue.length) list.lastChild.remove();
  model.queue.forEach((waiting, number) => {
    if (!list.children[number]) {
      const button = element("button", { type: "button", class: "name plain" });
      button.addEventListener("click", () => open(button.textContent));
      list.append(element("li", {}, button, element("span", { class: "how-many" }), element("span", { class: "note" })));
    }
    const [name, many, why] = list.children[number].children;
    put(name, waiting.function);
    put(many, `${plural(waiting.requests, "request")}, ${duration(Math.max(0, model.now() - waiting.since_ms))}`);
    put(why, waiting.why);
  });
}

// ------------------------------------------------------------------ connection and key

function tell(state, text) {
  at("link").dataset.state = state;
  put(at("link"), text);
  document.body.classList.toggle("stale", state === "lost");
}

function askForKey(complaint) {
  tell("waiting", "a key is needed");
  sessionStorage.removeItem(KEY);
  at("forget").hidden = true;
  put(at("ask-error"), complaint);
  if (!at("ask").open) at("ask").showModal();
  at("key").focus();
}

at("ask").addEventListener("cancel", (event) => event.preventDefault());
at("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = at("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) {
    put(at("ask-error"), "There are characters in this that no key has.");
    return;
  }
  at("key").value = "";
  at("ask").close();
  sessionStorage.setItem(KEY, key);
  watch(key);
});

at("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});

function watch(key) {
  at("forget").hidden = !key;
  tell("waiting", "connecting");
  stream.start(key);
}

async function askFor(name) {
  const headers = stream.key ? { Authorization: `Bearer ${stream.key}` } : {};
  try {
    const answer = await fetch(`functions/${encodeURIComponent(name)}`, { headers });
    return await answer.json();
  } catch {
    return { error: "Its manifest cannot be had: the server cannot be reached." };
  }
}

// ------------------------------------------------------------------ tools

at("filter").addEventListener("input", () => {
  table.words = at("filter").value.trim().toLowerCase();
  table.render();
});
at("show").addEventListener("change", () => {
  table.show = at("show").value;
  table.render();
});
document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "/" && !typing && !document.querySelector("dialog[open]")) {
    event.preventDefault();
    at("filter").focus();
  } else if (event.key === "Escape" && event.target === at("filter")) at("grid").focus();
});

const THEMES = ["system", "light", "dark"];
function showTheme() {
  put(at("theme"), `Theme: ${localStorage.getItem(THEME) || "system"}`);
}
at("theme").addEventListener("click", () => {
  const now = localStorage.getItem(THEME) || "system";
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  if (next === "system") {
    localStorage.removeItem(THEME);
    delete document.documentElement.dataset.theme;
  } else {
    localStorage.setItem(THEME, next);
    document.documentElement.dataset.theme = next;
  }
  showTheme();
  devices.paint();
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => devices.paint());

showTheme();
watch(sessionStorage.getItem(KEY) || "");
