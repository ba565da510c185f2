// What the service keeps of a job's steps, as columns: a run of 100,000 steps is some arrays of numbers.
import { getLarge, jobPath, query } from "./api.js";
import { placesOf } from "./zoom.js";

export const COLUMNS = ["step", "time", "loss", "validation_loss", "step_seconds", "predicted_step_seconds", "waited_seconds", "samples_per_second",
  "payload_bytes", "payload_bytes_total", "compression_ratio", "world_size"];
/** What a step's time goes into, and its words. */
export const STEP_PARTS = { forward_backward: "forward and backward", encode: "encode", wire: "exchange", slowest: "wait for the slowest", decode_update: "decode and update" };
const NO_EVENTS = "none"; // no event is of this kind: an answer with samples alone
export const BEYOND_ALL_STEPS = 1_000_000_000;

/** More than a screen is wide are not asked for, and what comes while one looks is thinned again when it is twice as many. */
const LEAST_POINTS = 200, MOST_POINTS = 2000;

/** Samples as columns, in order of step. */
class Columns {
  constructor() {
    this.columns = Object.fromEntries([...COLUMNS, ...Object.keys(STEP_PARTS)].map((name) => [name, []]));
    this.phase = [];
    /** [step, {name: number}] of each step at which the optimizer's health was taken. */
    this.health = [];
    /** The script's own numbers, by name: [step, value]. */
    this.reported = new Map();
  }

  get length() { return this.columns.step.length; }
  get lastStep() { return this.length ? this.columns.step[this.length - 1] : -1; }

  /** Forget the steps after this one. */
  cut(step) {
    let keep = this.length;
    while (keep > 0 && this.columns.step[keep - 1] > step) keep -= 1;
    for (const column of Object.values(this.columns)) column.length = keep;
    this.phase.length = keep;
    this.health = this.health.filter(([at]) => at <= step);
    for (const [name, pairs] of this.reported) this.reported.set(name, pairs.filter(([at]) => at <= step));
  }

  take(sample) {
    for (const name of COLUMNS) this.columns[name].push(sample[name] ?? null);
    for (const part of Object.keys(STEP_PARTS)) this.columns[part].push(sample.seconds_by_part?.[part] ?? null);
    this.phase.push(sample.phase);
    if (sample.health) this.health.push([sample.step, sample.health]);
    for (const [name, value] of Object.entries(sample.reported ?? {})) {
      if (!this.reported.has(name)) { if (this.reported.size >= 40) continue; this.reported.set(name, []); }
      this.reported.get(name).push([sample.step, typeof value === "number" ? value : null]);
    }
  }

  /** Values of the model, as the ratios say; null where nothing was sent. A ring of n sends 2 (n-1)/n values a value. */
  parameters() {
    const { compression_ratio: ratio, payload_bytes: sent, world_size: n } = this.columns;
    for (let at = this.length - 1; at >= 0; at -= 1) {
      if (ratio[at] !== null && n[at] > 1) return Math.round((ratio[at] * sent[at]) / ((2 * (n[at] - 1) / n[at]) * 4));
    }
    return null;
  }

  /**
   * Bytes so far, at each step: sent, and what a ring all-reduce in fp32 and in bf16 would have sent. Of steps that are
   * left out between two the workers' own sum says what was sent; of a worker that keeps none they were like the later one.
   */
  bytes() {
    const { payload_bytes: sent, payload_bytes_total: total, world_size: n, step } = this.columns, values = this.parameters() ?? 0;
    const found = { sent: [], fp32: [], bf16: [] };
    let all = 0, dense = 0;
    for (let at = 0; at < this.length; at += 1) {
      if (step[at] > 0) {
        const steps = at ? Math.max(1, step[at] - Math.max(0, step[at - 1])) : 1;
        const more = at && total[at] > total[at - 1] ? total[at] - total[at - 1] : 0;
        all += steps > 1 && more ? more : sent[at] * steps;
        dense += (2 * (n[at] - 1) / n[at]) * 4 * values * steps;
      }
      found.sent.push(all); found.fp32.push(dense); found.bf16.push(dense / 2);
    }
    return found;
  }

  /** Seconds since the first sample, at each step; none where a clock goes back: it was set, or is another worker's. */
  seconds() {
    const { time } = this.columns;
    let passed = 0;
    return time.map((one, at) => (passed += at ? Math.max(0, one - time[at - 1]) : 0));
  }

  /** The step after which phases change: [[from, to, phase], ...]. */
  phases() {
    const found = [], { step } = this.columns;
    for (let at = 0; at < this.length; at += 1) {
      const last = found.at(-1);
      if (last && last[2] === this.phase[at]) last[1] = step[at];
      else found.push([step[at], step[at], this.phase[at]]);
    }
    return found;
  }
}

