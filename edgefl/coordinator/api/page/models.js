// The models that runs have kept, and their roll-outs to devices: what runs where, how far a roll-out is, back to the model
// before.

import { get, post } from "./api.js";
import { act, ask } from "./dialogs.js";
import { button, h, link, refresh, replace, setText, toast } from "./dom.js";
import { accuracy, bytes, count, moment, shortHash, words } from "./format.js";
import { boards, model } from "./model.js";
import { section } from "./run.js";
import { scroller, Table } from "./tables.js";

const OPEN = ["preparing", "canary", "rolling"];
const MIN_CANARIES = 3;
const SHOWN_ROLLOUTS = 20;
const NEWS = /^(deployment|model)-/;

function marks(row) {
  return [row.best ? "best" : "", row.latest ? "latest" : ""].filter(Boolean).map((text) => [h("span", { class: "status" }, text), " "]).flat();
}

function running(sha256) {
  return boards().filter((row) => row.deployed === sha256).length;
}

function fileLink(row, text, attributes = {}) {
  const name = `${row.name.replace(/[^\w.-]+/g, "-")}-${row.round}`;
  return h("a", { class: "button", href: `/edgefl/v1/models/${row.sha256}/file`, download: `${name}.safetensors`, ...attributes }, text);
}

const COLUMNS = [
  { key: "model", title: "Model", isHeading: true, value: (row) => row.sha256, cell: (row) => h("span", {}, h("code", {}, shortHash(row.sha256)), " ", marks(row)) },
  { key: "run", title: "Run", value: (row) => row.name, cell: (row) => h("span", {}, link(["runs", row.run_id], row.name), h("span", { class: "minor block" }, `round ${row.round}`)) },
  { key: "task", title: "Task", class: "wide", value: (row) => row.task, cell: (row) => row.task },
  { key: "accuracy", title: "Accuracy", isNumber: true, value: (row) => row.accuracy, cell: (row) => accuracy(row.accuracy, 2) },
  { key: "size", title: "Size", class: "wide", isNumber: true, value: (row) => row.bytes_file, cell: (row) => bytes(row.bytes_file) },
  { key: "at", title: "Kept", class: "wide", isNumber: true, value: (row) => row.at, cell: (row) => moment(row.at) },
  { key: "boards", title: "Runs on", class: "wide", isNumber: true, value: (row) => running(row.sha256), cell: (row) => (running(row.sha256) ? `${running(row.sha256)} ${running(row.sha256) === 1 ? "board" : "boards"}` : "–") },
  { key: "acts", title: h("span", { class: "unseen" }, "Actions"), cell: (row) => h("p", { class: "actions" }, button("Roll out", () => act(() => rollOut(row)), { "aria-label": `Roll out ${shortHash(row.sha256)}` }), fileLink(row, "Download", { "aria-label": `Download ${shortHash(row.sha256)}` })) },
];

const STATES = ["running", "notified", "pending", "rejected", "failed", "reverting", "reverted", "superseded"];

function counts(rollout) {
  return STATES.filter((state) => rollout.counts[state]).map((state) => `${rollout.counts[state]} ${words(state)}`).join(", ");
}

let afterRollOut = () => {};

async function submit(body) {
  try {
    const made = await post("deployments", body);
    toast(`The roll-out of ${shortHash(made.model)} is ${made.status}.`);
  } finally {
    // Refused, it may be since a run that goes on keeps other models by now.
    afterRollOut();
  }
}

