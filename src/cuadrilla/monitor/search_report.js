"use strict";
// The page of a search; report_shared.js comes before it.

const SVG = "http://www.w3.org/2000/svg";
const SPACING = 112, HEIGHT = 380, TOP = 50, BOTTOM = 30, SIDE = 62;
const WIDE_SCORES = 10;
const MOST_LABELS = 12;
const LONGEST = -1;
const { trials, axes, metric, maximize } = report;
const kept = new Map();
let chosen = report.rungs.length > 1 ? 0 : LONGEST;

const compact = (value) => (value === null ? "" : new Intl.NumberFormat(language, { notation: "compact", maximumFractionDigits: 2 }).format(value));
const precise = (value) => (value === null ? "" : decimal(Number(value.toPrecision(5)).toString()));
const figure = (value) => (Number.isInteger(value) && Math.abs(value) >= 1e4 && Math.abs(value) < 1e15 ? whole(value) : short(value));
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
const shownValue = (value) => (value === undefined || value === null ? "" : typeof value === "number" ? figure(value) : value);
const inSteps = (rung) => {
  if (report.function) return say("budget %s", short(report.rungs[rung] / report.rungs.at(-1)));
  return report.rungs[rung] ? say("%s steps", whole(report.rungs[rung])) : say("steps not known");
};
const metricName = { val_loss: say("loss"), loss: say("loss"), val_bits_per_byte: say("bits per byte"), bits_per_byte: say("bits per byte") }[metric] ?? metric;
const scoreOf = (trial) => (chosen === LONGEST ? trial.score : trial.by_rung[chosen] ?? null);
/** Those that have come as far as what is chosen, or have failed at once. */
const inView = () => trials.filter((trial) => scoreOf(trial) !== null || (chosen <= 0 && trial.score === null));
const better = (one, other) => (maximize ? other - one : one - other);

function draw(tag, attributes, parent, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent?.append(made);
  return made;
}

// -- head and the best -------------------------------------------------------------------------------------------------

function showHead() {
  document.title = say("%s: search for better settings", report.name);
  document.getElementById("name").textContent = report.name;
  const made = new Date(report.made * 1000).toISOString().slice(0, 16).replace("T", " ");
  const how = { grid: "all combinations in turn", random: "by chance", tpe: "by what earlier trials have shown (TPE)" }[report.sampler];
  document.getElementById("about").textContent = say("%s; %s, written %s UTC", say(report.state), say(how), made);
  const figures = [["trials begun", say("%s of %s", whole(report.num_begun), whole(report.num_trials))], ["runs finished", whole(report.num_runs)]];
  if (report.num_failed) figures.push(["of these failed", whole(report.num_failed)]);
  if (report.function) figures.push(["function", report.function]);
  if (report.tokens) figures.push(["tokens trained", compact(report.tokens)]);
  figures.push(["time of all runs", duration(report.seconds)]);
  if (report.best) figures.unshift([say("best %s", metricName), precise(report.best.score)]);
  showFigures(figures);
}

function limits({ name, at_least: least, at_most: most }) {
  const found = [];
  if (most !== null) found.push(say("%s at most %s", name, figure(most)));
  if (least !== null) found.push(say("%s at least %s", name, figure(least)));
  return found;
}

function command(text, ...lines) {
  const box = document.getElementById("commands");
  box.append(element("p", say(text)), element("pre", lines.join("\n")));
}

function showBest() {
  const { best } = report;
  const note = document.querySelector("#best .note");
  const said = report.constraints.flatMap(limits);
  const more = said.length ? [say("Constraints: %s.", said.join("; "))] : [];
  if (report.rungs.length > 1) more.push(say("Rungs: runs of %s; one trial in %s goes on to the next.", report.rungs.map((_, rung) => inSteps(rung)).join(", "), report.factor));
  if (!best) {
    const none = trials.some((trial) => trial.score !== null) ? "No trial with a score meets all constraints yet." : "No run has finished with a score yet.";
    note.textContent = [say(none), ...more].join(" ");
    return document.querySelector("#best table").remove();
  }
  const direction = maximize ? "%s of run %s, higher is better." : "%s of run %s, lower is better.";
  const run = report.function && report.rungs.length === 1 ? best.run : `${best.run} (${inSteps(best.rung)})`;
  note.textContent = [say(direction, `${metricName} ${precise(best.score)}`, run), ...more].join(" ");
  fillTable("best", [["setting"], ["value"]], Object.entries(best.values).map(([key, value]) => ({ cells: [key, shownValue(value)] })));
  document.getElementById("best").classList.remove("empty");
  if (best.train) command("Train a run of its own with these settings:", best.train);
  if (best.arguments) command(say("Arguments for %s:", report.function), best.arguments);
  if (best.evaluate) command("Evaluate the run that was the best:", best.evaluate);
  if (best.sets) command("Use them in another run:", `cuadrilla train RUN ${best.sets}`);
}

