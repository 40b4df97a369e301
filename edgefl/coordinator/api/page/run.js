// One run: how far it is, its curves, who waited for whom, what each device gave, what was refused, and its file.

import { get, post } from "./api.js";
import { DURATION_AXIS, LineChart } from "./charts.js";
import { act, confirm } from "./dialogs.js";
import { button, h, link, refresh, replace, setText, toast, visible } from "./dom.js";
import { accuracy, bytes, count, digits, moment, percent, seconds, words } from "./format.js";
import { courseOf, courseRows, loadCourse, model, newestRow } from "./model.js";
import { eventList } from "./events.js";
import { goalOf, lasted, LIVE, progress, result, runAgain, status, timeLeft } from "./runs.js";
import { Table } from "./tables.js";
import { TimeLine } from "./timeline.js";
import { toToml } from "./toml.js";

const NUM_EVENTS = 100;
const NUM_MEASURED = 2000;
const NUM_UPDATES = 500;
const MAX_METRICS = 12;
const GUARDED = /rejected|clipped|quarantined|untrusted|held/;
export const ACCURACY = { label: "accuracy", format: (value) => `${digits(value * 100, 3)} %`, exact: (value) => accuracy(value, 2), least: 0, most: 1 };
export const LOSS = { label: "loss", format: (value) => digits(value, 3), exact: (value) => value.toFixed(4), least: 0 };
const APART = { label: "distance to their mean", format: (value) => digits(value, 3), min: 0 };
export const X = {
  rounds: { text: "Rounds", of: (row) => row.round, axis: { label: "round", name: "round", format: count, isWhole: true } },
  time: { text: "Time", of: (row, first) => row.closed_at - first, axis: DURATION_AXIS },
  bytes: { text: "Bytes", of: (row) => row.total_up + row.total_down, axis: { label: "bytes sent in both directions", name: "after", format: bytes } },
};

// Buttons for what the X axis shows, and for a loss by powers of ten.
export function xAxisChoice(state, draw) {
  const choices = Object.entries(X).map(([key, { text }]) => button(text, () => { state.x = key; draw(); }, { "data-x": key }));
  const element = h("div", { class: "choice", role: "group", "aria-label": "X axis" }, choices);
  const log = button("Log loss", () => { state.isLog = !state.isLog; draw(); });
  const mark = () => {
    choices.forEach((entry) => entry.setAttribute("aria-pressed", String(entry.dataset.x === state.x)));
    log.setAttribute("aria-pressed", String(Boolean(state.isLog)));
  };
  return { element: h("div", { class: "bar" }, h("span", { class: "quiet", "aria-hidden": "true" }, "X axis"), element, h("span", { class: "choice" }, log)), mark };
}

// The charts of one run, for its own page and for "now".
export class RunCharts {
  constructor(runId, { isShort = false } = {}) {
    Object.assign(this, { runId, x: "rounds" });
    const chart = (title, options = {}) => new LineChart(title, { group: `run-${runId}`, ...options });
    this.curve = chart("Accuracy");
    this.loss = chart("Loss");
    this.traffic = isShort ? null : chart("Bytes a round", { height: 180 });
    this.pace = isShort ? null : chart("Seconds a round", { height: 180 });
    // Only where devices have models of their own is there anything to disagree about.
    this.apart = isShort ? null : chart("Disagreement of the devices' models", { height: 180 });
    if (this.apart) this.apart.element.hidden = true;
    this.charts = [this.curve, this.loss, this.traffic, this.pace, this.apart].filter(Boolean);
    this.line = new TimeLine();
    this.choice = xAxisChoice(this, () => this.draw());
    this.failure = h("p", { class: "error", role: "alert", hidden: true }, h("span"), " ", button("Try again", () => loadCourse(this.runId)));
    this.element = h("div", {}, this.choice.element, this.failure, h("div", { class: "charts" }, this.charts.map((one) => one.element)), this.line.element);
  }

