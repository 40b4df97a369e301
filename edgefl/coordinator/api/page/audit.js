// The audit trail: who changed what, from where, and what came of it; newest first, older rows by pages.

import { get } from "./api.js";
import { signIn } from "./dialogs.js";
import { button, h, replace, setText } from "./dom.js";
import { moment } from "./format.js";
import { model } from "./model.js";
import { Table } from "./tables.js";

const PAGE_ROWS = 50;

const COLUMNS = [
  { key: "at", title: "When", value: (row) => row.id, isHeading: true, cell: (row) => h("time", { datetime: new Date(row.at * 1000).toISOString() }, moment(row.at)) },
  { key: "actor", title: "Who", class: "breaks", value: (row) => row.actor, cell: (row) => row.actor },
  { key: "action", title: "What", class: "breaks", value: (row) => row.action, cell: (row) => h("span", {}, row.action, h("span", { class: "minor narrow-text" }, row.outcome)) },
  { key: "outcome", title: "Outcome", class: "wide", value: (row) => row.outcome, cell: (row) => h("span", { class: row.outcome === "done" ? null : "warn" }, row.outcome) },
  { key: "source", title: "From", class: "wide", value: (row) => row.source, cell: (row) => row.source },
];

export function auditView(root) {
  if (!model.acts) {
    replace(root, h("h1", {}, "Audit trail"), h("p", {}, "This needs the role operator or admin."), h("p", {}, button("Sign in", () => signIn("This needs the role operator."), { class: "primary" })));
    return { update() {} };
  }
  const table = new Table({ caption: "Audit trail", columns: COLUMNS, rowKey: (row) => String(row.id), order: { key: "at", isDown: true }, empty: "Nothing was changed yet." });
  table.limit = Infinity;
  const note = h("p", { class: "quiet", role: "status" }, "Loading…");
  const older = button("Older", () => load(), { hidden: true });
  let rows = [];
  const load = async () => {
    older.disabled = true;
    try {
      const page = await get("history/audit", { limit: PAGE_ROWS, ...(rows.length ? { where: `id<${rows.at(-1).id}` } : {}) });
      rows = [...rows, ...page.rows.reverse()];
      table.show(rows);
      older.hidden = page.rows.length < PAGE_ROWS;
      setText(note, `${rows.length} rows, ${older.hidden ? "back to the first" : "the newest"}.`);
    } catch (error) {
      setText(note, error.message);
    }
    older.disabled = false;
  };
  replace(root, h("h1", {}, "Audit trail"), h("p", { class: "quiet" }, "Who changed what through the API or by a command on the coordinator's machine. Rows are only ever added."), table.element, note, h("p", { class: "actions" }, older));
  load();
  return { update() {} };
}
