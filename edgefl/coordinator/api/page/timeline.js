// Who computed, sent and waited when, over a few rounds; one line per device.

import { typeScale } from "./charts.js";
import { framed, h, replace, s, setText } from "./dom.js";
import { digits, seconds } from "./format.js";
import { scroller } from "./tables.js";

const ROW = 18;
const TOP = 18;
const BOTTOM = 36;
const STEPS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400];
const KINDS = [["computing", "compute"], ["sending and queueing", "send"], ["waiting for others", "wait"], ["brought no update", "lost"]];

export class TimeLine {
  constructor(title = "Round time line") {
    this.svg = s("svg", { class: "chart timeline", role: "img" });
    this.frame = h("div", { class: "plot" }, this.svg);
    this.note = h("p", { class: "quiet" });
    this.empty = h("p", { class: "state quiet" }, "Loading…");
    this.sums = h("tbody");
    const head = ["Device", "Computing", "Sending", "Waiting", "Updates"].map((text, index) => h("th", { scope: "col", class: index ? "number" : null }, text));
    this.details = h("details", {}, h("summary", {}, "Seconds by device"),
      scroller(h("table", {}, h("caption", { class: "unseen" }, "Seconds by device"), h("thead", {}, h("tr", {}, head)), this.sums), "Seconds by device"));
    const legend = KINDS.map(([name, kind]) => h("li", {}, s("svg", { class: "swatch", width: 14, height: 10, "aria-hidden": "true" }, kind === "lost" ? s("path", { class: "lost", d: "M3 1l8 8m0 -8l-8 8" }) : s("rect", { class: kind, width: 14, height: 10 })), name));
    this.element = h("figure", {}, h("div", { class: "figure-head" }, h("figcaption", {}, title), h("ul", { class: "legend" }, legend)),
      this.frame, this.note, this.empty, this.details);
    this.data = null;
    this.draw = framed(() => this.drawNow());
    new ResizeObserver(this.draw).observe(this.frame);
  }

  say(text) {
    this.data = null;
    setText(this.empty, text);
    this.empty.hidden = false;
    this.frame.hidden = this.details.hidden = this.note.hidden = true;
  }

  // `spans`: rows by round.
  show(spans, numDevices) {
    this.data = { spans, numDevices };
    this.draw();
  }

