// What the page knows: kept up to date by the feed, read by the views.

import { get } from "./api.js";

export const model = {
  fleet: "",
  reads: false,
  acts: false,
  user: null,
  role: null,
  openid: null,
  isLoaded: false,
  devices: new Map(),
  runs: new Map(),
  events: [],
  attention: [],
  liveRun: null,
  courses: new Map(),
  skewS: 0,
};

const KEPT_EVENTS = 30;
const SPAN_ROUNDS = 12;
const POINTS = 500;
const KEPT_POINTS = 1500;
const listeners = new Set();

export function listen(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function tell(what) {
  for (const listener of [...listeners]) listener(what);
}

export function nowS() {
  return Date.now() / 1000 + model.skewS;
}

export function take(kind, news) {
  model.skewS = news.now - Date.now() / 1000;
  if (kind === "snapshot") {
    model.devices = new Map(news.devices.map((row) => [row.device_id, row]));
    model.runs = new Map(news.runs.map((row) => [row.run_id, row]));
    model.events = news.events;
    model.attention = news.attention;
    model.liveRun = news.live_run;
    // After a gap, what is shown of runs may have gone on.
    if (model.isLoaded) for (const id of [...model.courses.keys()]) loadCourse(id);
    model.isLoaded = true;
    tell("all");
    return;
  }
  for (const row of news.devices ?? []) model.devices.set(row.device_id, row);
  for (const id of news.removed ?? []) model.devices.delete(id);
  for (const row of news.runs ?? []) {
    // Once it is over its sums are final; of a short one nothing was told meanwhile.
    if (row.finished_at && !model.runs.get(row.run_id)?.finished_at && model.courses.has(row.run_id)) loadCourse(row.run_id);
    model.runs.set(row.run_id, row);
  }
  if (news.events) model.events = [...model.events, ...news.events].slice(-KEPT_EVENTS);
  if (news.attention) model.attention = news.attention;
  if ("live_run" in news) model.liveRun = news.live_run;
  for (const course of news.courses ?? []) takeCourse(course);
  tell("changes");
}

// Returns the run's rounds as far as they are known, and begins to load them if they are not.
export function courseOf(runId) {
  if (!model.courses.has(runId)) {
    model.courses.set(runId, { rows: new Map(), spans: new Map(), numDevices: 0, isLoaded: false, error: "", version: 0 });
    loadCourse(runId);
  }
  return model.courses.get(runId);
}

export async function loadCourse(runId) {
  const path = `runs/${encodeURIComponent(runId)}`;
  const course = model.courses.get(runId);
  try {
    const [curve, line] = await Promise.all([get(`${path}/curve`, { points: POINTS }), get(`${path}/spans`, { rounds: SPAN_ROUNDS })]);
    // Rounds that the feed told meanwhile are newer.
    const told = [...course.rows.values()].filter((row) => !curve.rows.length || row.round > curve.rows.at(-1).round);
    course.rows = new Map(curve.rows.map((row) => [row.round, row]));
    addRows(course, told);
    const newer = [...course.spans].filter(([round]) => round > (line.last ?? -1));
    course.spans = new Map([...bySpan(line.rows), ...newer]);
    forgetOld(course);
    course.numDevices = Math.max(line.num_devices, course.numDevices);
    course.error = "";
  } catch (error) {
    course.error = error.message;
  }
  course.isLoaded = true;
  course.version += 1;
  tell("course");
}

function takeCourse(news) {
  const course = model.courses.get(news.run);
  if (!course) return;
  if (news.reload) {
    loadCourse(news.run);
    return;
  }
  course.version += 1;
  addRows(course, news.rows);
  if (news.spans) {
    for (const [round, rows] of bySpan(news.spans.rows)) course.spans.set(round, rows);
    course.numDevices = news.spans.num_devices;
    forgetOld(course);
  }
}

function forgetOld(course) {
  for (const round of [...course.spans.keys()].sort((a, b) => a - b).slice(0, -SPAN_ROUNDS)) course.spans.delete(round);
}

function addRows(course, rows) {
  for (const row of rows) {
    const known = course.rows.get(row.round);
    const before = known ? null : course.rows.get(row.round - 1) ?? newest(course, row.round);
    const sums = known ? { total_up: known.total_up, total_down: known.total_down } : before
      ? { total_up: before.total_up + row.bytes_up, total_down: before.total_down + row.bytes_down }
      : { total_up: row.total_up ?? row.bytes_up, total_down: row.total_down ?? row.bytes_down };
    course.rows.set(row.round, { ...row, ...sums });
  }
  // A page that stays open for days must not grow: every other old round goes, the newest stay.
  if (course.rows.size > KEPT_POINTS) {
    const rounds = [...course.rows.keys()].sort((a, b) => a - b);
    rounds.slice(1, -KEPT_POINTS / 2).forEach((round, index) => index % 2 && course.rows.delete(round));
  }
}

// Only a page that missed something comes here: as a rule the round before is known.
function newest(course, before) {
  const rounds = [...course.rows.keys()].filter((round) => round < before);
  return rounds.length ? course.rows.get(Math.max(...rounds)) : null;
}

function bySpan(rows) {
  const found = new Map();
  for (const row of rows) {
    if (!found.has(row.round)) found.set(row.round, []);
    found.get(row.round).push(row);
  }
  return found;
}

export function courseRows(course) {
  return [...course.rows.values()].sort((a, b) => a.round - b.round);
}

export function newestRow(course) {
  return course?.isLoaded && course.rows.size ? courseRows(course).at(-1) : null;
}

// The boards of the fleet: the coordinator's own evaluator is none of them.
export function boards() {
  return [...model.devices.values()].filter((row) => !row.built_in);
}

export const PRESENT = ["online", "late", "draining"];
export const HOT_C = 80;