  draw() {
    const course = courseOf(this.runId);
    const run = model.runs.get(this.runId) ?? { status: "queued" };
    const rows = courseRows(course);
    // Much is told every second that changes no chart.
    const state = JSON.stringify([this.runId, course.version, this.x, this.isLog, run.status, run.reason, run.goal_accuracy]);
    if (state === this.drawn) return;
    this.drawn = state;
    this.choice.mark();
    this.failure.hidden = !course.error;
    setText(this.failure.firstChild, `The curves could not be loaded: ${course.error}.`);
    const isWaiting = ["queued", ...LIVE].includes(run.status);
    // A run that ended before its first round has nothing to draw, and never will.
    this.element.hidden = course.isLoaded && !course.error && !rows.length && !isWaiting;
    if (!course.isLoaded || !rows.length) {
      const text = !course.isLoaded ? "Loading…" : course.error ? "Not loaded." : "No round has closed yet.";
      for (const chart of [...this.charts, this.line]) chart.say(text);
      return;
    }
    const { of, axis } = X[this.x];
    const first = rows[0].started_at ?? 0;
    const points = (name) => rows.map((row) => [of(row, first), row[name] ?? null]);
    const show = (chart, y, series, empty, marks = []) => chart?.show({ x: axis, y, series, marks }, empty);
    const nodes = rows.some((row) => (row.node_accuracy ?? null) !== null)
      ? [{ name: "mean of the devices' own", tone: "b", points: points("node_accuracy") }, { name: "worst of them", tone: "c", isDashed: true, points: points("worst_node_accuracy") }] : [];
    const global = { name: "global model", tone: "a", points: points("accuracy") };
    const best = bestOf(rows);
    const target = run.goal_accuracy ?? null;
    const marks = [target === null ? null : { y: target, text: `target ${accuracy(target)}` }, best ? { x: of(best, first), y: best.accuracy, text: `best ${accuracy(best.accuracy)}, round ${best.round}` } : null];
    show(this.curve, ACCURACY, best || !nodes.length ? [global, ...nodes] : nodes, "No model was evaluated yet.", marks.filter(Boolean));
    show(this.loss, { ...LOSS, isLog: this.isLog }, [{ name: "test", tone: "a", points: points("loss") }, { name: "training", tone: "b", isDashed: true, points: points("train_loss") }], "No loss was reported yet.");
    show(this.traffic, { label: "bytes", format: bytes, min: 0 }, [{ name: "up, from devices", tone: "a", points: points("bytes_up") }, { name: "down, to devices", tone: "b", isDashed: true, points: points("bytes_down") }]);
    show(this.pace, { label: "time of a round", format: seconds, min: 0 }, [{ name: "round", tone: "a", points: points("seconds") }]);
    if (this.apart) {
      this.apart.element.hidden = !rows.some((row) => (row.disagreement ?? null) !== null);
      show(this.apart, APART, [{ name: "disagreement", tone: "a", points: points("disagreement") }]);
    }
    this.line.show(course.spans, course.numDevices);
  }
}

export function bestOf(rows) {
  const known = rows.filter((row) => (row.accuracy ?? null) !== null);
  return known.length ? known.reduce((a, b) => (b.accuracy > a.accuracy ? b : a)) : null;
}

// The round of the newest evaluation, and by how many it is behind.
function evaluated(run, course) {
  const rows = course?.isLoaded ? courseRows(course) : [];
  const newest = rows.findLast((row) => (row.accuracy ?? null) !== null);
  if (!newest) return null;
  const behind = rows.at(-1).round - newest.round;
  return `round ${newest.round}${behind > 1 ? `, ${behind} behind` : ""}`;
}

