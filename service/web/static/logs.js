// What a job's processes wrote: the end of it first, followed as it grows; all of it, or the lines of one worker.
import { ApiError, getLarge, jobPath, Poller, query } from "./api.js";
import { h, newId, plain, put, say } from "./dom.js";
import { bytesText, OVER } from "./format.js";

const EVERY_MS = 1500;
const SHOWN_LINES = 3000;
const PART_BYTES = 1 << 20;
const TAIL_BYTES = 256 << 10;
/** Each attempt's log begins at a multiple of this (LOG_OFFSET_BITS of service/jobs/service.py). */
const ATTEMPT = 2 ** 40;
const MOST_WORKERS = 4096;
/** Characters: of one line, of all that are shown, and of all that are kept. */
const LONGEST_LINE = 20_000, MOST_SHOWN = 1 << 20, MOST_KEPT = 1 << 24;
/** Ray puts the process before each line, and a worker's process says once which worker it is (as thinwire/cli/watch.py reads it). */
const PROCESS = /^(\([^()]{0,200}\bpid=(\d{1,10})\b[^()]{0,200}\))/;
const IS_WORKER = /\bworker_started number=(\d{1,5}) pid=(\d+)\b/;

export class LogView {
  constructor(place, jobId, rank, job, failed) {
    this.jobId = jobId; this.job = job;
    this.offset = 0; this.begun = false; this.rest = ""; this.left = 0; this.lines = []; this.kept = 0; this.of = new Map(); this.numberOf = new Map();
    this.select = h("select", { id: newId("rank") }, h("option", { value: "" }, "all processes"));
    this.followed = h("input", { type: "checkbox", id: newId("follow"), checked: true });
    this.start = h("button", { type: "button", hidden: true }, "From the beginning");
    this.note = h("p", { class: "help", role: "status" });
    this.text = h("pre", { class: "log", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "Log" });
    put(place, h("p", { class: "filters" }, h("label", { for: this.select.id }, "Lines of"), this.select, this.followed, h("label", { for: this.followed.id }, "Follow"), this.start), this.note, this.text);
    this.wanted = rank ?? "";
    if (rank !== null) this.option(rank);
    this.select.addEventListener("change", () => { this.wanted = this.select.value; this.draw(true); });
    this.start.addEventListener("click", () => { this.start.hidden = true; this.reset(); this.skipped = 0; this.begun = true; this.offset = 0; this.followsFrom(null); this.poller.now(); });
    // The end of a long log is looked for first; from there on the stream brings what is written.
    this.from = null;
    const stream = { path: () => (this.from === null ? null : jobPath(this.jobId, `logs/stream${query({ offset: this.from })}`)), told: (message) => this.told(message) };
    this.poller = new Poller((signal) => this.load(signal), EVERY_MS, failed, stream).start();
  }

  stop() { this.poller.stop(); clearTimeout(this.later); }

  /** Let a stream bring what comes after this byte; null: none. */
  followsFrom(offset) {
    this.from = offset;
    this.poller.listen(offset === null ? null : String(offset));
  }

  /** What the stream says. A part that does not follow on what is shown, because that was asked for meanwhile, is passed over. */
  told({ event, data }) {
    if (event !== "log") { if (event === "end") { this.done = true; this.draw(false); this.empty(); } return false; }
    if (this.from !== this.offset) { this.followsFrom(this.offset); return false; }
    this.from = this.offset = data.next_offset;
    this.take(data.text);
    this.later ??= setTimeout(() => { this.later = null; this.draw(false); }, 100);
    return false;
  }

  empty() {
    if (!this.lines.length && !this.rest) say(this.note, this.done ? "The log is empty." : "There is no line yet.");
  }

  reset() { this.rest = ""; this.left = 0; this.lines = []; this.kept = 0; this.of.clear(); this.text.replaceChildren(); }

  async load(signal) {
    if (this.done || this.poller?.live) return;
    let first = true;
    try {
      for (;;) {
        const asked = this.offset;
        const found = await getLarge(jobPath(this.jobId, `logs${query({ offset: asked, limit: PART_BYTES })}`), { signal });
        if (asked !== this.offset) return; // the stream was quicker, or all of it is wanted: asked for next
        const moved = found.next_offset > this.offset;
        // A further attempt has a log of its own, from another offset on.
        if (!this.begun && moved && !found.complete && new Blob([found.text]).size > PART_BYTES / 2) {
          this.begun = true;
          const end = await this.end(this.offset, found.next_offset, signal);
          if (end - found.next_offset > TAIL_BYTES) {
            this.skipped = end - TAIL_BYTES;
            this.start.hidden = false;
            this.offset = this.skipped;
            this.rest = null; // the first line is cut
            continue;
          }
        }
        this.begun = true;
        this.offset = found.next_offset;
        this.take(found.text);
        if (first || moved) this.draw(false);
        first = false;
        if (!moved) {
          this.done = found.complete && OVER.has(this.job()?.state);
          this.empty();
          if (!this.done && this.from === null) this.followsFrom(this.offset);
          return;
        }
      }
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      say(this.note, error.message);
      this.done = error.status === 410;
    }
  }

