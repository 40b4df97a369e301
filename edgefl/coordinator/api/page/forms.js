// Letting a device join.

import { post } from "./api.js";
import { act } from "./dialogs.js";
import { button, h, link, refresh, replace, toast } from "./dom.js";
import { moment } from "./format.js";
import { boards, model } from "./model.js";

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
    const line = (text, label) => h("pre", { class: "join-line", tabindex: "0", "aria-label": label }, text);
    const copy = (text, name, options) => h("p", {}, button(name, () => navigator.clipboard.writeText(text).then(() => toast("Copied."), () => toast("The browser does not let this page copy; select the text.", "bad")), options));
    const joins = [h("p", {}, "Put the task and the file or folder of its training data in place of ", h("code", {}, "TASK=PATH"), ", such as ", h("code", {}, "table=/home/pi/readings.csv"), "."), line(token.join, "The command that joins"), copy(token.join, "Copy the command", token.setup ? {} : { class: "primary" })];
    const starts = line("edgefl device start", "The command that starts the agent");
    before = new Set(model.devices.keys());
    replace(made, h("h2", {}, "On the board"), h("p", {}, `For ${token.uses === 1 ? "one board" : `${token.uses} boards`} until ${moment(token.expires_at)}. It is shown once: only its hash is kept.`),
      token.setup
        ? [h("h3", {}, "Without edgefl: one line for its terminal"), h("p", {}, "It installs edgefl, joins, and starts at every boot. Put the task and the path of its data in place of ", h("code", {}, "TASK=PATH"), ", or leave that out: data may come later."), line(token.setup, "The line that installs and joins"), copy(token.setup, "Copy the line", { class: "primary" }), h("details", {}, h("summary", {}, "With edgefl on it"), joins, starts)]
        : h("ol", { class: "steps" },
          h("li", {}, h("h3", {}, "Install edgefl on the board"), h("p", {}, "From the wheels that ", h("code", {}, "edgefl provision wheels"), " makes, or with a prepared card; see the guide to the first Raspberry Pi. After ", h("code", {}, "edgefl provision setup"), ", this page gives you one line that does all of it.")),
          h("li", {}, h("h3", {}, "Let it join"), joins),
          h("li", {}, h("h3", {}, "Start its agent"), starts)),
      joined);
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
