// The list of runs, how a run's state is shown everywhere, and the choice of runs to compare.

import { button, h, link, replace } from "./dom.js";
import { accuracy, moment, seconds } from "./format.js";
import { courseRows, model, nowS } from "./model.js";
import { pickColumn, Table } from "./tables.js";

export const LIVE = ["running", "stopping", "waiting", "paused", "compiling"];
export const MAX_COMPARED = 8;
export const AGAIN_KEY = "edgefl-run-again";
const PACE_ROUNDS = 20;

export function status(run) {
  return h("span", { class: `status ${run.status}` }, run.status);
}

// A run whose coordinator was killed has no end; then its newest round says how far it came.
export function lasted(run, newest = null) {
  const end = run.finished_at ?? (LIVE.includes(run.status) ? nowS() : null) ?? newest?.closed_at;
  return run.started_at && end ? end - run.started_at : null;
}

export function goalOf(run) {
  return run.goal_rounds ?? run.config?.run?.rounds ?? null;
}

export function progress(run) {
  const goal = goalOf(run);
  return goal ? `${run.rounds} of ${goal}` : String(run.rounds);
}

// The accuracy of a run that was trained: that of the initial model is no result.
export function result(run) {
  return run.rounds ? run.accuracy : null;
}

// Seconds until its last round, from the pace of the newest ones; null where nobody can know.
export function timeLeft(run, course) {
  const goal = goalOf(run);
  const rows = course?.isLoaded ? courseRows(course).slice(-PACE_ROUNDS) : [];
  if (!goal || run.status !== "running" || rows.length < 2) return null;
  const pace = (rows.at(-1).closed_at - rows[0].closed_at) / (rows.at(-1).round - rows[0].round);
  return Math.max(0, goal - run.rounds) * pace;
}

// Opens a run's settings where runs are started.
export function runAgain(config) {
  sessionStorage.setItem(AGAIN_KEY, JSON.stringify(config));
  location.hash = "#/start";
}

const COLUMNS = [
  { key: "name", title: "Run", isHeading: true, value: (row) => row.name, cell: (row) => h("span", {}, link(["runs", row.run_id], row.name), h("span", { class: "minor block wide-text" }, row.run_id)) },
  { key: "status", title: "Status", value: (row) => row.status, cell: (row) => h("span", {}, status(row), row.reason ? h("span", { class: "minor block wide-text" }, row.reason) : null) },
  { key: "task", title: "Task", class: "wide", value: (row) => row.task, cell: (row) => row.task },
  { key: "strategy", title: "Strategy", class: "wide", value: (row) => row.strategy, cell: (row) => row.strategy },
  { key: "rounds", title: "Rounds", class: "wraps", isNumber: true, value: (row) => row.rounds, cell: progress },
  { key: "accuracy", title: "Accuracy", isNumber: true, value: result, cell: (row) => accuracy(result(row)) },
  { key: "duration", title: "Duration", class: "wide", isNumber: true, value: (row) => lasted(row), cell: (row) => seconds(lasted(row)) },
  { key: "submitted", title: "Submitted", class: "wide", isNumber: true, value: (row) => row.submitted_at, cell: (row) => moment(row.submitted_at) },
];

export function runsView(root) {
  const picked = new Set();
  const compare = button("Compare", () => { location.hash = `#/compare/${[...picked].map(encodeURIComponent).join("/")}`; }, { disabled: true, title: `Choose two to ${MAX_COMPARED} runs` });
  const onPick = () => { compare.disabled = picked.size < 2 || picked.size > MAX_COMPARED; };
  const columns = [pickColumn(picked, (row) => row.run_id, onPick), ...COLUMNS];
  const table = new Table({ caption: "Runs", columns, rowKey: (row) => row.run_id, order: { key: "submitted", isDown: true }, empty: "No run was submitted yet." });
  replace(root, h("div", { class: "head" }, h("h1", {}, "Runs"), h("p", { class: "actions" }, compare, link(["start"], "Start a run", { class: "button primary" }))), table.element);
  const draw = () => table.show([...model.runs.values()]);
  draw();
  return { update: draw };
}
