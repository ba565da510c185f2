// One job: how it goes, what has happened, what it wrote, what it left, what was asked for.
import { ApiError, call, get, getLarge, jobPath, Poller, query } from "./api.js";
import { Chart } from "./charts.js";
import { announce, ask, fill, h, newId, plain, put, say, table } from "./dom.js";
import { agoText, bytesText, EFFECTS, labelsText, limitsText, lossText, now, numberText, OVER, ratioText, secondsText, standingText, stepsText, timeText, wholeText, workersText } from "./format.js";
import { BEYOND_ALL_STEPS, STEP_PARTS, Samples } from "./history.js";
import { badge } from "./jobs.js";
import { LogView } from "./logs.js";
import { Zoom } from "./zoom.js";

const EVERY_MS = 2000;
const EVENTS_EVERY_MS = 4000;
const ETA_SAMPLES = 30;
const MOST_EVENTS = 20_000;
const PARTS = [["", "Overview"], ["events", "Events"], ["logs", "Log"], ["files", "Files"], ["spec", "Spec"]];

export function view(place, route, frame) {
  if (!route.parts[0]) { location.replace("#/"); return { stop() {} }; }
  const made = new JobView(place, route, frame);
  return { stop: () => made.stop(), goes: (to) => to.name === "jobs" && to.parts[0] === made.id && made.turn(to.parts[1] ?? "", to.parameters) };
}

class JobView {
  constructor(place, route, { me, failed }) {
    this.id = route.parts[0] ?? "";
    this.me = me; this.failed = failed;
    this.job = null; this.events = []; this.toldEvents = []; this.olderEvents = null; this.part = null;
    this.samples = new Samples(this.id, place.clientWidth);
    this.zoom = new Zoom({ name: "step", size: 1, digits: 0 }, () => this.poller?.now());
    this.charts = []; this.eventsDue = 0; this.drawDue = 0; this.later = null;
    this.state = h("span", { role: "status", "aria-live": "polite" });
    this.standing = h("p", { class: "standing" });
    this.actions = h("p", { class: "actions" });
    this.tabs = h("nav", { class: "tabs", "aria-label": "Of this job" }, PARTS.map(([name, title]) =>
      h("a", { href: `#/jobs/${encodeURIComponent(this.id)}${name && `/${name}`}` }, title)));
    this.body = h("div");
    this.refused = h("p", { class: "problem", role: "alert" });
    put(place, h("div", { class: "head" }, h("h1", { class: "id" }, this.id), this.state, this.actions), this.refused, this.standing, this.tabs, this.body);
    if (!this.turn(route.parts[1] ?? "", route.parameters)) put(this.body, h("p", { class: "problem", role: "alert" }, "There is no such page of a job."));
    const stream = { path: () => jobPath(this.id, "events?after=now"), told: (message) => this.told(message) };
    this.poller = new Poller((signal) => this.load(signal), EVERY_MS, failed, stream).start();
  }

  stop() {
    this.poller.stop();
    this.zoom.stop();
    clearTimeout(this.later);
    this.leave();
  }

  leave() {
    this.asking?.stop();
    this.asking = null;
    for (const chart of this.charts) chart.stop();
    this.charts = [];
  }