// Asks to whom a model goes, and by which rules.
function rollOut(row) {
  const able = boards().filter((one) => one.tasks?.includes(row.task));
  const groups = [...new Set(able.flatMap((one) => one.groups ?? []))].sort();
  const field = (id, label, input, help) => h("p", {}, h("label", { for: id }, label), input, h("span", { class: "minor block", id: `${id}-help` }, help));
  const whom = h("select", { id: "whom", "aria-describedby": "whom-help", onchange: () => tellWhom() }, h("option", { value: "" }, `all with a shard of ${row.task}`), groups.map((name) => h("option", { value: `group ${name}` }, `group ${name}`)), able.map((one) => h("option", { value: `board ${one.device_id}` }, one.device_id)));
  const number = (id, value, step, max) => h("input", { id, type: "number", min: 0, max, step, value, required: true, "aria-describedby": `${id}-help` });
  const canary = number("canary", 0, 1, 1000);
  const tolerance = number("tolerance", 0.02, "any", 1);
  const least = number("min-accuracy", 0, "any", 1);
  const names = () => able.filter((one) => whom.value === `board ${one.device_id}` || (one.groups ?? []).some((name) => whom.value === `group ${name}`)).map((one) => one.device_id).sort();
  const told = h("span", {});
  const tellWhom = () => {
    const chosen = whom.value ? names() : able.map((one) => one.device_id);
    setText(told, `${chosen.length} ${chosen.length === 1 ? "board" : "boards"}${whom.value ? "" : "; those that join later too"}.`);
  };
  tellWhom();
  ask(`Roll out ${shortHash(row.sha256)}?`, [
    h("p", {}, `Of run ${row.name}, round ${row.round}, accuracy ${accuracy(row.accuracy, 2)}. Each board fetches it, compares it with the model that it runs on its own test data, and keeps the better one.`),
    field("whom", "To", whom, told),
    field("canary", "Canaries", canary, `Boards that get it first; ${MIN_CANARIES} at least, 0 for all at once. If one refuses it, they go back and no other gets it.`),
    field("tolerance", "Worse by at most", tolerance, "A fraction of the accuracy that the model before has there."),
    field("min-accuracy", "Accuracy at least", least, "A fraction; 0 for no bound.")],
  { text: "Roll out", action: () => act(() => submit({ model: row.sha256, ...(whom.value ? { devices: names() } : {}), canary: Number(canary.value), tolerance: Number(tolerance.value), min_accuracy: Number(least.value) })) });
}

// The newest roll-out before this one that put another model of the task on boards.
function before(rollout, all) {
  return all.slice(all.indexOf(rollout) + 1).find((one) => one.task === rollout.task && one.model !== rollout.model && one.counts.running);
}

function rollBack(rollout, former) {
  act(() => ask(`Roll back to ${shortHash(former.model)}?`, [h("p", {}, `${rollout.devices ? `${rollout.devices.length} boards` : "All boards with a shard of the task"} get the model of before ${moment(rollout.created_at)} again, whatever it scores there.`)],
    { text: "Roll back", action: () => act(() => submit({ model: former.model, ...(rollout.devices ? { devices: rollout.devices } : {}), tolerance: 1 })) }));
}

