// What happened, newest first, and what needs attention: each line with its time, its device or run, and a text.

import { h, link } from "./dom.js";
import { moment, words } from "./format.js";
import { model } from "./model.js";

const ALARMING = /gone|lost|failed|flapping|cloned|quarantined|rejected|clipped|interrupted|paused|stalled|waiting|diverg|unreadable|unavailable|dropped|untrusted/;

export function isAlarming(event) {
  return ALARMING.test(event.kind);
}

// Beside its device or run, an event need not say what it is about.
export function kindOf(event) {
  return words(event.kind.replace(event.device_id ? /^device-/ : event.run_id ? /^run-/ : /^$/, ""));
}

export function subject(row) {
  if (row.device_id) return [link(["devices", row.device_id], row.device_id), " "];
  return row.run_id ? [link(["runs", row.run_id], model.runs.get(row.run_id)?.name ?? row.run_id), " "] : [];
}

// Commands in a message are for a terminal, and help nobody in a browser.
export function forBrowsers(message) {
  return message.replace(/[;,.]?\s*(?:see|run:?|try)?\s*`?edgefl (?:[a-z-]+ ){0,2}(?:list|show)`?(?: shows them)?/g, "").trim();
}

export function eventList(events, empty = "Nothing has happened yet.") {
  if (!events.length) return h("p", { class: "quiet" }, empty);
  return h("ol", { class: "events" }, events.map((event) => h("li", {},
    h("time", { datetime: new Date(event.at * 1000).toISOString() }, moment(event.at)),
    h("span", {}, subject(event), h("span", { class: isAlarming(event) ? "warn" : null }, kindOf(event)), event.message ? h("span", { class: "minor" }, ` ${forBrowsers(event.message)}`) : []))));
}

// `rows`: { level, text, device_id or run_id, at }, as the feed says them.
export function attentionList(rows) {
  if (!rows.length) return h("p", { class: "quiet" }, "Nothing needs attention.");
  return h("ul", { class: "attention" }, rows.map((row) => h("li", { class: row.level === "bad" ? "bad" : "warn" },
    h("span", { class: "mark", "aria-hidden": "true" }, row.level === "bad" ? "✕" : "!"),
    h("span", {}, subject(row), h("span", {}, forBrowsers(row.text)), row.at ? h("span", { class: "minor" }, ` since ${moment(row.at)}`) : []))));
}
