// Devices: the map of their memory, what they run, and what is on its way to them.

import { duration, element, hue, plural, put, size, speed } from "./words.js";

const LANE = 18;
const GAP = 3;
const LANES = 4;

export class Devices {
  constructor(box, reads, model, open) {
    this.box = box;
    this.reads = reads;
    this.model = model;
    this.open = open;
    this.cards = new Map();
    this.readLines = new Lines(reads);
    this.watchSize = new ResizeObserver(() => this.paint());
  }

  render() {
    const present = new Set(this.model.devices.map((device) => device.executor));
    for (const [name, card] of this.cards) {
      if (!present.has(name)) {
        this.watchSize.unobserve(card.canvas);
        card.root.remove();
        this.cards.delete(name);
      }
    }
    for (const device of this.model.devices) {
      let card = this.cards.get(device.executor);
      if (!card) {
        card = new Card(device.executor, this.open);
        this.cards.set(device.executor, card);
        this.box.append(card.root);
        this.watchSize.observe(card.canvas);
      }
      card.render(device, this.model);
    }
    const reads = this.model.loads.filter((load) => load.to === "host");
    this.reads.parentElement.hidden = reads.length === 0;
    this.readLines.render(reads, this.model);
  }

  // What moves although no message has come.
  tick() {
    for (const card of this.cards.values()) if (card.moves()) card.move(this.model);
    this.readLines.move(this.model);
  }

  paint() {
    for (const card of this.cards.values()) card.paint(this.model);
  }
}

class Card {
  constructor(name, open) {
    this.places = [];
    this.spans = [];
    this.canvas = element("canvas", { class: "map", role: "img" });
    this.title = element("h3", {}, name);
    this.used = element("p", { class: "used" });
    this.about = element("p", { class: "note" });
    this.running = element("p", { class: "running" });
    this.link = element("p", { class: "link-line" });
    this.list = element("ul", { class: "loads", "aria-label": `On the way to ${name}` });
    this.lines = new Lines(this.list);
    const head = element("div", { class: "card-head" }, this.title, this.used);
    this.root = element("article", { class: "card", "aria-label": `Device ${name}` });
    this.root.append(head, this.about, this.canvas, this.running, this.link, this.list);
    this.canvas.addEventListener("click", (event) => {
      const place = this.at(event);
      if (place) open(place.function);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const place = this.at(event);
      this.canvas.title = place ? `${place.function}: ${size(place.bytes)}, ${place.state}` : "free";
      this.canvas.classList.toggle("over", Boolean(place));
    });
  }

  render(device, model) {
    this.device = device;
    const used = device.capacity_bytes - device.free_bytes;
    put(this.used, device.here ? `${size(used)} of ${size(device.capacity_bytes)}` : "restarting");
    const restarts = device.restarts ? `, ${plural(device.restarts, "restart")}` : "";
    const held = device.here ? `, ${plural(device.places.length, "function")} in chunks of ${size(device.chunk_bytes)}` : "";
    const waste = device.here && device.waste_bytes ? `, ${size(device.waste_bytes)} unused in last ones` : "";
    put(this.about, `${device.description || "its process is gone, a new one is starting"}${held}${waste}${restarts}`);
    this.root.classList.toggle("gone", !device.here);
    put(this.running, running(device));
    this.loads = model.loads.filter((load) => load.to === device.executor);
    put(this.link, link(device, this.loads, model));
    this.lines.render(this.loads, model);
    this.canvas.setAttribute(
      "aria-label",
      `Memory of ${device.executor}: ${plural(device.places.length, "function")} in ${size(used)} of ${size(device.capacity_bytes)}`,
    );
    this.paint(model);
  }

  moves() {
    return this.loads && this.loads.length > 0;
  }

  move(model) {
    this.lines.move(model);
    this.paint(model);
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const lane = Math.floor((event.clientY - box.top) / (LANE + GAP));
    const found = this.spans.find((span) => span.lane === lane && x >= span.x && x < span.x + span.width);
    return found ? found.place : null;
  }

  paint(model) {
    const device = this.device;
    const width = this.canvas.clientWidth;
    if (!device || !width) return;
    const height = LANES * (LANE + GAP) - GAP;
    const ratio = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const style = getComputedStyle(this.canvas);
    const colours = { dark: style.colorScheme === "dark", ink: style.color, free: style.getPropertyValue("--free") };
    pen.fillStyle = colours.free;
    for (let lane = 0; lane < LANES; lane += 1) pen.fillRect(0, lane * (LANE + GAP), width, LANE);
    this.spans = device.here ? layout(device, width) : [];
    pen.font = `11px ${style.fontFamily}`;
    pen.textBaseline = "middle";
    for (const span of this.spans) this.paintSpan(pen, span, colours, model);
  }