export function facts(entries) {
  return h("dl", { class: "facts" }, entries.filter((entry) => entry[1] !== null && entry[1] !== undefined)
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

// Beside the tiles of "now" it need not say what they say.
export function runFacts(run, { isShort = false } = {}) {
  const course = model.courses.get(run.run_id);
  const newest = newestRow(course);
  const left = timeLeft(run, course);
  return facts([
    ["Rounds", isShort ? null : progress(run)],
    ["Time left", isShort || left === null ? null : seconds(left)],
    ["Accuracy", isShort ? null : accuracy(result(run))],
    ["Evaluated", evaluated(run, course)],
    ["Duration", seconds(lasted(run, newest))],
    ["Last round", newest ? seconds(newest.seconds) : null],
    ["Up", newest ? bytes(newest.total_up) : null],
    ["Down", newest ? bytes(newest.total_down) : null],
    ["Task", run.task],
    ["Strategy", run.strategy],
    ["Submitted", moment(run.submitted_at)],
  ]);
}

export function runBar(run) {
  const goal = goalOf(run);
  return goal ? h("progress", { max: goal, value: Math.min(run.rounds, goal), "aria-label": `${run.rounds} of ${goal} rounds` }) : null;
}

// Why a run does not go on stands above everything else.
export function runReason(run) {
  return run.reason && LIVE.includes(run.status) ? h("p", { class: "notice" }, run.reason) : null;
}

// Runs that this coordinator said it cannot take up again: their button is not shown again.
const refused = new Set();

export function runActions(run, redraw, more = []) {
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
      if (error.status === 401 || error.status === 403) throw error;
      refused.add(run.run_id);
      toast(error.status === 404 || error.status === 405 ? "This coordinator cannot resume runs." : error.message, "bad");
      redraw();
    }
  });
  const canStop = ["queued", "running", "waiting", "paused", "compiling", "interrupted"].includes(run.status);
  const canResume = ["interrupted", "stopped"].includes(run.status) && !refused.has(run.run_id);
  return h("p", { class: "actions" }, more,
    canResume ? button("Resume", resume) : null,
    canStop ? button("Stop", () => confirm(`Stop ${run.name}?`, "It ends after what is in flight; its model and its history stay.", { text: "Stop the run", action: stop })) : null);
}

const DEVICE_COLUMNS = [
  { key: "device", title: "Device", isHeading: true, value: (row) => row.device_id, cell: (row) => link(["devices", row.device_id], row.device_id) },
  { key: "used", title: "Updates used", isNumber: true, value: (row) => row.num_used, cell: (row) => `${count(row.num_used)} of ${count(row.num_assignments)}` },
  { key: "share", title: "Share", isNumber: true, value: (row) => row.share, cell: (row) => h("span", { class: "share-bar" }, meter(row.share), percent(row.share)) },
  ...[["late", "Late"], ["lost", "Lost"], ["rejected", "Refused"], ["failed", "Failed"]].map(([key, title]) => (
    { key, title, class: "wide", isNumber: true, isOptional: true, value: (row) => row[`num_${key}`] || null, cell: (row) => h("span", { class: row[`num_${key}`] ? "warn" : null }, String(row[`num_${key}`] ?? 0)) })),
  { key: "stale", title: "Staleness, mean and most", class: "wide", isNumber: true, isOptional: true, value: (row) => row.mean_staleness || null, cell: (row) => (row.mean_staleness ? `${digits(row.mean_staleness, 2)}, ${row.max_staleness}` : "0") },
  { key: "examples", title: "Examples", class: "wide", isNumber: true, isOptional: true, value: (row) => row.num_examples, cell: (row) => count(row.num_examples) },
  { key: "loss", title: "Training loss", class: "wide", isNumber: true, isOptional: true, value: (row) => row.loss, cell: (row) => ((row.loss ?? null) === null ? "–" : digits(row.loss, 3)) },
  { key: "compute", title: "Computing", class: "wide", isNumber: true, value: (row) => row.compute_s, cell: (row) => seconds(row.compute_s) },
  { key: "send", title: "Sending", class: "wide", isNumber: true, value: (row) => row.send_s, cell: (row) => seconds(row.send_s) },
  { key: "wait", title: "Waiting", class: "wide", isNumber: true, value: (row) => row.wait_s, cell: (row) => seconds(row.wait_s) },
  { key: "bytes", title: "Bytes", class: "wide", isNumber: true, value: (row) => row.bytes_up + row.bytes_down, cell: (row) => bytes(row.bytes_up + row.bytes_down) },
];