/** What is shown of a job: an overview of all its steps, and finer points of a part that is looked at. */
export class Samples extends Columns {
  /** width: of a chart, in pixels. Of a long history two samples a pixel come, of each range the lowest and the highest loss. */
  constructor(jobId, width) {
    super();
    this.jobId = jobId;
    this.points = Math.round(Math.min(MOST_POINTS, Math.max(LEAST_POINTS, 2 * (width || 0))));
    /** The newest step that there was when they were asked for: after a resume there are later ones. */
    this.seenStep = -1;
    /** Nothing was left out. */
    this.whole = false;
    /** Of the steps of a part: all that are kept, or as many as of all. null: of none. */
    this.finer = null;
    this.finerOf = null;
  }

  /** The overview, with the finer points in their place. */
  get shown() {
    const { finer } = this;
    if (!finer?.length) return this;
    if (this.joined?.of !== finer || this.joined.length !== this.length || this.joined.last !== this.columns.time.at(-1)) {
      this.joined = { of: finer, length: this.length, last: this.columns.time.at(-1), columns: this.join(finer) };
    }
    return this.joined.columns;
  }

  join(finer) {
    const found = new Columns(), first = finer.columns.step[0], last = finer.lastStep;
    const begin = placesOf(this.columns.step, [first, last]);
    const spliced = (outer, inner) => [...outer.slice(0, begin[0]), ...inner, ...outer.slice(begin[1])];
    const pairs = (outer, inner) => [...outer.filter(([step]) => step < first), ...inner, ...outer.filter(([step]) => step > last)];
    for (const name of Object.keys(found.columns)) found.columns[name] = spliced(this.columns[name], finer.columns[name]);
    found.phase = spliced(this.phase, finer.phase);
    found.health = pairs(this.health, finer.health);
    for (const name of this.reported.keys()) found.reported.set(name, pairs(this.reported.get(name), finer.reported.get(name) ?? []));
    return found;
  }

  /**
   * Have the finer points of these steps, [first, last], or of none. They are asked for once, and again where all of the
   * overview was. Returns whether other points are shown now.
   */
  async refine(steps, signal) {
    if (String(steps) === String(this.finerOf)) return false;
    if (steps === null || this.whole) {
      const before = this.finer;
      this.finer = this.finerOf = null;
      return before !== null;
    }
    const found = new Columns(), [first, last] = steps.map((step) => Math.min(BEYOND_ALL_STEPS, Math.max(0, step)));
    for await (const samples of this.parts({ after_step: first - 1, before_step: last + 1 }, signal)) samples.forEach((one) => found.take(one));
    this.finer = found;
    this.finerOf = steps;
    return true;
  }

  /** So many samples are shown of these steps. */
  count(steps) {
    const [first, end] = placesOf(this.shown.columns.step, steps);
    return end - first;
  }

  /**
   * Ask for what is new. progress: the job's newest sample: steps that a resumed run makes again come again.
   * part(): called after each part.
   */
  async refresh(progress, signal, part = () => {}) {
    this.loading = true; // what is told meanwhile may be part of the answer
    try {
      const at = this.length > 2 * this.points || progress.step < this.seenStep ? -1 : placesOf(this.columns.step, [-1, this.seenStep])[1] - 1;
      if (at < 0 || !(await this.goOn(at, signal, part))) await this.anew(signal, part);
      this.seenStep = progress.step;
    } finally {
      this.loading = false;
    }
  }

  /** What comes after one of them. Returns false where that one is no longer what it was: a run has gone back behind it. */
  async goOn(at, signal, part) {
    const step = this.columns.step[at], time = this.columns.time[at];
    let known = false;
    for await (const samples of this.parts({ after_step: step - 1 }, signal)) {
      if (!known) {
        if (samples[0]?.step !== step || samples[0].time !== time) return false;
        this.cut(step);
      }
      samples.slice(known ? 0 : 1).forEach((one) => this.take(one));
      this.whole &&= samples.length < this.points;
      known = true;
      part();
    }
    return known;
  }

  async anew(signal, part) {
    let count = 0;
    for await (const samples of this.parts({ after_step: -1 }, signal)) {
      if (!count) this.cut(-1);
      samples.forEach((one) => this.take(one));
      count += samples.length;
      part();
    }
    this.whole = count < this.points;
    this.finerOf = undefined; // what is there stays until it was asked for again
  }

  async *parts(asked, signal) {
    for (let after = asked.after_step; after !== null;) {
      const found = await getLarge(jobPath(this.jobId, `metrics${query({ ...asked, after_step: after, event_kind: NO_EVENTS, points: this.points })}`), { signal });
      yield found.samples;
      after = found.next_after_step;
    }
  }

  /**
   * The newest step, as a stream tells it: {attempt, sample}. job: as it was asked for; its progress is put forward.
   * Returns false where that is not the next one of it: then the job has to be asked for.
   */
  told(job, { attempt, sample }) {
    const last = job?.progress;
    if (this.loading || !last || !this.length || attempt !== job.attempt || sample.step <= last.step || sample.step <= this.lastStep || this.length > 2 * this.points) return false;
    job.progress = sample;
    job.validation_loss = sample.validation_loss ?? job.validation_loss;
    this.whole &&= sample.step === last.step + 1;
    this.take(sample);
    this.seenStep = sample.step;
    return true;
  }
}