  drawNow() {
    if (!this.data) return;
    const rounds = [...this.data.spans.keys()].sort((a, b) => a - b);
    const rows = rounds.flatMap((round) => this.data.spans.get(round)).filter((row) => row.dispatched_at !== null);
    if (!rows.length) {
      this.say("No round has closed yet.");
      return;
    }
    this.empty.hidden = true;
    this.frame.hidden = this.details.hidden = this.note.hidden = false;
    const names = [...new Set(rows.map((row) => row.device_id))].sort();
    const began = Math.min(...rows.map((row) => row.dispatched_at));
    const ended = Math.max(...rows.map((row) => ends(row)));
    const scale = typeScale();
    const width = Math.max(240, this.frame.clientWidth / scale);
    const left = Math.min(150, Math.max(64, width * 0.2));
    const height = TOP + names.length * ROW + BOTTOM;
    const toX = (at) => left + (at / Math.max(ended - began, 1e-6)) * (width - 12 - left);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height * scale);
    this.svg.setAttribute("aria-label", `Time line of rounds ${rounds[0]} to ${rounds.at(-1)}, ${seconds(ended - began)} in all; the table below has the sums.`);
    const lines = names.map((name, index) => this.row(name, index, rows.filter((row) => row.device_id === name), toX, began, left, width));
    replace(this.svg, this.axes(rounds, toX, began, ended, left, width, height), lines);
    this.tell(rounds, names, rows);
  }

  axes(rounds, toX, began, ended, left, width, height) {
    const bottom = height - BOTTOM;
    const group = s("g", { class: "axes" });
    const step = STEPS.find((size) => size >= (90 * (ended - began)) / (width - left)) ?? ended - began;
    for (let tick = 0; tick <= ended - began; tick += step) {
      const at = toX(tick);
      group.append(s("line", { x1: at, x2: at, y1: TOP, y2: bottom }));
      group.append(s("text", { x: at, y: bottom + 14, "text-anchor": at > width - 24 ? "end" : "middle" }, digits(tick, 4)));
    }
    group.append(s("text", { class: "label", x: (left + width) / 2, y: height - 5, "text-anchor": "middle" }, "seconds since the first of them began"));
    let free = -Infinity;
    for (const round of rounds) {
      const at = toX(Math.min(...this.data.spans.get(round).map((row) => row.dispatched_at ?? Infinity)) - began);
      if (!Number.isFinite(at)) continue;
      group.append(s("line", { class: "round", x1: at, x2: at, y1: TOP - 4, y2: bottom }));
      const text = free === -Infinity ? `round ${round}` : String(round);
      if (at >= free && at + text.length * 7 < width) {
        group.append(s("text", { x: at + 3, y: TOP - 6 }, text));
        free = at + text.length * 7 + 10;
      }
    }
    return group;
  }

  row(name, index, rows, toX, began, left, width) {
    const y = TOP + index * ROW;
    const group = s("g", {});
    const room = Math.floor((left - 8) / 6.6);
    // The end tells devices apart, as a rule.
    const label = name.length > room ? `${name.slice(0, 2)}…${name.slice(3 - room)}` : name;
    group.append(s("text", { class: "name", x: left - 6, y: y + 13, "text-anchor": "end" }, s("title", {}, name), label));
    group.append(s("line", { class: "lane", x1: left, x2: width - 12, y1: y + ROW - 0.5, y2: y + ROW - 0.5 }));
    for (const row of rows) {
      const back = ends(row) - (row.wait_s ?? 0);
      const spent = (row.compute_s ?? 0) + (row.send_s ?? 0);
      const from = Math.max(row.dispatched_at, back - spent);
      const parts = [["compute", from, row.compute_s ?? 0], ["send", from + (row.compute_s ?? 0), row.send_s ?? 0], ["wait", back, row.wait_s ?? 0]];
      const told = `${name}, round ${row.round}: computing ${seconds(row.compute_s ?? 0)}, sending ${seconds(row.send_s ?? 0)}, waiting ${seconds(row.wait_s ?? 0)}; ${row.outcome ?? "outstanding"}`;
      for (const [kind, at, lasts] of parts) {
        if (!lasts) continue;
        const x = toX(at - began);
        group.append(s("rect", { class: kind, x, y: y + 3, width: Math.max(0.7, toX(at + lasts - began) - x), height: ROW - 7 }, s("title", {}, told)));
      }
      if (row.outcome && row.outcome !== "used") {
        const x = toX(row.dispatched_at - began);
        group.append(s("path", { class: "lost", d: `M${x + 2} ${y + 5}l7 7m0 -7l-7 7` }, s("title", {}, `${told}`)));
      }
    }
    return group;
  }

  tell(rounds, names, rows) {
    const { numDevices } = this.data;
    const which = rounds.length > 1 ? `Rounds ${rounds[0]} to ${rounds.at(-1)}` : `Round ${rounds[0]}`;
    replace(this.note, numDevices > names.length
      ? `${which}; the ${names.length} of ${numDevices} devices that were busy longest.`
      : `${which}; ${names.length} ${names.length === 1 ? "device" : "devices"}.`);
    const sum = (kind, mine) => mine.reduce((total, row) => total + (row[kind] ?? 0), 0);
    replace(this.sums, names.map((name) => {
      const mine = rows.filter((row) => row.device_id === name);
      const times = ["compute_s", "send_s", "wait_s"].map((kind) => h("td", { class: "number" }, seconds(sum(kind, mine))));
      return h("tr", {}, h("th", { scope: "row" }, name), times, h("td", { class: "number" }, String(mine.length)));
    }));
  }
}

function ends(row) {
  return (row.received_at ?? row.dispatched_at) + (row.wait_s ?? 0);
}