  /** Show another part. Returns whether there is such a part. */
  turn(name, parameters) {
    const at = PARTS.findIndex(([one]) => one === name);
    if (at < 0) return false;
    [...this.tabs.children].forEach((link, number) => { if (number === at) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current"); });
    if (this.part === name) return true;
    this.leave();
    this.part = name;
    this.body.replaceChildren();
    ({ "": () => this.overview(), events: () => this.eventList(), logs: () => this.logPart(parameters), files: () => this.files(), spec: () => this.spec() })[name]();
    if (this.job) { this.drawPart(true); this.poller?.now(); }
    return true;
  }

  async load(signal) {
    const asked = this.job?.progress, job = await get(jobPath(this.id), { signal });
    const before = this.job;
    // What a stream has told meanwhile may be newer. Of its time nothing follows: the clock is a worker's.
    if (before?.progress !== asked && before.attempt === job.attempt && before.progress.step > job.progress?.step) job.progress = before.progress;
    this.job = job;
    this.draw(before);
    const told = this.poller.live && this.listed; // then each event comes by itself
    if (before?.state !== job.state || before?.attempt !== job.attempt || (!told && performance.now() >= this.eventsDue)) await this.loadEvents(signal);
    this.listed = this.poller.live;
    const progress = job.progress, last = before?.progress;
    if (progress && (this.samples.length === 0 || progress.step !== last?.step || progress.time !== last?.time || this.samples.lastStep < progress.step)) {
      await this.samples.refresh(progress, signal, () => this.drawPart(false));
    }
    const steps = this.zoom.range;
    await this.samples.refine(steps, signal);
    this.drawPart(true);
    if (steps !== null && steps === this.zoom.range) this.zoom.say(`samples of these steps: ${this.samples.count(steps)}`);
  }

  /** What the stream says. Returns whether the job has to be asked for. */
  told({ event, data }) {
    if (event === "sample") {
      if (!this.poller.current || !this.samples.told(this.job, data)) return true;
      this.drawSoon();
      return false;
    }
    if (event === "event") {
      this.toldEvents.push(data); // an answer that is on its way may be without it
      this.events = withEvents(this.events, [data]).slice(-MOST_EVENTS);
      this.drawSoon();
    }
    return true;
  }

  async loadEvents(signal) {
    if (OVER.has(this.job.state) && this.eventsDue === Infinity) return;
    this.toldEvents = [];
    const found = await getLarge(jobPath(this.id, `metrics${query({ after_step: BEYOND_ALL_STEPS })}`), { signal });
    const first = found.events[0];
    const kept = first ? this.events.filter((one) => one.time < first.time) : [];
    this.events = withEvents([...kept, ...found.events], this.toldEvents);
    if (!kept.length) this.olderEvents = found.next_before_event;
    // Some of the last words come after a job's end.
    const over = OVER.has(this.job.state) && now() - new Date(this.job.finished_at ?? 0).getTime() > 60_000;
    this.eventsDue = over ? Infinity : performance.now() + (found.events.length > 1000 ? 10 : 1) * EVENTS_EVERY_MS;
  }

  draw(before) {
    const { job } = this;
    if (before?.state !== job.state) {
      fill(this.state, badge(job));
      this.drawActions();
    } else if (before?.dashboard_url !== job.dashboard_url) this.drawActions();
    const attempt = job.attempt > 1 ? `Attempt ${job.attempt}. ` : "";
    const unreadable = job.unreadable ? ` Not all of it can be read: ${job.unreadable}` : "";
    const labels = labelsText(job.labels);
    say(this.standing, `${labels ? `Labels: ${labels}. ` : ""}${attempt}${standingText(job)}${unreadable}`);
  }

  drawActions() {
    const { job, me } = this, over = OVER.has(job.state), may = me.role !== "viewer";
    const held = this.actions.contains(document.activeElement) ? document.activeElement.textContent : null;
    const button = (name, does, attrs = {}) => h("button", { type: "button", ...attrs, on: { click: does } }, name);
    fill(this.actions,
      may && !over && job.state !== "CANCELLING" ? [button("Resize", () => this.resize()), button("Cancel", () => this.cancel())] : null,
      may && job.spec ? h("a", { class: "button", href: `#/submit${query({ like: job.id })}` }, "Clone") : null,
      may && job.spec && job.progress ? h("a", { class: "button", href: `#/submit${query({ continue: job.id })}` }, "Continue from it") : null,
      may && over ? button("Delete", () => this.remove(), { class: "danger" }) : null,
      job.dashboard_url ? h("a", { class: "button", href: job.dashboard_url, rel: "noreferrer" }, "Ray dashboard") : null);
    if (held) [...this.actions.children].find((one) => one.textContent === held)?.focus();
  }

  drawSoon() {
    this.later ??= setTimeout(() => { this.later = null; this.draw(this.job); this.drawPart(true); }, Math.max(0, this.drawDue - performance.now()));
  }

  drawPart(whole) {
    if (!this.job) return;
    if (!whole && performance.now() < this.drawDue) return;
    this.drawDue = performance.now() + 500;
    this.drawn?.();
  }

  // what a person does

  async change(method, path, body, said) {
    say(this.refused, "");
    try {
      await call(method, path, { body });
      announce(said);
      this.poller.now();
      return true;
    } catch (error) {
      const words = error instanceof ApiError && error.problems.length ? error.problems.map((one) => `${one.path}: ${one.message}`).join("; ") : error.message;
      say(this.refused, words);
      return false;
    }
  }

  async resize() {
    const wanted = this.job.wanted_workers, least = newId("min"), most = newId("max");
    const field = (id, value) => h("input", { id, type: "number", min: "1", max: "4096", step: "1", required: true, value });
    const from = field(least, wanted.min), to = field(most, wanted.max);
    const body = h("div", {}, h("p", {}, `Now ${limitsText(wanted.min, wanted.max)}; ${EFFECTS[wanted.takes_effect] ?? wanted.takes_effect}.`),
      h("p", { class: "field" }, h("label", { for: least }, "At least"), from), h("p", { class: "field" }, h("label", { for: most }, "At most"), to));
    if (!(await ask(`Resize ${this.id}`, body, "Resize"))) return;
    await this.change("PATCH", jobPath(this.id), { workers: { min: from.valueAsNumber, max: to.valueAsNumber } }, `${limitsText(from.value, to.value)} workers are wanted`);
  }

  async cancel() {
    const words = h("p", {}, "Its processes end. Its checkpoints stay, and a job can go on from them.");
    if (await ask(`Cancel ${this.id}?`, words, "Cancel the job", { danger: true })) await this.change("POST", jobPath(this.id, "cancel"), undefined, "the job is being cancelled");
  }

  async remove() {
    const words = h("p", {}, "Its checkpoints, history and log are removed and do not come back. A checkpoint.store elsewhere stays.");
    if (!(await ask(`Delete ${this.id}?`, words, "Delete it", { danger: true }))) return;
    if (await this.change("DELETE", jobPath(this.id), undefined, `${this.id} is deleted`)) location.hash = "#/";
  }

  // the parts

  overview() {
    this.shape = this.drawnOf = this.drawnSummary = null; // nothing of it is drawn yet, also where one comes back to it
    this.cards = h("dl", { class: "cards" });
    this.membership = h("ul", { class: "marks" });
    const { zoom } = this, marks = () => this.marks(), spans = () => this.samples.shown.phases();
    const chart = (title, lines, options) => { const made = new Chart(title, lines, { zoom, marks, spans, ...options }); this.charts.push(made); return made; };
    this.loss = chart("Loss", [{ name: "training", colour: "c1" }, { name: "validation", colour: "c2", points: true }], { y: { text: (value) => value.toPrecision(4) } });
    this.speed = chart("Throughput", [{ name: "samples/s", colour: "c1" }], { y: { text: numberText, fromZero: true } });
    this.times = chart("Seconds of a step", [{ name: "measured", colour: "c1" }, { name: "predicted", colour: "c2", dash: [6, 4] }, { name: "waited for the slowest", colour: "c3" }], { y: { text: secondsText, fromZero: true } });
    this.byPart = chart("Seconds of a step by part", Object.values(STEP_PARTS).map((name, at) => ({ name, colour: `c${at + 1}` })), { y: { text: secondsText, fromZero: true }, note: "of rank 0" });
    this.size = chart("Workers", [{ name: "train together", colour: "c1", stepped: true }], { y: { text: wholeText, fromZero: true } });
    this.ratio = chart("Compression", [{ name: "fp32 all-reduce over sent", colour: "c1" }], { y: { text: ratioText, fromZero: true } });
    this.bytes = chart("Bytes a worker has sent", [{ name: "sent", colour: "c1" }, { name: "fp32 would have", colour: "c3", dash: [6, 4] }, { name: "bf16 would have", colour: "c2", dash: [6, 4] }], { y: { text: bytesText, fromZero: true } });
    this.healthCharts = h("div", { class: "charts" });
    this.health = new Map();
    this.summary = h("div");
    put(this.body, this.cards, zoom.element, h("div", { class: "charts" }, this.charts.map((one) => one.element)),
      h("section", { "aria-label": "Joins and deaths" }, this.membership), this.summary,
      h("section", { "aria-label": "The optimizer's health" }, this.healthCharts));
    this.drawn = () => this.drawOverview();
  }

  marks() {
    if (this.marksOf !== this.events) {
      this.marksOf = this.events;
      let before = null;
      this.kept = [];
      for (const one of this.events) {
        if (one.kind === "regrouped") {
          const lost = Array.isArray(one.fields.lost) ? one.fields.lost : [], size = one.fields.world_size;
          const kind = lost.length ? "death" : before !== null && size > before ? "join" : "other";
          this.kept.push({ x: one.step, kind, words: `step ${one.step}: ${size ?? "unknown"} workers` + (lost.length ? `, lost ${lost.join(", ")}` : "") +
            (one.fields.reason ? ` (${one.fields.reason})` : "") + (typeof one.fields.seconds === "number" ? `, after ${secondsText(one.fields.seconds)}` : "") });
          before = typeof size === "number" ? size : before;
        } else if (one.kind === "resumed") this.kept.push({ x: one.step, kind: "other", words: `step ${one.step}: resumed from a checkpoint` });
      }
    }
    return this.kept;
  }

  drawOverview() {
    const { job } = this, samples = this.samples.shown, { columns } = samples, sample = job.progress;
    const cards = [["Step", stepsText(sample?.step ?? 0, job.steps), job.steps ? h("progress", { max: job.steps, value: sample?.step ?? 0, "aria-label": "Steps done" }) : null]];
    const bytes = sample ? samples.bytes() : null, sent = bytes?.sent.at(-1), dense = bytes?.fp32.at(-1);
    if (sample) {
      const predicted = sample.predicted_step_seconds;
      cards.push(["Phase", sample.phase], ["Loss", lossText(sample.loss)], ["Validation loss", lossText(job.validation_loss)],
        ["Samples/s", sample.samples_per_second.toFixed(1)], ["Step", secondsText(sample.step_seconds), predicted === null ? null : `predicted ${secondsText(predicted)}`],
        ["Compression", sample.world_size > 1 && sample.step > 0 && !sample.payload_bytes ? "nothing sent" : ratioText(sample.compression_ratio)],
        ["A worker has sent", bytesText(sent), dense ? `fp32 would be ${bytesText(dense)}` : null]);
      if (!OVER.has(job.state)) cards.push(["To go", this.etaText()]);
    }
    cards.push(["Workers", job.world_size === null || OVER.has(job.state) ? limitsText(job.wanted_workers.min, job.wanted_workers.max) : workersText(job, job.world_size), job.workers ? `${job.workers} report` : null],
      ["Submitted", agoText(job.created_at) + " ago", [job.submitted_by ? `by ${job.submitted_by}` : "", job.project === "default" ? "" : `project ${job.project}`].filter(Boolean).join(", ") || null]);
    if (job.started_at) cards.push([OVER.has(job.state) ? "Ran" : "Running", secondsText((new Date(job.finished_at ?? now()) - new Date(job.started_at)) / 1000), job.attempt > 1 ? `attempt ${job.attempt}` : null]);
    for (const [name, value] of Object.entries(sample?.reported ?? {}).slice(0, 9)) cards.push([name, numberText(value), "the script's own"]);
    this.fillCards(cards);
    if (this.drawnOf !== samples || this.drawnLength !== samples.length || this.drawnLast !== columns.time.at(-1) || this.drawnMarks !== this.marks()) {
      this.drawnOf = samples; this.drawnLength = samples.length; this.drawnLast = columns.time.at(-1); this.drawnMarks = this.marks();
      this.drawCharts(samples, bytes);
    }
    if (this.drawnSummary !== JSON.stringify(job.summary)) { this.drawnSummary = JSON.stringify(job.summary); this.drawSummary(); }
  }

  drawCharts(samples, bytes) {
    const { columns } = samples, x = columns.step;
    this.zoom.element.hidden = x.length < 2;
    const positive = (column) => column.map((one, at) => (x[at] > 0 ? one : null));
    this.loss.set([x, columns.loss, columns.validation_loss]);
    this.speed.set([x, positive(columns.samples_per_second)]);
    this.times.set([x, positive(columns.step_seconds), columns.predicted_step_seconds, columns.waited_seconds]);
    this.byPart.set([x, ...Object.keys(STEP_PARTS).map((part) => columns[part])]);
    this.size.set([x, columns.world_size]);
    this.ratio.set([x, columns.compression_ratio]);
    if (bytes) this.bytes.set([x, bytes.sent, samples.parameters() ? bytes.fp32 : x.map(() => null), samples.parameters() ? bytes.bf16 : x.map(() => null)]);
    fill(this.membership, this.marks().slice(-50).map((one) => h("li", { class: one.kind }, one.words)));
    const names = [...new Set(samples.health.flatMap(([, values]) => Object.keys(values).filter((name) => values[name] !== null)))];
    for (const name of [...names, ...samples.reported.keys()]) {
      if (!this.health.has(name)) {
        const made = new Chart(HEALTH[name] ?? name, [{ name: HEALTH[name] ? name : "value", colour: "c1", points: true }], { zoom: this.zoom, y: { text: numberText } });
        this.health.set(name, made);
        this.charts.push(made);
        this.healthCharts.append(made.element);
      }
      const pairs = samples.reported.get(name) ?? samples.health.map(([step, values]) => [step, values[name]]);
      this.health.get(name).set([pairs.map(([step]) => step), pairs.map(([, value]) => value ?? null)]);
    }
  }

  fillCards(cards) {
    // In place: a reader that stands on one is not thrown out.
    const shape = cards.map(([name]) => name).join("\n");
    if (this.shape !== shape) {
      this.shape = shape;
      this.values = cards.map(() => [h("dd"), h("dd", { class: "help" })]);
      fill(this.cards, cards.map(([name], at) => h("div", {}, h("dt", {}, name), this.values[at])));
    }
    cards.forEach(([, value, more], at) => {
      const [main, side] = this.values[at];
      say(main, value);
      if (more instanceof Node) {
        if (side.firstChild?.nodeName === more.nodeName) side.firstChild.value = more.value; else fill(side, more);
      } else say(side, more ?? "");
    });
  }

  etaText() {
    const { step, time } = this.samples.columns, { job } = this, end = step.length - 1;
    if (!job.steps || job.waiting_for_workers || job.workers === 0) return "-";
    const from = Math.max(0, end - ETA_SAMPLES);
    const each = end > from && time[end] > time[from] ? (time[end] - time[from]) / (step[end] - step[from]) : job.progress.step_seconds;
    return each > 0 ? secondsText((job.steps - job.progress.step) * each) : "-";
  }

  drawSummary() {
    const found = this.job.summary;
    this.summary.replaceChildren();
    if (!found || typeof found !== "object") return;
    const seconds = found.seconds;
    if (seconds && typeof seconds.total === "number") {
      put(this.summary, table("Where the time went, rank 0", ["part", "duration", "share"], Object.entries(seconds).filter(([name, value]) => name !== "total" && typeof value === "number").concat([["total", seconds.total]])
        .map(([name, value]) => [name.replaceAll("_", " "), secondsText(value), seconds.total ? `${Math.round((100 * value) / seconds.total)} %` : ""])));
    }
    const rows = [];
    if (typeof found.predicted_step_seconds === "number" && typeof found.measured_step_seconds === "number") {
      rows.push(["step, predicted", secondsText(found.predicted_step_seconds)], ["step, measured", secondsText(found.measured_step_seconds)], ["prediction over measured, less 1", `${(100 * (found.prediction_error ?? 0)).toFixed(1)} %`]);
    }
    const ratio = found.compression_ratio;
    if (ratio) rows.push(["ratio, compressed phase", ratioText(ratio.compressed_phase)], ["ratio, all steps", ratioText(ratio.overall)]);
    if (typeof found.parameters === "number") rows.push(["parameters", found.parameters.toLocaleString("en")]);
    if (typeof found.replicas_bit_equal === "boolean") rows.push(["replicas at the end", found.replicas_bit_equal ? "bit-equal" : "DIFFER"]);
    if (found.waited_for) rows.push(["came last in most steps", `worker ${found.waited_for.worker}, ${Math.round(100 * found.waited_for.share)} % of them; the others waited ${secondsText(found.waited_for.seconds)}`]);
    if (rows.length) put(this.summary, table("In the end", ["what", "value"], rows));
  }

  eventList() {
    const kinds = h("select", { id: newId("kind") }), list = h("tbody"), older = h("button", { type: "button", hidden: true }, "Older events");
    const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Events" }, h("table", {}, h("caption", { class: "visually-hidden" }, "Events, newest first"),
      h("thead", {}, h("tr", {}, ["Time", "Step", "Event", "What"].map((one) => h("th", { scope: "col" }, one)))), list));
    put(this.body, h("p", { class: "filters" }, h("label", { for: kinds.id }, "Kind"), kinds), scroll, older);
    let shown = null, chosen = "";
    kinds.addEventListener("change", () => { chosen = kinds.value; shown = null; this.drawn(); });
    older.addEventListener("click", async () => {
      try {
        const found = await getLarge(jobPath(this.id, `metrics${query({ after_step: BEYOND_ALL_STEPS, before_event: this.olderEvents })}`));
        this.events = [...found.events, ...this.events];
        this.olderEvents = found.next_before_event;
        this.drawn();
      } catch (error) { say(this.refused, error.message); }
    });
    this.drawn = () => {
      if (shown === this.events) return;
      shown = this.events;
      const known = [...new Set(this.events.map((one) => one.kind))].sort();
      fill(kinds, h("option", { value: "" }, "all"), known.map((one) => h("option", { value: one, selected: one === chosen }, one)));
      const rows = this.events.filter((one) => !chosen || one.kind === chosen).reverse();
      fill(list, rows.slice(0, 500).map((one) => h("tr", {}, h("td", {}, timeText(one.time)), h("td", {}, String(one.step)), h("th", { scope: "row" }, one.kind), h("td", { class: "words" }, eventText(one)))));
      older.hidden = this.olderEvents === null;
    };
  }