// -- axes --------------------------------------------------------------------------------------------------------------

/** Where a value is on an axis, 0 to 1; null: it is not there. `at` is the way back, as text. */
class Axis {
  constructor({ key, kind, low = 0, high = 0, is_whole = false, choices = [] }) {
    Object.assign(this, { key, kind, low, high, isWhole: is_whole, choices });
    this.order = new Map(choices.map((choice, index) => [choice, index]));
  }

  position(value) {
    if (value === undefined || value === null) return null;
    if (this.kind === "choice") {
      const index = this.order.get(value);
      return index === undefined ? null : this.choices.length > 1 ? index / (this.choices.length - 1) : 0.5;
    }
    if (typeof value !== "number" || (this.kind === "log" && value <= 0)) return null;
    if (!(this.high > this.low)) return 0.5;
    const part = this.kind === "log" ? Math.log(value / this.low) / Math.log(this.high / this.low) : value / (this.high - this.low) - this.low / (this.high - this.low);
    return Number.isFinite(part) ? Math.min(1, Math.max(0, part)) : null;
  }

  at(part) {
    if (this.kind === "choice") return this.choices[Math.round(part * (this.choices.length - 1))] ?? "";
    const value = this.valueAt(part);
    return this.isWhole ? whole(value) : decimal(Number(value.toPrecision(3)).toString());
  }

  valueAt(part) {
    return this.kind === "log" ? this.low * (this.high / this.low) ** part : this.low * (1 - part) + this.high * part;
  }

  /** [position, text] of what is written beside it. */
  labels() {
    if (this.kind !== "choice") {
      if (!(this.high > this.low)) return [[0.5, this.at(0)]];
      const found = [0, 0.25, 0.5, 0.75, 1].map((part) => [this.isWhole ? this.position(Math.round(this.valueAt(part))) : part, this.at(part)]);
      return found.filter(([, text], index) => found.findIndex(([, other]) => other === text) === index);
    }
    const every = Math.ceil(this.choices.length / MOST_LABELS);
    return this.choices.map((choice) => [this.position(choice), choice]).filter((_, index) => index % every === 0);
  }

  get step() {
    return this.kind === "choice" && this.choices.length > 1 ? 1 / (this.choices.length - 1) : 0.05;
  }
}

function scoreAxis(shown) {
  const scores = shown.map(scoreOf).filter((score) => score !== null);
  const [low, high] = scores.length ? [Math.min(...scores), Math.max(...scores)] : [0, 0];
  return new Axis({ key: metricName, kind: low > 0 && high / low > WIDE_SCORES ? "log" : "number", low, high });
}

// -- parallel coordinates ----------------------------------------------------------------------------------------------

const lines = new Map();
let columns = [], places = [];

/** From good to bad by the place among the scores: one that is far off takes no colour from the others. */
function colours(shown) {
  const scored = shown.filter((trial) => scoreOf(trial) !== null).sort((one, other) => better(scoreOf(one), scoreOf(other)));
  const mixed = (one, other, part) => `color-mix(in srgb, var(--${other}) ${(100 * part).toFixed(1)}%, var(--${one}))`;
  return new Map(scored.map((trial, index) => {
    const part = scored.length > 1 ? index / (scored.length - 1) : 0;
    return [trial, part < 0.5 ? mixed("good", "middle", 2 * part) : mixed("middle", "bad", 2 * part - 1)];
  }));
}

const yOf = (part) => TOP + (1 - part) * (HEIGHT - TOP - BOTTOM);
const partOf = (y) => Math.min(1, Math.max(0, 1 - (y - TOP) / (HEIGHT - TOP - BOTTOM)));

/** Through the axes that the trial is on; where it is not, the line ends, and a place between two gaps is a dot. */
function path(points) {
  const pieces = [];
  points.forEach((y, index) => {
    if (y === null) return;
    const here = `${places[index].toFixed(1)} ${y.toFixed(1)}`;
    const follows = index > 0 && points[index - 1] !== null;
    pieces.push(follows ? `L${here}` : `M${here}h0`);
  });
  return pieces.join("");
}

