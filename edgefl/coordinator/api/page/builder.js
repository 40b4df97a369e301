// Starting a run: a form made of the schema of run files, the run file beside it, each in step with the other, and what the
// coordinator says of it: what is wrong, at its field; who would take part, and what a round costs.

import { get, post } from "./api.js";
import { act, signIn } from "./dialogs.js";
import { button, h, replace, setText, toast } from "./dom.js";
import { bytes, count, plain, seconds, words } from "./format.js";
import { boards, model } from "./model.js";
import { facts } from "./run.js";
import { AGAIN_KEY } from "./runs.js";
import { Table } from "./tables.js";
import { literal, readToml, setToml, toToml } from "./toml.js";

const EXAMPLE = `[run]
task = "digits"
rounds = 20

[strategy]
name = "fedavg"
`;
const CHECK_MS = 500;
const TEXT_KEY = "edgefl-run-file";
const NUMBER = /^[+-]?\d[\d_]*(\.[\d_]+)?([eE][+-]?\d+)?$/;
const BOOLEAN = /^(true|false)$/;
// Settings of every strategy that trains; the others are its own.
const LOCAL = ["schedule", "iterations", "seconds", "optimizer", "momentum", "weight_decay", "head_epochs", "personal_lambda", "keep_optimizer"];
const LABELS = {
  "run.accuracy": "Accuracy reached", "run.bytes": "Bytes sent", "devices.min": "Devices to begin with", "devices.count": "Devices asked in a round", "devices.fraction": "Or a fraction of them", "strategy.name": "Strategy",
  "compression.up": "Codec of updates", "compression.down": "Codec of the model", "guard.enabled": "Compare updates",
};
// What a group shows at once; its tables' other settings lie under "More".
const GROUPS = [
  { title: "Task", isOpen: true, first: ["run.task", "run.name", "task.*"], more: ["run.seed", "run.init", "run.local_test_fraction", "run.evaluate_on", "run.evaluate_every"] },
  { title: "When it ends", isOpen: true, first: ["run.rounds", "run.accuracy", "run.seconds"], more: ["run.epochs", "run.updates", "run.bytes", "run.until", "run.accuracy_window", "run.trust_single_evaluation", "run.on_divergence"] },
  { title: "Strategy", isOpen: true, first: ["strategy.name", "strategy.*"], more: [...LOCAL.map((name) => `strategy.${name}`), "server.*"] },
  { title: "Devices", isOpen: true, first: ["devices.groups", "devices.names", "devices.min"], more: ["devices.*", "run.*"] },
  { title: "Compression", first: ["compression.up", "compression.down"], more: ["compression.*"] },
  { title: "Guard", first: ["guard.enabled", "guard.norm_ratio", "guard.min_cosine"], more: ["guard.*"] },
  { title: "Models that are kept", first: ["models.keep_last", "models.auto_deploy", "models.canary"], more: ["models.*"] },
];
const PLAN_COLUMNS = [
  { key: "device", title: "Device", isHeading: true, value: (row) => row.device_id, cell: (row) => row.device_id },
  { key: "part", title: "Takes part", value: (row) => Number(!row.takes_part), cell: (row) => h("span", {}, row.takes_part ? "yes" : h("span", { class: "warn" }, "no"), row.reason ? h("span", { class: "minor block" }, row.reason) : null) },
  { key: "time", title: "Computes", isNumber: true, isOptional: true, value: (row) => row.seconds ?? null, cell: (row) => seconds(row.seconds) },
  { key: "bytes", title: "Up", isNumber: true, isOptional: true, value: (row) => row.bytes_up ?? null, cell: (row) => bytes(row.bytes_up) },
];

// What is the default anyway need not stand in a run file.
function withoutDefaults(config, schema) {
  return Object.fromEntries(Object.entries(config).map(([table, values]) => {
    const known = table === "strategy" || table === "task" ? {} : schema.properties[table]?.properties ?? {};
    return [table, Object.fromEntries(Object.entries(values ?? {}).filter(([name, value]) => known[name]?.default === undefined || known[name].default !== value))];
  }));
}

