// One device: its state, what it has done lately, what it can do, its log; draining and removing it.

import { get } from "./api.js";
import { CLOCK_AXIS, LineChart } from "./charts.js";
import { button, h, link, refresh, replace, toast, visible } from "./dom.js";
import { bytes, count, moment, percent, plain, seconds, shortHash, words } from "./format.js";
import { deviceActions, presence, temperature, work } from "./fleet.js";
import { model } from "./model.js";
import { eventList } from "./events.js";
import { facts, section } from "./run.js";
import { scroller } from "./tables.js";

const NUM_BEATS = 720;
const NUM_ROWS = 12;

function number(text, more = "wide") {
  return h("td", { class: `number ${more}` }, text);
}

export function deviceView(root, deviceId) {
  const head = h("div", { class: "head" });
  const numbers = h("div");
  const heat = new LineChart("Temperature", { height: 190, group: `device-${deviceId}` });
  const load = new LineChart("Load", { height: 190, group: `device-${deviceId}` });
  const done = h("div");
  const events = h("div");
  const abilities = h("tbody");
  const log = h("div");
  let shown = "";
  let seen = "";
  let lastEvent = null;
  let deployed = null;
  let place = null; // once its state and its past are known too, so that nothing moves
  let disk = null;
  const path = `devices/${encodeURIComponent(deviceId)}`;
  replace(root, h("p", { class: "quiet" }, "Loading…"));
  const asked = askPast();
  get(path).then(async (found) => {
    const past = await asked;
    const rows = Object.entries({ examples: found.examples, version: found.version, "joined at": moment(found.joined_at), ...found.capabilities })
      .filter(([, value]) => value !== null && value !== "").map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, words(name)), h("td", { class: "break" }, plain(value))));
    replace(abilities, rows);
    deployed = found.model ? shortHash(found.model) : null;
    place = () => {
      place = null;
      replace(root, head, numbers, h("div", { class: "charts" }, heat.element, load.element),
        section("Newest assignments", done), section("Events", events),
        h("details", {}, h("summary", {}, "Capabilities"), scroller(h("table", { class: "settings" }, abilities), "Capabilities")),
        h("details", { ontoggle: (event) => event.target.open && loadLog() }, h("summary", {}, "Log"), log));
      showPast(past);
      draw();
    };
    if (model.isLoaded) place();
  }, (error) => replace(root, h("h1", {}, error.status === 404 ? "No such device" : "The device could not be loaded"),
    h("p", {}, error.status === 404 ? `No device ${deviceId} is in this fleet; it may have been removed.` : error.message), h("p", {}, link(["fleet"], "To the fleet", { class: "button" }))));

  // Asked of the board itself.
  async function loadLog() {
    replace(log, h("p", { class: "quiet" }, "Loading…"));
    try {
      const { rows } = await get(`${path}/logs`);
      replace(log, rows.length ? h("pre", { class: "file", tabindex: "0", "aria-label": "Log" }, rows.map((row) => `${moment(row.at)} ${row.level} ${row.message}\n`)) : h("p", { class: "quiet" }, "It has logged nothing yet."));
    } catch (error) {
      replace(log, h("p", { class: "error" }, error.message), button("Try again", loadLog));
    }
  }

  // Rows of its heartbeats, updates and events, or the error that kept them away.
  async function askPast() {
    try {
      const found = await Promise.all([
        get("history/heartbeats", { device: deviceId, limit: NUM_BEATS }), get("history/updates", { device: deviceId, limit: NUM_ROWS }), get("history/events", { device: deviceId, limit: NUM_ROWS })]);
      return found.map((answer) => answer.rows);
    } catch (error) {
      return error;
    }
  }

  function showPast(past) {
    if (past instanceof Error) {
      for (const chart of [heat, load]) if (!chart.data) chart.say(past.message, true);
      toast(past.message, "bad");
      return;
    }
    const [beats, updates, happened] = past;
    disk = beats.at(-1)?.disk_free_bytes ?? null;
    const points = (name, factor = 1) => beats.map((row) => [row.at, row[name] === null ? null : row[name] * factor]);
    heat.show({ x: CLOCK_AXIS, y: { label: "temperature, °C", format: String, exact: (value) => `${value.toFixed(1)} °C` }, series: [{ name: "processor", tone: "a", points: points("temperature_c") }] }, "This board has no temperature sensor.");
    load.show({ x: CLOCK_AXIS, y: { label: "share in use, %", format: String, exact: (value) => `${Math.round(value)} %`, min: 0, most: 100 }, series: [{ name: "CPU", tone: "a", points: points("cpu_fraction", 100) }, { name: "memory", tone: "b", isDashed: true, points: points("memory_fraction", 100) }] }, "No heartbeat was recorded yet.");
    drawUpdates(updates);
    replace(events, eventList([...happened].reverse()));
  }

  function drawUpdates(rows) {
    if (!rows.length) {
      replace(done, h("p", { class: "quiet" }, "It was given no work yet."));
      return;
    }
    const columns = ["Run", "Round", "Outcome", "Computing", "Sending", "Waiting", "Up", "Down", "Loss"];
    replace(done, scroller(h("table", {}, h("caption", { class: "unseen" }, "Newest assignments"),
      h("thead", {}, h("tr", {}, columns.map((text, index) => h("th", { scope: "col", class: index === 0 || index === 2 ? null : index > 3 ? "number wide" : "number" }, text)))),
      h("tbody", {}, [...rows].reverse().map((row) => h("tr", {}, h("th", { scope: "row" }, link(["runs", row.run_id], model.runs.get(row.run_id)?.name ?? row.run_id)),
        number(count(row.round), ""), h("td", { class: row.outcome && row.outcome !== "used" ? "warn" : null, title: row.reason }, row.outcome ?? "outstanding"),
        number(seconds(row.compute_s), ""), number(seconds(row.send_s)), number(seconds(row.wait_s)), number(bytes(row.bytes_up)), number(bytes(row.bytes_down)),
        number(row.loss === null ? "–" : row.loss.toPrecision(3)))))), "Newest assignments"));
  }

  function draw() {
    const row = model.devices.get(deviceId);
    document.title = visible(`${deviceId} · edgefl`);
    if (!row && !model.isLoaded) return;
    if (!row) {
      replace(head, h("div", {}, h("h1", {}, deviceId), h("p", {}, "This device is not in the fleet any more. ", link(["fleet"], "To the fleet"))));
      return;
    }
    const state = JSON.stringify([row.presence, row.since, row.drained, model.acts]);
    if (state !== shown) {
      shown = state;
      refresh(head, h("div", {}, h("h1", {}, deviceId, " ", presence(row)), h("p", { class: "minor" }, row.model ?? "")),
        h("p", { class: "actions" }, row.built_in ? null : deviceActions([deviceId], (verb) => { if (verb === "remove") location.hash = "#/fleet"; })));
    }
    const now = JSON.stringify([row, deployed, disk]);
    if (now === seen) return;
    seen = now;
    refresh(numbers, facts([["A copy of it", row.cloned ? h("span", { class: "warn" }, row.cloned) : null], ["May not train now", row.blocked ?? null], ["Drift of its data", row.drift ? h("span", { class: row.drifted ? "warn" : null }, row.drift) : null], ["Labels", row.label_page ? h("a", { href: row.label_page, target: "_blank", rel: "noopener noreferrer" }, `Label its data at ${row.label_page.slice(8, -1)}`) : null], ["Current run", work(row)], ["Temperature", row.temperature_c === undefined ? null : temperature(row)], ["Throttling", row.throttled ? h("span", { class: "warn" }, row.throttled.replaceAll(",", ", ")) : null], ["CPU", percent(row.cpu_fraction)], ["Memory", percent(row.memory_fraction)], ["Free disk", disk === null ? null : bytes(disk)],
      ["Power", row.power_w === undefined ? null : `${row.power_w.toFixed(1)} W`], ["Battery", row.battery_fraction === undefined ? null : percent(row.battery_fraction)],
      ["Step time", row.seconds_per_iteration ? seconds(row.seconds_per_iteration) : null], ["Role", row.role], ["Groups", row.groups?.join(", ") ?? null], ["Examples", row.examples ? count(row.examples) : null], ["Tasks", row.tasks?.join(", ") ?? "no shard"],
      ["Deployed model", deployed]]));
  }

  function update() {
    if (place && model.isLoaded) place();
    draw();
    // Something happened to it: its past has grown.
    const newest = model.events.findLast((event) => event.device_id === deviceId)?.id ?? 0;
    if (newest !== lastEvent && lastEvent !== null && head.isConnected) askPast().then((past) => { showPast(past); draw(); });
    lastEvent = newest;
  }
  return { update };
}
