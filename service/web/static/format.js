// How quantities are written: as the command line writes them (thinwire/cli/quantities.py).

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

/** Three significant digits, as %.3g. */
function three(value) {
  if (value === 0) return "0";
  const text = value.toPrecision(3);
  return text.includes("e") ? text : String(Number(text));
}

export function bytesText(amount) {
  if (amount === null || amount === undefined) return "-";
  let size = amount, unit = 0;
  while (Math.abs(size) >= 999.5 && unit < UNITS.length - 1) { size /= 1000; unit += 1; }
  return unit === 0 ? `${size.toFixed(0)} B` : `${three(size)} ${UNITS[unit]}`;
}

export function secondsText(amount) {
  if (amount === null || amount === undefined || !Number.isFinite(amount)) return "-";
  if (amount < 9.95) return `${Number(amount.toPrecision(2))} s`;
  if (amount < 59.5) return `${amount.toFixed(0)} s`;
  const whole = Math.round(amount), minutes = Math.floor(whole / 60), seconds = whole % 60;
  if (minutes < 60) return `${minutes} min ${String(seconds).padStart(2, "0")} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${String(minutes % 60).padStart(2, "0")} min` : `${Math.floor(hours / 24)} days`;
}

export function ratioText(ratio) {
  if (ratio === null || ratio === undefined) return "-";
  return ratio < 999.5 ? `${three(ratio)}x` : `${Math.round(ratio).toLocaleString("en")}x`;
}

/** Of what has no halves, on an axis too. */
export const wholeText = (value) => (Number.isInteger(value) ? String(value) : "");
export const lossText = (loss) => (loss === null || loss === undefined ? "-" : loss.toFixed(4));
export const stepsText = (step, of) => (of === null || of === undefined ? `${step}` : `${step}/${of}`);
export const numberText = (value) =>
  value === null || value === undefined ? "-" : typeof value === "number" && !Number.isSafeInteger(value) ? String(Number(value.toPrecision(4))) : String(value);

/** A moment, in the reader's own zone, to the second. Takes unix seconds, or a text of ISO 8601. */
export function timeText(moment) {
  if (moment === null || moment === undefined) return "-";
  const date = typeof moment === "number" ? new Date(moment * 1000) : new Date(moment);
  if (Number.isNaN(date.getTime())) return "-";
  const two = (value) => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ` +
    `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** By how many milliseconds the service's clock is ahead of this machine's, where it is more than an answer takes. */
let ahead = 0;
/** The service has just said its time: an HTTP date. */
export function clockIs(date) {
  const by = Date.parse(date) - Date.now();
  ahead = Math.abs(by) > 5000 ? by : 0;
}
/** The service's time, in milliseconds: by it are all moments that it names. */
export const now = () => Date.now() + ahead;

export const clockText = (date) => timeText(date.getTime() / 1000).slice(11);
export const agoText = (moment) => secondsText(Math.max(0, (now() - new Date(moment).getTime()) / 1000));

export const limitsText = (least, most) => (least === most ? `${least}` : `${least}..${most}`);

/** How many workers train, and how many are wanted where that is another number: 3 (wanted 2..8). */
export function workersText(job, count) {
  const wanted = limitsText(job.wanted_workers.min, job.wanted_workers.max);
  return wanted === String(count) ? wanted : `${count} (wanted ${wanted})`;
}

export const EFFECTS = {
  at_start: "the job starts with that",
  in_place: "the job follows while it runs",
  at_restart: "the job follows when it restarts next (workers.elastic = restart)",
};

const STANDING = {
  SUBMITTING: "being handed to the cluster",
  QUEUED: "all of its places are free: being handed to the cluster",
  PENDING: "the cluster starts the job's driver and its workers, which takes 20 to 60 s",
  RUNNING: "the workers import torch, form their group and load the data",
  CANCELLING: "being stopped",
};
export const OVER = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);
export const STATES = ["SUBMITTING", "QUEUED", "PENDING", "RUNNING", "CANCELLING", "SUCCEEDED", "FAILED", "CANCELLED"];

/** Where a job stands, in a sentence; "" where its figures say it all. */
export function standingText(job) {
  if (job.reason) return job.reason;
  if (job.queue) return queueText(job.queue);
  if (job.waiting_for_workers) {
    return `waiting for workers (${job.waiting_for_workers.have} of ${job.waiting_for_workers.min})`;
  }
  return job.progress || OVER.has(job.state) ? "" : STANDING[job.state] ?? "";
}

function queueText(queue) {
  if (queue.held) return `position ${queue.position} of ${queue.of}, since ${timeText(queue.since)}: ${queue.held}; it starts when one of them is over`;
  const held = queue.holders.map((one) =>
    `${one.job} ${one.workers}` + (one.min < one.workers ? ` (it needs ${one.min})` : ""));
  if (queue.other_projects) held.push(`other projects ${queue.other_projects}`);
  if (queue.others) held.push(`others than the service ${queue.others}`);
  let needs = `it needs ${queue.needs} places at once, ${queue.free} of ${queue.total} are free`;
  if (queue.needs > queue.total) {
    needs = `it needs ${queue.needs} places, and the cluster has ${queue.total}: add machines, or lower workers.min`;
  } else {
    needs += queue.starts_at === null ? "; when it starts is not known"
      : `; it may start at ${timeText(queue.starts_at)}, as the steps of those before it go`;
  }
  return `position ${queue.position} of ${queue.of}, since ${timeText(queue.since)}: ${needs}` +
    (held.length ? `; held by ${held.join(", ")}` : "");
}

/** Labels of a job, as they are asked for: team=vision, lab=3. */
export const labelsText = (labels) => Object.entries(labels ?? {}).map(([name, value]) => (value ? `${name}=${value}` : name)).join(", ");
