// Requests to the coordinator. The token lives in this tab's session storage and travels as a header: no cookie goes
// along by itself, so no other site can act in its name, and it is gone with the tab.

const KEY = "edgefl-token";
const SILENT_MS = 40000;
const MAX_PAUSE_MS = 15000;

export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function token() {
  return sessionStorage.getItem(KEY);
}

export function setToken(text) {
  if (text) sessionStorage.setItem(KEY, text);
  else sessionStorage.removeItem(KEY);
}

function headers(more = {}) {
  const known = token();
  return known ? { Authorization: `Bearer ${known}`, ...more } : more;
}

async function answer(response) {
  const body = await response.json().catch(() => ({}));
  if (response.ok) return body;
  const detail = typeof body.detail === "string" ? body.detail : "the request was not understood";
  throw new Refused(response.status, body.error ?? "", body.message ?? detail);
}

export async function get(path, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  return answer(await fetch(`/edgefl/v1/${path}${query ? `?${query}` : ""}`, { headers: headers() }));
}

export async function post(path, body = {}) {
  const options = { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify({ v: 1, ...body }) };
  return answer(await fetch(`/edgefl/v1/${path}`, options));
}

// Reads the feed for ever; `fetch`, since an EventSource cannot show a token. A tab that is hidden lets go of its
// connection after a while, because browsers open no more than six to one server.
export class Feed {
  constructor({ onMessage, onState }) {
    this.onMessage = onMessage;
    this.onState = onState;
    this.lastId = null;
    this.pauseMs = 500;
    this.controller = null;
    this.isStopped = true;
    this.life = 0;
  }

  start() {
    if (!this.isStopped) return;
    this.isStopped = false;
    this.life += 1;
    this.run(this.life);
  }

  stop() {
    this.isStopped = true;
    this.controller?.abort();
  }

  // A loop of an earlier life ends by itself, also when a new one was started meanwhile.
  isOver(life) {
    return this.isStopped || life !== this.life;
  }

  async run(life) {
    while (!this.isOver(life)) {
      try {
        await this.read();
      } catch (error) {
        if (error instanceof Refused && error.status === 401 && life === this.life) {
          this.isStopped = true;
          this.onState("refused");
          return;
        }
      }
      if (this.isOver(life)) break;
      this.onState("reconnecting");
      await new Promise((resolve) => setTimeout(resolve, this.pauseMs * (0.5 + Math.random() / 2)));
      this.pauseMs = Math.min(2 * this.pauseMs, MAX_PAUSE_MS);
    }
    if (this.isStopped) this.onState("paused");
  }

  async read() {
    this.controller = new AbortController();
    const more = { Accept: "text/event-stream", ...(this.lastId ? { "Last-Event-ID": this.lastId } : {}) };
    let watchdog = setTimeout(() => this.controller.abort(), SILENT_MS);
    try {
      const response = await fetch("/edgefl/v1/feed", { headers: headers(more), signal: this.controller.signal, cache: "no-store" });
      if (!response.ok) await answer(response);
      this.onState("live");
      this.pauseMs = 500;
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let pieces = [];
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        clearTimeout(watchdog);
        watchdog = setTimeout(() => this.controller.abort(), SILENT_MS);
        // A snapshot of a large fleet comes in many pieces: only the newest can hold its end.
        pieces.push(value);
        if (!value.includes("\n\n") && !value.startsWith("\n")) continue;
        const blocks = pieces.join("").split("\n\n");
        pieces = [blocks.pop()];
        blocks.forEach((block) => this.take(block));
      }
    } finally {
      clearTimeout(watchdog);
    }
  }

  take(block) {
    const fields = {};
    for (const line of block.split("\n")) {
      const colon = line.indexOf(": ");
      if (colon > 0) fields[line.slice(0, colon)] = line.slice(colon + 2);
    }
    if (!fields.data) return;
    this.lastId = fields.id ?? this.lastId;
    this.onMessage(fields.event, JSON.parse(fields.data));
  }
}