export function startView(root) {
  replace(root, h("p", { class: "quiet" }, "Loading…"));
  let view = null;
  get("run-schema").then(({ schema }) => { view = new Builder(root, schema); }, (error) => replace(root, h("h1", {}, "Start a run"), h("p", { class: "error", role: "alert" }, `The form could not be loaded: ${error.message}.`), h("p", {}, button("Try again", () => startView(root), { class: "primary" }))));
  return { update: () => view?.update() };
}

class Builder {
  constructor(root, schema) {
    Object.assign(this, { schema, fields: new Map(), turn: 0, timer: null, choices: "" });
    const again = sessionStorage.getItem(AGAIN_KEY);
    sessionStorage.removeItem(AGAIN_KEY);
    const kept = sessionStorage.getItem(TEXT_KEY);
    this.text = h("textarea", { id: "run-file", rows: 14, spellcheck: "false", autocomplete: "off", wrap: "off", "aria-describedby": "text-fault", oninput: () => this.takeText() });
    this.text.value = again ? toToml(withoutDefaults(JSON.parse(again), schema)) : kept ?? EXAMPLE;
    this.fault = h("p", { class: "error", id: "text-fault" });
    this.said = h("p", { role: "status", class: "quiet" }, "");
    this.advice = h("div");
    this.rows = new Table({ caption: "Who would take part", columns: PLAN_COLUMNS, rowKey: (row) => row.device_id, order: { key: "part" }, empty: "No device is in the fleet." });
    this.groups = GROUPS.map((group) => this.group(group));
    this.lists = h("div", { hidden: true });
    const file = h("input", { id: "file", type: "file", accept: ".toml,application/toml,text/plain", onchange: async () => {
      if (file.files.length) this.text.value = await file.files[0].text();
      this.takeText();
    } });
    replace(root, h("div", { class: "head" }, h("h1", {}, "Start a run")),
      h("form", { class: "builder", novalidate: true, onsubmit: (event) => { event.preventDefault(); this.start(); } },
        h("section", { class: "settings-form", "aria-label": "Settings" }, this.groups.map((group) => group.element), this.lists),
        h("div", { class: "beside-form" },
          h("section", { "aria-label": "Run file" }, h("label", { for: "run-file" }, "Run file (TOML)"), this.text, this.fault, h("p", {}, h("label", { for: "file" }, "or choose a file: "), file)),
          h("section", { "aria-label": "What the coordinator says" }, h("h2", {}, "What the coordinator says"), this.advice)),
        h("div", { class: "build-bar" }, this.said, h("p", { class: "actions" }, button("Check", () => this.check()), h("button", { type: "submit", class: "primary" }, "Start the run")))));
    this.takeText();
  }

  update() {
    const names = boards();
    const known = JSON.stringify([names.map((row) => row.device_id), names.map((row) => row.groups), model.acts]);
    if (known === this.choices) return;
    const isNew = this.choices !== "";
    this.choices = known;
    const options = (id, values) => h("datalist", { id }, [...new Set(values)].sort().map((value) => h("option", { value })));
    replace(this.lists, options("known-groups", names.flatMap((row) => row.groups ?? [])), options("known-names", names.map((row) => row.device_id)));
    if (isNew) this.schedule();
  }

  // The schema of a setting, that of the chosen task and strategy too; undefined for one that no field can show.
  settingsOf(table) {
    const chosen = (entries, path) => entries.find(({ if: one }) => path(one) === this.valueOf(table === "task" ? "run.task" : "strategy.name"))?.then;
    if (table === "task") return chosen(this.schema.allOf, (one) => one.properties.run.properties.task.const)?.properties.task.properties ?? {};
    const fixed = this.schema.properties[table].properties;
    if (table !== "strategy") return fixed;
    return { ...chosen(this.schema.properties.strategy.allOf, (one) => one.properties.name.const)?.properties, ...fixed };
  }

