// What comes from a run enters the page as `textContent` only. Here: numbers as text, and curves.

/** States, phases, levels, events that are marked, and facts of machines: as the run writes them. */
const WORDS = [_("running"), _("complete"), _("stopped"), _("failed"), _("waiting"), _("unknown"), _("loading"), _("receiving"), _("computing"), _("sending"), _("paused"), _("joined"), _("left"), _("evicted"), _("rolled back to the last checkpoint"), _("update skipped"), _("info"), _("warning"), _("error"), _("non-finite"), _("outlier"), _("device"), _("processor"), _("cores"), _("system"), _("container")];

const COLOURS = ["#1f6feb", "#d9480f", "#2b8a3e", "#9c36b5", "#c98500", "#0b7285", "#c2255c", "#5f3dc4"];
const OTHERS = "#868e96";
const MARKS = { joined: "#2b8a3e", left: "#868e96", evicted: "#e03131", failed: "#e03131", "rolled back to the last checkpoint": "#9c36b5", "update skipped": "#e8a300" };
const MAX_STACKED = 12;
const MAX_MARKS = 60;
const whole = (value) => decimals(value, 0);
const short = (value) => (known(value) ? value.toLocaleString(language, { maximumSignificantDigits: 4, useGrouping: "always" }) : MISSING);
const bytes = (value) => {
  if (!known(value)) return MISSING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  for (; value >= 1024 && step < units.length - 1; step += 1) value /= 1024;
  return `${decimals(value, value < 10 && step ? 1 : 0)} ${units[step]}`;
};
const ofBytes = (used, all) => (known(used) ? bytes(used) + (known(all) ? ` / ${bytes(all)}` : "") : "");
const rate = (value) => (known(value) ? `${bytes(value)}/s` : MISSING);
const WHEN = { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
const dated = (time) => (time ? new Date(time * 1000).toLocaleString(language, WHEN) : "");

function duration(seconds) {
  if (!known(seconds)) return MISSING;
  if (seconds < 1) return `${whole(seconds * 1000)} ms`;
  if (seconds < 10) return `${decimals(seconds, 1)} s`;
  const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = parts.findIndex(([, size]) => seconds >= size);
  const [unit, size] = parts[first];
  const next = parts[first + 1];
  const rest = next ? Math.floor((seconds % size) / next[1]) : 0;
  return `${Math.floor(seconds / size)} ${unit}` + (rest && first < 2 ? ` ${rest} ${next[0]}` : "");
}

// The axis below the curves, and their smoothing, as a person has chosen them

const STEPS = [...Array(16).keys()].flatMap((power) => [1, 2, 5].map((first) => first * 10 ** power)); // there is no half of a step
const SECONDS = [...[1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200], ...STEPS.slice(0, 9).map((days) => 86400 * days)];
const compact = (value) => value.toLocaleString(language, { notation: "compact" });
const AXES = {
  version: { title: _("step"), shown: whole, distances: STEPS },
  tokens: { title: _("tokens"), shown: compact, distances: STEPS },
  elapsed: { title: _("training time"), shown: (value) => (value ? duration(value) : "0"), distances: SECONDS },
};

/** Where the points of a series stand: at their steps, or at what had been trained by then (a redone step came later). */
function along({ x, columns }) {
  let last = 0;
  return columns.get($("axis").value)?.map((value) => (last = Math.max(last, value ?? last))) ?? x;
}

/** The same for other steps than those of the series, in their order. */
function placed(steps, series) {
  const places = along(series);
  let at = 0;
  return steps.map((step) => {
    while (at < series.x.length - 1 && series.x[at] < step) at += 1;
    return places === series.x ? step : places[at];
  });
}

/** A mean that forgets, without the bias of its beginning. `weight`: how much of it stays at each point. */
function smoothed(values, weight) {
  let mean = 0, bias = 1;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    bias *= weight;
    return mean / (1 - bias);
  });
}

/** A curve as lines of a chart: where it is smoothed, it stays faintly behind. */
function curve(name, values, colour = COLOURS[0]) {
  const weight = Number($("smoothing").value);
  if (!values.some(known)) return [];
  if (!weight) return [{ name, values, colour }];
  return [{ name, values, colour, faint: true }, { name: say("{name}, smoothed", { name }), values: smoothed(values, weight), colour }];
}

/** The place of the nearest value, for a legend: curves have gaps where others have points. */
function nearest(values, at) {
  for (let by = 0; by <= values.length / 20; by += 1) {
    const found = [at - by, at + by].find((place) => known(values[place]));
    if (found !== undefined) return found;
  }
  return at;
}

/** A box with a plot, which is made anew only when its lines change. `lines`: name, values, colour, faint, dots, shown. */
class Chart {
  constructor(parent, { height = 230, marks = () => [] } = {}) {
    this.box = make("div", null, parent, { className: "chart" });
    this.title = make("h3", "", this.box);
    Object.assign(this, { height, marks, made: "", plot: null, width: 0 });
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(this.box);
  }

