// What matters now: the fleet and its run in four numbers, the run's curves, what needs attention, what happened last.

import { h, link, refresh, replace } from "./dom.js";
import { attentionList, eventList, isAlarming, kindOf } from "./events.js";
import { accuracy, moment, seconds } from "./format.js";
import { stateMark } from "./fleet.js";
import { boards, courseOf, courseRows, model, PRESENT } from "./model.js";
import { RunCharts, runActions, runBar, runFacts, runReason, section } from "./run.js";
import { goalOf, progress, result, status, timeLeft } from "./runs.js";

const SHOWN_EVENTS = 12;
const CHANGE_ROUNDS = 10;
const STATES = ["online", "late", "draining", "gone", "offline", "never seen"];

export function nowView(root) {
  const [steps, tiles, fleetPart, attention, events] = Array.from({ length: 5 }, () => h("div"));
  const runPart = h("section", { "aria-label": "The run that goes on" });
  let charts = null;
  let shown = "";
  replace(root, h("h1", { class: "unseen" }, "Now"), steps, tiles,
    h("div", { class: "overview" }, runPart, h("div", { class: "columns" }, h("div", {}, section("Attention", attention), h("section", { "aria-label": "Fleet" }, h("h2", {}, link(["fleet"], "Fleet")), fleetPart)), section("Events", events))));

  function draw() {
    const run = chosenRun();
    const isNew = !boards().length || !model.runs.size;
    refresh(steps, isNew ? firstSteps() : []);
    refresh(tiles, boards().length ? tileRow(run) : []);
    drawRun(run);
    drawFleet();
    refresh(attention, attentionList(model.attention));
    refresh(events, eventList([...model.events].reverse().slice(0, SHOWN_EVENTS)));
  }

  function drawRun(run) {
    runPart.hidden = !run;
    if (!run) return;
    const isLive = run.run_id === model.liveRun;
    if (charts?.runId !== run.run_id) {
      charts = new RunCharts(run.run_id, { isShort: true });
      shown = "";
    }
    const state = JSON.stringify([run.run_id, run.status, run.reason, model.acts]);
    if (state !== shown) {
      shown = state;
      const start = isLive ? [] : [link(["start"], "Start a run", { class: "button primary" })];
      const head = h("div", { class: "head" }, h("h2", { class: "large" }, isLive ? "" : "Last run: ", link(["runs", run.run_id], run.name), " ", status(run)),
        runActions(run, () => { shown = ""; draw(); }, start));
      runPart.bar = h("div");
      runPart.numbers = h("div");
      replace(runPart, head, runReason(run), runPart.bar, runPart.numbers, charts.element);
    }
    refresh(runPart.bar, isLive ? runBar(run) ?? [] : []);
    charts.draw();
    refresh(runPart.numbers, runFacts(run, { isShort: true }));
  }

  function drawFleet() {
    const all = boards();
    const numbers = STATES.map((state) => [state, all.filter((row) => row.presence === state).length]).filter((entry) => entry[1]);
    const bar = h("div", { class: "share", "aria-hidden": "true" }, numbers.map(([state, number]) => {
      const piece = h("i", { class: state.replace(" ", "-") });
      piece.style.flexGrow = String(number);
      return piece;
    }));
    const atWork = all.filter((row) => row.run).length;
    refresh(fleetPart, all.length ? bar : h("p", { class: "quiet" }, "No board has joined yet."),
      h("ul", { class: "counts" }, numbers.map(([state, number]) => h("li", {}, h("b", {}, String(number)), " ", stateMark(state), " ", state)), atWork ? h("li", {}, h("b", {}, String(atWork)), " at work") : []));
  }

  draw();
  return { update: draw };
}

// The run that goes on, else the last that did, even if for less than a second, of which nothing was told.
function chosenRun() {
  const lastAt = (row) => row.finished_at ?? row.started_at ?? 0;
  return model.runs.get(model.liveRun) ?? [...model.runs.values()].sort((a, b) => lastAt(b) - lastAt(a) || b.submitted_at - a.submitted_at)[0];
}

function tile(name, value, more, kind = null) {
  return h("div", { class: "tile" }, h("dt", {}, name), h("dd", { class: kind }, value, more ? h("span", { class: "minor" }, more) : null));
}

function tileRow(run) {
  const all = boards();
  const online = all.filter((row) => PRESENT.includes(row.presence)).length;
  const course = run ? courseOf(run.run_id) : null;
  const left = run ? timeLeft(run, course) : null;
  const alert = model.events.findLast(isAlarming);
  return h("dl", { class: "tiles" },
    tile("Boards online", `${online} of ${all.length}`, model.attention.length ? `${model.attention.length} need${model.attention.length === 1 ? "s" : ""} attention` : "all is well", online < all.length ? "warn" : null),
    run ? tile("Round", progress(run), left !== null ? `${seconds(left)} left` : goalOf(run) ? run.status : "no limit of rounds") : null,
    run ? tile("Accuracy", accuracy(result(run)), change(course)) : null,
    tile("Last alert", alert ? kindOf(alert) : "none", alert ? `${alert.device_id ?? ""} ${moment(alert.at)}`.trim() : null, alert ? "warn" : null));
}

// How much better than some rounds ago.
function change(course) {
  const known = course?.isLoaded ? courseRows(course).filter((row) => (row.accuracy ?? null) !== null) : [];
  if (known.length < 2) return "";
  const newest = known.at(-1);
  const before = known.findLast((row) => row.round <= newest.round - CHANGE_ROUNDS) ?? known[0];
  const points = 100 * (newest.accuracy - before.accuracy);
  return `${points < 0 ? "−" : "+"}${Math.abs(points).toFixed(1)} in ${newest.round - before.round} rounds`;
}

// What a new owner does first; each step says whether it is done.
function firstSteps() {
  const numBoards = boards().length;
  const hasTrainer = boards().some((row) => row.tasks?.length);
  const step = (isDone, title, ...content) => h("li", { class: isDone ? "done" : null }, h("h3", {}, title, isDone ? h("span", { class: "minor" }, " done") : null), ...content);
  return h("section", { "aria-label": "First steps" }, h("h2", { class: "large" }, "Three steps to your first model"),
    h("ol", { class: "steps" },
      step(numBoards > 0, "Make a join token", h("p", {}, "It lets one board or more into this fleet. In a terminal: ", h("code", {}, "edgefl coordinator token")), numBoards ? null : h("p", {}, link(["join"], "Make a token", { class: "button primary" }))),
      step(numBoards > 0, "Run its command on the board", h("p", {}, "The token comes as one command, ", h("code", {}, "edgefl device join …"), "; then ", h("code", {}, "edgefl device start"), "."),
        h("p", { role: "status", class: numBoards ? null : "waits" }, numBoards ? `${numBoards} ${numBoards === 1 ? "board has" : "boards have"} joined.` : "Waiting for the first board…")),
      step(model.runs.size > 0, "Start a run", h("p", {}, hasTrainer ? "The boards have data to train on." : "As soon as a board has joined with a shard."), numBoards ? h("p", {}, link(["start"], "Start a run", { class: "button primary" })) : null)));
}
