// What the page asks of the service. All addresses are relative to the page, so that a proxy may put a prefix before it.
import { project } from "./project.js";
import { clockIs } from "./format.js";
import { Stream } from "./stream.js";

export class ApiError extends Error {
  constructor(status, body) {
    super(body.message);
    this.status = status;
    this.code = body.code;
    this.problems = body.problems ?? [];
  }
}

/** Nobody answers, or only that there is no answer now. Trying again may help. */
export class Unreachable extends Error {}

/** The session is over, or there was none. */
export class SignedOut extends Error {}

const TRY_AGAIN = new Set([429, 502, 503, 504]);
const SILENT_MS = 30_000;

/** Who wants to know how the service answers: `ok()` at each answer, `heard()` where a stream says something, `lost(error)` where there was none. */
export const watcher = { ok() {}, heard() {}, lost() {}, signedOut() {} };

/**
 * One request. Raises SignedOut, ApiError, Unreachable; and AbortError where `signal` says so.
 * token: for the one request that begins a session.
 */
export async function call(method, path, { body, signal, headers = {}, token, as = "json" } = {}) {
  const init = { method, headers: { ...headers }, signal: within(signal), cache: "no-store", credentials: "same-origin", redirect: "manual" };
  if (body !== undefined) {
    init.headers["Content-Type"] = "application/json";
    init.body = JSON.stringify(body);
  }
  if (project.chosen) init.headers["Thinwire-Project"] = project.chosen;
  if (token !== undefined) init.headers.Authorization = `Bearer ${token}`;
  let answer, text;
  try {
    answer = await fetch(path, init);
    clockIs(answer.headers.get("Date"));
    text = await answer.text();
  } catch (error) {
    if (signal?.aborted) throw signal.reason ?? error;
    const lost = new Unreachable("the service does not answer");
    watcher.lost(lost);
    throw lost;
  }
  if (TRY_AGAIN.has(answer.status) && token === undefined) {
    const lost = new Unreachable(message(text) ?? `the service answers ${answer.status}`);
    if (method === "GET") watcher.lost(lost);
    throw lost;
  }
  let found = null;
  try {
    if (answer.type === "opaqueredirect") throw new Error("sent elsewhere");
    found = text && as === "json" ? JSON.parse(text) : text;
  } catch {
    const lost = new Unreachable("what answers is not the service: a proxy, or a sign-in of a network, is in between");
    watcher.lost(lost);
    throw lost;
  }
  watcher.ok();
  if (answer.status === 401 && token === undefined) {
    watcher.signedOut(found?.message);
    throw new SignedOut(found?.message ?? "signed out");
  }
  if (!answer.ok) {
    const error = typeof found === "object" && found?.message ? found : { code: "unknown", message: message(text) ?? `the service answers ${answer.status}` };
    throw new ApiError(answer.status, error);
  }
  return found;
}

function message(text) {
  try { return JSON.parse(text).message ?? null; } catch { return null; }
}

function within(signal) {
  const limit = AbortSignal.timeout(SILENT_MS);
  return signal ? AbortSignal.any([signal, limit]) : limit;
}

export const get = (path, options) => call("GET", path, options);

/**
 * Send a blob, and say how much of it has gone: fetch cannot. sent(bytes). Raises as `call` does.
 * Its cookie and its origin are the browser's own, as of every request here.
 */
export function send(path, blob, type, { sent, signal }) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    const lost = (words) => reject(new Unreachable(words));
    const stop = () => request.abort();
    request.open("PUT", path);
    request.setRequestHeader("Content-Type", type);
    if (project.chosen) request.setRequestHeader("Thinwire-Project", project.chosen);
    request.upload.addEventListener("progress", (event) => sent(event.loaded));
    request.addEventListener("abort", () => reject(signal.reason));
    request.addEventListener("error", () => lost("the service does not answer, or has broken the connection off"));
    request.addEventListener("load", () => {
      let found = null;
      try { found = JSON.parse(request.responseText); } catch { /* said below */ }
      if (request.status >= 200 && request.status < 300) resolve(found);
      else if (request.status === 401) { watcher.signedOut(found?.message); reject(new SignedOut(found?.message ?? "signed out")); }
      else reject(new ApiError(request.status, found?.message ? found : { code: "unknown", message: `the service answers ${request.status}` }));
    });
    request.addEventListener("loadend", () => signal.removeEventListener("abort", stop));
    signal.addEventListener("abort", stop);
    if (signal.aborted) reject(signal.reason); else request.send(blob);
  });
}

