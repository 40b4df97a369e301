// Requests to the coordinator. Who is signed in is known by a cookie that no script can read. A change also carries the
// CSRF token of the session, which the coordinator says to its own page alone; it is kept in memory.

const SILENT_MS = 40000;
const MAX_PAUSE_MS = 15000;

export class Refused extends Error {
  constructor(status, code, message, faults = []) {
    super(message);
    this.faults = faults;
    this.status = status;
    this.code = code;
  }
}

let csrfToken = null;

export async function getAccess() {
  const access = await get("access");
  csrfToken = access.csrf_token;
  return access;
}

async function answer(response) {
  const body = await response.json().catch(() => ({}));
  if (response.ok) return body;
  const detail = typeof body.detail === "string" ? body.detail : "the request was not understood";
  throw new Refused(response.status, body.error ?? "", body.message ?? detail, body.faults);
}

export async function get(path, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  return answer(await fetch(`/edgefl/v1/${path}${query ? `?${query}` : ""}`));
}

export async function post(path, body = {}) {
  const known = csrfToken;
  try {
    return await send(path, body);
  } catch (error) {
    if (error.status !== 401) throw error;
    // Another tab may have signed in anew meanwhile.
    await getAccess();
    if (!csrfToken || csrfToken === known) throw error;
    return send(path, body);
  }
}

async function send(path, body) {
  const headers = { "Content-Type": "application/json", ...(csrfToken ? { "X-Edgefl-Csrf": csrfToken } : {}) };
  return answer(await fetch(`/edgefl/v1/${path}`, { method: "POST", headers, body: JSON.stringify({ v: 1, ...body }) }));
}

export async function startSession(token) {
  return answer(await fetch("/edgefl/v1/session", { method: "POST", headers: { Authorization: `Bearer ${token}` } }));
}

export async function endSession() {
  return answer(await fetch("/edgefl/v1/session", { method: "DELETE", headers: csrfToken ? { "X-Edgefl-Csrf": csrfToken } : {} }));
}

// Reads the feed for ever; `fetch`, since an EventSource does not say why it was refused. A tab that is hidden lets go of its
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
      const response = await fetch("/edgefl/v1/feed", { headers: more, signal: this.controller.signal, cache: "no-store" });
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
