// What matters now: the run that goes on, the state of the fleet, who needs a look, what happened last.

import { h, link, replace } from "./dom.js";
import { moment, words } from "./format.js";
import { presence, temperature } from "./fleet.js";
import { model, troubleOf } from "./model.js";
import { RunCharts, runActions, runBar, runFacts } from "./run.js";
import { status } from "./runs.js";

const SHOWN_TROUBLE = 10;
const SHOWN_EVENTS = 12;
const STATES = ["online", "late", "draining", "gone", "offline", "never seen"];

export function nowView(root) {
  const runPart = h("section", { "aria-label": "The run that goes on" });
  const fleetPart = h("section", { "aria-label": "The fleet" });
  const troublePart = h("section", { "aria-label": "Devices that need a look" });
  const eventPart = h("section", { "aria-label": "Newest events" });
  let charts = null;
  let shown = "";
  replace(root, h("h1", { class: "unseen" }, "Now"), runPart, h("div", { class: "columns" }, h("div", {}, fleetPart, troublePart), eventPart));

  function draw() {
    drawRun();
    drawFleet();
    drawTrouble();
    drawEvents();
  }

  function drawRun() {
    const live = model.runs.get(model.liveRun);
    // The last that went on, even if it did so for less than a second, of which nothing was told; none that only waits.
    const lastAt = (row) => row.finished_at ?? row.started_at ?? 0;
    const last = [...model.runs.values()].sort((a, b) => lastAt(b) - lastAt(a) || b.submitted_at - a.submitted_at)[0];
    const run = live ?? last;
    if (!run) {
      replace(runPart, h("h2", {}, "No run yet"), h("p", {}, link(["start"], "Start a run", { class: "button primary" })));
      return;
    }
    if (charts?.runId !== run.run_id) {
      charts = new RunCharts(run.run_id, { isShort: true });
      shown = "";
    }
    const state = JSON.stringify([run.run_id, run.status, model.acts]);
    if (state !== shown) {
      shown = state;
      runPart.head = h("div", { class: "head" }, h("h2", {}, live ? "" : "Last run: ", link(["runs", run.run_id], run.name), " ", status(run)),
        h("div", { class: "actions" }, live ? null : link(["start"], "Start a run", { class: "button primary" }), runActions(run, () => { shown = ""; draw(); })));
      runPart.bar = h("div");
      runPart.numbers = h("div");
      replace(runPart, runPart.head, runPart.bar, runPart.numbers, charts.element);
    }
    replace(runPart.bar, live ? runBar(run) ?? [] : []);
    charts.draw();
    replace(runPart.numbers, runFacts(run));
  }

  function drawFleet() {
    const all = [...model.devices.values()];
    const numbers = STATES.map((state) => [state, all.filter((row) => row.presence === state).length]).filter((entry) => entry[1]);
    const bar = h("div", { class: "share", "aria-hidden": "true" }, numbers.map(([state, number]) => {
      const piece = h("i", { class: state.replace(" ", "-") });
      piece.style.flexGrow = String(number);
      return piece;
    }));
    const told = numbers.map(([state, number]) => h("li", {}, h("b", {}, String(number)), " ", presence({ presence: state })));
    const atWork = all.filter((row) => row.run).length;
    replace(fleetPart, h("h2", {}, link(["fleet"], "Fleet"), ` of ${all.length}`), numbers.length ? bar : [],
      h("ul", { class: "counts" }, told, atWork ? h("li", {}, h("b", {}, String(atWork)), " at work") : []),
      all.length ? [] : h("p", {}, "No device has joined yet. ", link(["join"], "Let one join")));
  }

  function drawTrouble() {
    const rows = [...model.devices.values()].filter(troubleOf).sort((a, b) => (a.device_id < b.device_id ? -1 : 1));
    if (!rows.length) {
      replace(troublePart, h("h2", {}, "Needs a look"), h("p", { class: "quiet" }, model.devices.size ? "No device is late, gone, throttled or hot." : "–"));
      return;
    }
    const lines = rows.slice(0, SHOWN_TROUBLE).map((row) => h("tr", {}, h("th", { scope: "row" }, link(["devices", row.device_id], row.device_id)),
      h("td", {}, presence(row)), h("td", { class: "number" }, temperature(row)), h("td", {}, row.throttled ? h("span", { class: "warn" }, row.throttled.replaceAll(",", ", ")) : "")));
    replace(troublePart, h("h2", {}, "Needs a look"), h("div", { class: "scroll" }, h("table", {}, h("caption", { class: "unseen" }, "Devices that are late, gone, throttled or hot"),
      h("thead", { class: "unseen" }, h("tr", {}, ["Device", "Presence", "Temperature", "Held back by"].map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, lines))),
    rows.length > SHOWN_TROUBLE ? h("p", { class: "quiet" }, `and ${rows.length - SHOWN_TROUBLE} more in the `, link(["fleet"], "fleet")) : []);
  }

  function drawEvents() {
    replace(eventPart, h("h2", {}, "Events"), eventList([...model.events].reverse().slice(0, SHOWN_EVENTS)));
  }

  draw();
  return { update: draw };
}

// Beside its device or run, an event need not say what it is about.
function kindOf(event) {
  return event.kind.replace(event.device_id ? /^device-/ : event.run_id ? /^run-/ : /^$/, "");
}

export function eventList(events) {
  if (!events.length) return h("p", { class: "quiet" }, "Nothing has happened yet.");
  return h("ol", { class: "events" }, events.map((event) => h("li", {},
    h("time", { datetime: new Date(event.at * 1000).toISOString() }, moment(event.at)),
    h("span", {}, event.device_id ? [link(["devices", event.device_id], event.device_id), " "] : [], event.run_id && !event.device_id ? [link(["runs", event.run_id], model.runs.get(event.run_id)?.name ?? event.run_id), " "] : [],
      h("span", { class: /gone|lost|failed|flapping|cloned|quarantined|rejected|clipped|interrupted|paused|stalled|unavailable|dropped/.test(event.kind) ? "warn" : null }, words(kindOf(event))), event.message ? h("span", { class: "minor" }, ` ${event.message}`) : []))));
}
