// Scales and ticks: round numbers, as many as there is room for.

export function niceTicks(low, high, wanted) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) {
    ticks.push(Number((index * step).toPrecision(12)));
  }
  return ticks;
}

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

// Ticks for clock times or durations in seconds: whole minutes and hours, not tens of them.
export function timeTicks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  if (rough < 1) return niceTicks(low, high, wanted);
  const step = TIME_STEPS.find((size) => size >= rough) ?? Math.ceil(rough / 86400) * 86400;
  const ticks = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) ticks.push(at);
  return ticks;
}

export function linear(domain, range) {
  const [low, high] = domain;
  const [from, to] = range;
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

export function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null || value === undefined) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}
