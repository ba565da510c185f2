// Charts, each with its legend, what a screen reader says of it, and the same numbers as a table.
import uPlot from "./vendor/uPlot.esm.js";
import { fill, h, newId, table } from "./dom.js";
import { wholeText } from "./format.js";
import { placesOf } from "./zoom.js";

const TABLE_ROWS = 200;
const HEIGHT = 220;
const dark = matchMedia("(prefers-color-scheme: dark)");
const still = matchMedia("(prefers-reduced-motion: reduce)");

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/**
 * One chart. title; lines: [{name, colour (a variable of the style sheet), dash, stepped, points}]; x: {name, text(value)};
 * y: {text(value), log}; marks(): [{x, kind: "death" | "join" | "other"}]; spans(): [[from, to, phase], ...]; zoom: the Zoom
 * of all charts of a view, which stays whatever comes.
 */
export class Chart {
  constructor(title, lines, { zoom, x = { name: "step", text: wholeText }, y = { text: String }, marks = () => [], spans = () => [], note = "" }) {
    this.title = title; this.lines = lines; this.x = x; this.y = y; this.marks = marks; this.spans = spans; this.zoom = zoom;
    this.data = [[], ...lines.map(() => [])];
    this.id = newId("chart");
    this.canvas = h("div", { class: "plot", role: "img", "aria-label": title });
    this.legend = h("p", { class: "legend" });
    this.details = h("details", { on: { toggle: () => this.tabulate() } }, h("summary", {}, "Show as table"), h("div"));
    this.element = h("figure", { class: "chart", "aria-labelledby": this.id },
      h("figcaption", { id: this.id }, title, note ? h("span", { class: "help" }, ` ${note}`) : null), this.legend, this.canvas, this.details);
    this.resized = new ResizeObserver(() => this.fit());
    this.resized.observe(this.canvas);
    zoom.charts.add(this);
    this.themed = () => this.build();
    dark.addEventListener("change", this.themed);
  }

  stop() {
    this.resized.disconnect();
    this.zoom.charts.delete(this);
    dark.removeEventListener("change", this.themed);
    this.plot?.destroy();
    this.plot = null;
  }

  /** Show these numbers: data[0] of x, then a column for each line; null leaves a gap, and is passed over in lines. */
  set(data) {
    this.data = data;
    const any = data[0].length > 0 && data.slice(1).some((column) => column.some((one) => one !== null));
    this.element.hidden = !any;
    if (!any) return;
    if (!this.plot) this.build();
    this.look();
  }

  /** Draw the part that is looked at, and say it in all ways. */
  look() {
    if (this.element.hidden || !this.data[0].length) return;
    const { plot, zoom: { range } } = this;
    plot?.batch(() => {
      plot.setData(this.data, range === null);
      if (range !== null) plot.setScale("x", { min: range[0], max: range[1] });
    });
    this.tell(plot?.cursor.idx ?? null);
    this.tabulate();
    this.canvas.setAttribute("aria-label", this.inWords());
  }

  /** Where in the data the part begins that is looked at, and the place after its end. */
  seen() { return placesOf(this.data[0], this.zoom.range); }

