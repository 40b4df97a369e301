// Starting a run from a run file, and letting a device join.

import { post } from "./api.js";
import { act } from "./dialogs.js";
import { button, h, replace, toast } from "./dom.js";
import { bytes, moment, plain } from "./format.js";
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
  const uses = h("input", { id: "uses", type: "number", min: 1, max: 1000000, value: 1, required: true });
  const ttl = h("select", { id: "ttl" }, [["30m", "30 minutes"], ["24h", "24 hours"], ["7d", "7 days"], ["30d", "30 days"]].map(([value, name]) => h("option", { value, selected: value === "24h" }, name)));
  const role = h("select", { id: "role" }, [["trainer", "trainer"], ["evaluator", "evaluator"]].map(([value, name]) => h("option", { value }, name)));
  const groups = h("input", { id: "groups", type: "text", placeholder: "greenhouse, north", autocomplete: "off", spellcheck: "false" });
  const made = h("section", { role: "status" });
  const make = () => act(async () => {
    const names = groups.value.split(",").map((name) => name.trim()).filter(Boolean);
    const token = await post("tokens", { ttl: ttl.value, uses: Number(uses.value), groups: names, role: role.value });
    const line = h("pre", { class: "join-line", tabindex: "0", "aria-label": "The command that joins" }, token.join);
    const picture = h("img", { class: "qr", width: 260, height: 260, alt: "QR code of the command that joins", src: `data:image/svg+xml;base64,${btoa(token.qr_svg)}` });
    const copy = button("Copy the command", () => navigator.clipboard.writeText(token.join).then(() => toast("Copied."), () => toast("The browser does not let this page copy; select the text.", "bad")));
    replace(made, h("h2", {}, "On the board"), h("p", {}, `Lets in ${token.uses === 1 ? "one board" : `${token.uses} boards`} until ${moment(token.expires_at)}. It is shown once: only its hash is kept. Put what the board trains on in place of `, h("code", {}, "PATH"), "."),
      h("div", { class: "made" }, h("div", {}, line, h("p", {}, copy)), picture));
  }, "admin");
  replace(root, h("h1", {}, "Let a device join"),
    h("form", { class: "grid", onsubmit: (event) => { event.preventDefault(); make(); } },
      h("p", {}, h("label", { for: "uses" }, "How many boards"), uses), h("p", {}, h("label", { for: "ttl" }, "Good for"), ttl),
      h("p", {}, h("label", { for: "role" }, "As"), role), h("p", {}, h("label", { for: "groups" }, "In groups"), groups),
      h("p", { class: "actions left" }, h("button", { type: "submit", class: "primary" }, "Make a token"))), made);
  return { update() {} };
}