function showParallel() {
  const box = document.querySelector("#parallel .scroll");
  const shown = inView();
  columns = [...axes.map((axis) => new Axis(axis)), scoreAxis(shown)];
  const width = Math.max(box.clientWidth || 0, 2 * SIDE + SPACING * (columns.length - 1));
  places = columns.map((_, index) => SIDE + (index * (width - 2 * SIDE)) / (columns.length - 1 || 1));
  const picture = draw("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "group" });
  picture.setAttribute("aria-label", say("parallel coordinates of %s trials", whole(shown.length)));
  const group = draw("g", { class: "lines" }, picture);
  lines.clear();
  const coloured = colours(shown);
  for (const trial of [...shown].reverse()) lines.set(trial, drawLine(group, trial, coloured.get(trial)));
  columns.forEach((axis, index) => drawAxis(picture, axis, index));
  box.replaceChildren(picture);
  filter();
}

function drawLine(group, trial, colour) {
  const parts = columns.map((axis, index) => axis.position(index < axes.length ? trial.values[axis.key] : scoreOf(trial)));
  const line = draw("path", { d: path(parts.map((part) => (part === null ? null : yOf(part)))) }, group);
  line.style.stroke = "var(--faint)";
  if (colour) line.style.stroke = colour;  // a browser that cannot mix colours keeps the other
  if (trial.missed.length) line.classList.add("missed");
  line.addEventListener("pointerenter", () => point(trial));
  line.addEventListener("pointerleave", () => point(null));
  return { line, parts };
}

function drawAxis(picture, axis, index) {
  const x = places[index];
  const cutAt = axis.key.lastIndexOf(".") + 1;
  const name = draw("g", {}, picture);
  draw("title", {}, name, axis.key);
  if (cutAt) draw("text", { x, y: 16, "text-anchor": "middle", class: "tick" }, name, cut(axis.key.slice(0, cutAt), 18));
  draw("text", { x, y: 32, "text-anchor": "middle" }, name, cut(axis.key.slice(cutAt), 16));
  draw("line", { x1: x, x2: x, y1: yOf(1), y2: yOf(0), class: "axis" }, picture);
  for (const [part, text] of axis.labels()) {
    draw("text", { x: x - 7, y: yOf(part) + 4, "text-anchor": "end", class: "tick" }, picture, cut(text, 9));
  }
  const range = draw("rect", { x: x - 9, width: 18, y: yOf(1), height: 0, class: "kept" }, picture);
  const hit = draw("rect", { x: x - 17, width: 34, y: yOf(1) - 8, height: yOf(0) - yOf(1) + 16, class: "hit" }, picture);
  const handles = [0, 1].map((end) => drawHandle(picture, axis, index, end));
  axis.show = () => {
    const [low, high] = kept.get(index) ?? [0, 1];
    range.setAttribute("y", yOf(high) - 3);
    range.setAttribute("height", kept.has(index) ? yOf(low) - yOf(high) + 6 : 0);
    handles.forEach((handle, end) => {
      const part = [low, high][end];
      handle.setAttribute("transform", `translate(${x} ${yOf(part) + (end ? -5 : 5)})`);
      handle.setAttribute("aria-valuenow", Math.round(100 * part));
      handle.setAttribute("aria-valuetext", axis.at(part));
    });
  };
  brush(hit, picture, axis, index);
}

function drawHandle(picture, axis, index, end) {
  const handle = draw("path", { d: end ? "M-7 3L0 -5L7 3Z" : "M-7 -3L0 5L7 -3Z", class: "handle", role: "slider", tabindex: 0, "aria-orientation": "vertical", "aria-valuemin": 0, "aria-valuemax": 100 }, picture);
  handle.setAttribute("aria-label", say(end ? "%s: to" : "%s: from", axis.key));
  handle.addEventListener("keydown", (event) => {
    const range = [...(kept.get(index) ?? [0, 1])];
    const moves = { ArrowUp: axis.step, ArrowRight: axis.step, ArrowDown: -axis.step, ArrowLeft: -axis.step, PageUp: 0.25, PageDown: -0.25, Home: -1, End: 1 };
    if (event.key === "Escape" || event.key === "Delete") return keep(index, null);
    if (!(event.key in moves)) return;
    event.preventDefault();
    const moved = Math.min(1, Math.max(0, range[end] + moves[event.key]));
    range[end] = end ? Math.max(moved, range[0]) : Math.min(moved, range[1]);
    keep(index, range);
  });
  return handle;
}

/** Dragging keeps what is between; a click on a choice keeps that one, elsewhere it keeps all. */
function brush(hit, picture, axis, index) {
  let from = null;
  const here = (event) => partOf(event.clientY - picture.getBoundingClientRect().top);
  hit.addEventListener("pointerdown", (event) => {
    from = here(event);
    hit.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  hit.addEventListener("pointermove", (event) => {
    if (from === null || Math.abs(here(event) - from) < 0.02) return;
    keep(index, [Math.min(from, here(event)), Math.max(from, here(event))]);
  });
  hit.addEventListener("pointerup", (event) => {
    if (from !== null && Math.abs(here(event) - from) < 0.02) {
      const nearest = axis.kind === "choice" ? axis.position(axis.at(from)) : null;
      const before = kept.get(index);
      const again = before && before[0] === nearest && before[1] === nearest;
      keep(index, nearest === null || again ? null : [nearest, nearest]);
    }
    from = null;
  });
  hit.addEventListener("pointercancel", () => (from = null));
}

function keep(index, range) {
  if (range === null || (range[0] <= 0 && range[1] >= 1)) kept.delete(index);
  else kept.set(index, range);
  filter();
}

function filter() {
  const near = 1e-9;
  let number = 0;
  for (const [trial, { line, parts }] of lines) {
    const passes = [...kept].every(([index, [low, high]]) => parts[index] !== null && parts[index] >= low - near && parts[index] <= high + near);
    line.classList.toggle("off", !passes);
    number += passes ? 1 : 0;
    const row = rows.get(trial);
    if (row) row.hidden = !passes;
  }
  for (const [trial, row] of rows) if (!lines.has(trial)) row.hidden = kept.size > 0;
  columns.forEach((axis) => axis.show());
  document.querySelector("#parallel output").textContent = say("%s of %s trials", whole(number), whole(lines.size));
  document.querySelector("#parallel button").hidden = !kept.size;
}

/** The trial that is pointed at, in the chart and in the table. */
function point(trial) {
  for (const [other, { line }] of lines) line.classList.toggle("shown", other === trial);
  for (const [other, row] of rows) row.classList.toggle("shown", other === trial);
  const said = trial ? [trial.run, scoreOf(trial) === null ? say("failed") : `${metricName} ${precise(scoreOf(trial))}`, ...Object.entries(trial.values).map(([key, value]) => `${key} ${shownValue(value)}`)] : [];
  document.getElementById("under").textContent = said.join(" · ");
}

function showPicker() {
  document.querySelector("#parallel button").addEventListener("click", () => {
    kept.clear();
    filter();
  });
  if (report.rungs.length < 2) return;
  const list = element("select");
  const options = report.rungs.map((_, rung) => [rung, say("rung %s: runs of %s", rung, inSteps(rung))]);
  for (const [value, text] of [...options, [LONGEST, say("the longest run of each trial")]]) list.append(Object.assign(element("option", text), { value }));
  list.value = String(chosen);
  list.addEventListener("change", () => {
    chosen = Number(list.value);
    kept.delete(axes.length);
    showParallel();
    showScatter();
  });
  document.getElementById("which").append(`${say("scores of")} `, list);
}

// -- the table ---------------------------------------------------------------------------------------------------------

const rows = new Map();

function notes(trial) {
  const found = trial.missed.map(({ name, value, limit, at_most: most }) => say(most ? "%s is %s, at most %s" : "%s is %s, at least %s", name, figure(value), figure(limit)));
  const state = { running: say("going on"), "broken off": say("broken off"), failed: trial.reason ? `${say("failed")}: ${trial.reason}` : say("failed") }[trial.state];
  return [...(state ? [state] : []), ...(found.length ? [say("misses: %s", found.join("; "))] : [])].join(". ");
}

function showTrials() {
  const table = document.querySelector("#trials table");
  const fields = [
    { name: say("run"), of: (trial) => trial.run, sort: (trial) => trial.trial },
    { name: say("score"), of: (trial) => precise(trial.score), sort: (trial) => trial.score, number: true },
    ...(report.rungs.length > 1 ? [{ name: say("rung"), of: (trial) => String(trial.rung), sort: (trial) => trial.rung, number: true }] : []),
    ...axes.map(({ key, kind }) => ({ name: key, key, of: (trial) => shownValue(trial.values[key]), sort: (trial) => trial.values[key] ?? null, number: kind !== "choice" })),
    { name: say("time"), of: (trial) => duration(trial.seconds), sort: (trial) => trial.seconds, number: true },
    ...(report.tokens ? [{ name: say("tokens"), of: (trial) => whole(trial.tokens), sort: (trial) => trial.tokens, number: true }] : []),
    { name: say("where"), of: (trial) => trial.place, sort: (trial) => trial.place },
    { name: say("notes"), of: notes, sort: notes, className: "notes" },
  ];
  const head = element("tr");
  const body = element("tbody");
  fields.forEach((field) => {
    const cell = element("th", undefined, field.number ? "number" : "");
    const button = element("button");
    button.type = "button";
    const dot = field.key ? field.name.lastIndexOf(".") + 1 : 0;
    if (dot) button.append(element("small", field.name.slice(0, dot)));
    button.append(element("span", field.name.slice(dot)));
    button.addEventListener("click", () => sortBy(field, cell, head, body));
    cell.append(button);
    head.append(cell);
  });
  for (const trial of trials) {
    const row = element("tr", undefined, report.best && trial.trial === report.best.trial ? "set" : "");
    for (const field of fields) row.append(element("td", field.of(trial), [field.className, field.number ? "number" : "", field.className && (trial.missed.length || trial.state === "failed") ? "bad" : ""].filter(Boolean).join(" ")));
    row.addEventListener("pointerenter", () => point(trial));
    row.addEventListener("pointerleave", () => point(null));
    rows.set(trial, row);
    body.append(row);
  }
  const top = element("thead");
  top.append(head);
  table.append(top, body);
  const all = report.num_begun > trials.length ? say("Click a heading to sort. The best %s of %s trials are shown.", whole(trials.length), whole(report.num_begun)) : say("Click a heading to sort.");
  document.querySelector("#trials .note").textContent = [all, ...(report.rungs.length > 1 ? [say("A trial's score is that of its longest run.")] : [])].join(" ");
}

/** What is not there comes last, whichever way. */
function sortBy({ sort }, cell, head, body) {
  const up = cell.getAttribute("aria-sort") !== "ascending";
  for (const each of head.children) each.removeAttribute("aria-sort");
  cell.setAttribute("aria-sort", up ? "ascending" : "descending");
  const lacks = (value) => value === null || value === undefined || value === "";
  const order = (one, other) => (typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other), language, { numeric: true }));
  const sorted = [...rows.keys()].sort((one, other) => {
    const [first, second] = [sort(one), sort(other)];
    if (lacks(first) || lacks(second)) return Number(lacks(first)) - Number(lacks(second));
    return up ? order(first, second) : order(second, first);
  });
  body.append(...sorted.map((trial) => rows.get(trial)));
}

// -- what has decided, and the score by each setting -------------------------------------------------------------------

function showImportance() {
  const { parts, problem, trials: number, fewest, best } = report.importance;
  const box = document.querySelector("#importance .bars");
  for (const [key, part] of parts) {
    const bar = element("i");
    bar.style.width = `${100 * (part / parts[0][1])}%`;
    const holder = element("span");
    holder.append(bar);
    box.append(element("span", key), holder, element("b", percent(part)));
  }
  const said = {
    few: () => say("Too few trials have finished for this: %s of at least %s.", number, fewest),
    optuna: () => say("This needs Optuna: pip install 'cuadrilla[tune]', then write the report again."),
    none: () => say("The settings do not tell good trials from others yet."),
    "": () => `${say("From the shortest runs of %s trials: how far the best %s of them differ from all in each setting (PED-ANOVA).", whole(number), whole(Math.ceil(best * number)))} ${say("It says what mattered within the ranges that were searched, not what is best.")}`,
  }[problem];
  document.querySelector("#importance .note").textContent = said();
}

/** Strokes of no length with round ends are dots: one element for all of them. */
const dots = (points) => points.map(([x, y]) => `M${x.toFixed(1)} ${y.toFixed(1)}h0`).join("");
const crosses = (points) => points.map(([x, y]) => `M${(x - 3).toFixed(1)} ${(y - 3).toFixed(1)}l6 6m0 -6l-6 6`).join("");

function showScatter() {
  const box = document.querySelector("#scatter .charts");
  const scored = inView().filter((trial) => scoreOf(trial) !== null);
  box.replaceChildren();
  document.getElementById("scatter").classList.toggle("empty", !scored.length || !axes.length);
  const scores = scoreAxis(scored);
  const able = scored.filter((trial) => !trial.missed.length).sort((one, other) => better(scoreOf(one), scoreOf(other)));
  for (const axis of axes.map((each) => new Axis(each))) drawScatter(box, axis, scores, scored, able[0]);
}

function drawScatter(parent, axis, scores, scored, best) {
  const [width, height, left, right, top, bottom] = [320, 200, 56, 12, 10, 34];
  const box = element("div", undefined, "chart");
  box.append(element("h3", axis.key));
  const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img" }, box);
  picture.setAttribute("aria-label", say("%s against %s", metricName, axis.key));
  const inset = axis.kind === "choice" ? 0.1 : 0.03;
  const x = (part) => left + (inset + part * (1 - 2 * inset)) * (width - left - right);
  const y = (part) => top + (0.04 + 0.92 * (1 - part)) * (height - top - bottom);
  for (const [part, text] of scores.labels()) {
    draw("line", { x1: left, x2: width - right, y1: y(part), y2: y(part), class: "grid" }, picture);
    draw("text", { x: left - 5, y: y(part) + 4, "text-anchor": "end", class: "tick" }, picture, text);
  }
  const labels = axis.labels();
  const room = Math.floor((width - left - right) / Math.max(labels.length, 1) / 6.5);
  for (const [part, text] of labels) draw("text", { x: x(part), y: height - 12, "text-anchor": "middle", class: "tick" }, picture, cut(text, Math.max(room, 3)));
  const where = (trial) => [axis.position(trial.values[axis.key]), scores.position(scoreOf(trial))];
  const there = scored.filter((trial) => where(trial).every((part) => part !== null));
  const at = (trial) => {
    const [across, up] = where(trial);
    const aside = axis.kind === "choice" ? (((trial.trial * 0.618) % 1) - 0.5) * 12 : 0;
    return [x(across) + aside, y(up)];
  };
  const [met, missed] = [there.filter((trial) => !trial.missed.length), there.filter((trial) => trial.missed.length)];
  draw("path", { d: dots(met.map(at)), class: "dots" }, picture);
  draw("path", { d: crosses(missed.map(at)), class: "dots missed" }, picture);
  if (best && there.includes(best)) draw("circle", { cx: at(best)[0], cy: at(best)[1], r: 6, class: "ring" }, picture);
  parent.append(box);
}

// -- how the search went -----------------------------------------------------------------------------------------------

function showProgress() {
  const { progress, curves } = report;
  const section = document.getElementById("progress");
  const box = section.querySelector(".charts");
  if (!progress.length && !curves.length) return section.classList.add("empty");
  if (progress.length) {
    const byTokens = progress.at(-1).tokens > 0;
    const x = progress.map((each, index) => (byTokens ? each.tokens : index + 1));
    const series = [{ name: say("best so far"), values: progress.map((each) => each.best), stepped: true }, { name: say("each run"), values: progress.map((each) => each.score), dots: true }];
    const log = wide(series);
    drawChart(box, say(byTokens ? "Best score so far, by tokens trained" : "Best score so far, by runs"), series, { x, label: say(byTokens ? "tokens" : "runs"), log, ticks: compact });
  }
  if (curves.length) {
    const [x, ...values] = uPlot.join(curves.map(({ points }) => [points.map(([tokens]) => tokens), points.map(([, value]) => value)]));
    const series = curves.map(({ run }, index) => ({ name: run, values: values[index].map((value) => value ?? null) }));
    const name = report.curve_metric === "val_loss" ? say("loss") : report.curve_metric === "val_bits_per_byte" ? say("bits per byte") : report.curve_metric;
    drawChart(box, say("Held-out %s of the best trials", name), series, { x, label: say("tokens"), log: wide(series), ticks: compact });
  }
  if (report.rungs.length > 1) section.querySelector(".note").textContent = say("Scores of all rungs are in one chart: longer runs score better by themselves.");
}

function wide(series) {
  const values = series.flatMap((each) => each.values).filter((value) => value !== null);
  return values.length > 0 && Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) > WIDE_SCORES;
}

showHead();
showBest();
showTrials();
showPicker();
showParallel();
showImportance();
showScatter();
showProgress();
let drawnWidth = document.querySelector("#parallel .scroll").clientWidth;
new ResizeObserver(() => {
  const width = document.querySelector("#parallel .scroll").clientWidth;
  if (Math.abs(width - drawnWidth) < 8) return;  // a scroll bar that comes and goes
  drawnWidth = width;
  showParallel();
}).observe(document.querySelector("#parallel .scroll"));
document.body.dataset.ready = "yes";
