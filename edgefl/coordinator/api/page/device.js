// One device: how it feels, what it has done lately, what it can do; and letting it rest.

import { get, post } from "./api.js";
import { LineChart } from "./charts.js";
import { act } from "./dialogs.js";
import { button, h, link, replace, toast, visible } from "./dom.js";
import { bytes, clock, count, exactClock, moment, percent, plain, seconds, shortHash, words } from "./format.js";
import { presence, temperature, work } from "./fleet.js";
import { model } from "./model.js";
import { eventList } from "./now.js";
import { facts } from "./run.js";

const NUM_BEATS = 720;
const NUM_ROWS = 25;

function number(text) {
  return h("td", { class: "number" }, text);
}

export function deviceView(root, deviceId) {
  const head = h("div", { class: "head" });
  const numbers = h("div");
  const time = { label: "time", name: "at", format: clock, exact: exactClock, isTime: true };
  const heat = new LineChart("Temperature", { height: 190, empty: "This board has told no temperature yet." });
  const load = new LineChart("Load", { height: 190 });
  const done = h("div");
  const events = h("div");
  const abilities = h("tbody");
  let shown = "";
  let seen = "";
  let lastEvent = null;
  let deployed = null;
  const path = `devices/${encodeURIComponent(deviceId)}`;
  replace(root, h("p", { class: "quiet" }, "Loading…"));
  get(path).then((found) => {
    const rows = Object.entries({ examples: found.examples, version: found.version, "joined at": moment(found.joined_at), ...found.capabilities })
      .filter(([, value]) => value !== null && value !== "").map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, words(name)), h("td", { class: "break" }, plain(value))));
    replace(abilities, rows);
    deployed = found.model ? shortHash(found.model) : null;
    replace(root, head, numbers, h("div", { class: "charts" }, heat.element, load.element),
      h("section", {}, h("h2", {}, "Newest assignments"), done), h("section", {}, h("h2", {}, "Events"), events),
      h("details", {}, h("summary", {}, "What it is and can do"), h("div", { class: "scroll" }, h("table", { class: "settings" }, abilities))));
    draw();
    loadPast();
  }, (error) => replace(root, h("h1", {}, "No such device"), h("p", { class: "error" }, error.message)));

  async function loadPast() {
    try {
      const [beats, updates, happened] = await Promise.all([
        get("history/heartbeats", { device: deviceId, limit: NUM_BEATS }), get("history/updates", { device: deviceId, limit: NUM_ROWS }), get("history/events", { device: deviceId, limit: NUM_ROWS })]);
      const points = (name, factor = 1) => beats.rows.map((row) => [row.at, row[name] === null ? null : row[name] * factor]);
      heat.show({ x: time, y: { label: "temperature, °C", format: (value) => String(value), exact: (value) => `${value.toFixed(1)} °C` }, series: [{ name: "processor", tone: "a", points: points("temperature_c") }] });
      load.show({ x: time, y: { label: "share in use, %", format: (value) => String(value), exact: (value) => `${Math.round(value)} %`, min: 0, max: 100, most: 100 }, series: [{ name: "CPU", tone: "a", points: points("cpu_fraction", 100) }, { name: "memory", tone: "b", isDashed: true, points: points("memory_fraction", 100) }] });
      drawUpdates(updates.rows);
      replace(events, eventList([...happened.rows].reverse()));
    } catch (error) {
      toast(error.message, "bad");
    }
  }

  function drawUpdates(rows) {
    if (!rows.length) {
      replace(done, h("p", { class: "quiet" }, "It was given no work yet."));
      return;
    }
    const columns = ["Run", "Round", "Outcome", "Computing", "Sending", "Waiting", "Up", "Down", "Loss"];
    replace(done, h("div", { class: "scroll" }, h("table", {}, h("caption", { class: "unseen" }, "Newest assignments"),
      h("thead", {}, h("tr", {}, columns.map((text, index) => h("th", { scope: "col", class: index === 0 || index === 2 ? null : "number" }, text)))),
      h("tbody", {}, [...rows].reverse().map((row) => h("tr", {}, h("th", { scope: "row" }, link(["runs", row.run_id], model.runs.get(row.run_id)?.name ?? row.run_id)),
        number(count(row.round)), h("td", { class: row.outcome && row.outcome !== "used" ? "warn" : null, title: row.reason }, row.outcome ?? "outstanding"),
        number(seconds(row.compute_s)), number(seconds(row.send_s)), number(seconds(row.wait_s)), number(bytes(row.bytes_up)), number(bytes(row.bytes_down)),
        number(row.loss === null ? "–" : row.loss.toPrecision(3))))))));
  }

  function draw() {
    const row = model.devices.get(deviceId);
    document.title = visible(`${deviceId} · edgefl`);
    if (!row && !model.isLoaded) return;
    if (!row) {
      replace(head, h("div", {}, h("h1", {}, deviceId), h("p", { class: "quiet" }, "This device is not in the fleet any more.")));
      return;
    }
    const state = JSON.stringify([row.presence, row.since, row.drained, model.acts]);
    if (state !== shown) {
      shown = state;
      const isDrained = Boolean(row.drained);
      const go = () => act(async () => {
        await post(`${path}/${isDrained ? "resume" : "drain"}`);
        toast(isDrained ? `${deviceId} gets work again.` : `${deviceId} finishes what it has and gets no more work.`);
      });
      replace(head, h("div", {}, h("h1", {}, deviceId, " ", presence(row)), h("p", { class: "minor" }, row.model ?? "")),
        h("p", { class: "actions" }, row.presence === "never seen" && !isDrained ? null : button(isDrained ? "Give it work again" : "Drain", go, { class: isDrained ? "primary" : null })));
    }
    const now = JSON.stringify([row, deployed]);
    if (now === seen) return;
    seen = now;
    replace(numbers, facts([["A copy of it", row.cloned ? h("span", { class: "warn" }, row.cloned) : null], ["At work on", work(row)], ["Temperature", temperature(row)], ["Held back by", row.throttled?.replaceAll(",", ", ") ?? "nothing"], ["CPU", percent(row.cpu_fraction)], ["Memory", percent(row.memory_fraction)],
      ["Power", row.power_w === undefined ? null : `${row.power_w.toFixed(1)} W`], ["Battery", row.battery_fraction === undefined ? null : percent(row.battery_fraction)],
      ["An iteration", row.seconds_per_iteration ? seconds(row.seconds_per_iteration) : null], ["Role", row.role], ["Groups", row.groups?.join(", ") ?? null], ["Tasks", row.tasks?.join(", ") ?? "no shard"],
      ["Deployed model", deployed]]));
  }

  function update() {
    draw();
    // Something happened to it: its past has grown.
    const newest = model.events.findLast?.((event) => event.device_id === deviceId)?.id ?? null;
    if (newest !== lastEvent && lastEvent !== null) loadPast();
    lastEvent = newest ?? 0;
  }
  return { update };
}
