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
