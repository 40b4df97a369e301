// The fleet: who is there, on which board, at which work, how warm; and actions on several devices at once.

import { post } from "./api.js";
import { act, confirm } from "./dialogs.js";
import { button, h, link, replace, s, setText, toast } from "./dom.js";
import { celsius, count, moment, percent, plain, seconds, shortHash } from "./format.js";
import { boards, HOT_C, model } from "./model.js";
import { pickColumn, Table } from "./tables.js";

const ORDER = ["gone", "late", "offline", "draining", "online", "never seen"];
const FIRST_MAPPED = 12;
const MAP_SHARE = 0.15;
const MIN_CELL = 10;
const MAX_CELL = 32;
const MAP_KEY = [["online", "online"], ["online works", "at work"], ["late", "late or draining"], ["gone", "gone"], ["offline", "offline or never seen"], ["online trouble", "throttled or hot"]];
const isHot = (row) => (row.temperature_c ?? 0) >= HOT_C;
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
  ["hot", `${HOT_C} °C or more`, isHot],
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

export function stateMark(state) {
  return h("span", { class: `presence ${state.replace(" ", "-")}` }, s("svg", { width: 12, height: 12, viewBox: "0 0 12 12", "aria-hidden": "true" }, (MARKS[state] ?? MARKS["never seen"]).cloneNode(true)));
}

