// Line charts in SVG: axes with units, a legend, and a reading line for mouse, finger and arrow keys.

import { extent, linear, niceTicks, timeTicks } from "./axes.js";
import { framed, h, replace, s } from "./dom.js";

const MARGIN = { top: 10, right: 14, bottom: 38, left: 52 };
const LETTER_PX = 6.4;
const TICK_PX = { x: 84, y: 42 };

// `chart.show({ x, y, series })`: x and y are { label, format, isTime, min, max }; a series is
// { name, tone, points: [[x, y], …], isDashed }. A point whose y is null breaks the line.
export class LineChart {
  constructor(title, { height = 230, empty = "Nothing to draw yet." } = {}) {
    this.height = height;
    this.svg = s("svg", { class: "chart", tabindex: "0", role: "img" });
    this.reading = h("p", { class: "reading", "aria-live": "off" }, "\u00a0");
    this.legend = h("ul", { class: "legend" });
    this.empty = h("p", { class: "quiet empty" }, empty);
    this.heading = h("figcaption", {}, title);
    this.frame = h("div", { class: "plot" }, this.svg);
    this.element = h("figure", {}, h("div", { class: "figure-head" }, this.heading, this.legend), this.frame, this.reading, this.empty);
    this.title = title;
    this.data = null;
    this.index = null;
    this.draw = framed(() => this.drawNow());
    new ResizeObserver(this.draw).observe(this.frame);
    this.svg.addEventListener("pointermove", (event) => this.pointAt(event));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  show(data) {
    this.data = data;
    this.draw();
  }

  drawNow() {
    if (!this.data) return;
    const { x, y, series } = this.data;
    const drawn = series.filter((line) => line.points.some((point) => point[1] !== null && point[1] !== undefined));
    this.empty.hidden = drawn.length > 0;
    this.frame.hidden = this.reading.hidden = drawn.length === 0;
    replace(this.legend, series.length > 1 ? series.map((line) => h("li", {}, swatch(line), line.name)) : []);
    if (!drawn.length) return;
    const width = Math.max(240, this.frame.clientWidth);
    const points = drawn.flatMap((line) => line.points);
    const xs = padded(extent(points.map((point) => point[0])), x, 0);
    const ys = padded(extent(points.map((point) => point[1])), y, 0.06);
    const yTicks = niceTicks(ys[0], ys[1], (this.height - MARGIN.top - MARGIN.bottom) / TICK_PX.y);
    const labels = yTicks.map((tick) => y.format(tick));
    this.left = Math.max(MARGIN.left, 31 + LETTER_PX * Math.max(...labels.map((text) => text.length)));
    const xTicks = (x.isTime ? timeTicks : niceTicks)(xs[0], xs[1], (width - this.left - MARGIN.right) / TICK_PX.x)
      .filter((tick) => !x.isWhole || Number.isInteger(tick));
    this.toX = linear(xs, [this.left, width - MARGIN.right]);
    this.toY = linear(ys, [this.height - MARGIN.bottom, MARGIN.top]);
    this.drawn = drawn;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.svg.setAttribute("height", this.height);
    this.svg.setAttribute("aria-label", this.summary());
    this.cursor = s("g", { class: "cursor" });
    replace(this.svg, this.grid(width, xTicks, yTicks), drawn.map((line) => this.line(line)), this.cursor);
    if (this.index !== null) this.point(Math.min(this.index, drawn[0].points.length - 1));
  }

  grid(width, xTicks, yTicks) {
    const { x, y } = this.data;
    const bottom = this.height - MARGIN.bottom;
    const group = s("g", { class: "axes" });
    for (const tick of yTicks) {
      const at = this.toY(tick);
      group.append(s("line", { x1: this.left, x2: width - MARGIN.right, y1: at, y2: at }));
      group.append(s("text", { x: this.left - 7, y: at + 4, "text-anchor": "end" }, y.format(tick)));
    }
    const step = xTicks.length > 1 ? xTicks[1] - xTicks[0] : undefined;
    for (const tick of xTicks) {
      const at = this.toX(tick);
      group.append(s("line", { class: "tick", x1: at, x2: at, y1: bottom, y2: bottom + 4 }));
      const anchor = at > width - 30 ? "end" : at < this.left + 12 ? "start" : "middle";
      group.append(s("text", { x: at, y: bottom + 16, "text-anchor": anchor }, x.format(tick, step)));
    }
    group.append(s("line", { class: "base", x1: this.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }));
    group.append(s("text", { class: "label", x: (this.left + width - MARGIN.right) / 2, y: this.height - 5, "text-anchor": "middle" }, x.label));
    const middle = (MARGIN.top + bottom) / 2;
    group.append(s("text", { class: "label", x: 11, y: middle, "text-anchor": "middle", transform: `rotate(-90 11 ${middle})` }, y.label));
    return group;
  }

  line(line) {
    const group = s("g", { class: `line ${line.tone}${line.isDashed ? " dashed" : ""}` });
    const pieces = [];
    let isOpen = false;
    for (const [px, py] of line.points) {
      if (py === null || py === undefined) {
        isOpen = !line.breaks && isOpen;
        continue;
      }
      pieces.push(`${isOpen ? "L" : "M"}${this.toX(px).toFixed(1)} ${this.toY(py).toFixed(1)}`);
      isOpen = true;
    }
    group.append(s("path", { d: pieces.join("") }));
    const known = line.points.filter((point) => point[1] !== null && point[1] !== undefined);
    if (known.length <= 40) known.forEach((point) => group.append(s("circle", { cx: this.toX(point[0]), cy: this.toY(point[1]), r: known.length > 1 ? 1.8 : 3 })));
    return group;
  }

  summary() {
    const { x, y } = this.data;
    const told = this.drawn.map((line) => {
      const known = line.points.filter((point) => point[1] !== null && point[1] !== undefined);
      const [low, high] = extent(known.map((point) => point[1]));
      return `${line.name}: newest ${y.format(known.at(-1)[1])}, from ${y.format(low)} to ${y.format(high)}`;
    });
    return `${this.title}, ${y.label} by ${x.label}. ${told.join("; ")}. Arrow keys read single points.`;
  }

  pointAt(event) {
    if (!this.drawn?.length) return;
    const box = this.svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * this.svg.viewBox.baseVal.width;
    const points = this.drawn[0].points;
    let best = 0;
    points.forEach((point, index) => {
      if (Math.abs(this.toX(point[0]) - at) < Math.abs(this.toX(points[best][0]) - at)) best = index;
    });
    this.point(best);
  }

  key(event) {
    const count = this.drawn?.[0]?.points.length ?? 0;
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -count, End: count };
    if (!count || !(event.key in steps)) return;
    event.preventDefault();
    this.reading.setAttribute("aria-live", "polite");
    this.point(Math.max(0, Math.min(count - 1, (this.index ?? count) + steps[event.key])));
  }