  valueOf(path) {
    const [table, ...name] = path.split(".");
    return this.places?.get(path)?.value ?? this.places?.get(table)?.value?.[name.join(".")] ?? this.schema.properties[table]?.properties?.[name.join(".")]?.default;
  }

  group({ title, isOpen, first, more }) {
    const [shown, hidden, count] = [h("div", { class: "fields" }), h("div", { class: "fields" }), h("span", { class: "minor" })];
    const rest = h("details", { class: "more-settings" }, h("summary", {}, "More settings"), hidden);
    const about = h("p", { class: "minor" });
    const element = h("details", { class: "group", open: isOpen }, h("summary", {}, h("h2", {}, title), count), about, shown, rest);
    return { element, shown, hidden, rest, count, about, first, more };
  }

  // Builds the fields of all groups; again only where task or strategy are others than before.
  build() {
    const state = JSON.stringify([this.valueOf("run.task"), this.valueOf("strategy.name")]);
    if (state === this.built) return;
    this.built = state;
    const own = document.activeElement?.id;
    const named = new Set(GROUPS.flatMap((group) => [...group.first, ...group.more]));
    const before = this.fields;
    this.fields = new Map();
    for (const group of this.groups) {
      for (const [place, wanted] of [[group.shown, group.first], [group.hidden, group.more]]) {
        const paths = wanted.flatMap((path) => {
          const [table, name] = path.split(".");
          const known = this.settingsOf(table);
          if (name !== "*") return known[name] ? [path] : [];
          return Object.keys(known).map((one) => `${table}.${one}`).filter((one) => !named.has(one));
        });
        replace(place, paths.map((path) => this.field(path, before)).filter(Boolean));
      }
      group.rest.hidden = !group.hidden.childElementCount;
    }
    const strategy = this.schema.properties.strategy.allOf.find((one) => one.if.properties.name.const === this.valueOf("strategy.name"))?.then;
    setText(this.groups[2].about, (strategy?.description ?? "").replaceAll("`", ""));
    if (own) document.getElementById(own)?.focus();
  }

  field(path, before) {
    const [table, name] = path.split(".");
    const kind = this.settingsOf(table)[name];
    if (kind.type === "object") return null;
    const id = `set-${table}-${name}`;
    const isSame = before.get(path)?.state === JSON.stringify(kind) && !kind.examples;
    if (isSame) {
      this.fields.set(path, before.get(path));
      return before.get(path).element;
    }
    const choices = choicesOf(kind);
    const about = { id, "aria-describedby": `${id}-help ${id}-fault` };
    const list = { "devices.groups": "known-groups", "devices.names": "known-names" }[path];
    const input = choices
      ? h("select", { ...about, onchange: () => this.set(path, input.value) }, kind.examples ? [] : h("option", { value: "" }, `default: ${kind.default === undefined ? "none" : plain(kind.default)}`), choices.map(([value, text]) => h("option", { value }, text)))
      : h("input", { ...about, type: "text", autocomplete: "off", spellcheck: "false", list, inputmode: isNumeric(kind) ? "decimal" : null, placeholder: kind.default === undefined || kind.default === "" ? "none" : `default: ${plain(kind.default)}`, oninput: () => this.set(path, input.value) });
    const fault = h("p", { class: "error", id: `${id}-fault` });
    const help = h("p", { class: "minor", id: `${id}-help` }, helpOf(kind));
    const element = h("div", { class: "field" }, h("label", { for: id }, LABELS[path] ?? capital(words(name))), input, fault, help);
    this.fields.set(path, { element, input, fault, kind, state: JSON.stringify(kind) });
    return element;
  }

  // From the form to the text.
  set(path, written) {
    const [table, name] = path.split(".");
    const { kind } = this.fields.get(path);
    try {
      let text = setToml(this.text.value, table, name, toLiteral(kind, written));
      this.places = readToml(text).places;
      if (kind.examples) text = this.dropForeign(text, path);
      this.text.value = text;
    } catch {
      return;
    }
    this.takeText();
  }

