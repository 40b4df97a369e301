// The fleet: who is there, how warm, held back by what, at which work.

import { button, h, link, replace, s, setText } from "./dom.js";
import { celsius, moment, percent, seconds, shortHash } from "./format.js";
import { HOT_C, model, troubleOf } from "./model.js";
import { Table } from "./tables.js";

const ORDER = ["gone", "late", "draining", "never seen", "offline", "online"];
const FILTERS = [
  ["all", "All", () => true],
  ["online", "Online", (row) => row.presence === "online"],
  ["late", "Late", (row) => row.presence === "late"],
  ["gone", "Gone", (row) => row.presence === "gone"],
  ["offline", "Offline", (row) => row.presence === "offline"],
  ["draining", "Draining", (row) => row.presence === "draining" || row.drained],
  ["never", "Never seen", (row) => row.presence === "never seen"],
  ["cloned", "Cloned", (row) => Boolean(row.cloned)],
  ["throttled", "Throttled", (row) => Boolean(row.throttled)],
  ["hot", `${HOT_C} °C or more`, (row) => (row.temperature_c ?? 0) >= HOT_C],
];

// A form for each state, so that colour is never alone.
const MARKS = {
  online: s("circle", { cx: 6, cy: 6, r: 4.5 }),
  late: s("path", { d: "M6 .8 11.200 10.500H.8Z" }),
  gone: s("path", { d: "m2 2 8 8m0-8-8 8", fill: "none", "stroke-width": 2.4 }),
  offline: s("circle", { cx: 6, cy: 6, r: 4, fill: "none", "stroke-width": 1.8 }),
  draining: s("rect", { x: 1.5, y: 1.5, width: 9, height: 9 }),
  "never seen": s("path", { d: "M2 6h8", fill: "none", "stroke-width": 2.2 }),
};

export function presence(row) {
  const mark = MARKS[row.presence] ?? MARKS["never seen"];
  const kind = row.presence.replace(" ", "-");
  const asked = row.drained && row.presence !== "draining" ? " (to drain)" : "";
  const since = row.since && row.presence !== "never seen" ? ` since ${moment(row.since)}` : "";
  return h("span", { class: `presence ${kind}` },
    s("svg", { width: 12, height: 12, viewBox: "0 0 12 12", "aria-hidden": "true" }, mark.cloneNode(true)),
    h("span", {}, `${row.presence}${asked}`, since ? h("span", { class: "since" }, since) : null));
}

export function temperature(row) {
  if (row.temperature_c === undefined) return "–";
  return h("span", { class: row.temperature_c >= HOT_C ? "bad" : row.temperature_c >= HOT_C - 10 ? "warn" : null }, celsius(row.temperature_c));
}

export function work(row) {
  if (!row.run) return row.role === "evaluator" ? "evaluates" : row.presence === "online" ? "idle" : "–";
  const name = model.runs.get(row.run)?.name ?? row.run;
  const speed = row.seconds_per_iteration ? `, ${seconds(row.seconds_per_iteration)} each` : "";
  return h("span", {}, link(["runs", row.run], name, { class: "work" }), h("span", { class: "minor" }, row.iteration === undefined ? "" : ` iteration ${row.iteration}${speed}`));
}

export function deviceColumns() {
  return [
    { key: "device", title: "Device", isHeading: true, value: (row) => row.device_id, cell: (row) => h("span", {}, link(["devices", row.device_id], row.device_id), minor(row)) },
    { key: "presence", title: "Presence", value: (row) => ORDER.indexOf(row.presence), cell: presence },
    { key: "work", title: "At work on", value: (row) => row.run ?? null, cell: work },
    { key: "temperature", title: "Temp.", isNumber: true, value: (row) => row.temperature_c ?? null, cell: temperature },
    { key: "throttled", title: "Held back by", class: "wide", value: (row) => row.throttled ?? null, cell: (row) => (row.throttled ? h("span", { class: "warn" }, row.throttled.replaceAll(",", ", ")) : "–") },
    { key: "cpu", title: "CPU", class: "wide", isNumber: true, value: (row) => row.cpu_fraction ?? null, cell: (row) => percent(row.cpu_fraction) },
    { key: "memory", title: "Memory", class: "wide", isNumber: true, value: (row) => row.memory_fraction ?? null, cell: (row) => percent(row.memory_fraction) },
    { key: "deployed", title: "Runs model", class: "wide", value: (row) => row.deployed ?? null, cell: (row) => shortHash(row.deployed) },
    { key: "power", title: "Power", class: "wide", isNumber: true, value: (row) => row.power_w ?? null, cell: power },
  ];
}

