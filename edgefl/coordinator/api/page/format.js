// Numbers with their units, as people read them.

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let size = count;
  for (const unit of UNITS) {
    if (Math.abs(size) < 999.5 || unit === "PB") return `${unit === "B" ? Math.round(size) : digits(size, 3)} ${unit}`;
    size /= 1000;
  }
  return "";
}

export function digits(value, count = 3) {
  return String(Number(value.toPrecision(count)));
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1e-3) return value === 0 ? "0 s" : `${digits(value * 1e6, 2)} µs`;
  if (value < 1) return `${digits(value * 1000, 3)} ms`;
  if (value < 60) return `${digits(value, 3)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function percent(fraction) {
  return fraction === null || fraction === undefined ? "–" : `${Math.round(fraction * 100)} %`;
}

export function accuracy(value, places = 1) {
  return value === null || value === undefined ? "–" : `${(value * 100).toFixed(places)} %`;
}

export function celsius(value) {
  return value === null || value === undefined ? "–" : `${value.toFixed(0)} °C`;
}

export function count(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en-GB");
}

const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const LONG_DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric" });
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const SHORT_CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });

// A date with its time: a time alone is a riddle on the next day.
export function moment(unixS) {
  if (unixS === null || unixS === undefined) return "–";
  const date = new Date(unixS * 1000);
  const isThisYear = date.getFullYear() === new Date().getFullYear();
  return `${(isThisYear ? DAY : LONG_DAY).format(date)} ${CLOCK.format(date)}`;
}

export function clock(unixS, stepS = 60) {
  const date = new Date(unixS * 1000);
  return stepS >= 43200 ? DAY.format(date) : (stepS < 60 ? CLOCK : SHORT_CLOCK).format(date);
}

export function words(slug) {
  return String(slug).replaceAll("-", " ").replaceAll("_", " ");
}

// Enough of a SHA-256 to tell models of one fleet apart.
export function shortHash(sha256) {
  return sha256 ? sha256.slice(0, 12) : "–";
}

// Any value of a run's settings or a board's capabilities, in one line.
export function plain(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Array.isArray(value)) return value.map(plain).join(", ") || "–";
  if (typeof value === "object") return Object.entries(value).map(([key, entry]) => `${key} ${plain(entry)}`).join(", ") || "–";
  return String(value);
}