  // Settings that another strategy or task has not are left out, and named.
  dropForeign(text, path) {
    const table = path === "run.task" ? "task" : "strategy";
    const known = this.settingsOf(table);
    const foreign = [...this.places.keys()].filter((one) => one.startsWith(`${table}.`)).map((one) => one.slice(table.length + 1)).filter((name) => !known[name]);
    if (foreign.length && Object.keys(known).length > 1) {
      toast(`Left out, since ${this.valueOf(path)} does not have it: ${foreign.join(", ")}.`);
      for (const name of foreign) text = setToml(text, table, name, null);
    }
    return text;
  }

  // From the text to the form.
  takeText() {
    sessionStorage.setItem(TEXT_KEY, this.text.value);
    let problem = "";
    try {
      this.places = readToml(this.text.value).places;
    } catch (error) {
      problem = `The form does not follow this text, ${error.message}.`;
    }
    setText(this.fault, problem);
    this.build();
    for (const [path, { input, kind }] of this.fields) {
      input.disabled = Boolean(problem);
      if (input === document.activeElement) continue;
      const shown = this.shownOf(path, kind);
      if (kind.examples && ![...input.options].some((option) => option.value === shown)) input.append(h("option", { value: shown }, shown));
      if (input.value !== shown) input.value = shown;
    }
    for (const group of this.groups) {
      const number = [...this.fields].filter(([path, field]) => group.element.contains(field.element) && this.isSet(path)).length;
      setText(group.count, number ? `${number} set` : "defaults");
    }
    this.schedule();
  }

  isSet(path) {
    const [table, name] = path.split(".");
    return this.places?.has(path) || name in Object(this.places?.get(table)?.value);
  }

  shownOf(path, kind) {
    if (!this.isSet(path)) return kind.examples ? String(kind.default ?? "") : "";
    const value = this.valueOf(path);
    if (Array.isArray(value)) return value.join(", ");
    return typeof value === "number" ? this.places.get(path)?.raw ?? String(value) : String(value);
  }

