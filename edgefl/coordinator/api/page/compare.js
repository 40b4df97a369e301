// Up to eight runs beside each other: their curves in one chart, their results, and the settings in which they differ.

import { get } from "./api.js";
import { LineChart, swatch } from "./charts.js";
import { h, link, replace } from "./dom.js";
import { accuracy, bytes, count, plain, seconds } from "./format.js";
import { ACCURACY, bestOf, LOSS, section, X, xAxisChoice } from "./run.js";
import { lasted, MAX_COMPARED, result, status } from "./runs.js";
import { scroller } from "./tables.js";

const TONES = ["a", "b", "c", "d"];
const POINTS = 400;

export function compareView(root, ids) {
  const state = { x: "rounds", isLog: false };
  const choice = xAxisChoice(state, draw);
  const curve = new LineChart("Accuracy", { height: 300, group: "compare" });
  const loss = new LineChart("Loss", { height: 300, group: "compare" });
  let runs = [];
  replace(root, h("p", { class: "quiet" }, "Loading…"));
  Promise.all(ids.slice(0, MAX_COMPARED).map(load)).then((found) => {
    runs = found;
    replace(root, h("div", { class: "head" }, h("h1", {}, "Compare runs"), h("p", { class: "actions" }, link(["runs"], "To the runs", { class: "button" }))),
      ids.length > MAX_COMPARED ? h("p", { class: "notice" }, `The first ${MAX_COMPARED} of ${ids.length} runs.`) : [],
      choice.element, h("div", { class: "charts" }, curve.element, loss.element), section("Results", results()), section("Settings that differ", differences()));
    draw();
  }, (error) => replace(root, h("h1", {}, "The runs could not be compared"), h("p", { class: "error" }, error.message), h("p", {}, link(["runs"], "To the runs", { class: "button" }))));

  async function load(id, index) {
    const path = `runs/${encodeURIComponent(id)}`;
    const [run, answer] = await Promise.all([get(path), get(`${path}/curve`, { points: POINTS })]);
    return { run, rows: answer.rows, line: { name: run.name, tone: TONES[index % TONES.length], isDashed: index >= TONES.length } };
  }

  function draw() {
    choice.mark();
    const { of, axis } = X[state.x];
    const series = (name) => runs.map(({ rows, line }) => ({ ...line, points: rows.map((row) => [of(row, rows[0].started_at ?? 0), row[name] ?? null]) }));
    curve.show({ x: axis, y: ACCURACY, series: series("accuracy") }, "No model was evaluated.");
    loss.show({ x: axis, y: { ...LOSS, isLog: state.isLog }, series: series("loss") }, "No loss was measured.");
  }

  // On a phone without the columns in `wide`.
  function table(caption, headings, lines, wide = []) {
    const kind = (index) => (wide.includes(index) ? "wide" : null);
    return scroller(h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, headings.map((text, index) => h("th", { scope: "col", class: kind(index) }, text)))),
      h("tbody", {}, lines.map(([name, ...cells]) => h("tr", {}, h("th", { scope: "row" }, name), cells.map((text, index) => h("td", { class: kind(index + 1) }, text)))))), caption);
  }

  function results() {
    return table("Results", ["Run", "Status", "Rounds", "Accuracy", "Best", "Duration", "Bytes"], runs.map(({ run, rows, line }) => {
      const last = rows.at(-1);
      const best = bestOf(rows);
      return [h("span", {}, swatch(line), " ", link(["runs", run.run_id], run.name)), status(run), count(run.rounds), accuracy(result(run), 2), best ? `${accuracy(best.accuracy, 2)}, round ${best.round}` : "–", seconds(lasted(run, last)), last ? bytes(last.total_up + last.total_down) : "–"];
    }), [1, 5, 6]);
  }

  function differences() {
    const settings = runs.map(({ run }) => flat(run.config));
    const names = [...new Set(settings.flatMap((one) => Object.keys(one)))].filter((name) => name !== "run.name" && new Set(settings.map((one) => one[name] ?? "–")).size > 1);
    if (!names.length) return h("p", { class: "quiet" }, "They have the same settings.");
    return table("Settings that differ", ["Setting", ...runs.map(({ run }) => run.name)], names.sort().map((name) => [name, ...settings.map((one) => one[name] ?? "–")]));
  }

  return { update() {} };
}

// Every setting by its path, as text.
function flat(config) {
  return Object.fromEntries(Object.entries(config).flatMap(([section, table]) => Object.entries(table ?? {}).map(([name, value]) => [`${section}.${name}`, plain(value)])));
}
