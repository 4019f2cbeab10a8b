// P98 against the SLO, as a line. The deadline stands at half height; what is twice as late leaves the picture.

import { POINTS } from "./model.js";

const NS = "http://www.w3.org/2000/svg";

export function spark(width, height, label = false) {
  const svg = document.createElementNS(NS, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "sparkline");
  if (!label) svg.setAttribute("aria-hidden", "true");
  for (const kind of ["deadline", "line", "late"]) {
    const path = document.createElementNS(NS, "path");
    path.setAttribute("class", kind);
    svg.append(path);
  }
  svg.children[0].setAttribute("d", `M0 ${height / 2}H${width}`);
  return svg;
}

export function draw(svg, points, deadline) {
  const { width, height } = svg.viewBox.baseVal;
  const step = width / POINTS;
  let line = "";
  let late = "";
  let drawn = false;
  points.forEach((point, at) => {
    if (!point || (!point[1] && !point[2])) {
      drawn = false;
      return;
    }
    const x = (POINTS - points.length + at + 0.5) * step;
    // Where all were refused there is no percentile: as late as can be.
    const value = point[1] ? point[0] : 2 * deadline;
    const y = height - 1.5 - Math.min(value / (2 * deadline), 1) * (height - 3);
    line += `${drawn ? "L" : `M${(x - step / 3).toFixed(1)} ${y.toFixed(1)}L`}${x.toFixed(1)} ${y.toFixed(1)}`;
    if (value > deadline) late += `M${x.toFixed(1)} ${y.toFixed(1)}V${(height / 2).toFixed(1)}`;
    drawn = true;
  });
  set(svg.children[1], line);
  set(svg.children[2], late);
}

function set(path, d) {
  if (path.getAttribute("d") !== d) path.setAttribute("d", d);
}
