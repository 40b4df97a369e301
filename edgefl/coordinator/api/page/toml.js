// A run's settings as a run file, and a reader that says where each value stands, so that one setting of a text can be
// changed and all else, comments too, stays. What is a valid run file, the coordinator says.

const SPACE = /[ \t]+/y;
const LINES = /(?:[ \t\r\n]|#[^\n]*)+/y;
const COMMENT = /#[^\n]*/y;
const NEWLINE = /\r?\n/y;
const BARE = /[A-Za-z0-9_-]+/y;
const BASIC = /"(?:[^"\\\n]|\\.)*"/y;
const LITERAL = /'[^'\n]*'/y;
const PLAIN = /true\b|false\b|[+-]?\d[\d_]*(?:\.[\d_]+)?(?:[eE][+-]?\d+)?(?![\w:])/y;

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

export function literal(value) {
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (isTable(value)) return `{ ${Object.entries(value).map(([name, entry]) => `${key(name)} = ${literal(entry)}`).join(", ")} }`;
  return JSON.stringify(value);
}

// Returns { places, tables }: by its path, such as "run.rounds", each setting's { value, raw, start, end, lineStart, lineEnd },
// and by name the end of each table's last line. Throws an Error that names the line of what it cannot read.
export function readToml(text) {
  const places = new Map();
  const tables = new Map();
  let at = 0;
  let path = [];
  const take = (pattern) => {
    pattern.lastIndex = at;
    const found = pattern.exec(text);
    if (found) at = pattern.lastIndex;
    return found?.[0];
  };
  const fail = (wanted) => { throw new Error(`line ${text.slice(0, at).split("\n").length}: ${wanted}`); };
  const expect = (mark) => {
    if (text[at] !== mark) fail(`expected ${mark}`);
    at += 1;
  };

  function quoted() {
    if (text.startsWith('"""', at) || text.startsWith("'''", at)) fail("a text over several lines, which the form does not show");
    const single = take(LITERAL);
    if (single) return single.slice(1, -1);
    const double = take(BASIC);
    if (!double) return null;
    try {
      return JSON.parse(double);
    } catch {
      return fail("a text that the form does not show");
    }
  }

  function names() {
    const found = [];
    do {
      take(SPACE);
      found.push(take(BARE) ?? quoted() ?? fail("expected a name"));
      take(SPACE);
    } while (text[at] === "." && ++at);
    return found;
  }

  function list(close, item) {
    const found = [];
    at += 1;
    for (take(LINES); text[at] !== close; take(LINES)) {
      found.push(item());
      take(LINES);
      if (text[at] === ",") at += 1;
      else if (text[at] !== close) fail(`expected ${close}`);
    }
    at += 1;
    return found;
  }

  function pair() {
    const name = names();
    expect("=");
    take(SPACE);
    return [name.join("."), value()];
  }

  function value() {
    if (text[at] === "[") return list("]", value);
    if (text[at] === "{") return Object.fromEntries(list("}", pair));
    const plain = take(PLAIN);
    if (plain) return plain === "true" ? true : plain === "false" ? false : Number(plain.replaceAll("_", ""));
    return quoted() ?? fail("expected a value");
  }

  function endLine() {
    take(SPACE);
    take(COMMENT);
    if (at < text.length && !take(NEWLINE)) fail("expected the end of the line");
    tables.set(path.join("."), at);
  }

  for (take(LINES); at < text.length; take(LINES)) {
    const lineStart = text.lastIndexOf("\n", at - 1) + 1;
    if (text[at] === "[") {
      at += 1;
      path = names();
      expect("]");
      endLine();
      continue;
    }
    const name = [...path, ...names()].join(".");
    if (places.has(name)) fail(`${name} stands there twice`);
    expect("=");
    take(SPACE);
    const start = at;
    const found = { value: value(), start, end: at, lineStart };
    endLine();
    places.set(name, { ...found, raw: text.slice(found.start, found.end), lineEnd: at });
  }
  return { places, tables };
}

// Returns the text with one setting of a table changed: `written` as it stands in the file, null to leave the setting out.
export function setToml(text, table, name, written) {
  const { places, tables } = readToml(text);
  const place = places.get(`${table}.${name}`);
  const inline = places.get(table);
  if (inline && isTable(inline.value)) {
    const others = Object.entries(inline.value).filter(([known]) => known !== name).map(([known, value]) => `${key(known)} = ${literal(value)}`);
    return `${text.slice(0, inline.start)}{ ${[...others, ...(written === null ? [] : [`${name} = ${written}`])].join(", ")} }${text.slice(inline.end)}`;
  }
  if (place && written === null) return text.slice(0, place.lineStart) + text.slice(place.lineEnd);
  if (place) return text.slice(0, place.start) + written + text.slice(place.end);
  if (written === null) return text;
  const dotted = tables.has(table) ? null : [...places].find(([path]) => path.startsWith(`${table}.`));
  const line = `${dotted ? `${table}.` : ""}${name} = ${written}\n`;
  const where = dotted ? dotted[1].lineEnd : tables.get(table) ?? text.length;
  const before = text.slice(0, where);
  const gap = before && !before.endsWith("\n") ? "\n" : "";
  const head = tables.has(table) || dotted ? "" : `${before.trim() ? "\n" : ""}[${table}]\n`;
  return `${before}${gap}${head}${line}${text.slice(where)}`;
}
