// A run's settings as a run file.

export function toToml(config) {
  return Object.entries(config).map(([name, table]) => block([name], table)).filter(Boolean).join("\n");
}

function block(path, table) {
  const known = Object.entries(table ?? {}).filter(([, value]) => !isEmpty(value));
  const lines = known.filter(([, value]) => !isTable(value)).map(([name, value]) => `${key(name)} = ${literal(value)}\n`);
  const inner = known.filter(([, value]) => isTable(value)).map(([name, value]) => block([...path, name], value));
  return (lines.length ? `[${path.map(key).join(".")}]\n${lines.join("")}` : "") + inner.join("");
}

function isTable(value) {
  return typeof value === "object" && !Array.isArray(value);
}

function isEmpty(value) {
  return value === null || value === undefined || (typeof value === "object" && !Object.keys(value).length);
}

function key(name) {
  return /^[\w-]+$/.test(name) ? name : JSON.stringify(name);
}

function literal(value) {
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (isTable(value)) return `{ ${Object.entries(value).map(([name, entry]) => `${key(name)} = ${literal(entry)}`).join(", ")} }`;
  return JSON.stringify(value);
}
