"use strict";
// Everything that comes from the run is put in as text (textContent), never as HTML.

const report = JSON.parse(document.getElementById("report").textContent);
const COLOURS = ["#1f6feb", "#d9480f", "#2b8a3e", "#9c36b5", "#e8a300", "#0b7285", "#c2255c", "#5f3dc4"];
const MARKS = { joined: "#2b8a3e", left: "#e03131", evicted: "#e03131", "rolled back to the last checkpoint": "#9c36b5", "update skipped": "#e8a300" };
const WORTH_A_WARNING = 0.01;
const steps = report.rows.map((row) => row.version);

const language = document.documentElement.lang;
const WORDS = new Map(Object.entries(report.words));
const say = (words, ...values) => (WORDS.get(words) ?? words).replace(/%s/g, (blank) => values.shift() ?? blank);
const whole = (value) => Math.round(value).toLocaleString(language);
const decimal = (text) => (language === "es" ? text.replace(".", ",") : text);
const short = (value) => (value === null || value === undefined ? "–" : decimal(Number(value.toPrecision(4)).toString()));
const rough = (value) => decimal(Number(value.toPrecision(2)).toString());
const percent = (part) => (part === null ? "–" : `${decimal((100 * part).toFixed(1))} %`);

const measure = (key) => say(key.replace("val_", "").replaceAll("_", " "));
const isMeasure = (key) => key.startsWith("val_") && !key.endsWith("_error");

function duration(seconds) {
  const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = parts.findIndex(([, size]) => seconds >= size);
  if (first < 0) return "0 s";
  const [unit, size] = parts[first];
  const next = parts[first + 1];
  const rest = next ? Math.floor((seconds % size) / next[1]) : 0;
  return `${Math.floor(seconds / size)} ${unit}` + (rest ? ` ${rest} ${next[0]}` : "");
}

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function fillTable(section, columns, rows) {
  const table = document.querySelector(`#${section} table`);
  if (!rows.length) return document.getElementById(section).classList.add("empty");
  const head = element("tr");
  for (const [name, number] of columns) head.append(element("th", say(name), number ? "number" : ""));
  table.append(head);
  for (const { cells, set } of rows) {
    const line = element("tr", undefined, set ? "set" : "");
    cells.forEach((cell, index) => line.append(element("td", cell, columns[index][1] ? "number" : "")));
    table.append(line);
  }
}

// -- head ------------------------------------------------------------------------------------------------------------

function span() {
  const times = report.events.map((event) => event.time).filter((time) => time);
  return times.length > 1 ? Math.max(...times) - Math.min(...times) : 0;
}

function showHead() {
  document.title = `${report.name} · ${say("cuadrilla report")}`;
  document.getElementById("name").textContent = report.name;
  const made = new Date(report.made * 1000).toISOString().slice(0, 16).replace("T", " ");
  const version = report.environment.cuadrilla ? `cuadrilla ${report.environment.cuadrilla}, ` : "";
  document.getElementById("about").textContent = say("%s; %swritten %s UTC", say(report.state), version, made);
  const last = (key) => report.rows.map((row) => row[key]).filter((value) => value !== null && value !== undefined).at(-1);
  const figures = [["step", whole(report.version)], ["tokens", whole(report.tokens)], ["loss", short(last("loss"))]];
  if (report.parameters) figures.unshift(["parameters", whole(report.parameters)]);
  const validation = new Set(report.rows.flatMap((row) => Object.keys(row).filter(isMeasure)));
  for (const key of validation) {
    const error = last(`${key}_error`);
    figures.push([say("held-out %s", measure(key)), short(last(key)) + (error === undefined ? "" : ` ± ${rough(error)}`)]);
  }
  if (report.best) figures.push(["lowest held-out loss", say("%s at step %s", short(report.best.loss), whole(report.best.version))]);
  const rates = report.rows.map((row) => row.tokens_per_second).filter((rate) => rate).sort((a, b) => a - b);
  if (rates.length) figures.push(["tokens/s (median)", whole(rates[rates.length >> 1])]);
  const { splits = {}, vocabulary = 0, leak = 0 } = report.data;
  const train = splits.train ?? {};
  if (train.num_tokens) figures.push([say("bytes per token (%s tokens)", whole(vocabulary)), short(train.num_bytes / train.num_tokens)]);
  if (leak >= WORTH_A_WARNING) {
    const text = say("%s of the held-out text is in the training text: its loss looks too good.", percent(leak));
    document.getElementById("warning").textContent = text;
  }
  if (span()) figures.push(["from first to last event", duration(span())]);
  for (const [name, value] of figures) {
    const card = element("div");
    card.append(element("dt", say(name)), element("dd", value));
    document.getElementById("figures").append(card);
  }
}

