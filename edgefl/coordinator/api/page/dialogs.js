// Signing in, and asking before something is ended.

import { endSession, getAccess, startSession } from "./api.js";
import { button, h, setText, toast } from "./dom.js";
import { model, tell } from "./model.js";

export async function learnAccess() {
  const { reads, acts, user, role, fleet, openid } = await getAccess();
  Object.assign(model, { reads, acts, user, role, fleet: fleet ?? "", openid });
}

let onSignIn = () => {};

export function afterSignIn(action) {
  onSignIn = action;
}

export function signIn(why) {
  const input = h("input", { id: "token", name: "token", type: "password", autocomplete: "off", spellcheck: "false", required: true });
  const wrong = h("p", { class: "error", role: "alert" });
  const form = h("form", { method: "dialog" },
    h("h2", {}, "Sign in"), h("p", {}, why),
    model.openid ? h("p", {}, h("a", { class: "button primary", href: "/edgefl/v1/sign-in" }, `Sign in with ${model.openid}`)) : null,
    h("label", { for: "token" }, "Access token"), input,
    h("p", { class: "quiet" }, "Printed by ", h("code", {}, "edgefl coordinator user add"), "; the first one is in ", h("code", {}, "~/.config/edgefl/operator.toml"), " of the user who ran ", h("code", {}, "edgefl coordinator init"), ". The page forgets it at once and keeps a session of 12 hours."),
    wrong, h("p", { class: "actions" }, h("button", { type: "submit", class: model.openid ? null : "primary" }, "Sign in"), button("Cancel", () => dialog.close())));
  const dialog = show(form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await startSession(input.value.trim());
      await learnAccess();
      dialog.close();
      toast(`Signed in: ${model.user}, ${model.role}.`);
      tell("access");
      onSignIn();
    } catch (error) {
      setText(wrong, error.message);
      input.select();
    }
  });
}

export function signOut() {
  endSession().then(learnAccess).then(() => { tell("access"); onSignIn(); }, (error) => toast(error.message, "bad"));
}

// Runs an action that needs a role; asks to sign in where there is none.
export async function act(action, role = "operator") {
  if (!(role === "admin" ? model.role === "admin" : model.acts)) {
    signIn(model.role ? `This needs the role ${role}; you have the role ${model.role}.` : `This needs the role ${role}.`);
    return;
  }
  try {
    await action();
  } catch (error) {
    toast(error.message, "bad");
    if (error.status !== 401 && error.status !== 403) return;
    // The session may be over, the user revoked, or given another role.
    await learnAccess().catch(() => {});
    tell("access");
    if (error.status === 401) signIn(error.message);
  }
}

export function confirm(question, text, go) {
  ask(question, [h("p", {}, text)], go, "danger");
}

// The same with content of its own, such as fields, whose values have to be valid.
export function ask(question, content, go, kind = "primary") {
  const form = h("form", { method: "dialog", onsubmit: () => go.action() }, h("h2", {}, question), content,
    h("p", { class: "actions" }, h("button", { type: "submit", class: kind }, go.text), button("Cancel", () => dialog.close(), { autofocus: kind === "danger" })));
  const dialog = show(form);
}

function show(form) {
  const dialog = h("dialog", { "aria-label": form.querySelector("h2").textContent }, form);
  // What opened it has the focus again, if it is still there.
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (document.activeElement === document.body) document.getElementById("main").focus({ preventScroll: true });
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}