  logPart(parameters) {
    this.asking = new LogView(this.body, this.id, parameters.get("rank"), () => this.job, this.failed);
    this.drawn = null;
  }

  files() {
    const place = h("div", {}, h("p", {}, "asking ..."));
    put(this.body, place);
    this.drawn = null;
    const once = async (signal) => { await this.listFiles(place, signal); poller.stop(); };
    const poller = new Poller(once, EVERY_MS, (error) => fill(place, h("p", { class: "problem", role: "alert" }, error.message)));
    this.asking = poller.start();
  }

  async listFiles(place, signal) {
    const [job, found] = [await get(jobPath(this.id), { signal }), await getLarge(jobPath(this.id, "checkpoints"), { signal })];
    const file = (name, path) => h("a", { href: path, download: name }, name);
    const left = [];
    for (const name of ["loss.png", "summary.json"]) if (job.progress) left.push(name);
    fill(place, h("p", {}, "Its folder on the service's machine: ", h("code", {}, job.run_dir), `. The service keeps ${bytesText(job.kept_bytes)} of its history and log.`),
      found.store ? h("p", {}, "Its checkpoints are in ", h("code", {}, found.store), ", where the service does not look.") : null,
      found.checkpoints.length ? table("Checkpoints, the newest last", ["checkpoint", "files", "bytes", ""], found.checkpoints.map((one) => [one.folder,
        h("details", {}, h("summary", {}, `${one.files.length}`), h("ul", {}, one.files.map((each) => h("li", {}, file(each.name, jobPath(this.id, "checkpoints", encodeURIComponent(one.folder), encodeURIComponent(each.name))), ` ${bytesText(each.bytes)}`)))),
        bytesText(one.files.reduce((sum, each) => sum + each.bytes, 0)), one.files.some((each) => each.name === "manifest.json") ? "whole" : "not whole"]))
        : found.store ? null : h("p", {}, "No checkpoint yet."),
      left.length ? h("p", {}, "What rank 0 leaves at the end of a run that succeeds: ", left.map((name, at) => [at ? ", " : "", file(name, jobPath(this.id, "files", name))]), ".") : null);
  }