function meter(share) {
  const bar = h("i", { "aria-hidden": "true" });
  bar.style.width = `${Math.round(60 * share)}px`;
  return bar;
}

// What each device gave: sums over the whole run, and the loss of its newest update.
async function loadDevices(run) {
  const path = (kind) => get(`history/${kind}`, { run: run.run_id, by: "device" });
  const [sums, stale, dropouts, updates] = await Promise.all([get("history/devices", { run: run.run_id }), path("stale"), path("dropouts"), get("history/updates", { run: run.run_id, limit: NUM_UPDATES })]);
  const losses = new Map(updates.rows.filter((row) => row.loss !== null).map((row) => [row.device_id, row.loss]));
  const more = new Map();
  for (const row of [...stale.rows, ...dropouts.rows]) more.set(row.device_id, { ...more.get(row.device_id), ...row });
  const rows = sums.rows.filter((row) => row.num_assignments).map((row) => ({ ...row, ...more.get(row.device_id), loss: losses.get(row.device_id) ?? null, num_examples: row.examples?.[run.task] ?? null }));
  const all = rows.reduce((sum, row) => sum + row.num_used, 0);
  return rows.map((row) => ({ ...row, share: all ? row.num_used / all : 0 }));
}

// Whatever a task or a strategy measures beside accuracy and loss, by name: one chart each. A round's metrics are of all
// examples together; what only evaluations have is the mean over them.
async function loadMetrics(run) {
  const [scores, rounds] = await Promise.all(["evaluations", "rounds"].map((kind) => get(`history/${kind}`, { run: run.run_id, limit: NUM_MEASURED })));
  const found = new Map();
  const pooled = new Map(rounds.rows.map((row) => [row.round, { ...row.facts, ...row.metrics }]));
  const isPooled = (name, round) => name in (pooled.get(round) ?? {});
  const own = scores.rows.filter((row) => !row.subject).map((row) => [row.round, Object.fromEntries(Object.entries(row.metrics ?? {}).filter(([name]) => !isPooled(name, row.round)))]);
  for (const [round, metrics] of [...pooled, ...own]) {
    for (const [name, value] of Object.entries(metrics ?? {})) {
      if (typeof value !== "number" || name === "disagreement" || !(found.has(name) || found.size < MAX_METRICS)) continue;
      if (!found.has(name)) found.set(name, new Map());
      const [sum, number] = found.get(name).get(round) ?? [0, 0];
      found.get(name).set(round, [sum + value, number + 1]);
    }
  }
  return [...found].map(([name, values]) => [name, [...values].map(([round, [sum, number]]) => [round, sum / number]).sort((a, b) => a[0] - b[0])]);
}

function modelLinks(run, rows) {
  if (!rows.length) return h("p", { class: "quiet" }, "No model was kept yet.");
  const entry = (kind) => {
    const row = rows.find((one) => one[kind]);
    if (!row) return null;
    return h("li", {}, h("a", { class: "button", href: `/edgefl/v1/models/${row.sha256}/file`, download: `${run.name.replace(/[^\w.-]+/g, "-")}-${kind}.safetensors` }, `Download the ${kind} model`),
      h("span", { class: "minor" }, `round ${row.round}${row.accuracy === null ? "" : `, accuracy ${accuracy(row.accuracy)}`}, ${bytes(row.bytes_file)}, ${row.sha256.slice(0, 12)}`));
  };
  return h("ul", { class: "plain" }, entry("best"), entry("latest"));
}

