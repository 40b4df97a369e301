// Starting a run from a run file, and letting a device join.

import { post } from "./api.js";
import { act } from "./dialogs.js";
import { button, h, link, refresh, replace, toast } from "./dom.js";
import { bytes, moment, plain } from "./format.js";
import { boards, model } from "./model.js";
import { facts } from "./run.js";

const EXAMPLE = `[run]
task = "digits"
rounds = 20
[strategy]
name = "fedavg"
`;

export function startView(root) {
  const text = h("textarea", { id: "run-file", rows: 16, spellcheck: "false", autocomplete: "off", wrap: "off" });
  text.value = sessionStorage.getItem("edgefl-run-file") ?? EXAMPLE;
  text.addEventListener("input", () => sessionStorage.setItem("edgefl-run-file", text.value));
  const file = h("input", { id: "file", type: "file", accept: ".toml,application/toml,text/plain", onchange: async () => {
    if (file.files.length) text.value = await file.files[0].text();
    text.dispatchEvent(new Event("input"));
  } });
  const answer = h("div", { role: "status" });
  const fail = (error) => {
    replace(answer, h("p", { class: "error" }, error.message));
    if (error.status === 401) throw error;
  };
  const check = () => act(() => post("run-files", { toml: text.value }).then(tell, fail));
  const start = () => act(async () => {
    try {
      const { config } = await post("run-files", { toml: text.value });
      const run = await post("runs", { config });
      toast(`${run.name} is ${run.status}.`);
      location.hash = `#/runs/${encodeURIComponent(run.run_id)}`;
    } catch (error) {
      fail(error);
    }
  });
  function tell(checked) {
    const { config } = checked;
    const { names = [], groups = [], min } = config.devices ?? {};
    const meant = names.length ? plain(names) : groups.length ? `groups ${plain(groups)}` : "all with a shard";
    replace(answer, h("p", {}, "This run file can be run."), facts([["Task", config.run.task], ["Strategy", config.strategy.name], ["Rounds", plain(config.run.rounds)], ["Seed", plain(config.run.seed)],
      ["Up", config.compression?.up], ["Down", config.compression?.down], ["Devices", min > 1 ? `${meant}, at least ${min}` : meant], ["State kept", checked.state_bytes ? bytes(checked.state_bytes) : null]]));
  }
  replace(root, h("h1", {}, "Start a run"),
    h("form", { onsubmit: (event) => { event.preventDefault(); start(); } },
      h("label", { for: "run-file" }, "Run file (TOML)"), text,
      h("p", {}, h("label", { for: "file" }, "or choose a file: "), file),
      h("p", { class: "actions left" }, h("button", { type: "submit", class: "primary" }, "Start the run"), button("Check only", check))), answer);
  return { update() {} };
}

export function joinView(root) {
  const field = (id, label, input) => h("p", {}, h("label", { for: id }, label), input);
  const choices = (id, options, chosen) => h("select", { id }, options.map(([value, name]) => h("option", { value, selected: value === chosen }, name)));
  const uses = h("input", { id: "uses", type: "number", min: 1, max: 1000000, value: 1, required: true });
  const ttl = choices("ttl", [["30m", "30 minutes"], ["24h", "24 hours"], ["7d", "7 days"], ["30d", "30 days"]], "24h");
  const role = choices("role", [["trainer", "trains on its data"], ["evaluator", "evaluates models on its data"]]);
  const groups = h("input", { id: "groups", type: "text", placeholder: "greenhouse, north", autocomplete: "off", spellcheck: "false" });
  const made = h("section", { role: "status" });
  const joined = h("p", { role: "status" });
  let before = null;
  const make = () => act(async () => {
    const names = groups.value.split(",").map((name) => name.trim()).filter(Boolean);
    const token = await post("tokens", { ttl: ttl.value, uses: Number(uses.value), groups: names, role: role.value });
    const line = h("pre", { class: "join-line", tabindex: "0", "aria-label": "The command that joins" }, token.join);
    const picture = h("img", { class: "qr", width: 220, height: 220, alt: "QR code of the command that joins", src: `data:image/svg+xml;base64,${btoa(token.qr_svg)}` });
    const copy = button("Copy the command", () => navigator.clipboard.writeText(token.join).then(() => toast("Copied."), () => toast("The browser does not let this page copy; select the text.", "bad")), { class: "primary" });
    before = new Set(model.devices.keys());
    replace(made, h("h2", {}, "On the board"), h("p", {}, `For ${token.uses === 1 ? "one board" : `${token.uses} boards`} until ${moment(token.expires_at)}. It is shown once: only its hash is kept.`),
      h("div", { class: "made" }, h("ol", { class: "steps" },
        h("li", {}, h("h3", {}, "Install edgefl on the board"), h("p", {}, "From the wheels that ", h("code", {}, "edgefl provision wheels"), " makes, or with a prepared card; see the guide to the first Raspberry Pi.")),
        h("li", {}, h("h3", {}, "Let it join"), h("p", {}, "Put the file or folder with its training data, its shard, in place of ", h("code", {}, "PATH"), "."), line, h("p", {}, copy)),
        h("li", {}, h("h3", {}, "Start its agent"), h("pre", { class: "join-line" }, "edgefl device start"), joined)), picture));
    update();
  }, "admin");
  function update() {
    if (!before) return;
    const fresh = boards().filter((row) => !before.has(row.device_id));
    joined.className = fresh.length ? "good" : "waits";
    refresh(joined, fresh.length ? ["Joined: ", fresh.map((row) => [link(["devices", row.device_id], row.device_id), ` (${row.presence}) `])] .flat(2) : "Waiting for the board…");
  }
  replace(root, h("h1", {}, "Let a device join"),
    h("p", {}, "A join token lets a board into this fleet. You get one command, which you run on the board; this page says when it has joined. Its training data never leaves it."),
    h("form", { class: "grid", onsubmit: (event) => { event.preventDefault(); make(); } },
      field("uses", "How many boards", uses), field("ttl", "Valid for", ttl), field("role", "Role", role), field("groups", "Groups", groups),
      h("p", { class: "actions left" }, h("button", { type: "submit", class: "primary" }, "Make a token"))), made,
    model.role === "admin" ? [] : h("p", { class: "quiet" }, "This needs the role admin: you will be asked to sign in. In a terminal of the coordinator's machine, ", h("code", {}, "edgefl coordinator token"), " does the same."));
  return { update };
}