  paintSpan(pen, span, colours, model) {
    const { place, x, width, lane } = span;
    const y = lane * (LANE + GAP);
    const inner = Math.max(width - 1, 0.5);
    const { angle, shade } = hue(place.function);
    const light = (colours.dark ? 0.66 : 0.8) - 0.08 * shade;
    const load = this.loads.find((each) => each.function === place.function);
    pen.fillStyle = `oklch(${light} 0.1 ${angle})`;
    pen.globalAlpha = place.state === "evicting" ? 0.35 : load ? 0.4 : 1;
    pen.fillRect(x, y, inner, LANE);
    pen.globalAlpha = 1;
    if (load) {
      const done = model.progress(load).share * span.whole - span.before;
      pen.fillRect(x, y, Math.max(0, Math.min(done, inner)), LANE);
    }
    if (this.device.executing === place.function) {
      pen.strokeStyle = colours.ink;
      pen.lineWidth = 2;
      pen.strokeRect(x + 1, y + 1, Math.max(inner - 2, 0), LANE - 2);
    }
    if (inner > 44) {
      pen.fillStyle = load || place.state === "evicting" ? colours.ink : "#101014";
      pen.fillText(fitted(pen, place.function, inner - 12), x + 6, y + LANE / 2 + 0.5);
    }
  }
}

// Memory as lanes of text: one after the other, and on into the next lane.
function layout(device, width) {
  const spans = [];
  const scale = (width * LANES) / Math.max(device.capacity_bytes, 1);
  let at = 0;
  for (const place of device.places) {
    const whole = place.bytes * scale;
    let before = 0;
    while (before < whole - 0.01) {
      const lane = Math.floor((at + before + 0.001) / width);
      const part = Math.min(whole - before, (lane + 1) * width - at - before);
      if (lane >= LANES || part <= 0) break;
      spans.push({ place, lane, x: at + before - lane * width, width: part, before, whole });
      before += part;
    }
    at += whole;
  }
  return spans;
}

function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let length = Math.max(1, Math.floor((text.length * width) / pen.measureText(text).width) - 1);
  while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > width) length -= 1;
  return `${text.slice(0, length)}…`;
}

function running(device) {
  if (!device.here) return "";
  if (device.executing === null) return "Idle";
  return `Running ${device.executing}${device.together > 1 ? `, ${device.together} requests as one` : ""}`;
}

function link(device, loads, model) {
  if (!device.here) return "";
  const rate = `Host link ${speed(device.link_bytes_per_s)}`;
  if (device.lent_to) return `${rate}: lent to ${device.lent_to}`;
  const over = loads.filter((load) => !load.source);
  if (over.length) return `${rate}: busy`;
  const from = loads.find((load) => load.source);
  if (from) return `${rate}: idle; copying from ${from.source}`;
  const feeds = model.loads.find((load) => load.source === device.executor);
  return `${rate}: idle${feeds ? `; ${feeds.to} copies from here` : ""}`;
}

// Loads in flight, a line each.
class Lines {
  constructor(list) {
    this.list = list;
    this.lines = new Map();
  }

  render(loads, model) {
    const keys = new Set(loads.map(keyOf));
    for (const [key, line] of this.lines) {
      if (!keys.has(key)) {
        line.root.remove();
        this.lines.delete(key);
      }
    }
    for (const load of loads) {
      if (!this.lines.has(keyOf(load))) {
        const line = loadLine(load);
        this.lines.set(keyOf(load), line);
        this.list.append(line.root);
      }
    }
    this.move(model);
  }

  move(model) {
    for (const { load, fill, left } of this.lines.values()) {
      const { share, left: ms } = model.progress(load);
      fill.style.width = `${(100 * share).toFixed(1)}%`;
      put(left, ms > 0 ? `about ${Math.round(100 * share)} %, ${duration(ms)} left` : `${duration(-ms)} longer than expected`);
    }
  }
}

function keyOf(load) {
  return `${load.to} ${load.started_ms} ${load.function}`;
}

function loadLine(load) {
  const fill = element("span", { class: "fill" });
  const left = element("span", { class: "left" });
  const name = element("span", { class: "name" }, load.function);
  const about = element("span", { class: "note" }, `${size(load.bytes)} ${way(load)}`);
  const track = element("span", { class: "track", "aria-hidden": "true" }, fill);
  return { root: element("li", { class: "load" }, name, about, track, left), load, fill, left };
}

function way(load) {
  if (load.to === "host") return "from disk";
  if (load.source) return `from ${load.source}`;
  const helpers = load.helpers.length ? ` and over ${load.helpers.join(", ")}` : "";
  return `from host memory${helpers}${load.path === "build" ? ", being built" : ""}`;
}
