// Numbers as people read them, and the elements that hold them. Everything that comes from the server goes in as text.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
export const PATHS = ["resident", "peer", "host", "disk", "build"];

export function size(bytes) {
  let unit = 0;
  while (bytes >= 1024 && unit < UNITS.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit === 0 || bytes >= 100 ? Math.round(bytes) : bytes.toFixed(1)} ${UNITS[unit]}`;
}

export function speed(bytesPerSecond) {
  if (bytesPerSecond < 1e9) return `${(bytesPerSecond / 1e6).toFixed(bytesPerSecond < 1e7 ? 1 : 0)} MB/s`;
  return `${(bytesPerSecond / 1e9).toFixed(bytesPerSecond < 1e10 ? 1 : 0)} GB/s`;
}

export function duration(ms) {
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60000) return `${(ms / 1000).toFixed(1)} s`;
  return `${Math.round(ms / 60000)} min`;
}

export function count(number) {
  return number.toLocaleString("en-US");
}

export function rate(perSecond) {
  if (perSecond === 0) return "0/s";
  if (perSecond < 1) return `${(perSecond * 60).toFixed(perSecond < 1 / 6 ? 1 : 0)}/min`;
  return `${perSecond < 100 ? perSecond.toFixed(1) : count(Math.round(perSecond))}/s`;
}

export function share(part, whole) {
  if (!whole) return "–";
  const percent = (100 * part) / whole;
  // 99.97 % is not 100 %.
  return `${percent === 100 ? "100" : Math.min(percent, 99.99).toFixed(percent < 99 ? 1 : 2)} %`;
}

// Billionths of a currency, with as many digits as say something.
export function money(nanos, currency) {
  const amount = nanos / 1e9;
  const digits = amount === 0 || amount >= 1 ? 2 : Math.min(9, 1 - Math.floor(Math.log10(amount)));
  return `${amount.toFixed(digits)} ${currency}`.trim();
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

// Anything that was typed by somebody is text here, and never markup.
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// The colour of a function: always the same one for the same name.
export function hue(name) {
  let hash = 2166136261;
  for (let at = 0; at < name.length; at += 1) hash = Math.imul(hash ^ name.charCodeAt(at), 16777619);
  hash ^= hash >>> 15;
  hash = Math.imul(hash, 2246822519);
  hash ^= hash >>> 13;
  return { angle: ((hash >>> 0) % 24) * 15, shade: (hash >>> 8) & 1 };
}

export function pathBar(bar, paths) {
  const total = Object.values(paths).reduce((sum, each) => sum + each, 0);
  while (bar.children.length < PATHS.length) bar.append(element("span", { class: PATHS[bar.children.length] }));
  PATHS.forEach((path, at) => {
    bar.children[at].style.width = total ? `${(100 * (paths[path] || 0)) / total}%` : "0";
  });
  const told = PATHS.filter((path) => paths[path]).map((path) => `${path} ${share(paths[path], total)}`);
  bar.setAttribute("aria-label", told.join(", ") || "no answers yet");
  bar.title = told.join(", ");
}