// -- curves ----------------------------------------------------------------------------------------------------------

function smoothed(values) {
  const keep = Math.max(0, 1 - 100 / Math.max(values.length, 1));
  let mean = null;
  return values.map((value) => {
    if (value === null) return mean;
    mean = mean === null ? value : keep * mean + (1 - keep) * value;
    return mean;
  });
}

const column = (key) => report.rows.map((row) => row[key] ?? null);
const marks = report.events.filter((event) => event.event in MARKS && event.version > 0);

function drawMarks(plot) {
  const context = plot.ctx;
  context.save();
  for (const mark of marks) {
    const x = plot.valToPos(mark.version, "x", true);
    if (x < plot.bbox.left || x > plot.bbox.left + plot.bbox.width) continue;
    context.strokeStyle = MARKS[mark.event];
    context.globalAlpha = 0.5;
    context.setLineDash([4, 4]);
    context.beginPath();
    context.moveTo(x, plot.bbox.top);
    context.lineTo(x, plot.bbox.top + plot.bbox.height);
    context.stroke();
  }
  context.restore();
}

function chart(title, series, { log = false } = {}) {
  const box = element("div", undefined, "chart");
  box.append(element("h3", say(title)));
  document.querySelector("#curves .charts").append(box);
  const style = getComputedStyle(document.documentElement);
  const axis = { stroke: style.getPropertyValue("--faint"), grid: { stroke: style.getPropertyValue("--line") } };
  const lines = series.map(({ name, dots, faint }, index) => ({
    label: name,
    stroke: COLOURS[index % COLOURS.length] + (faint ? "66" : ""),
    width: faint ? 1 : 2,
    spanGaps: true,
    paths: dots ? () => null : undefined,
    points: { show: Boolean(dots) || steps.length === 1, size: 7, fill: COLOURS[index % COLOURS.length] },
    value: (_plot, value) => short(value),
  }));
  const size = () => ({ width: box.clientWidth - 16, height: 260 });
  const plot = new uPlot(
    {
      ...size(),
      scales: { x: { time: false }, y: log ? { distr: 3 } : {} },
      axes: [{ ...axis }, { ...axis, size: 64, values: (_plot, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))) }],
      series: [{ label: say("step") }, ...lines],
      cursor: { sync: { key: "steps" } },
      hooks: { draw: [drawMarks] },
    },
    [steps, ...series.map(({ values }) => values)],
    box,
  );
  new ResizeObserver(() => plot.setSize(size())).observe(box);
}