let queue = Promise.resolve();
/** The same of an answer that may be some MiB long: of these the service gives one person few at once. */
export function getLarge(path, options) {
  const mine = queue.then(() => { options?.signal?.throwIfAborted(); return get(path, options); });
  queue = mine.catch(() => {});
  return mine;
}

export const jobPath = (id, ...rest) => ["v1/jobs", encodeURIComponent(id), ...rest].join("/");

export function query(parameters) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) if (value !== null && value !== undefined && value !== "") search.set(name, value);
  const text = search.toString();
  return text ? `?${text}` : "";
}

/** Where a stream tells what happens it says nothing of leases that run out, or of a queue: that is asked for so often. */
const SLOW_MS = 10_000;
const LEAST_MS = 1000;
const OPEN_MS = 1500;

/**
 * Ask what is shown until `stop`, again and again: every `everyMs`, and ever more seldom while nobody answers; at once
 * where the page is looked at again. ask(signal): what is asked; what it raises beside Unreachable and SignedOut is given to `failed`.
 *
 * path, told: of a stream that says when to ask. While it lives, `ask` is called where told(message) returns true, at
 * least `leastMs` after the last time, and every SLOW_MS; where it cannot be opened, or breaks off, every `everyMs`
 * as without one: a browser has few connections, a service few streams, and a proxy may pass none on. It is opened
 * before the first question, or anew when it has come back: so nothing happens between what was asked and what is told.
 */
export class Poller {
  constructor(ask, everyMs, failed = (error) => { throw error; }, { path = null, told = () => true, leastMs = LEAST_MS } = {}) {
    this.ask = ask; this.everyMs = everyMs; this.failed = failed;
    this.path = path; this.told = told; this.leastMs = leastMs;
    this.stopped = new AbortController();
    this.tries = 0;
    this.stream = null;
    this.turns = this.turnsKnown = 0;
    this.asked = -Infinity;
    this.due = null;
    this.wake = () => {};
    this.seen = () => { if (!document.hidden) this.now(); };
    document.addEventListener("visibilitychange", this.seen);
    addEventListener("online", this.seen);
  }

  start() { this.listen(); this.run(); return this; }

  /** Does a stream say what happens? */
  get live() { return this.stream !== null && (this.stream.live || this.stream.ended); }

  /** Has all been asked for since the stream began to say what happens? Before that there is a hole in front of what it tells. */
  get current() { return this.live && this.turnsKnown === this.turns; }

  /** Open the stream, or another one, from an id on. */
  listen(lastId = null) {
    this.stream?.stop();
    this.stream = null;
    if (this.path === null || this.path() === null || this.stopped.signal.aborted) return;
    this.stream = new Stream(this.path, (message) => { if (this.told(message)) this.within(this.leastMs); }, () => { this.turns += 1; this.now(); }, watcher.heard);
    this.stream.lastId = lastId;
  }

  /** Ask now. */
  now() { this.tries = 0; this.within(0); }

  /** Ask, so long after the last time at least. */
  within(leastMs) {
    this.due = Math.min(this.due ?? Infinity, Math.max(performance.now(), this.asked + leastMs));
    this.wake();
  }

  stop() {
    this.stopped.abort(new DOMException("the view was left", "AbortError"));
    this.stream?.stop();
    document.removeEventListener("visibilitychange", this.seen);
    removeEventListener("online", this.seen);
    this.wake();
  }

  async run() {
    const signal = this.stopped.signal;
    if (this.stream) await Promise.race([this.stream.tried, new Promise((resolve) => setTimeout(resolve, OPEN_MS))]);
    while (!signal.aborted) {
      let waitMs = null;
      const { turns } = this;
      this.due = null;
      this.asked = performance.now();
      try {
        await this.ask(signal);
        this.turnsKnown = turns;
        this.tries = 0;
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof SignedOut) { this.stream?.stop(); return; }
        if (error instanceof Unreachable) waitMs = Math.min(20_000, this.everyMs * 2 ** Math.min(this.tries++, 6));
        else { this.stop(); this.failed(error); return; }
      }
      await this.wait(performance.now(), waitMs);
    }
  }

  /** Until it is time to ask. */
  async wait(since, waitMs) {
    while (!this.stopped.signal.aborted) {
      const at = Math.min(this.due ?? Infinity, since + (waitMs ?? (this.live ? Math.max(SLOW_MS, this.everyMs) : this.everyMs)));
      const left = at - performance.now();
      if (left <= 0 && !document.hidden) return;
      await new Promise((resolve) => {
        const timer = document.hidden ? null : setTimeout(resolve, left);
        this.wake = () => { clearTimeout(timer); resolve(); };
      });
    }
  }
}
