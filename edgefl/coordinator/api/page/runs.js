// The list of runs, and how a run's state is shown everywhere.

import { h, link, replace } from "./dom.js";
import { accuracy, moment, seconds } from "./format.js";
import { model, nowS } from "./model.js";
import { Table } from "./tables.js";

export const LIVE = ["running", "stopping", "paused"];

export function status(run) {
  return h("span", { class: `status ${run.status}` }, run.status);
}

// A run whose coordinator was killed has no end; then its newest round says how far it came.
export function lasted(run, newest = null) {
  const end = run.finished_at ?? (LIVE.includes(run.status) ? nowS() : null) ?? newest?.closed_at;
  return run.started_at && end ? end - run.started_at : null;
}

export function progress(run) {
  const goal = run.goal_rounds ?? run.config?.run?.rounds;
  return goal ? `${run.rounds} of ${goal}` : String(run.rounds);
}

const COLUMNS = [
  { key: "name", title: "Run", isHeading: true, value: (row) => row.name, cell: (row) => h("span", {}, link(["runs", row.run_id], row.name), h("span", { class: "minor block wide-text" }, row.run_id)) },
  { key: "status", title: "Status", value: (row) => row.status, cell: (row) => h("span", {}, status(row), row.reason && !LIVE.includes(row.status) ? h("span", { class: "minor block wide-text" }, row.reason) : null) },
  { key: "task", title: "Task", class: "wide", value: (row) => row.task, cell: (row) => row.task },
  { key: "strategy", title: "Strategy", class: "wide", value: (row) => row.strategy, cell: (row) => row.strategy },
  { key: "rounds", title: "Rounds", class: "wraps", isNumber: true, value: (row) => row.rounds, cell: progress },
  { key: "accuracy", title: "Accuracy", isNumber: true, value: (row) => row.accuracy, cell: (row) => accuracy(row.accuracy) },
  { key: "lasted", title: "Lasted", class: "wide", isNumber: true, value: lasted, cell: (row) => seconds(lasted(row)) },
  { key: "submitted", title: "Submitted", class: "wide", isNumber: true, value: (row) => row.submitted_at, cell: (row) => moment(row.submitted_at) },
];

export function runsView(root) {
  const table = new Table({ caption: "Runs", columns: COLUMNS, rowKey: (row) => row.run_id, order: { key: "submitted", isDown: true }, empty: "No run was submitted yet." });
  replace(root, h("div", { class: "head" }, h("h1", {}, "Runs"), h("p", { class: "actions" }, link(["start"], "Start a run", { class: "button primary" }))), table.element);
  const draw = () => table.show([...model.runs.values()]);
  draw();
  return { update: draw };
}