function showCurves() {
  const loss = column("loss");
  const lines = [{ name: say("each step"), values: loss, faint: true }, { name: say("smoothed"), values: smoothed(loss) }];
  const heldOut = column("val_loss");
  if (heldOut.some((value) => value !== null)) lines.push({ name: say("held-out"), values: heldOut, dots: true });
  const positive = lines.every(({ values }) => values.every((value) => value === null || value > 0));
  chart(positive ? "Loss (logarithmic)" : "Loss", lines, { log: positive });
  const others = new Set(report.rows.flatMap((row) => Object.keys(row).filter((key) => isMeasure(key) && key !== "val_loss")));
  for (const key of others) {
    const name = measure(key);
    const [values, errors] = [column(key), column(`${key}_error`)];
    const edge = (sign) => ({ name: say(sign > 0 ? "+ standard error" : "− standard error"), faint: true,
      values: values.map((value, index) => (value === null || errors[index] === null ? null : value + sign * errors[index])) });
    const hasErrors = errors.some((error) => error !== null);
    chart(say("Held-out %s", name), [{ name, values }, ...(hasErrors ? [edge(1), edge(-1)] : [])]);
  }
  chart("Tokens per second", [{ name: say("tokens/s"), values: column("tokens_per_second") }]);
  const names = report.machines.filter((machine) => machine.share).map((machine) => machine.name);
  if (names.length > 1) {
    const share = (name) => report.rows.map((row) => (row.shares ? 100 * (row.shares[name] ?? 0) : null));
    chart("Share of each step, %, smoothed", names.map((name) => ({ name, values: smoothed(share(name)) })));
  }
  chart("Gradient norm", [{ name: say("norm"), values: column("grad_norm") }]);
  chart("Learning rate, part of the highest", [{ name: say("factor"), values: column("lr_factor") }]);
  const seen = [...new Set(marks.map((mark) => mark.event))];
  document.getElementById("marks").textContent = seen.length ? say("Dashed lines: %s.", seen.map((event) => say(event)).join(", ")) : "";
}

// -- the rest ----------------------------------------------------------------------------------------------------------

function showSamples() {
  const { samples } = report;
  if (!samples.length) return document.getElementById("samples").classList.add("empty");
  const slider = element("input");
  Object.assign(slider, { type: "range", min: 0, max: samples.length - 1, value: samples.length - 1 });
  slider.setAttribute("aria-label", say("step of the sample"));
  const label = element("span");
  const show = () => {
    const sample = samples[Number(slider.value)];
    label.textContent = say("step %s", whole(sample.version));
    document.querySelector("#samples blockquote").textContent = sample.text;
  };
  slider.addEventListener("input", show);
  document.querySelector("#samples .picker").append(label, slider);
  show();
}

function detail(details) {
  return Object.entries(details).map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
}

function showTables() {
  const columns = [
    [["machine"], (m) => m.name], [["device"], (m) => m.device], [["share", true], (m) => percent(m.share)],
    [["waits", true], (m) => (m.waits === null ? "" : percent(m.waits))], [["joined", true], (m) => whole(m.joined)],
    [["lost", true], (m) => whole(m.lost)], [["last reason"], (m) => m.last_reason], [["last word"], (m) => m.word],
  ].filter(([, of]) => report.machines.some((m) => of(m) !== ""));
  fillTable("machines", columns.map(([column]) => column), report.machines.map((m) => ({ cells: columns.map(([, of]) => of(m)) })));
  const clock = (time) => (time ? new Date(time * 1000).toISOString().slice(0, 19).replace("T", " ") : "");
  fillTable(
    "events",
    [["time (UTC)"], ["step", true], ["event"], ["details"]],
    report.events.map((e) => ({ cells: [clock(e.time), whole(e.version), say(e.event), detail(e.details)] })),
  );
  const { sources = [], splits = {} } = report.data;
  fillTable("data", [["source or split"], ["licence"], ["bytes", true], ["documents", true], ["tokens", true]], [
    ...sources.map((s) => ({ cells: [s.name, s.licence ?? "", whole(s.num_bytes ?? 0), "", ""] })),
    ...Object.entries(splits).map(([name, s]) => ({
      cells: [name, "", whole(s.num_bytes ?? 0), whole(s.num_documents ?? 0), whole(s.num_tokens ?? 0)], set: true,
    })),
  ]);
  fillTable("config", [["key"], ["value"]], Object.entries(report.values).map(([key, value]) => ({
    cells: [key, JSON.stringify(value)], set: report.changed.includes(key),
  })));
  const { packages = {}, schema: _schema, ...facts } = report.environment;
  const versions = ["torch", "numpy", "tokenizers", "grpcio", "ray"].filter((name) => name in packages);
  fillTable("environment", [["what"], ["version"]], [
    ...Object.entries(facts), ...versions.map((name) => [name, packages[name]]),
  ].map((cells) => ({ cells })));
}

showHead();
showCurves();
showSamples();
showTables();
document.body.dataset.ready = "yes";
