// What the page asks of the service. All addresses are relative to the page, so that a proxy may put a prefix before it.

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

/** Who wants to know how the service answers: `ok()` at each answer, `lost(error)` where there was none. */
export const watcher = { ok() {}, lost() {}, signedOut() {} };

/** Whose jobs are looked at, of who may choose: a project's name, in each window its own; null: the first, or all. */
export const project = {
  get chosen() { return sessionStorage.getItem("thinwire project"); },
  set chosen(name) { if (name) sessionStorage.setItem("thinwire project", name); else sessionStorage.removeItem("thinwire project"); },
};

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

/**
 * Ask again and again, until `stop`: every `everyMs`, and ever more seldom while nobody answers; at once where the page
 * is looked at again. ask(signal): what is asked; what it raises beside Unreachable and SignedOut is given to `failed`.
 */
export class Poller {
  constructor(ask, everyMs, failed = (error) => { throw error; }) {
    this.ask = ask; this.everyMs = everyMs; this.failed = failed;
    this.stopped = new AbortController();
    this.tries = 0;
    this.wake = () => {};
    this.seen = () => { if (!document.hidden) this.wake(); };
    document.addEventListener("visibilitychange", this.seen);
    addEventListener("online", this.seen);
  }

  start() { this.run(); return this; }

  /** Ask now. */
  now() { this.tries = 0; this.wake(); }

  stop() {
    this.stopped.abort(new DOMException("the view was left", "AbortError"));
    document.removeEventListener("visibilitychange", this.seen);
    removeEventListener("online", this.seen);
    this.wake();
  }

  async run() {
    const signal = this.stopped.signal;
    while (!signal.aborted) {
      let waitMs = this.everyMs;
      try {
        await this.ask(signal);
        this.tries = 0;
      } catch (error) {
        if (signal.aborted || error instanceof SignedOut) return;
        if (error instanceof Unreachable) waitMs = Math.min(20_000, this.everyMs * 2 ** Math.min(this.tries++, 6));
        else { this.failed(error); return; }
      }
      await new Promise((resolve) => {
        const timer = document.hidden ? null : setTimeout(resolve, waitMs);
        this.wake = () => { clearTimeout(timer); resolve(); };
      });
    }
  }
}