export function presence(row) {
  const mark = stateMark(row.presence);
  const asked = row.drained && row.presence !== "draining" ? " (to drain)" : "";
  const since = row.since && row.presence !== "never seen" ? ` since ${moment(row.since)}` : "";
  mark.append(h("span", {}, `${row.presence}${asked}`, since ? h("span", { class: "since" }, since) : null));
  return mark;
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

const COLUMNS = [
  { key: "device", title: "Device", isHeading: true, value: (row) => row.device_id, cell: (row) => h("span", {}, link(["devices", row.device_id], row.device_id), minor(row)) },
  { key: "presence", title: "State", value: (row) => ORDER.indexOf(row.presence) + (row.built_in ? 0.5 : 0), cell: presence },
  { key: "work", title: "Current run", value: (row) => row.run ?? null, cell: work },
  { key: "board", title: "Board", class: "wide", isOptional: true, value: (row) => row.model ?? null, cell: (row) => row.model ?? "–" },
  { key: "groups", title: "Groups", class: "wide", isOptional: true, value: (row) => row.groups?.join(", ") ?? null, cell: (row) => plain(row.groups) },
  { key: "examples", title: "Examples", class: "wide", isNumber: true, isOptional: true, value: (row) => row.examples ?? null, cell: (row) => count(row.examples) },
  { key: "temperature", title: "Temp.", isNumber: true, isOptional: true, value: (row) => row.temperature_c ?? null, cell: temperature },
  { key: "throttled", title: "Throttling", class: "wide", isOptional: true, value: (row) => row.throttled ?? null, cell: (row) => (row.throttled ? h("span", { class: "warn" }, row.throttled.replaceAll(",", ", ")) : "–") },
  { key: "cpu", title: "CPU", class: "wide", isNumber: true, isOptional: true, value: (row) => row.cpu_fraction ?? null, cell: (row) => percent(row.cpu_fraction) },
  { key: "memory", title: "Memory", class: "wide", isNumber: true, isOptional: true, value: (row) => row.memory_fraction ?? null, cell: (row) => percent(row.memory_fraction) },
  { key: "deployed", title: "Deployed model", class: "wide", isOptional: true, value: (row) => row.deployed ?? null, cell: (row) => shortHash(row.deployed) },
  { key: "power", title: "Power", class: "wide", isNumber: true, isOptional: true, value: (row) => row.power_w ?? row.battery_fraction ?? null, cell: power },
  { key: "version", title: "Version", class: "wide", isOptional: true, value: (row) => row.version ?? null, cell: (row) => row.version ?? "–" },
];

function minor(row) {
  return [row.role === "trainer" ? null : h("span", { class: "minor beside" }, row.role), row.cloned ? h("span", { class: "warn beside", title: row.cloned }, "cloned") : null];
}

function power(row) {
  const told = [row.power_w === undefined ? null : `${row.power_w.toFixed(1)} W`, row.battery_fraction === undefined ? null : `battery ${percent(row.battery_fraction)}`];
  return told.filter(Boolean).join(", ") || "–";
}

// One button for each action on devices: their names, in order; `done` is told afterwards.
export function deviceActions(names, done) {
  const each = (verb, said) => () => act(async () => {
    for (const name of names) await post(`devices/${encodeURIComponent(name)}/${verb}`);
    toast(`${names.length === 1 ? names[0] : `${names.length} devices`} ${said}`);
    done(verb);
  }, verb === "remove" ? "admin" : "operator");
  const which = names.length === 1 ? names[0] : `${names.length} devices`;
  const rows = names.map((name) => model.devices.get(name)).filter(Boolean);
  return [
    rows.some((row) => !row.drained && row.presence !== "never seen") ? button("Drain", each("drain", "will get no more work.")) : null,
    rows.some((row) => row.drained) ? button("Give it work again", each("resume", "will get work again.")) : null,
    button("Remove", () => confirm(`Remove ${which}?`, `${names.slice(0, 8).join(", ")}${names.length > 8 ? ` and ${names.length - 8} more` : ""} must join again with a new token; what was recorded stays.`, { text: `Remove ${which}`, action: each("remove", "removed.") }), { class: "danger" }),
  ];
}

export function fleetView(root) {
  let chosen = new URLSearchParams(location.hash.split("?")[1] ?? "").get("show") ?? "all";
  let shown = "";
  const picked = new Set();
  const search = h("input", { type: "search", id: "find", placeholder: "name, group, task or board", oninput: () => draw(), autocomplete: "off", spellcheck: "false" });
  const chips = new Map(FILTERS.map(([key, title]) => [key, chip(key, title)]));
  const summary = h("p", { class: "quiet", role: "status" });
  const bulk = h("p", { class: "actions left bulk", hidden: true });
  const map = h("div", { class: "map", "aria-hidden": "true" });
  const key = h("ul", { class: "legend", "aria-hidden": "true" }, MAP_KEY.map(([kind, text]) => h("li", {}, h("i", { class: kind }), text)));
  const columns = [pickColumn(picked, (row) => row.device_id, () => drawBulk()), ...COLUMNS.map((column) => ({ ...column }))];
  const table = new Table({ caption: "Devices of the fleet", columns, rowKey: (row) => row.device_id, order: { key: "presence" } });
  replace(root, h("div", { class: "head" }, h("h1", {}, "Fleet"), h("p", { class: "actions" }, link(["join"], "Let a device join", { class: "button" }))),
    h("div", { class: "filters", role: "group", "aria-label": "Which devices" }, [...chips.values()].map((entry) => entry.element)),
    h("p", { class: "search" }, h("label", { for: "find" }, "Find"), search), map, key, summary, bulk, table.element);

  function chip(key, title) {
    const number = h("span", { class: "count" });
    const element = button([title, " ", number], () => { chosen = key; draw(); });
    return { element, number };
  }

  function drawBulk() {
    const names = [...picked].filter((name) => model.devices.has(name)).sort();
    const state = JSON.stringify(names.map((name) => [name, model.devices.get(name).drained]));
    if (state === shown) return;
    shown = state;
    bulk.hidden = !names.length;
    replace(bulk, h("span", { class: "quiet" }, `${names.length} chosen`), deviceActions(names, () => { picked.clear(); table.forget(); draw(); }));
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
    drawMap(map, all.length > FIRST_MAPPED ? all : []);
    key.hidden = map.hidden;
    const numBoards = boards().length;
    const told = `${numBoards} ${numBoards === 1 ? "board" : "boards"}`;
    setText(summary, rows.length === all.length ? `${told}${all.length > numBoards ? ", and the coordinator's own evaluator" : ""}` : `${rows.length} of ${all.length} devices`);
    table.emptyText = all.length ? "No device is like that." : "No device has joined yet.";
    table.show(rows);
    drawBulk();
  }
  draw();
  return { update: draw };
}

function text(row) {
  return [row.device_id, row.model, row.presence, row.version, ...(row.groups ?? []), ...(row.tasks ?? [])].join(" ").toLowerCase();
}

// A cell a device, by state: a large fleet at a glance. The table says the same in words.
function drawMap(map, rows) {
  map.hidden = !rows.length;
  // As large as lets all of them fill a share of the window.
  const size = Math.sqrt((MAP_SHARE * map.clientWidth * innerHeight) / Math.max(1, rows.length)) - 2;
  map.style.setProperty("--cell", `${Math.min(MAX_CELL, Math.max(MIN_CELL, Math.floor(size)))}px`);
  const place = (row) => ORDER.indexOf(row.presence);
  const sorted = [...rows].sort((a, b) => place(a) - place(b) || (a.device_id < b.device_id ? -1 : 1));
  while (map.children.length > sorted.length) map.lastChild.remove();
  while (map.children.length < sorted.length) map.append(h("i"));
  sorted.forEach((row, index) => {
    const cell = map.children[index];
    const kind = `${row.presence.replace(" ", "-")} ${row.run ? "works" : ""} ${row.throttled || isHot(row) ? "trouble" : ""}`;
    if (cell.className !== kind) cell.className = kind;
    const told = `${row.device_id}: ${row.presence}${row.temperature_c ? `, ${celsius(row.temperature_c)}` : ""}`;
    if (cell.title !== told) cell.title = told;
  });
}