export function modelsView(root) {
  const failure = h("p", { class: "error", role: "alert", hidden: true }, h("span"), " ", button("Try again", () => load()));
  const task = h("select", { id: "task", onchange: () => draw() });
  const runningNow = h("p", { class: "quiet", role: "status" }, "Loading…");
  const table = new Table({ caption: "Models", columns: COLUMNS, rowKey: (row) => `${row.run_id} ${row.version}`, order: { key: "at", isDown: true }, empty: "No run has kept a model yet." });
  const rollouts = h("div");
  const content = h("div", { hidden: true }, table.element, h("div", { class: "below" }, section("Roll-outs", rollouts)));
  const opened = new Map();
  let [models, rows, seen, wasDeployed] = [null, [], null, ""];
  replace(root, h("div", { class: "head" }, h("h1", {}, "Models"), h("p", { class: "actions" }, link(["runs"], "To the runs", { class: "button" }))), failure,
    h("p", { class: "search" }, h("label", { for: "task" }, "Task"), task), runningNow, content);

  async function load() {
    try {
      const [kept, sent] = await Promise.all([get("models"), get("deployments")]);
      [models, rows] = [kept.rows, [...sent.rows].sort((a, b) => b.created_at - a.created_at)];
      failure.hidden = true;
      for (const id of opened.keys()) loadDevices(id);
    } catch (error) {
      failure.hidden = false;
      setText(failure.firstChild, `The models could not be loaded: ${error.message}.`);
      if (!models) setText(runningNow, "Not loaded.");
    }
    draw();
  }

  function draw() {
    if (!models) return;
    content.hidden = false;
    const tasks = [...new Set(models.map((row) => row.task))].sort();
    const chosen = task.value;
    refresh(task, h("option", { value: "" }, "all"), tasks.map((name) => h("option", { value: name }, name)));
    task.value = tasks.includes(chosen) ? chosen : "";
    const fits = (row) => !task.value || row.task === task.value;
    const deployed = boards().filter((row) => row.deployed).length;
    setText(runningNow, `${models.filter(fits).length} kept; ${deployed} of ${boards().length} boards run one.`);
    const now = JSON.stringify(boards().map((row) => row.deployed));
    if (now !== wasDeployed) table.forget();
    wasDeployed = now;
    table.show(models.filter(fits));
    drawRollouts(rows.filter(fits));
  }

  function drawRollouts(shown) {
    if (!shown.length) {
      refresh(rollouts, h("p", { class: "quiet" }, "No model was rolled out yet."));
      return;
    }
    const list = shown.slice(0, SHOWN_ROLLOUTS).map((rollout) => {
      const former = before(rollout, rows);
      const all = Object.values(rollout.counts).reduce((sum, one) => sum + one, 0);
      const answered = all - ["pending", "notified", "reverting"].reduce((sum, state) => sum + (rollout.counts[state] ?? 0), 0);
      const isOpen = OPEN.includes(rollout.status);
      const isNewest = rows.find((one) => one.task === rollout.task) === rollout;
      return h("li", { class: "rollout" },
        h("div", { class: "head" }, h("h3", {}, h("code", {}, shortHash(rollout.model)), " ", h("span", { class: `status ${rollout.status === "done" ? "finished" : isOpen ? "running" : rollout.status}` }, rollout.status)),
          isNewest && former ? h("p", { class: "actions" }, button("Roll back", () => rollBack(rollout, former), { class: "danger", "aria-label": `Roll back to ${shortHash(former.model)}` })) : null),
        h("p", { class: "minor" }, `${rollout.task}, ${moment(rollout.created_at)}, to ${rollout.devices ? `${rollout.devices.length} chosen` : "all"}${rollout.canary ? `, ${rollout.canary} canaries first` : ""}: ${counts(rollout)}`),
        isOpen && all ? h("progress", { max: all, value: answered, "aria-label": `${answered} of ${all} have answered` }) : null,
        rollout.reason ? h("p", { class: "warn" }, rollout.reason) : null,
        details(rollout));
    });
    refresh(rollouts, h("ul", { class: "rollouts" }, list));
  }

  function details(rollout) {
    const each = opened.get(rollout.deployment_id);
    const content = !each ? [] : each === "loading" ? h("p", { class: "quiet" }, "Loading…") : each instanceof Error ? h("p", { class: "error" }, each.message) : devices(each);
    return h("details", { open: Boolean(each), ontoggle: (event) => toggle(rollout.deployment_id, event.target.open) }, h("summary", {}, "Each board"), content);
  }

  function toggle(id, isOpen) {
    if (isOpen === opened.has(id)) return;
    if (!isOpen) opened.delete(id);
    else {
      opened.set(id, "loading");
      loadDevices(id);
    }
    draw();
  }

  async function loadDevices(id) {
    try {
      opened.set(id, (await get(`deployments/${encodeURIComponent(id)}`)).each);
    } catch (error) {
      opened.set(id, error);
    }
    draw();
  }

  afterRollOut = load;
  load();
  return { update() {
    const newest = model.events.findLast((event) => NEWS.test(event.kind))?.id ?? 0;
    if (seen !== null && newest !== seen) load();
    else draw();
    seen = newest;
  } };
}

function devices(each) {
  const head = ["Board", "State", "Accuracy", "Before", "Examples"];
  return scroller(h("table", {}, h("caption", { class: "unseen" }, "Each board"), h("thead", {}, h("tr", {}, head.map((text, index) => h("th", { scope: "col", class: index > 2 ? "number wide" : index > 1 ? "number" : null }, text)))),
    h("tbody", {}, each.map((row) => h("tr", {}, h("th", { scope: "row" }, link(["devices", row.device_id], row.device_id), row.part === "canary" ? h("span", { class: "minor beside" }, "canary") : null),
      h("td", { class: ["rejected", "failed", "reverting", "reverted"].includes(row.state) ? "warn" : null }, words(row.state), row.reason ? h("span", { class: "minor block" }, row.reason) : null),
      h("td", { class: "number" }, accuracy(row.accuracy)), h("td", { class: "number wide" }, accuracy(row.former_accuracy)), h("td", { class: "number wide" }, count(row.num_examples)))))), "Each board");
}
