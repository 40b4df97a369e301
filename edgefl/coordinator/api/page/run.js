// One run: how far it is, its curves, its traffic, who waited for whom, and its settings.

import { get, post } from "./api.js";
import { LineChart } from "./charts.js";
import { act, confirm } from "./dialogs.js";
import { button, h, replace, setText, toast, visible } from "./dom.js";
import { accuracy, bytes, count, digits, moment, plain, seconds } from "./format.js";
import { courseOf, courseRows, model } from "./model.js";
import { lasted, LIVE, progress, status } from "./runs.js";
import { TimeLine } from "./timeline.js";

const ACCURACY = { label: "accuracy", format: (value) => digits(value, 3), exact: (value) => value.toFixed(4), least: 0, most: 1 };
const LOSS = { label: "loss", format: (value) => digits(value, 3), exact: (value) => value.toFixed(4), least: 0 };
const APART = { label: "distance to their mean", format: (value) => digits(value, 3), exact: (value) => value.toPrecision(3), min: 0 };
const X = {
  rounds: { text: "Rounds", of: (row) => row.round, axis: { label: "round", name: "round", format: (value) => count(value), isWhole: true } },
  time: { text: "Time", of: (row, first) => row.closed_at - first, axis: { label: "time since the first round began", name: "after", format: (value) => seconds(value), isTime: true, min: 0 } },
  bytes: { text: "Bytes", of: (row) => row.total_up + row.total_down, axis: { label: "bytes sent in both directions", name: "after", format: (value) => bytes(value), min: 0 } },
};

// The charts of one run, for its own page and for "now".
export class RunCharts {
  constructor(runId, { isShort = false } = {}) {
    this.runId = runId;
    this.x = "rounds";
    this.curve = new LineChart("Accuracy");
    this.loss = isShort ? null : new LineChart("Loss");
    this.traffic = new LineChart("Traffic", { height: 200 });
    this.pace = isShort ? null : new LineChart("Seconds a round", { height: 200 });
    // Only where devices have models of their own is there anything to disagree about.
    this.apart = isShort ? null : new LineChart("Disagreement of the devices' models", { height: 200 });
    if (this.apart) this.apart.element.hidden = true;
    this.line = new TimeLine();
    this.note = h("p", { class: "error" });
    const choices = Object.entries(X).map(([key, { text }]) => button(text, () => { this.x = key; this.draw(); }, { "data-x": key }));
    this.choice = h("div", { class: "choice", role: "group", "aria-label": "Against what the curves are drawn" }, choices);
    const charts = [this.curve, this.loss, this.traffic, this.pace, this.apart].filter(Boolean);
    this.element = h("div", {}, h("div", { class: "bar" }, h("span", { class: "quiet" }, "Against"), this.choice), this.note,
      h("div", { class: "charts" }, charts.map((chart) => chart.element)), this.line.element);
  }

  draw() {
    const course = courseOf(this.runId);
    setText(this.note, course.error);
    if (!course.isLoaded) return;
    const rows = courseRows(course);
    const status = model.runs.get(this.runId)?.status ?? "queued";
    // A run that ended before its first round has nothing to draw, and never will.
    this.element.hidden = !rows.length && !["queued", ...LIVE].includes(status);
    const x = X[this.x];
    const first = rows[0]?.started_at ?? 0;
    for (const entry of this.choice.children) entry.setAttribute("aria-pressed", String(entry.dataset.x === this.x));
    const points = (name) => rows.map((row) => [x.of(row, first), row[name] ?? null]);
    const nodes = rows.some((row) => row.node_accuracy !== null && row.node_accuracy !== undefined)
      ? [{ name: "mean of the devices' own", tone: "b", points: points("node_accuracy") }, { name: "worst of them", tone: "c", isDashed: true, points: points("worst_node_accuracy") }] : [];
    const global = { name: "global model", tone: "a", points: points("accuracy") };
    const hasGlobal = rows.some((row) => row.accuracy !== null);
    this.curve.show({ x: x.axis, y: ACCURACY, series: hasGlobal || !nodes.length ? [global, ...nodes] : nodes });
    this.loss?.show({ x: x.axis, y: LOSS, series: [{ name: "test", tone: "a", points: points("loss") }, { name: "training", tone: "b", isDashed: true, points: points("train_loss") }] });
    this.traffic.show({ x: x.axis, y: { label: "bytes in all", format: bytes, min: 0 }, series: [{ name: "up, from devices", tone: "a", points: points("total_up") }, { name: "down, to devices", tone: "b", isDashed: true, points: points("total_down") }] });
    this.pace?.show({ x: x.axis, y: { label: "time of a round", format: seconds, min: 0 }, series: [{ name: "round", tone: "a", points: points("seconds") }] });
    if (this.apart) {
      this.apart.element.hidden = !rows.some((row) => (row.disagreement ?? null) !== null);
      this.apart.show({ x: x.axis, y: APART, series: [{ name: "disagreement", tone: "a", points: points("disagreement") }] });
    }
    this.line.show(course.spans, course.numDevices);
  }
}