  /** Where the log ends, about: the service says it of no log, but whether there is something at an offset. */
  async end(from, known, signal) {
    const anyAt = async (offset) => (await getLarge(jobPath(this.jobId, `logs${query({ offset, limit: 4 })}`), { signal })).text.length > 0;
    let low = known, step = PART_BYTES;
    while (step < 2 ** 33 && (await anyAt(low + step))) { low += step; step *= 2; }
    let high = low + step;
    while (high - low > TAIL_BYTES / 4) {
      const middle = Math.floor((low + high) / 2);
      if (await anyAt(middle)) low = middle; else high = middle;
    }
    return high;
  }

  take(text) {
    const whole = this.rest === null ? text.slice(text.indexOf("\n") + 1) : this.rest + text;
    const lines = whole.split("\n");
    this.rest = lines.pop();
    for (const raw of lines) { this.line(raw, this.left); this.left = 0; }
    // Of a line to which no end comes, as a bar of progress has none, both ends are kept.
    if (this.rest.length > 4 * LONGEST_LINE) {
      this.left += this.rest.length - 2 * LONGEST_LINE;
      this.rest = this.rest.slice(0, LONGEST_LINE) + this.rest.slice(-LONGEST_LINE);
    }
  }

  line(raw, left) {
    const line = shortened(plain(raw), left), process = PROCESS.exec(line);
    let number = null;
    if (process) {
      const said = IS_WORKER.exec(line);
      if (said && said[2] === process[2] && Number(said[1]) < MOST_WORKERS) {
        this.numberOf.delete(process[1]);
        this.numberOf.set(structuredClone(process[1]), said[1]); // a part of a string keeps the whole of it
        // Of those that have been replaced nothing comes any more: the newest are known.
        if (this.numberOf.size > 2 * MOST_WORKERS) this.numberOf.delete(this.numberOf.keys().next().value);
        this.option(said[1]);
        for (const one of this.of.get(process[1]) ?? []) one.number = said[1];
        this.of.delete(process[1]);
      }
      number = this.numberOf.get(process[1]) ?? null;
    }
    const made = { line, number, process: process ? process[1] : null };
    this.hold(made);
    this.lines.push(made);
    this.kept += line.length;
    if (this.lines.length > 4 * SHOWN_LINES || this.kept > MOST_KEPT) {
      for (const { line: gone } of this.lines.splice(0, this.lines.length >> 1)) this.kept -= gone.length;
      this.of.clear(); // of lines that are kept alone, however many processes there are
      for (const one of this.lines) this.hold(one);
    }
  }

  /** Have a line of a process known, until it says which worker it is. */
  hold(made) {
    if (made.process === null || made.number !== null) return;
    if (!this.of.has(made.process)) this.of.set(made.process, []);
    this.of.get(made.process).push(made);
  }

  option(number) {
    if ([...this.select.options].some((one) => one.value === number)) return;
    this.select.append(h("option", { value: number }, `worker ${number}`));
    this.select.value = this.wanted;
  }

  draw(anew) {
    const shown = this.wanted === "" ? this.lines : this.lines.filter((one) => one.number === this.wanted);
    let from = shown.length, size = 0;
    while (from > Math.max(0, shown.length - SHOWN_LINES) && size < MOST_SHOWN) size += shown[--from].line.length;
    const last = shown.slice(from).map((one) => one.line).join("\n") + (this.wanted === "" && this.rest ? `\n${shortened(plain(this.rest), this.left)}` : "");
    if (this.text.textContent !== last) this.text.textContent = last;
    const where = this.skipped ? `The beginning, ${bytesText(this.skipped % ATTEMPT)}, is left out. ` : "";
    const left = from > 0 ? `The last ${(shown.length - from).toLocaleString("en")} lines; thinwire logs ${this.jobId} has all. ` : "";
    if (shown.length || anew) say(this.note, shown.length ? where + left : `No line of worker ${this.wanted} yet.`);
    if (this.followed.checked) this.text.scrollTop = this.text.scrollHeight;
  }
}

/** A line as it is shown: of a very long one both ends. left: characters of its midst that are gone already. */
function shortened(line, left) {
  if (!left && line.length <= LONGEST_LINE) return line;
  const half = Math.min(LONGEST_LINE, line.length) >> 1;
  return `${line.slice(0, half)} [${(left + line.length - 2 * half).toLocaleString("en")} characters left out] ${line.slice(-half)}`;
}
