// The page as a whole: one feed, one view at a time, chosen by what follows the # of the address.

import { Feed } from "./api.js";
import { auditView } from "./audit.js";
import { startView } from "./builder.js";
import { compareView } from "./compare.js";
import { deviceView } from "./device.js";
import { afterSignIn, learnAccess, signIn, signOut } from "./dialogs.js";
import { framed, h, replace, setText, visible } from "./dom.js";
import { fleetView } from "./fleet.js";
import { joinView } from "./forms.js";
import { courseOf, listen, model, take, tell } from "./model.js";
import { modelsView } from "./models.js";
import { nowView } from "./now.js";
import { runView } from "./run.js";
import { runsView } from "./runs.js";

const HIDDEN_MS = 20000;
const TITLES = { "": "Now", fleet: "Fleet", runs: "Runs", models: "Models", join: "Join", audit: "Audit trail", start: "Start a run", compare: "Compare runs" };
const STATES = { live: "live", reconnecting: "reconnecting", refused: "sign in to read", paused: "paused" };

const SIGN_IN_REFUSED = "The sign-in was refused: nobody gave this account a role here, it was revoked, or it took too long. Ask an admin of this fleet; the reason is among the events.";
const SIGN_IN_FAILED = "The provider could not be asked, or too many tried. The reason is among the events.";

const main = document.getElementById("main");
const stateOf = document.getElementById("link");
const session = document.getElementById("sign-in");
let view = null;

function route() {
  return location.hash.replace(/^#\/?/, "").split("?")[0].split("/").map(decodeURIComponent);
}

function show() {
  const [name, id, ...more] = route();
  for (const entry of document.querySelectorAll("nav a")) {
    const part = entry.getAttribute("href").slice(2);
    const isHere = part === name || (part === "fleet" && name === "devices") || (part === "runs" && ["start", "compare"].includes(name));
    if (isHere) entry.setAttribute("aria-current", "page");
    else entry.removeAttribute("aria-current");
  }
  document.title = visible(`${TITLES[name] ?? id ?? "Now"} · edgefl`);
  if (name === "sign-in") {
    view = null;
    replace(main, h("h1", {}, "Not signed in"), h("p", {}, id === "refused" ? SIGN_IN_REFUSED : SIGN_IN_FAILED), h("p", {}, h("button", { type: "button", class: "primary", onclick: () => signIn("Try again, or use an access token.") }, "Sign in")));
    return;
  }
  if (!model.reads) {
    view = null;
    replace(main, h("h1", {}, "edgefl"), h("p", {}, "Who reads this fleet has to sign in."), h("p", {}, h("button", { type: "button", class: "primary", onclick: () => signIn("Who reads this fleet has to sign in.") }, "Sign in")));
    return;
  }
  // A run, a device and the audit trail ask for what they show by themselves; the other views wait for the fleet.
  if (!model.isLoaded && name !== "audit" && !(id && ["runs", "devices", "compare"].includes(name))) return;
  if (name === "fleet") view = fleetView(main);
  else if (name === "devices" && id) view = deviceView(main, id);
  else if (name === "runs" && id) view = runView(main, id);
  else if (name === "runs") view = runsView(main);
  else if (name === "compare" && id) view = compareView(main, [id, ...more]);
  else if (name === "start") view = startView(main);
  else if (name === "audit") view = auditView(main);
  else if (name === "models") view = modelsView(main);
  else if (name === "join") view = joinView(main);
  else view = nowView(main);
}

function showSession() {
  setText(document.getElementById("fleet-name"), model.fleet || "edgefl");
  setText(document.getElementById("user"), model.user ?? "");
  document.getElementById("user").title = visible(model.role ?? "");
  setText(session, model.user ? "Sign out" : "Sign in");
  document.getElementById("audit").hidden = !model.acts;
}

const feed = new Feed({
  onMessage: take,
  onState(state) {
    stateOf.className = `link ${state}`;
    setText(stateOf, STATES[state]);
    if (state === "refused") learnAccess().then(onAccess, () => {});
  },
});

// What a screen reader is told of runs: each change of state, in whatever view.
let states = null;

function tellStates() {
  const now = new Map([...model.runs.values()].map((run) => [run.run_id, run.status]));
  const changed = states ? [...now].filter(([id, status]) => states.get(id) !== status) : [];
  if (changed.length) setText(document.getElementById("told"), changed.map(([id, status]) => `${model.runs.get(id).name} ${status}`).join(", "));
  if (model.isLoaded) states = now;
}

const refresh = framed(() => view?.update());

listen((what) => {
  if (what === "access") showSession();
  if (what === "all" || what === "changes") tellStates();
  if (what === "all" && !view) show();
  else refresh();
});

async function begin() {
  try {
    await learnAccess();
  } catch {
    setTimeout(begin, 2000);
    return;
  }
  showSession();
  const [name, id] = route();
  // Its charts need not wait for the fleet.
  if (model.reads && name === "runs" && id) courseOf(id);
  if (model.reads) feed.start();
  else stateOf.textContent = STATES.refused;
  show();
}

function onAccess() {
  view = null;
  if (model.user && route()[0] === "sign-in") location.hash = "#/";
  showSession();
  if (model.reads) {
    feed.start();
    if (model.isLoaded) show();
  } else {
    feed.stop();
    model.isLoaded = false;
    show();
  }
}

afterSignIn(onAccess);

session.addEventListener("click", () => (model.user ? signOut() : signIn("To start and stop runs, drain devices and make join tokens.")));
addEventListener("hashchange", () => {
  show();
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
});

// Its address would be taken for a view.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});

let hiding = null;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(() => feed.stop(), HIDDEN_MS);
  else if (model.reads) feed.start();
});

// Durations of what goes on grow by themselves.
setInterval(() => { if (model.liveRun && !document.hidden) tell("time"); }, 1000);
begin();
