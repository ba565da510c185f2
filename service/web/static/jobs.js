// All jobs, newest first, a page of them at a time.
import { getLarge, Poller, query } from "./api.js";
import { announce, fill, h, newId, say } from "./dom.js";
import { agoText, labelsText, lossText, OVER, standingText, STATES, stepsText, workersText } from "./format.js";

const PAGE = 50;
const EVERY_MS = 3000;

export function view(place, route, { me, failed }) {
  const state = h("select", { id: "state" }, h("option", { value: "" }, "all"), STATES.map((one) => h("option", { value: one }, one)));
  const text = h("input", { id: "find", type: "search", placeholder: "ID, person or label", maxlength: "200", autocomplete: "off", spellcheck: "false" });
  const body = h("tbody");
  const count = h("p", { class: "help", role: "status" });
  const newer = h("button", { type: "button" }, "Newer"), older = h("button", { type: "button" }, "Older");
  const compare = h("a", { class: "button", href: "#/compare", "aria-disabled": "true" }, "Compare");
  const scroll = h("div", { class: "scroll" },
    h("table", { class: "jobs" },
      h("caption", { class: "visually-hidden" }, "Jobs, newest first"),
      h("thead", {}, h("tr", {},
        h("th", { scope: "col" }, h("span", { class: "visually-hidden" }, "Compare")), h("th", { scope: "col" }, "Job"), h("th", { scope: "col" }, "State"),
        h("th", { scope: "col" }, "Progress"), h("th", { scope: "col", class: "wide" }, "Loss"), h("th", { scope: "col", class: "wide" }, "Workers"),
        h("th", { scope: "col", class: "wide" }, "Who"), h("th", { scope: "col", class: "wide" }, "Age"))),
      body));
  place.append(
    h("div", { class: "head" }, h("h1", {}, "Jobs"), h("p", { class: "actions" }, compare, me.role === "viewer" ? null : h("a", { class: "button main", href: "#/submit" }, "Submit a job"))),
    h("form", { class: "filters", role: "search", on: { submit: (event) => event.preventDefault() } },
      h("label", { for: "state" }, "State"), state, h("label", { for: "find" }, "Find"), text),
    scroll, count,
    h("nav", { class: "pages", "aria-label": "Pages of jobs" }, newer, older));
  const rows = new Map(), chosen = new Set();
  state.value = STATES.includes(route.parameters.get("state")) ? route.parameters.get("state") : "";
  text.value = route.parameters.get("find") ?? "";
  let before = [], next = null;

  let told = "", later = null;
  const samplesOf = () => [...rows.values()].map((row) => row.job).filter((job) => !OVER.has(job.state)).map((job) => job.id).sort();
  const path = () => `v1/events?${new URLSearchParams([["after", "now"], ...samplesOf().map((id) => ["samples_of", id])])}`;
  const poller = new Poller(load, EVERY_MS, failed, { path, told: happened, leastMs: EVERY_MS }).start();
  state.addEventListener("change", again);
  let typing = null;
  text.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(again, 250); });
  older.addEventListener("click", () => { if (next) { before.push(next); turned(); } });
  newer.addEventListener("click", () => { before.pop(); turned(); });

  function again() {
    before = [];
    history.replaceState(null, "", `#/${query({ state: state.value, find: text.value.trim() })}`);
    turned();
  }

  function turned() {
    older.disabled = newer.disabled = true;
    poller.now();
  }

  /** What the stream says. Returns whether the list has to be asked for: not where it is about jobs on other pages. */
  function happened({ event, data }) {
    if (event !== "sample") return event === "gap" || rows.has(data.job_id) || (event === "state" && before.length === 0);
    const row = rows.get(data.job_id);
    if (row && data.sample.time >= (row.job.progress?.time ?? 0)) {
      row.job.progress = data.sample;
      later ??= setTimeout(() => { later = null; for (const one of rows.values()) one.update(one.job); }, 500);
    }
    return false;
  }

  async function load(signal) {
    const asked = query({ limit: PAGE, state: state.value, text: text.value.trim(), before: before.at(-1) });
    const found = await getLarge(`v1/jobs${asked}`, { signal });
    // An answer to what was asked before is passed over: the filter has changed meanwhile, and is asked for next.
    if (asked !== query({ limit: PAGE, state: state.value, text: text.value.trim(), before: before.at(-1) })) return;
    next = found.next;
    draw(found.jobs);
    const of = samplesOf().join();
    if (told !== of) { told = of; poller.stream?.turn(); }
    older.disabled = next === null;
    newer.disabled = before.length === 0;
    const first = before.length * PAGE;
    say(count, found.jobs.length === 0 ? (text.value.trim() || state.value ? "No job is like that." : "There is no job yet. Submit one, or run thinwire quickstart.")
      : before.length || next ? `Page ${before.length + 1}: ${found.jobs.length} jobs, from number ${first + 1} on`
        : `${found.jobs.length} ${found.jobs.length === 1 ? "job" : "jobs"}`);
  }

  function draw(jobs) {
    const ids = new Set(jobs.map((job) => job.id));
    for (const [id, row] of rows) if (!ids.has(id)) { row.element.remove(); rows.delete(id); }
    jobs.forEach((job, at) => {
      let row = rows.get(job.id);
      if (!row) { row = new Row(job, chosen, choose); rows.set(job.id, row); }
      row.update(job);
      if (body.children[at] !== row.element) body.insertBefore(row.element, body.children[at] ?? null);
    });
    scroll.hidden = jobs.length === 0;
  }

  function choose() {
    const enough = chosen.size >= 2;
    compare.setAttribute("aria-disabled", String(!enough));
    compare.setAttribute("href", enough ? `#/compare${query({ jobs: [...chosen].join(",") })}` : "#/compare");
    fill(compare, chosen.size ? `Compare ${chosen.size}` : "Compare");
    announce(`${chosen.size} chosen${enough ? "" : "; two or more can be compared"}`);
  }

  return { stop() { clearTimeout(typing); clearTimeout(later); poller.stop(); } };
}

