"use strict";
// The page of a run; report_shared.js comes before it.

const MARKS = { joined: "#2b8a3e", left: "#e03131", evicted: "#e03131", failed: "#e03131", "rolled back to the last checkpoint": "#9c36b5", "update skipped": "#e8a300" };
const WORTH_A_WARNING = 0.01;
const steps = report.rows.map((row) => row.version);

const measure = (key) => say(key.replace("val_", "").replaceAll("_", " "));
const isMeasure = (key) => key.startsWith("val_") && !key.endsWith("_error");

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
  showFigures(figures);
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
  const shown = { x: steps, label: say("step"), log, options: { cursor: { sync: { key: "steps" } }, hooks: { draw: [drawMarks] } } };
  drawChart(document.querySelector("#curves .charts"), say(title), series, shown);
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
