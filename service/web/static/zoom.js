// Which part of their steps, seconds or bytes the charts of a view show: by the mouse, and by fields for everybody.
import { announce, h, newId, say } from "./dom.js";

/** So long after the last change a part is settled, and finer points of it are asked for. */
const SETTLED_MS = 300;

export class Zoom {
  /** unit: see `measure`. settled(): called where another part has been looked at for a while. */
  constructor(unit, settled) {
    this.settled = settled;
    /** [from, to] in x; null: all of it. */
    this.range = null;
    /** What the cursors of the charts have in common. */
    this.sync = newId("sync");
    this.charts = new Set();
    this.later = null;
    const valid = () => this.to.setCustomValidity("");
    const field = () => h("input", { id: newId("part"), type: "number", step: "any", required: true, on: { input: valid } });
    this.from = field(); this.to = field();
    this.label = h("label", { for: this.from.id });
    this.all = h("button", { type: "button", on: { click: () => this.set(null) } }, "All of it");
    this.said = h("span", { class: "help", role: "status" });
    this.element = h("form", { class: "filters zoom", "aria-label": "Zoom", hidden: true, on: { submit: (event) => this.asked(event) } },
      this.label, this.from, h("label", { for: this.to.id }, "to"), this.to, h("button", {}, "Zoom in"), this.all, this.said);
    this.measure(unit);
  }

  stop() { clearTimeout(this.later); }

  /** Measure in this unit, and show all. unit: {name, size (in x), digits}. */
  measure(unit) {
    this.unit = unit;
    say(this.label, `From ${unit.name}`);
    this.set(null);
  }

  /** Show this part in all charts. range: [from, to], or null. */
  set(range) {
    const { size, digits } = this.unit, before = this.range;
    this.range = range;
    [this.from, this.to].forEach((field, at) => { field.value = range === null ? "" : (range[at] / size).toFixed(digits); });
    if (range === null && document.activeElement === this.all) this.from.focus();
    this.all.disabled = range === null;
    this.say("");
    for (const chart of this.charts) chart.look();
    if (String(range) === String(before)) return;
    if (range === null) announce("all of it is shown");
    clearTimeout(this.later);
    this.later = setTimeout(this.settled, SETTLED_MS);
  }

  /** What was chosen; of steps and the like whole ones. */
  chosen(from, to) {
    const { size, digits } = this.unit;
    this.set(digits ? [from, to] : [Math.floor(from / size) * size, Math.ceil(to / size) * size]);
  }

  /** Say what of the part is shown. */
  say(words) { say(this.said, words); }

  asked(event) {
    event.preventDefault();
    const range = [this.from, this.to].map((field) => field.valueAsNumber * this.unit.size);
    this.to.setCustomValidity(range[1] > range[0] ? "" : "must be more than where it begins");
    if (this.to.reportValidity()) this.chosen(...range);
  }
}

/** Where in sorted numbers a range begins, and the place after its end. range: null for all. */
export function placesOf(xs, range) {
  return range === null ? [0, xs.length] : [firstAt(xs, (x) => x >= range[0]), firstAt(xs, (x) => x > range[1])];
}

/** The first place of which this holds, as it does of all after it. */
function firstAt(xs, holds) {
  let low = 0, high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(xs[middle])) high = middle; else low = middle + 1;
  }
  return low;
}