  /** What was chosen by dragging. */
  chosen(plot) {
    const { left, width } = plot.select;
    plot.setSelect({ left: 0, width: 0 }, false);
    if (width > 0) this.zoom.chosen(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
  }

  fit() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    if (this.plot) { if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT }); } else if (this.data[0].length) this.build();
  }

  build() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    this.plot?.destroy();
    const axis = { stroke: colour("text-soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 }, font: "12px system-ui" };
    this.plot = new uPlot({
      width, height: HEIGHT, legend: { show: false },
      cursor: {
        sync: { key: this.zoom.sync, filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } }, drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => { this.zoom.set(null); } }, points: { show: !still.matches },
      },
      scales: { x: { time: false }, y: { distr: this.y.log ? 3 : 1, range: this.y.log ? undefined : (_, low, high) => within(low, high, this.y.fromZero) } },
      axes: [{ ...axis, values: (_, ticks) => ticks.map((one) => this.x.text(one)) }, { ...axis, size: 68, values: (_, ticks) => ticks.map((one) => (one === null ? "" : this.y.text(one))) }],
      series: [{}, ...this.lines.map((line) => ({
        label: line.name, stroke: colour(line.colour), width: 1.5, dash: line.dash, spanGaps: true,
        paths: line.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
        points: { size: 5, ...(line.points ? { show: true } : {}) }, // of others where they have room
      }))],
      hooks: { drawClear: [(plot) => this.shade(plot)], draw: [(plot) => this.strike(plot)], setCursor: [(plot) => this.tell(plot.cursor.idx ?? null)], setSelect: [(plot) => this.chosen(plot)] },
    }, this.data, this.canvas);
    if (this.zoom.range !== null) this.look(); else this.tell(null);
  }

  /** The phases, behind the lines. */
  shade(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    for (const [from, to, phase] of this.spans()) {
      if (phase !== "warmup") continue;
      const left = Math.max(bbox.left, plot.valToPos(from, "x", true)), right = Math.min(bbox.left + bbox.width, plot.valToPos(to, "x", true));
      if (right <= left) continue;
      ctx.fillStyle = colour("warmup");
      ctx.fillRect(left, bbox.top, right - left, bbox.height);
    }
    ctx.restore();
  }

  /** Deaths and joins, over them. */
  strike(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = Math.max(1, devicePixelRatio);
    for (const { x, kind } of this.marks()) {
      const at = Math.round(plot.valToPos(x, "x", true));
      if (at < bbox.left || at > bbox.left + bbox.width) continue;
      ctx.strokeStyle = colour(kind === "death" ? "bad" : kind === "join" ? "good" : "text-soft");
      ctx.setLineDash(kind === "death" ? [] : [4 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath(); ctx.moveTo(at, bbox.top); ctx.lineTo(at, bbox.top + bbox.height); ctx.stroke();
    }
    ctx.restore();
  }

  /** The legend: each line's value at the cursor, or its last of those that are seen. */
  tell(index) {
    const at = Math.max(0, index ?? this.seen()[1] - 1);
    if (at >= this.data[0].length) return;
    fill(this.legend, h("span", {}, `${this.x.name} ${this.x.text(this.data[0][at])}`), this.lines.map((line, number) => {
      const value = known(this.data[number + 1], at);
      return h("span", { class: `key ${line.colour}${line.dash ? " dashed" : ""}` }, `${line.name} ${value === null ? "-" : this.y.text(value)}`);
    }));
  }

  /** For who does not see it. */
  inWords() {
    const [xs, ...columns] = this.data.map((column) => column.slice(...this.seen()));
    if (!xs.length) return `${this.title}: nothing in this part`;
    const words = this.lines.map((line, number) => {
      const first = columns[number].find((one) => one !== null), last = known(columns[number], xs.length - 1);
      return first === undefined || last === null ? "" : `${line.name} from ${this.y.text(first)} to ${this.y.text(last)}`;
    }).filter(Boolean);
    return `${this.title}, ${this.x.name} ${this.x.text(xs[0])} to ${this.x.text(xs.at(-1))}: ${words.join("; ")}`;
  }

  tabulate() {
    if (!this.details.open) return;
    const [first, end] = this.seen(), all = end - first;
    const rows = thinned(all, TABLE_ROWS).map((at) => first + at);
    fill(this.details.lastChild, table(`${this.title}${all > rows.length ? `, ${rows.length} of ${all} rows` : ""}`, [this.x.name, ...this.lines.map((line) => line.name)],
      rows.map((at) => [this.x.text(this.data[0][at]), ...this.lines.map((_, number) => {
        const value = this.data[number + 1][at];
        return value === null || value === undefined ? "" : this.y.text(value);
      })])));
  }
}

function within(low, high, fromZero) {
  if (low === null || high === null) return [0, 1];
  if (fromZero) low = Math.min(0, low);
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  return [fromZero && low === 0 ? 0 : low - room, high + room];
}

/** The value there, or the last before it. */
function known(column, at) {
  for (let back = at; back >= 0; back -= 1) if (column[back] !== null && column[back] !== undefined) return column[back];
  return null;
}

/** Which of so many rows, the first and the last among them. */
export function thinned(length, most) {
  if (length <= most) return Array.from({ length }, (_, at) => at);
  return Array.from({ length: most }, (_, at) => Math.round((at * (length - 1)) / (most - 1)));
}
