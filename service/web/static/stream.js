// What the service tells as it happens: server-sent events, read on from the last id wherever the connection broke.
// By fetch and not by EventSource, which says neither why a stream cannot be opened nor that nothing comes any more.

import { project } from "./project.js";

const SILENT_MS = 45_000; // the service says something every 15 s
const RETRY_MS = 2000;
const SELDOM_MS = 60_000;
/** A stream that has told what happens for so long is opened again soon: there are proxies that cut each after 30 or 60 s. */
const LIVED_MS = 10_000;
const LONGEST = 1 << 20; // of one line: the service writes none of half of it
/** A browser opens six connections to one service over HTTP/1.1, for all of its windows: some are left for questions. */
const PLACES = 4;

export class Stream {
  /**
   * path(): the address. told({id, event, data}): called for each message. turned(): called when it has come alive,
   * and when it is so no more. heard(): called for whatever comes. It is closed while nobody sees the page.
   */
  constructor(path, told, turned, heard) {
    this.path = path; this.told = told; this.turned = turned; this.heard = heard;
    this.lastId = null;
    /** It tells all that happens. */
    this.live = false;
    /** Nothing more comes, ever. */
    this.ended = false;
    this.stopped = new AbortController();
    this.connection = new AbortController();
    this.tries = 0;
    this.wake = () => {};
    this.seen = () => { if (document.hidden) this.connection.abort(); else { this.tries = 0; this.wake(); } };
    document.addEventListener("visibilitychange", this.seen);
    addEventListener("online", this.seen);
    /** Once: it has come alive, or cannot for now. */
    this.tried = new Promise((resolve) => { this.resolve = resolve; });
    this.run();
  }

  stop() {
    this.stopped.abort();
    this.connection.abort();
    this.wake();
    document.removeEventListener("visibilitychange", this.seen);
    removeEventListener("online", this.seen);
  }

  /** Open it anew, at the address of now. */
  turn() { this.tries = 0; this.hurry = true; this.connection.abort(); this.wake(); }

  async run() {
    while (!this.stopped.signal.aborted && !this.ended) {
      this.hurry = false;
      if (!document.hidden) {
        this.connection = new AbortController();
        try {
          await inPlace(() => this.read(this.connection));
        } catch (error) {
          console.error(error); // of this page, at what was told: the view asks again
        }
        this.connection.abort();
        if (!this.hurry) this.be(false);
        this.resolve();
      }
      if (this.hurry || this.stopped.signal.aborted || this.ended) continue;
      const waitMs = Math.min(SELDOM_MS, RETRY_MS * 2 ** Math.min(this.tries++, 5));
      await new Promise((resolve) => {
        const timer = document.hidden ? null : setTimeout(resolve, waitMs);
        this.wake = () => { clearTimeout(timer); resolve(); };
      });
    }
    this.resolve();
  }

  be(live) {
    if (this.live === live) return;
    this.live = live;
    this.turned();
    this.resolve();
  }

  /** One connection, to its end. It is aborted where nothing is heard for too long. Raises what `told` raises. */
  async read(connection) {
    let timer = null;
    const wait = () => { clearTimeout(timer); timer = setTimeout(() => connection.abort(), SILENT_MS); };
    wait();
    try {
      const headers = { Accept: "text/event-stream", ...(this.lastId === null ? {} : { "Last-Event-ID": this.lastId }), ...(project.chosen ? { "Thinwire-Project": project.chosen } : {}) };
      const answer = await fetch(this.path(), { headers, signal: connection.signal, cache: "no-store", credentials: "same-origin", redirect: "error" }).catch(() => null);
      if (answer === null) return;
      if (answer.status === 204) { this.ended = true; this.turned(); return; }
      if (!answer.ok || !/^text\/event-stream\b/.test(answer.headers.get("Content-Type") ?? "")) { await answer.body?.cancel(); return; }
      const since = performance.now(), reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      const message = { id: this.lastId, event: "", data: "" };
      let rest = "", came = false;
      for (;;) {
        const { value, done } = await reader.read().catch(() => ({ done: true }));
        if (came && performance.now() - since > LIVED_MS) this.tries = 0;
        if (done || connection.signal.aborted) return;
        wait();
        this.heard();
        const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
        rest = lines.pop();
        if (rest.length > LONGEST) return; // what is in between is not the service
        for (const line of lines) this.take(line, message);
        // Only what has come is proof: there are proxies that keep a stream until it ends.
        if (!this.ended) this.be(true);
        came = true;
        if (this.ended) return;
      }
    } finally {
      clearTimeout(timer);
    }
  }

  take(line, message) {
    const colon = line.indexOf(":"), name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (line !== "") {
      if (name === "id") message.id = value;
      else if (name === "event") message.event = value;
      else if (name === "data") message.data = message.data ? `${message.data}\n${value}` : value;
      return;
    }
    const { id, event, data } = message;
    message.event = message.data = "";
    this.lastId = id;
    if (!data) return;
    if (event === "end") this.ended = true;
    this.told({ id, event, data: JSON.parse(data) });
    if (this.ended) this.turned();
  }
}

/** Do it in one of the places that all windows of this browser have, or not at all. */
async function inPlace(does) {
  // Over plain HTTP to another machine there are no locks, and each window that is seen has its streams.
  if (!navigator.locks) return does();
  for (let place = 0; place < PLACES; place += 1) {
    const done = await navigator.locks.request(`thinwire stream ${place}`, { ifAvailable: true }, async (lock) => {
      if (lock === null) return false;
      await does();
      return true;
    });
    if (done) return;
  }
}
