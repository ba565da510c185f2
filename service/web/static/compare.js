// Two or more runs beside one another: by step, by seconds, and by bytes sent.
import { get, jobPath, Poller, query } from "./api.js";
import { Chart } from "./charts.js";
import { fill, h, newId, put, say, table } from "./dom.js";
import { bytesText, lossText, OVER, ratioText, secondsText, stepsText, wholeText } from "./format.js";
import { BEYOND_ALL_STEPS, Samples } from "./history.js";
import { badge } from "./jobs.js";
import { placesOf, Zoom } from "./zoom.js";

const MOST = 8;
const EVERY_MS = 4000;
const AXES = {
  step: { name: "step", text: wholeText, of: (samples) => samples.columns.step, unit: { name: "step", size: 1, digits: 0 } },
  seconds: { name: "time", text: secondsText, of: (samples) => samples.seconds(), unit: { name: "second", size: 1, digits: 1 } },
  bytes: { name: "sent", text: bytesText, of: (samples) => samples.bytes().sent, unit: { name: "MB", size: 1e6, digits: 3 } },
};

export function view(place, route, { failed }) {
  const wanted = [...new Set((route.parameters.get("jobs") ?? "").split(",").filter(Boolean))], ids = wanted.slice(0, MOST);
  const runs = ids.map((id, at) => ({ id, colour: `c${at + 1}`, samples: new Samples(id, place.clientWidth), job: null, progress: null }));
  const axis = h("select", { id: newId("axis") }, Object.keys(AXES).map((one) => h("option", { value: one }, one)));
  axis.value = Object.hasOwn(AXES, route.parameters.get("by")) ? route.parameters.get("by") : "step";
  const add = h("input", { id: newId("add"), placeholder: "another job's ID", spellcheck: "false", autocomplete: "off" });
  const list = h("div"), figures = h("div", { class: "charts" }), note = h("p", { class: "help", role: "status" });
  put(place, h("h1", {}, "Compare"),
    h("form", { class: "filters", on: { submit: more } }, h("label", { for: axis.id }, "By"), axis, h("label", { for: add.id }, "Add"), add, h("button", {}, "Add")),
    note, list);
  let charts = [], poller = null;
  const zoom = new Zoom(AXES[axis.value].unit, () => poller?.now());
  put(place, zoom.element, figures);
  axis.addEventListener("change", () => { history.replaceState(null, "", address(ids)); build(); zoom.measure(AXES[axis.value].unit); draw(); });

  function address(jobs) { return `#/compare${query({ jobs: jobs.join(","), by: axis.value })}`; }

  function more(event) {
    event.preventDefault();
    const id = add.value.trim();
    if (id && ids.length < MOST) location.hash = address([...ids, id]);
    else if (id) say(note, `At most ${MOST} runs.`);
  }

  function build() {
    for (const chart of charts) chart.stop();
    const lines = runs.map((run) => ({ name: run.id, colour: run.colour }));
    const x = AXES[axis.value];
    const made = (title, y, points = false) => new Chart(title, lines.map((line) => ({ ...line, points })), { x, y, zoom });
    charts = [made("Training loss", { text: (value) => value.toPrecision(4) }), made("Validation loss", { text: (value) => value.toPrecision(4) }, true),
      made("Bytes a worker has sent", { text: bytesText, fromZero: true }), made("Seconds of a step", { text: secondsText, fromZero: true })];
    fill(figures, charts.map((one) => one.element));
  }

  function draw() {
    if (runs.some((run) => run.job || run.gone)) {
      fill(list, table("The runs", ["job", "state", "step", "loss", "validation", "time", "a worker sent", "against fp32", "workers"], runs.map((run) => {
        const { job, samples } = run, bytes = samples.bytes(), sent = bytes.sent.at(-1), seconds = samples.seconds().at(-1);
        return [h("span", {}, h("span", { class: `key ${run.colour}` }), h("a", { href: `#/jobs/${encodeURIComponent(run.id)}` }, run.id), " ", h("button", { type: "button", "aria-label": `Leave out ${run.id}`, on: { click: () => { location.hash = address(ids.filter((one) => one !== run.id)); } } }, "x")),
          job ? badge(job) : run.gone ?? "", job?.progress ? stepsText(job.progress.step, job.steps) : "-", lossText(job?.progress?.loss), lossText(job?.validation_loss),
          secondsText(seconds), bytesText(sent), sent ? ratioText(bytes.fp32.at(-1) / sent || null) : "-", String(job?.progress?.world_size ?? "-")];
      })));
    }
    const joined = joinedBy(runs.map((run) => AXES[axis.value].of(run.samples.shown)));
    const column = (of) => [joined.xs, ...runs.map((run, at) => spread(joined, at, of(run.samples.shown)))];
    zoom.element.hidden = joined.xs.length < 2;
    const steps = (name) => (samples) => samples.columns[name].map((one, at) => (samples.columns.step[at] > 0 ? one : null));
    charts[0].set(column((samples) => samples.columns.loss));
    charts[1].set(column((samples) => samples.columns.validation_loss));
    charts[2].set(column((samples) => samples.bytes().sent));
    charts[3].set(column(steps("step_seconds")));
  }

  /**
   * The steps of a run that lie in the part that is looked at, and one more at either end. A part that goes beyond a
   * run's end stays the same while the run goes on: what comes is told.
   */
  function stepsOf({ samples }) {
    const { step } = samples.columns;
    if (zoom.range === null || !step.length) return null;
    const [first, end] = placesOf(AXES[axis.value].of(samples), zoom.range);
    if (first === step.length) return null;
    return [step[Math.max(0, first - 1)], step[end] ?? BEYOND_ALL_STEPS];
  }

  /** Returns whether anything may be another. */
  async function loadRun(run, signal) {
    if (!run.over) {
      run.job = await get(jobPath(run.id), { signal });
      const { progress } = run.job;
      if (progress && (progress.step !== run.progress?.step || progress.time !== run.progress?.time)) {
        await run.samples.refresh(progress, signal);
        run.progress = progress;
      }
    }
    const finer = await run.samples.refine(stepsOf(run), signal), was = run.over;
    run.over = OVER.has(run.job.state) && run.samples.lastStep >= (run.job.progress?.step ?? -1);
    return finer || !was;
  }

  async function load(signal) {
    let changed = false;
    for (const run of runs) {
      if (run.gone) continue;
      try {
        changed = await loadRun(run, signal) || changed;
      } catch (error) {
        if (error.status !== 404) throw error;
        run.gone = "there is no such job"; changed = true;
      }
    }
    if (changed) draw();
  }

  if (ids.length === 0) {
    say(note, "Choose two or more in the list of jobs, or add them here by their IDs.");
    return { stop() {} };
  }
  if (wanted.length > MOST) say(note, `At most ${MOST} runs: of these ${wanted.length} the first ${MOST}.`);
  build();
  let later = null;
  const told = ({ event, data }) => {
    const run = runs.find((one) => one.id === data.job_id);
    if (event !== "sample" || !poller.current || !run?.samples.told(run.job, data)) return run !== undefined;
    run.progress = run.job.progress;
    later ??= setTimeout(() => { later = null; draw(); }, 500);
    return false;
  };
  const path = () => `v1/events?${new URLSearchParams([["after", "now"], ...ids.map((id) => ["samples_of", id])])}`;
  poller = new Poller(load, EVERY_MS, failed, { path, told }).start();
  return { stop() { clearTimeout(later); zoom.stop(); poller.stop(); for (const chart of charts) chart.stop(); } };
}

/** One axis for several runs: all their values, in order, and where each run has which. */
export function joinedBy(axes) {
  const xs = [...new Set(axes.flat())].sort((one, other) => one - other);
  const at = new Map(xs.map((x, place) => [x, place]));
  return { xs, places: axes.map((axis) => axis.map((x) => at.get(x))) };
}

function spread({ xs, places }, run, column) {
  const found = new Array(xs.length).fill(null);
  places[run].forEach((place, at) => { if (column[at] !== null) found[place] = column[at]; });
  return found;
}
