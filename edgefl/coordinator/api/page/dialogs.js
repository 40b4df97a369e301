// Logging in, and asking before something is ended.

import { get, setToken, token } from "./api.js";
import { button, h, setText, toast } from "./dom.js";
import { model, tell } from "./model.js";

export async function learnAccess() {
  const access = await get("access");
  Object.assign(model, { reads: access.reads, acts: access.acts, fleet: access.fleet ?? "" });
  return access;
}

let onLogIn = () => {};

export function afterLogIn(action) {
  onLogIn = action;
}

export function askForToken(why) {
  const input = h("input", { id: "token", type: "password", autocomplete: "off", spellcheck: "false", required: true });
  const wrong = h("p", { class: "error", role: "alert" });
  const form = h("form", { method: "dialog" },
    h("h2", {}, "Log in"), h("p", {}, why),
    h("label", { for: "token" }, "Access token"), input,
    h("p", { class: "quiet" }, "The operator token acts, the viewer token reads; both are in operator.toml on the machine where ", h("code", {}, "edgefl coordinator init"), " ran. It is kept in this tab until the tab is closed."),
    wrong, h("p", { class: "actions" }, h("button", { type: "submit", class: "primary" }, "Log in"), button("Cancel", () => dialog.close())));
  const dialog = show(form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const before = token();
    setToken(input.value.trim());
    try {
      const access = await learnAccess();
      if (!access.acts && !(access.reads && (await isViewer()))) throw new Error("This token is not one of this coordinator's.");
      dialog.close();
      toast(access.acts ? "Logged in: you can act." : "Logged in: you can read.");
      tell("access");
      onLogIn();
    } catch (error) {
      setToken(before);
      await learnAccess().catch(() => {});
      setText(wrong, error.message);
      input.select();
    }
  });
}

// On loopback everybody reads, so reading alone does not prove a viewer's token; there it adds nothing either.
async function isViewer() {
  const known = token();
  setToken("");
  const bare = await get("access");
  setToken(known);
  return !bare.reads;
}

export function logOut() {
  setToken("");
  learnAccess().then(() => { tell("access"); onLogIn(); }, () => {});
}

// Runs an action that needs the operator; asks for the token where there is none.
export async function act(action) {
  if (!model.acts) {
    askForToken("This needs the operator token.");
    return;
  }
  try {
    await action();
  } catch (error) {
    toast(error.message, "bad");
    if (error.status === 401) askForToken(error.message);
  }
}

export function confirm(question, text, go) {
  const form = h("form", { method: "dialog" }, h("h2", {}, question), h("p", {}, text),
    h("p", { class: "actions" }, button(go.text, () => { dialog.close(); go.action(); }, { class: "danger" }), button("Cancel", () => dialog.close())));
  const dialog = show(form);
}

function show(form) {
  const dialog = h("dialog", {}, form);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}