function minor(row) {
  const told = [row.role === "trainer" ? null : row.role, ...(row.groups ?? [])].filter(Boolean);
  return [told.length ? h("span", { class: "minor beside" }, told.join(", ")) : null,
    row.cloned ? h("span", { class: "warn beside", title: row.cloned }, "cloned") : null];
}

function power(row) {
  const told = [row.power_w === undefined ? null : `${row.power_w.toFixed(1)} W`, row.battery_fraction === undefined ? null : `battery ${percent(row.battery_fraction)}`];
  return told.filter(Boolean).join(", ") || "–";
}

export function fleetView(root) {
  let chosen = new URLSearchParams(location.hash.split("?")[1] ?? "").get("show") ?? "all";
  const search = h("input", { type: "search", id: "find", placeholder: "name, group, task or board", oninput: () => draw(), autocomplete: "off", spellcheck: "false" });
  const chips = new Map(FILTERS.map(([key, title]) => [key, chip(key, title)]));
  const summary = h("p", { class: "quiet", role: "status" });
  const map = h("div", { class: "map", "aria-hidden": "true" });
  const table = new Table({ caption: "Devices of the fleet", columns: deviceColumns(), rowKey: (row) => row.device_id, order: { key: "presence" }, empty: "No device is like that." });
  replace(root, h("div", { class: "head" }, h("h1", {}, "Fleet"), h("p", { class: "actions" }, link(["join"], "Let a device join", { class: "button" }))),
    h("div", { class: "filters", role: "group", "aria-label": "Which devices" }, [...chips.values()].map((entry) => entry.element)),
    h("p", { class: "search" }, h("label", { for: "find" }, "Find"), search), map, summary, table.element);

  function chip(key, title) {
    const number = h("span", { class: "count" });
    const element = button([title, " ", number], () => { chosen = key; draw(); });
    return { element, number };
  }

  function draw() {
    const all = [...model.devices.values()];
    for (const [key, , fits] of FILTERS) {
      const number = all.filter(fits).length;
      setText(chips.get(key).number, String(number));
      chips.get(key).element.hidden = number === 0 && key !== "all" && key !== "online" && key !== chosen;
      chips.get(key).element.setAttribute("aria-pressed", String(key === chosen));
    }
    const wanted = search.value.trim().toLowerCase();
    const fits = FILTERS.find(([key]) => key === chosen)?.[2] ?? (() => true);
    const rows = all.filter((row) => fits(row) && (!wanted || text(row).includes(wanted)));
    drawMap(map, all.length > 40 ? all : []);
    setText(summary, rows.length === all.length ? `${all.length} ${all.length === 1 ? "device" : "devices"}` : `${rows.length} of ${all.length} devices`);
    table.emptyText = all.length ? "No device is like that." : "No device has joined yet.";
    table.show(rows);
  }
  draw();
  return { update: draw };
}

function text(row) {
  return [row.device_id, row.model, row.presence, ...(row.groups ?? []), ...(row.tasks ?? [])].join(" ").toLowerCase();
}

// A cell a device: a large fleet at a glance. The table says the same in words.
function drawMap(map, rows) {
  map.hidden = !rows.length;
  const sorted = [...rows].sort((a, b) => (a.device_id < b.device_id ? -1 : 1));
  while (map.children.length > sorted.length) map.lastChild.remove();
  while (map.children.length < sorted.length) map.append(h("i"));
  sorted.forEach((row, index) => {
    const cell = map.children[index];
    const kind = `${row.presence.replace(" ", "-")} ${row.run ? "works" : ""} ${["throttled", "hot"].includes(troubleOf(row)) ? "trouble" : ""}`;
    if (cell.className !== kind) cell.className = kind;
    const told = `${row.device_id}: ${row.presence}${row.temperature_c ? `, ${celsius(row.temperature_c)}` : ""}`;
    if (cell.title !== told) cell.title = told;
  });
}