export function runView(root, wanted) {
  let run = model.runs.get(wanted) ?? null;
  let shown = "";
  let loadedRounds = null;
  const [head, notice, bar, numbers, models, guarded, events] = Array.from({ length: 7 }, () => h("div"));
  head.className = "head";
  const measured = h("div", { class: "charts" });
  const byName = new Map();
  const file = h("pre", { class: "file", tabindex: "0", "aria-label": "Run file" });
  const charts = new RunCharts(wanted);
  const devices = new Table({ caption: "What each device gave", columns: DEVICE_COLUMNS, rowKey: (row) => row.device_id, order: { key: "used", isDown: true }, empty: "No device was given work yet." });
  replace(root, h("p", { class: "quiet" }, "Loading…"));
  get(`runs/${encodeURIComponent(wanted)}`).then((found) => {
    run = { ...found, ...model.runs.get(found.run_id) };
    charts.runId = found.run_id;
    setText(file, toToml(found.config));
    const copy = button("Copy", () => navigator.clipboard.writeText(file.textContent).then(() => toast("Copied."), () => toast("The browser does not let this page copy; select the text.", "bad")));
    replace(root, head, notice, bar, numbers, h("div", { class: "overview" }, h("div", {}, charts.element, measured, section("Devices in this run", devices.element)),
      h("div", {}, section("Guard decisions", guarded), section("Models", models), section("Events", events),
      h("details", {}, h("summary", {}, "Run file"), h("p", { class: "actions left" }, copy, again()), file))));
    draw();
  }, (error) => replace(root, h("h1", {}, error.status === 404 ? "No such run" : "The run could not be loaded"),
    h("p", {}, error.status === 404 ? `There is no run ${wanted} here; it may be of another fleet.` : error.message), h("p", {}, link(["runs"], "To the runs", { class: "button" }))));

  function again() {
    return button("Run again with changes", () => runAgain(run.config));
  }

  async function loadMore() {
    loadedRounds = `${run.rounds} ${run.status}`;
    const fail = (place) => (error) => replace(place, h("p", { class: "error" }, error.message));
    loadDevices(run).then((rows) => devices.show(rows), fail(devices.element));
    loadMetrics(run).then((metrics) => metrics.forEach(([name, points]) => showMetric(name, points)), (error) => toast(error.message, "bad"));
    get("models", { run: run.run_id }).then((answer) => replace(models, modelLinks(run, answer.rows)), fail(models));
    get("history/events", { run: run.run_id, limit: NUM_EVENTS }).then(({ rows }) => {
      const newest = [...rows].reverse();
      replace(guarded, eventList(newest.filter((row) => GUARDED.test(row.kind)), "Nothing was refused, clipped or held back."));
      replace(events, eventList(newest.filter((row) => !GUARDED.test(row.kind))));
    }, fail(events));
  }

  function showMetric(name, points) {
    if (!byName.has(name)) {
      byName.set(name, new LineChart(words(name), { height: 180 }));
      measured.append(byName.get(name).element);
    }
    byName.get(name).show({ x: X.rounds.axis, y: { label: words(name), format: (value) => digits(value, 3) }, series: [{ name: words(name), tone: "a", points }] });
  }

  function draw() {
    if (!run) return;
    run = { ...run, ...model.runs.get(run.run_id) };
    document.title = visible(`${run.name} · edgefl`);
    const state = JSON.stringify([run.status, run.reason, model.acts, refused.has(run.run_id)]);
    if (state !== shown) {
      shown = state;
      refresh(head, h("div", {}, h("h1", {}, run.name, " ", status(run)), h("p", { class: "minor" }, run.run_id, run.reason && !LIVE.includes(run.status) ? `: ${run.reason}` : "")),
        runActions(run, () => { shown = ""; draw(); }, [again()]));
      replace(notice, runReason(run));
    }
    refresh(bar, LIVE.includes(run.status) ? runBar(run) ?? [] : []);
    charts.draw();
    refresh(numbers, runFacts(run));
    // The rest is asked for once, and again when the run has gone on by a tenth or is over.
    const [rounds, wasStatus] = (loadedRounds ?? "-1 ").split(" ");
    if (run.status !== wasStatus || run.rounds > 1.1 * rounds + 5) loadMore();
  }
  return { update: draw };
}

export function section(title, ...children) {
  return h("section", { "aria-label": title }, h("h2", {}, title), ...children);
}