export function facts(entries) {
  return h("dl", { class: "facts" }, entries.filter((entry) => entry[1] !== null && entry[1] !== undefined)
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

export function runFacts(run) {
  const course = model.courses.get(run.run_id);
  const newest = course?.isLoaded && course.rows.size ? courseRows(course).at(-1) : null;
  return facts([
    ["Rounds", progress(run)],
    ["Accuracy", accuracy(run.accuracy)],
    ["Lasted", seconds(lasted(run, newest))],
    ["Last round", newest ? seconds(newest.seconds) : null],
    ["Up", newest ? bytes(newest.total_up) : null],
    ["Down", newest ? bytes(newest.total_down) : null],
    ["Task", run.task],
    ["Strategy", run.strategy],
    ["Submitted", moment(run.submitted_at)],
  ]);
}

export function runBar(run) {
  const goal = run.goal_rounds ?? run.config?.run?.rounds;
  return goal ? h("progress", { max: goal, value: Math.min(run.rounds, goal), "aria-label": `${run.rounds} of ${goal} rounds` }) : null;
}

// Runs that this coordinator said it cannot take up again: their button is not shown again.
const refused = new Set();

export function runActions(run, redraw) {
  const path = `runs/${encodeURIComponent(run.run_id)}`;
  const stop = () => act(async () => {
    const answer = await post(`${path}/stop`);
    toast(`${run.name} is ${answer.status}.`);
  });
  const resume = () => act(async () => {
    try {
      const answer = await post(`${path}/resume`);
      toast(`${run.name} is ${answer.status}.`);
    } catch (error) {
      if (error.status === 401) throw error;
      refused.add(run.run_id);
      toast(error.status === 404 || error.status === 405 ? "This coordinator cannot resume runs." : error.message, "bad");
      redraw();
    }
  });
  const canStop = ["queued", "running", "paused", "interrupted"].includes(run.status);
  const canResume = ["interrupted", "stopped"].includes(run.status) && !refused.has(run.run_id);
  return h("p", { class: "actions" },
    canResume ? button("Resume", resume, { class: "primary" }) : null,
    canStop ? button("Stop", () => confirm(`Stop ${run.name}?`, "It ends after what is in flight; its model and its history stay.", { text: "Stop the run", action: stop })) : null);
}

export function runView(root, wanted) {
  let run = model.runs.get(wanted) ?? null;
  let shown = "";
  const head = h("div", { class: "head" });
  const bar = h("div");
  const numbers = h("div");
  const settings = h("tbody");
  const charts = new RunCharts(wanted);
  replace(root, h("p", { class: "quiet" }, "Loading…"));
  get(`runs/${encodeURIComponent(wanted)}`).then((found) => {
    run = { ...found, ...model.runs.get(found.run_id) };
    charts.runId = found.run_id;
    const rows = Object.entries(found.config).flatMap(([section, table]) => Object.entries(table ?? {})
      .filter(([, value]) => value !== null && !(Array.isArray(value) && !value.length) && !(typeof value === "object" && !Object.keys(value).length))
      .map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, `${section}.${name}`), h("td", {}, plain(value)))));
    replace(settings, rows, h("tr", {}, h("th", { scope: "row" }, "model file"), h("td", { class: "break" }, found.model ?? "none kept yet")));
    replace(root, head, bar, numbers, charts.element,
      h("details", {}, h("summary", {}, "Settings"), h("div", { class: "scroll" }, h("table", { class: "settings" }, settings))));
    draw();
  }, (error) => replace(root, h("h1", {}, "No such run"), h("p", { class: "error" }, error.message)));

  function draw() {
    if (!run) return;
    run = { ...run, ...model.runs.get(run.run_id) };
    document.title = visible(`${run.name} · edgefl`);
    const state = JSON.stringify([run.status, run.reason, model.acts, refused.has(run.run_id)]);
    if (state !== shown) {
      shown = state;
      replace(head, h("div", {}, h("h1", {}, run.name, " ", status(run)), h("p", { class: "minor" }, run.run_id, run.reason ? `: ${run.reason}` : "")),
        runActions(run, () => { shown = ""; draw(); }));
    }
    replace(bar, LIVE.includes(run.status) ? runBar(run) ?? [] : []);
    charts.draw();
    replace(numbers, runFacts(run));
  }
  return { update: draw };
}