  spec() {
    let shown = null;
    const text = h("pre", { tabindex: "0", "aria-label": "The job file" });
    put(this.body, h("p", {}, "What was asked for, with all defaults. What has been resized since is on the overview."), text);
    this.drawn = async () => {
      if (shown || !this.job.spec) return;
      shown = this.job.spec;
      const { dump } = await import("./vendor/js-yaml.esm.min.mjs");
      say(text, dump(shown, { lineWidth: 110 }));
    };
  }
}

/** What docs/operations.md says of each number, in short. */
const HEALTH = {
  error_to_momentum: "Error memory over momentum",
  sign_density_worker: "Sign density, sent",
  sign_density_server: "Sign density, sent back",
  max_step: "Largest step, in units of lr",
  variance_ratio: "Variance ratio of the warm-up",
  floored_elements: "Elements at the variance floor",
  rounds_skipped: "Rounds skipped",
  num_uploads: "Gradients sent (CADA)",
  possible_uploads: "Gradients that could have been sent (CADA)",
  lamb_coeff_min: "Trust coefficient, smallest",
  lamb_coeff_median: "Trust coefficient, median",
  lamb_coeff_max: "Trust coefficient, largest",
};

/** Events with those that are not among the last of them. */
function withEvents(events, more) {
  const last = events.slice(-200), isNew = (one) => !last.some((other) => other.kind === one.kind && other.step === one.step && other.time === one.time);
  return [...events, ...more.filter(isNew)];
}

function eventText(event) {
  const { told, ...fields } = event.fields;
  const rest = Object.entries(fields).filter(([, value]) => value !== null && !(Array.isArray(value) && !value.length))
    .map(([name, value]) => `${name}: ${typeof value === "object" ? JSON.stringify(value) : numberOrText(value)}`).join(", ");
  return plain([told, rest].filter(Boolean).join("; ")).slice(0, 2000);
}

const numberOrText = (value) => (typeof value === "number" && !Number.isInteger(value) ? numberText(value) : String(value));