  fit() {
    const width = this.box.clientWidth - 16;
    if (!this.plot || width <= 0 || width === this.width) return;
    this.width = width;
    this.plot.setSize({ width, height: this.height });
  }

  show(title, x, lines, { log = false, filled = false, most = null } = {}) {
    this.title.textContent = title;
    this.box.hidden = !x.length || !lines.length;
    if (this.box.hidden || !this.box.clientWidth) return;
    this.lines = lines;
    const axis = $("axis").value;
    const made = JSON.stringify([lines.map(({ name, colour, faint, dots }) => [name, colour, faint, dots]), log, filled, axis, language, isDark.matches, x.length === 1]);
    const data = [x, ...lines.map(({ values }) => values)];
    if (made === this.made) return this.plot.setData(data);
    this.plot?.destroy();
    this.made = made;
    this.width = this.box.clientWidth - 16;
    this.plot = new uPlot(this.options({ log, filled, most, axis: AXES[axis], single: x.length === 1 }), data, this.box);
    this.plot.root.querySelector(".u-legend")?.setAttribute("aria-hidden", "true");
  }

  options({ log, filled, most, axis, single }) {
    const style = getComputedStyle(document.documentElement);
    const look = { stroke: style.getPropertyValue("--faint"), grid: { stroke: style.getPropertyValue("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const series = this.lines.map(({ name, colour, faint, dots }, index) => ({
      label: name,
      stroke: colour + (faint ? (isDark.matches ? "b8" : "70") : ""),
      width: filled ? 0.5 : faint ? 1 : 2,
      fill: filled ? colour : undefined,
      spanGaps: !filled,
      paths: dots ? () => null : undefined,
      points: { show: Boolean(dots) || single, size: 6, fill: colour },
      value: (_plot, value, _series, point) => short(point === null || point === undefined ? null : (this.lines[index].shown?.[point] ?? value)),
    }));
    return {
      width: this.width, height: this.height,
      scales: { x: { time: false }, y: log ? { distr: 3 } : most ? { range: [0, most] } : {} },
      axes: [
        { ...look, size: 30, space: 75, incrs: axis.distances, values: (_plot, ticks) => ticks.map(axis.shown) },
        { ...look, size: 58, values: (_plot, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))) },
      ],
      series: [{ label: say(axis.title), value: (_plot, value) => (known(value) ? axis.shown(value) : MISSING) }, ...series],
      legend: { live: true },
      cursor: { sync: { key: axis.title }, dataIdx: (plot, line, at) => nearest(plot.data[line], at) },
      hooks: { draw: [(plot) => this.drawMarks(plot)] },
    };
  }

  drawMarks(plot) {
    const context = plot.ctx;
    context.save();
    context.setLineDash([4, 4]);
    context.globalAlpha = 0.6;
    for (const { place, event } of this.marks()) {
      const x = plot.valToPos(place, "x", true);
      if (x < plot.bbox.left || x > plot.bbox.left + plot.bbox.width) continue;
      context.strokeStyle = MARKS[event];
      context.beginPath();
      context.moveTo(x, plot.bbox.top);
      context.lineTo(x, plot.bbox.top + plot.bbox.height);
      context.stroke();
    }
    context.restore();
  }
}

/** Lines from the top of the pile to its bottom, each filled down to zero: what is below covers it. */
function stacked(shares) {
  const total = (values) => values.reduce((sum, value) => sum + value, 0);
  const sorted = [...shares.columns].sort((one, other) => total(other[1]) - total(one[1]));
  const most = sorted.length > MAX_STACKED + 1 ? MAX_STACKED : sorted.length;
  const parts = sorted.slice(0, most).map(([name, values], index) => ({ name, values, colour: COLOURS[index % COLOURS.length] }));
  const rest = sorted.slice(most);
  if (rest.length) parts.push({ name: say("{n} others", { n: rest.length }), values: shares.x.map((_x, at) => rest.reduce((sum, [, values]) => sum + values[at], 0)), colour: OTHERS });
  const piled = new Array(shares.x.length).fill(0);
  return parts.map(({ name, values, colour }) => ({
    name, colour, values: values.map((value, at) => (piled[at] += 100 * value)), shown: values.map((value) => 100 * value),
  })).reverse();
}

const SVG = "http://www.w3.org/2000/svg";

/** How busy a machine was. `values`: 0 to 1, or null. */
function spark(values, label) {
  const drawn = (tag, attributes, ...inside) => {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...inside);
    return made;
  };
  const step = 120 / Math.max(values.length - 1, 1);
  const points = values.map((value, at) => [at * step, 27 - 26 * Math.min(1, value ?? 0)].map((number) => number.toFixed(1)).join(",")).join(" ");
  return drawn("svg", { viewBox: "0 0 120 28", preserveAspectRatio: "none", class: "spark", role: "img", "aria-label": label },
    drawn("polygon", { class: "area", points: `0,28 ${points} 120,28` }), drawn("polyline", { class: "busy", points }));
}
