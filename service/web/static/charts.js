// Charts, each with its legend, what a screen reader says of it, and the same numbers as a table.
import uPlot from "./vendor/uPlot.esm.js";
import { fill, h, newId, table } from "./dom.js";

const TABLE_ROWS = 200;
const HEIGHT = 220;
const dark = matchMedia("(prefers-color-scheme: dark)");
const still = matchMedia("(prefers-reduced-motion: reduce)");

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/**
 * One chart. title; lines: [{name, colour (a variable of the style sheet), dash, stepped, points}]; x: {name, text(value)};
 * y: {text(value), log}; marks(): [{x, kind: "death" | "join" | "other"}]; spans(): [[from, to, phase], ...].
 */
export class Chart {
  constructor(title, lines, { x = { name: "step", text: String }, y = { text: String }, marks = () => [], spans = () => [], sync = null, note = "" } = {}) {
    this.title = title; this.lines = lines; this.x = x; this.y = y; this.marks = marks; this.spans = spans; this.sync = sync;
    this.data = [[], ...lines.map(() => [])];
    this.id = newId("chart");
    this.canvas = h("div", { class: "plot", role: "img", "aria-label": title });
    this.legend = h("p", { class: "legend" });
    this.details = h("details", { on: { toggle: () => this.tabulate() } }, h("summary", {}, "Show as table"), h("div"));
    this.element = h("figure", { class: "chart", "aria-labelledby": this.id },
      h("figcaption", { id: this.id }, title, note ? h("span", { class: "help" }, ` ${note}`) : null), this.legend, this.canvas, this.details);
    this.resized = new ResizeObserver(() => this.fit());
    this.resized.observe(this.canvas);
    this.themed = () => this.build();
    dark.addEventListener("change", this.themed);
  }

  stop() {
    this.resized.disconnect();
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
    if (this.plot) this.plot.setData(data); else this.build();
    this.tell(null);
    if (this.details.open) this.tabulate();
    this.canvas.setAttribute("aria-label", this.inWords());
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
      cursor: { sync: this.sync ? { key: this.sync } : undefined, drag: { x: true, y: false, setScale: true }, points: { show: !still.matches } },
      scales: { x: { time: false }, y: { distr: this.y.log ? 3 : 1, range: this.y.log ? undefined : (_, low, high) => within(low, high, this.y.fromZero) } },
      axes: [{ ...axis, values: (_, ticks) => ticks.map((one) => this.x.text(one)) }, { ...axis, size: 68, values: (_, ticks) => ticks.map((one) => (one === null ? "" : this.y.text(one))) }],
      series: [{}, ...this.lines.map((line) => ({
        label: line.name, stroke: colour(line.colour), width: 1.5, dash: line.dash, spanGaps: true,
        paths: line.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
        points: { show: line.points ?? false, size: 5 },
      }))],
      hooks: { drawClear: [(plot) => this.shade(plot)], draw: [(plot) => this.strike(plot)], setCursor: [(plot) => this.tell(plot.cursor.idx ?? null)] },
    }, this.data, this.canvas);
    this.tell(null);
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

  /** The legend: each line's value at the cursor, or its last. */
  tell(index) {
    const end = this.data[0].length - 1, at = index ?? end;
    if (at < 0) return;
    fill(this.legend, h("span", {}, `${this.x.name} ${this.x.text(this.data[0][at])}`), this.lines.map((line, number) => {
      const value = known(this.data[number + 1], at);
      return h("span", { class: `key ${line.colour}${line.dash ? " dashed" : ""}` }, `${line.name} ${value === null ? "-" : this.y.text(value)}`);
    }));
  }

  /** For who does not see it. */
  inWords() {
    const [xs, ...columns] = this.data;
    const words = this.lines.map((line, number) => {
      const first = columns[number].find((one) => one !== null), last = known(columns[number], xs.length - 1);
      return first === undefined || last === null ? "" : `${line.name} from ${this.y.text(first)} to ${this.y.text(last)}`;
    }).filter(Boolean);
    return `${this.title}, ${this.x.name} ${this.x.text(xs[0])} to ${this.x.text(xs.at(-1))}: ${words.join("; ")}`;
  }

  tabulate() {
    if (!this.details.open) return;
    const rows = thinned(this.data[0].length, TABLE_ROWS);
    const left = this.data[0].length - rows.length;
    fill(this.details.lastChild, table(`${this.title}${left > 0 ? `, ${rows.length} of ${this.data[0].length} rows` : ""}`, [this.x.name, ...this.lines.map((line) => line.name)],
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
