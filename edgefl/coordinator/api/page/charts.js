// Line charts, drawn by uPlot on a canvas: zoom by dragging or by the keys + and -, a double click or Escape shows all. A chart reads its points
// aloud by mouse, finger and arrow keys, and says in words whether it loads, failed or has nothing to show.

import { framed, h, replace, s, setText } from "./dom.js";
import { clock, seconds } from "./format.js";

const KEY_STEPS = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
const KEY_ZOOMS = { "+": 0.5, "=": 0.5, "-": 2, Escape: Infinity };
const MARKED_POINTS = 40;
const WIDE = 640;
const charts = new Set();

// How much larger type is than at the usual width, for what is drawn in pixels.
export function typeScale() {
  return parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--small-px")) / 12;
}

// The canvas does not follow the theme by itself.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.drawAnew()));

// `chart.show({ x, y, series, marks })`: x and y are { label, name, format, exact, isTime, isLog, min, max }; a series
// is { name, tone, points: [[x, y], …], isDashed }, all with x ascending; a mark is { y, text } or { x, text }. A point
// whose y is null is skipped. Charts of one `group` share cursor and zoom.
export class LineChart {
  constructor(title, { height = 220, group = null } = {}) {
    Object.assign(this, { title, height, group, data: null, plot: null, isZoomed: false });
    this.frame = h("div", { class: "plot", tabindex: "0", role: "img" });
    this.reading = h("p", { class: "reading", "aria-live": "off" }, "\u00a0");
    this.legend = h("ul", { class: "legend" });
    this.note = h("p", { class: "state quiet" }, "Loading…");
    this.heading = h("figcaption", {}, title);
    this.element = h("figure", {}, h("div", { class: "figure-head" }, this.heading, this.legend), this.frame, this.reading, this.note);
    this.frame.hidden = this.reading.hidden = true;
    this.draw = framed(() => this.drawNow());
    new ResizeObserver(() => this.resize()).observe(this.element);
    this.frame.addEventListener("keydown", (event) => this.key(event));
    this.frame.addEventListener("blur", () => this.plot?.setCursor({ left: -10, top: -10 }));
  }

  // Without data there is one line of text: that it loads, why it failed, or why there is nothing.
  say(text, isError = false) {
    this.data = null;
    setText(this.note, text);
    this.note.className = `state ${isError ? "error" : "quiet"}`;
    this.note.hidden = false;
    this.frame.hidden = this.reading.hidden = true;
    replace(this.legend);
  }

  show(data, empty = "No values yet.") {
    const drawn = data.series.filter((line) => line.points.some((point) => isKnown(point[1])));
    if (!drawn.length) {
      this.say(empty);
      return;
    }
    this.data = { marks: [], ...data, drawn };
    this.draw();
  }

  drawNow() {
    if (!this.data) return;
    const { drawn, series } = this.data;
    this.note.hidden = true;
    this.frame.hidden = this.reading.hidden = false;
    replace(this.legend, series.length > 1 ? drawn.map((line) => h("li", {}, swatch(line), line.name)) : []);
    const table = uPlot.join(drawn.map((line) => columns(line.points, this.data.y.isLog)));
    const shape = JSON.stringify([this.data.x.label, this.data.y.label, this.data.y.isLog, drawn.map((line) => [line.name, line.tone, line.points.length <= MARKED_POINTS])]);
    this.frame.setAttribute("aria-label", this.summary());
    this.element.dataset.points = table[0].length;
    if (this.plot && this.shape === shape) {
      // Someone who has zoomed in stays there.
      this.plot.setData(table, !this.isZoomed);
      return;
    }
    this.shape = shape;
    this.plot?.destroy();
    this.plot = new uPlot(this.options(), table, this.frame);
    charts.add(this);
  }

  drawAnew() {
    this.shape = "";
    this.drawNow();
  }

  resize() {
    if (!this.frame.isConnected) charts.delete(this);
    else if (this.plot && !this.frame.hidden && this.frame.clientWidth !== this.plot.width) this.plot.setSize(this.size());
  }