  point(index) {
    this.index = index;
    if (!this.drawn?.length || !this.cursor) return;
    if (index === null) {
      replace(this.cursor);
      replace(this.reading, "\u00a0");
      return;
    }
    const { x, y } = this.data;
    const at = this.drawn[0].points[index][0];
    const px = this.toX(at);
    replace(this.cursor, s("line", { x1: px, x2: px, y1: MARGIN.top, y2: this.height - MARGIN.bottom }));
    const told = [];
    for (const line of this.drawn) {
      const value = line.points.find((point) => point[0] === at)?.[1];
      if (value === null || value === undefined) continue;
      this.cursor.append(s("circle", { class: line.tone, cx: px, cy: this.toY(value), r: 4 }));
      told.push(`${line.name} ${(y.exact ?? y.format)(value)}`);
    }
    replace(this.reading, `${x.name ?? x.label} ${(x.exact ?? x.format)(at)}: ${told.join(", ") || "not known"}`);
  }
}

export function swatch(line) {
  return s("svg", { class: `swatch line ${line.tone}${line.isDashed ? " dashed" : ""}`, width: 22, height: 10, viewBox: "0 0 22 10", "aria-hidden": "true" },
    s("path", { d: "M1 5H21" }));
}

function padded(found, axis, share) {
  let [low, high] = found;
  const room = (high - low || Math.abs(high) || 1) * share;
  low = axis.min ?? low - room;
  high = Math.max(axis.max ?? -Infinity, high + room);
  if (axis.most !== undefined) high = Math.min(high, axis.most);
  if (axis.least !== undefined) low = Math.max(low, axis.least);
  return high > low ? [low, high] : [low, low + 1];
}