/** The state of a job, as a word with a colour. */
export function badge(job) {
  return h("span", { class: `state ${job.state}` }, job.state);
}

class Row {
  constructor(job, chosen, changed) {
    const id = newId("job");
    this.box = h("input", { type: "checkbox", "aria-labelledby": `${id}-compare ${id}`, on: { change: () => { chosen[this.box.checked ? "add" : "delete"](job.id); changed(); } } });
    this.box.checked = chosen.has(job.id);
    this.state = h("td");
    this.bar = h("progress", { "aria-labelledby": `${id} ${id}-step` });
    this.step = h("span", { id: `${id}-step` });
    this.note = h("div", { class: "note" });
    this.labels = h("div", { class: "note" });
    [this.loss, this.workers, this.who, this.age] = [1, 2, 3, 4].map(() => h("td", { class: "wide" }));
    this.element = h("tr", {},
      h("td", {}, this.box, h("span", { id: `${id}-compare`, class: "visually-hidden" }, "Compare")),
      h("th", { scope: "row" }, h("a", { id, href: `#/jobs/${encodeURIComponent(job.id)}` }, job.id), this.labels),
      this.state, h("td", {}, this.bar, " ", this.step, this.note), this.loss, this.workers, this.who, this.age);
  }

  update(job) {
    this.job = job;
    if (this.shown !== job.state) { fill(this.state, badge(job)); this.shown = job.state; }
    const step = job.progress?.step ?? 0;
    this.bar.hidden = !job.steps;
    if (job.steps) { this.bar.max = job.steps; this.bar.value = step; }
    say(this.step, job.progress ? stepsText(step, job.steps) : "");
    say(this.note, standingText(job).slice(0, 160));
    say(this.labels, labelsText(job.labels));
    say(this.loss, lossText(job.progress?.loss));
    say(this.workers, OVER.has(job.state) ? String(job.progress?.world_size ?? "-") : job.world_size === null ? "-" : workersText(job, job.world_size));
    say(this.who, job.submitted_by ?? "-");
    say(this.age, agoText(job.created_at));
  }
}