  // A chart on a very wide screen keeps its proportions.
  size() {
    const width = Math.max(200, this.frame.clientWidth);
    return { width, height: Math.round(this.height * Math.max(1, width / WIDE)) };
  }

  options() {
    const { x, y, drawn } = this.data;
    const style = getComputedStyle(this.element);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const font = `${style.getPropertyValue("--small-px")} ${style.fontFamily}`;
    const scale = typeScale();
    const axis = { stroke: colour("quiet"), font, labelFont: font, labelSize: 16 * scale, labelGap: 2, grid: { stroke: colour("rule"), width: 1 }, ticks: { stroke: colour("rule"), width: 1, size: 4 } };
    const isCoarse = matchMedia("(pointer: coarse)").matches;
    return {
      ...this.size(), padding: [8, 14, 0, 0], legend: { show: false },
      cursor: { y: false, drag: { x: !isCoarse, y: false }, points: { size: 8 }, ...(this.group ? { sync: { key: this.group, setSeries: false, scales: ["x", null] } } : {}) },
      scales: { x: { time: false, range: (plot, low, high) => (high > low ? [low, high] : [low - 0.5, high + 0.5]) }, y: y.isLog ? { distr: 3 } : { range: (plot, low, high) => padded(low, high, y, this.data.marks) } },
      axes: [
        { ...axis, label: x.label, grid: { show: false }, size: 32 * scale, space: 80 * scale, values: (plot, ticks) => ticks.map((tick) => (x.isWhole && !Number.isInteger(tick) ? "" : x.format(tick, ticks[1] - ticks[0]))), ...(x.isTime ? { incrs: TIME_STEPS } : {}) },
        { ...axis, label: y.label, space: 34 * scale, values: (plot, ticks) => ticks.map((tick) => (tick === null ? "" : y.format(tick))), size: (plot, values) => scale * Math.max(40, 16 + 6.6 * Math.max(...(values ?? [""]).map((text) => text.length))) },
      ],
      series: [{}, ...drawn.map((line) => ({ label: line.name, stroke: colour(`tone-${line.tone}`), width: 1.7 * scale, dash: line.isDashed ? [5, 3] : undefined, spanGaps: true, points: { show: line.points.length <= MARKED_POINTS, size: 5 } }))],
      hooks: {
        setCursor: [() => this.read()],
        setScale: [(plot, key) => {
          if (key === "x") this.isZoomed = plot.scales.x.min > plot.data[0][0] || plot.scales.x.max < plot.data[0].at(-1);
        }],
        draw: [(plot) => this.drawMarks(plot, colour)],
      },
    };
  }

  // Targets as lines, best values as rings.
  drawMarks(plot, colour) {
    const { ctx, bbox } = plot;
    const scale = devicePixelRatio * typeScale();
    ctx.save();
    ctx.fillStyle = ctx.strokeStyle = colour("ink");
    ctx.lineWidth = scale;
    ctx.font = `${11 * scale}px ${getComputedStyle(this.element).fontFamily}`;
    for (const mark of this.data?.marks ?? []) {
      const top = plot.valToPos(mark.y, "y", true);
      ctx.beginPath();
      if (mark.x === undefined) {
        ctx.setLineDash([3 * scale, 4 * scale]);
        ctx.moveTo(bbox.left, top);
        ctx.lineTo(bbox.left + bbox.width, top);
        ctx.textAlign = "right";
        ctx.fillText(mark.text, bbox.left + bbox.width - 4 * scale, top - 4 * scale);
      } else {
        const left = plot.valToPos(mark.x, "x", true);
        if (left < bbox.left || left > bbox.left + bbox.width) continue;
        ctx.setLineDash([]);
        ctx.arc(left, top, 4.5 * scale, 0, 2 * Math.PI);
        ctx.textAlign = left > bbox.left + bbox.width / 2 ? "right" : "left";
        ctx.fillText(mark.text, left + (ctx.textAlign === "right" ? -8 : 8) * scale, top + 14 * scale);
      }
      ctx.stroke();
    }
    ctx.restore();
  }