  schedule() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.check(), CHECK_MS);
  }

  async check() {
    clearTimeout(this.timer);
    if (!this.text.isConnected) return;
    if (!model.acts) {
      this.showFaults([]);
      setText(this.said, "Not checked.");
      replace(this.advice, h("p", {}, model.role ? `Checking and starting need the role operator; you have the role ${model.role}.` : "Who is signed in as an operator sees here who would take part, and what a round costs."), model.role ? [] : h("p", {}, button("Sign in", () => signIn("To check and start runs."))));
      return;
    }
    this.turn += 1;
    const { turn } = this;
    setText(this.said, "Checking…");
    try {
      const { config } = await post("run-files", { toml: this.text.value });
      const plan = await post("runs/plan", { config });
      if (turn !== this.turn || !this.text.isConnected) return;
      this.showFaults([]);
      this.showPlan(plan, config);
    } catch (error) {
      if (turn === this.turn && this.text.isConnected) this.showFailure(error);
    }
  }

  showFailure(error) {
    const faults = error.faults?.length ? error.faults : [{ setting: null, message: error.message }];
    const others = this.showFaults(faults);
    setText(this.said, faults.length === 1 && others.length ? "It cannot be started as it is." : `${faults.length} ${faults.length === 1 ? "setting is" : "settings are"} wrong.`);
    replace(this.advice, others.length ? h("ul", { class: "faults" }, others.map((text) => h("li", { class: "error" }, text))) : h("p", { class: "quiet" }, "What is wrong stands at its field."));
  }

  // Puts each fault at its field, whose group is opened; returns those that no field has.
  showFaults(faults) {
    const others = [];
    for (const { input, fault } of this.fields.values()) {
      setText(fault, "");
      input.removeAttribute("aria-invalid");
    }
    for (const { setting, message } of faults) {
      const field = this.fields.get(setting);
      if (!field) {
        others.push(message);
        continue;
      }
      setText(field.fault, message.replace(`${setting} must`, "It must").replace(`${setting}: `, ""));
      field.input.setAttribute("aria-invalid", "true");
      for (let place = field.element.closest("details"); place; place = place.parentElement.closest("details")) place.open = true;
    }
    return others;
  }

  showPlan(plan, config) {
    const taking = plan.rows.filter((row) => row.takes_part).length;
    setText(this.said, plan.obstacle ? "It would wait." : `It can be started: ${taking} ${taking === 1 ? "device takes" : "devices take"} part.`);
    const { names = [], groups = [] } = config.devices ?? {};
    const rules = Object.entries(plan.goal ?? {}).map(([name, value]) => (name === "until" ? value : name === "accuracy" ? `accuracy ${value}` : name === "bytes" ? bytes(value) : `${count(value)} ${name}`));
    replace(this.advice, plan.obstacle ? h("p", { class: "notice" }, `It would wait: ${plan.obstacle}.`) : [],
      plan.warnings.map((text) => h("p", { class: "notice" }, text)),
      facts([["Devices asked first", count(plan.num_devices)], ["Meant", names.length ? plain(names) : groups.length ? `groups ${plain(groups)}` : "all with a shard"], ["Evaluated by", plan.evaluators.length ? plan.evaluators.join(", ") : "the devices"], ["A round computes", seconds(plan.seconds)],
        ["A round sends up", bytes(plan.bytes_up)], ["and down", bytes(plan.bytes_down)], ["Model", bytes(plan.model_bytes)], ["Ends after", rules.join(" or ") || null], ["State kept", plan.state_bytes ? bytes(plan.state_bytes) : null]]),
      this.rows.element, h("details", {}, h("summary", {}, "What these figures assume"), plan.assumed.map((text) => h("p", { class: "minor" }, text))));
    this.rows.show(plan.rows);
  }

  start() {
    act(async () => {
      try {
        const { config } = await post("run-files", { toml: this.text.value });
        const run = await post("runs", { config });
        toast(`${run.name} is ${run.status}.`);
        location.hash = `#/runs/${encodeURIComponent(run.run_id)}`;
      } catch (error) {
        if (error.status === 401 || error.status === 403) throw error;
        this.turn += 1;
        this.showFailure(error);
        [...this.fields.values()].find((field) => field.input.hasAttribute("aria-invalid"))?.input.focus();
      }
    });
  }
}

function choicesOf(kind) {
  if (kind.examples) return kind.examples.map((value) => [value, value]);
  if (kind.enum) return kind.enum.map((value) => [value, words(value)]);
  return kind.type === "boolean" ? [["true", "yes"], ["false", "no"]] : null;
}

function isNumeric(kind) {
  return kind.type === "integer" || kind.type === "number";
}

function isList(kind) {
  return kind.type === "array";
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

// What a setting is, and its bounds.
function helpOf(kind) {
  const bounds = [["minimum", "at least"], ["exclusiveMinimum", "above"], ["maximum", "at most"], ["exclusiveMaximum", "below"]].filter(([name]) => name in kind && kind[name] < 1e15).map(([name, text]) => `${text} ${kind[name]}`);
  const text = capital((kind.description ?? "").replaceAll("`", "").replace(/\bNone\b/g, "none"));
  return [text, bounds.length ? `${capital(bounds.join(", "))}.` : "", (kind.anyOf ?? [kind]).some(isList) ? "Several with commas." : ""].filter(Boolean).join(" ");
}

// What somebody typed as it stands in the file: what is no number stays a text, which the coordinator then refuses.
function toLiteral(kind, written) {
  const text = written.trim();
  if (!text) return null;
  const kinds = kind.anyOf ?? [kind];
  if (kinds.some((one) => one.type === "boolean") && BOOLEAN.test(text)) return text;
  if (kinds.some(isList)) return literal(text.split(",").map((one) => one.trim()).filter(Boolean));
  return kinds.some(isNumeric) && NUMBER.test(text) ? text : literal(text);
}