  summary() {
    const { x, y, drawn, marks } = this.data;
    const told = drawn.map((line) => {
      const known = line.points.map((point) => point[1]).filter(isKnown);
      const [low, high] = known.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
      const format = y.exact ?? y.format;
      return `${line.name}: newest ${format(known.at(-1))}, from ${format(low)} to ${format(high)}`;
    });
    return `${this.title}, ${y.label} by ${x.label}. ${[...told, ...marks.map((mark) => mark.text)].join("; ")}. Arrow keys read single points, + and - zoom.`;
  }

  key(event) {
    if (this.plot && event.key in KEY_ZOOMS && !event.ctrlKey && !event.metaKey) this.zoom(KEY_ZOOMS[event.key]);
    if (!this.plot || !(event.key in KEY_STEPS)) return;
    event.preventDefault();
    this.reading.setAttribute("aria-live", "polite");
    const last = this.plot.data[0].length - 1;
    const index = Math.max(0, Math.min(last, (this.plot.cursor.idx ?? last + 1) + KEY_STEPS[event.key]));
    this.plot.setCursor({ left: this.plot.valToPos(this.plot.data[0][index], "x"), top: this.plot.height / 2 });
  }

  // Shows so much more or less of x around the cursor, in all charts of the group.
  zoom(factor) {
    const { cursor, data, scales } = this.plot;
    const all = data[0];
    const at = cursor.idx === null || cursor.idx === undefined ? (scales.x.min + scales.x.max) / 2 : all[cursor.idx];
    const half = ((scales.x.max - scales.x.min) * factor) / 2;
    const [low, high] = [Math.max(all[0], at - half), Math.min(all.at(-1), at + half)];
    if (all.filter((value) => value >= low && value <= high).length < 2) return;
    for (const chart of charts) if (chart === this || (this.group && chart.group === this.group)) chart.plot.setScale("x", { min: low, max: high });
    this.reading.setAttribute("aria-live", "polite");
  }

  read() {
    const index = this.plot?.cursor.idx;
    if (!this.data || index === null || index === undefined) {
      setText(this.reading, "\u00a0");
      return;
    }
    const { x, y, drawn } = this.data;
    const at = this.plot.data[0][index];
    const told = drawn.map((line, number) => [line.name, this.plot.data[number + 1][index]]).filter(([, value]) => isKnown(value))
      .map(([name, value]) => `${name} ${(y.exact ?? y.format)(value)}`);
    const format = (value) => (x.exact ?? x.format)(x.isWhole ? Math.round(value) : value);
    const { min, max } = this.plot.scales.x;
    const part = this.isZoomed ? `; shown: ${format(min)} to ${format(max)}` : "";
    setText(this.reading, `${x.name} ${format(at)}: ${told.join(", ") || "not known"}${part}`);
  }
}

export function swatch(line) {
  return s("svg", { class: `swatch tone-${line.tone}${line.isDashed ? " dashed" : ""}`, width: 22, height: 10, viewBox: "0 0 22 10", "aria-hidden": "true" },
    s("path", { d: "M1 5H21" }));
}

const TIME_STEPS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

// Axes of time: what the clock says, or how long after a start.
export const CLOCK_AXIS = { label: "time", name: "at", format: clock, exact: (value) => clock(value, 1), isTime: true };
export const DURATION_AXIS = { label: "time since the first round began", name: "after", format: seconds, isTime: true };

function isKnown(value) {
  return value !== null && value !== undefined;
}

// A logarithmic axis has no place for zero.
function columns(points, isLog = false) {
  return [points.map((point) => point[0]), points.map((point) => (isLog && point[1] <= 0 ? null : point[1] ?? null))];
}

function padded(low, high, axis, marks) {
  if (low === null) return [0, 1];
  const lines = marks.filter((mark) => mark.x === undefined).map((mark) => mark.y);
  low = axis.min ?? Math.min(low, ...lines);
  high = Math.max(axis.max ?? -Infinity, high, ...lines);
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  if (axis.min === undefined) low = Math.max(axis.least ?? -Infinity, low - room);
  high = Math.min(axis.most ?? Infinity, high + room);
  return high > low ? [low, high] : [low, low + 1];
}
