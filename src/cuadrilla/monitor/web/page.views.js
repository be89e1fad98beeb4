// The pages. `data` is what the stream has told of the run that is shown.

const MAX_EVENTS = 500, MAX_SAMPLES = 100, MAX_LOG = 1000, MAX_POINTS = 120, MAX_COMPARED = 6;
const MAX_EVENT_ROWS = 150, MAX_LOG_ROWS = 400;
const fresh = () => ({ head: {}, crew: [], jobs: [], figures: emptySeries(), shares: emptySeries(), points: new Map(), events: [], samples: [], log: [] });
let data = fresh();

function take(news) {
  if (news.anew) data = fresh();
  if (news.head) data.head = news.head;
  if (news.crew) data.crew = news.crew;
  if (news.jobs) data.jobs = news.jobs;
  if (news.figures) merge(data.figures, news.figures, null);
  if (news.shares) merge(data.shares, news.shares, 0);
  for (const [name, more] of Object.entries(news.points ?? {})) data.points.set(name, [...(data.points.get(name) ?? []), ...more].slice(-MAX_POINTS));
  data.events = [...data.events, ...(news.events ?? [])].slice(-MAX_EVENTS);
  data.samples = [...data.samples, ...(news.samples ?? [])].slice(-MAX_SAMPLES);
  data.log = [...data.log, ...(news.log ?? [])].sort((one, other) => one.time - other.time || one.number - other.number).slice(-MAX_LOG);
  return news;
}

function head(table, columns) {
  const row = make("tr");
  for (const { title, number, name } of columns) make("th", title, row, { className: [number ? "number" : "", name ?? ""].join(" ").trim(), scope: "col" });
  table.tHead.replaceChildren(row);
}

/** Rows of texts. A column's `name` is the class of its cells; a row may be `{ cells, name }`. */
function fillTable(table, columns, rows) {
  head(table, columns);
  table.hidden = !rows.length;
  table.tBodies[0].replaceChildren(...rows.map(({ cells, name }) => {
    const line = make("tr", null, null, { className: name ?? "" });
    cells.forEach((text, at) => make("td", text, line, { className: [columns[at].number ? "number" : "", columns[at].name ?? ""].join(" ").trim() }));
    return line;
  }));
}

// Head

const FIGURES = [[_("step"), "version", whole], [_("tokens"), "tokens", whole], [_("loss"), "loss", short], [_("tokens/s"), "tokens_per_second", whole], [_("time of a step"), "seconds", duration]];
const isMeasure = (key) => key.startsWith("val_") && !key.endsWith("_error");
/** What was measured of held-out data: measures of ours have names, those of a task its own. */
const MEASURES = { val_loss: _("held-out loss"), val_bits_per_byte: _("bits per byte") };
const measure = (key) => (Object.hasOwn(MEASURES, key) ? say(MEASURES[key]) : say("held-out {name}", { name: key.slice(4).replaceAll("_", " ") }));

function showHead() {
  const { head: now } = data;
  const state = now.state ?? "";
  $("state").textContent = state && spoken(state);
  $("state").className = `badge ${state}`;
  $("state").hidden = !state;
  $("why").textContent = now.reason ?? "";
  $("why").hidden = $("figures").hidden || !now.reason;
  document.title = now.name ? `${now.name} · cuadrilla` : "cuadrilla";
  const here = data.crew.filter((machine) => machine.here && machine.works).length;
  const figures = FIGURES.filter(([, key]) => known(now[key])).map(([name, key, shown]) => [say(name), shown(now[key])]);
  for (const key of Object.keys(now).filter((name) => isMeasure(name) && known(now[name]))) {
    const error = now[`${key}_error`];
    figures.push([measure(key), short(now[key]) + (known(error) ? ` ± ${error.toLocaleString(language, { maximumSignificantDigits: 2 })}` : "")]);
  }
  if (known(now.best_loss)) figures.push([say("lowest held-out loss"), say("{value} at step {n}", { value: short(now.best_loss), n: whole(now.best_version) })]);
  if (here) figures.push([say("machines"), whole(here)]);
  if (data.jobs.length) figures.push([say("have ended"), `${whole(data.jobs.filter(hasEnded).length)} / ${whole(data.jobs.length)}`]);
  $("figures").replaceChildren(...figures.map(([name, value]) => {
    const card = make("div");
    make("dt", name, card);
    make("dd", value, card);
    return card;
  }));
}

// Crew

const crewTable = new MachineTable("#crew", [JOB, PHASE, SHARE, SPEED, WAITS, ...USAGE, LINK, SEEN]);

function showCrew() {
  document.querySelector("#crew .empty").hidden = data.crew.length > 0 || !data.head.name;
  crewTable.show(data, { isRunning: data.head.state === "running" });
  showJobs(document.querySelector("#crew .jobs"));
}

// The runs of a queue in their order, or the trials of a search

const hasEnded = ({ state }) => ["complete", "failed", "stopped"].includes(state);
const stepOf = (job) => (known(job.step) ? (known(job.steps) ? `${whole(job.step)} / ${whole(job.steps)}` : whole(job.step)) : "");
const figureOf = (value) => (known(value) ? short(value) : "");
const JOB_COLUMNS = [
  { title: _("state"), of: (job) => spoken(job.state), fill: (cell, job) => cell.replaceChildren(make("span", spoken(job.state), null, { className: `badge ${job.state}` })) },
  { title: _("machine"), of: (job) => job.machine, fill: (cell, job) => cell.classList.toggle("faint", job.state !== "running") },
  { title: _("step"), number: true, of: stepOf, fill: (cell, job) => { if (known(job.step) && job.steps) bar(cell, job.step / job.steps); } },
  { title: _("loss"), number: true, of: (job) => figureOf(job.loss) },
  { title: _("bits per byte"), number: true, of: (job) => figureOf(job.val_bits_per_byte) },
  { title: _("score"), number: true, of: (job) => figureOf(job.score) },
  { title: _("settings"), name: "values", of: (job) => job.values ?? "" },
  { title: _("reason"), name: "why", of: (job) => job.reason ?? "" },
];

function showJobs(table) {
  const { jobs } = data;
  const shown = JOB_COLUMNS.filter(({ of }) => jobs.some((job) => of(job)));
  const focused = table.contains(document.activeElement) ? document.activeElement.dataset.job : undefined;
  table.hidden = !jobs.length;
  head(table, [{ title: say("job") }, ...shown.map(({ title, number, name }) => ({ title: say(title), number, name }))]);
  table.tBodies[0].replaceChildren(...jobs.map((job) => {
    const line = make("tr", null, null, { className: job.state });
    const button = make("button", job.title, make("td", null, line, { className: "first" }), { type: "button" });
    button.dataset.job = job.name;
    button.addEventListener("click", () => openJob(job));
    for (const { title, number, name, of, fill } of shown) {
      const text = of(job);
      const cell = make("td", text, line, { className: `${number ? "number" : ""} ${name ?? ""} ${text ? "" : "blank"}` });
      cell.dataset.label = say(title);
      if (text) fill?.(cell, job);
    }
    return line;
  }));
  if (focused !== undefined) [...table.querySelectorAll("button")].find(({ dataset }) => dataset.job === focused)?.focus({ preventScroll: true });
}

/** Its curves: a run of the list, or a trial, which the list does not have. */
function openJob(job) {
  choose(runs.find(({ path }) => path === job.run)?.key ?? `${current}/${job.name}`);
  openTab("train", { focus: true });
}

// Run

const charts = {};
const marksOf = () => data.events.filter((event) => event.event in MARKS && event.version > 0).slice(-MAX_MARKS);
const isKnown = (values) => values.some((value) => value !== null);

function showTrain() {
  const { figures, shares } = data;
  const panel = $("train");
  panel.querySelector(".empty").hidden = figures.x.length > 0 || !data.head.name;
  const measures = [...figures.columns.keys()].filter((key) => isMeasure(key) && key !== "val_loss");
  placeCharts(panel.querySelector(".charts"), ["loss", ...measures, "speed", "shares", "norm", "rate"]);
  const column = (key) => figures.columns.get(key) ?? [];
  const both = (values, name) => (values.length ? [{ name, values, colour: COLOURS[0], faint: true }, { name: say("smoothed"), values: smoothed(values), colour: COLOURS[0] }] : []);
  const alone = (values, name) => (isKnown(values) ? [{ name, values, colour: COLOURS[0] }] : []);
  const lines = both(column("loss"), say("each step")), heldOut = column("val_loss");
  if (isKnown(heldOut)) lines.push({ name: say("held-out"), values: heldOut, colour: COLOURS[1], dots: true });
  const log = lines.every(({ values }) => values.every((value) => value === null || value > 0));
  charts.loss.show(say(log ? _("Loss (logarithmic)") : _("Loss")), figures.x, lines, { log });
  for (const key of measures) charts[key].show(key === "val_bits_per_byte" ? say("Bits per byte of the held-out text") : measure(key), figures.x, measured(column(key), column(`${key}_error`), measure(key)));
  charts.speed.show(say("Tokens per second"), figures.x, both(column("tokens_per_second"), say("tokens/s")));
  charts.shares.show(say("Share of each step, %"), shares.x, shares.columns.size > 1 ? stacked(shares) : [], { filled: true, most: 100 });
  charts.norm.show(say("Gradient norm"), figures.x, alone(column("grad_norm"), say("norm")));
  charts.rate.show(say("Learning rate, part of the highest"), figures.x, alone(column("lr_factor"), say("factor")));
  showEvents(panel);
}

/** One chart for each name, in this order; those of other names are hidden. */
function placeCharts(parent, names) {
  const isNew = names.some((name) => !charts[name]);
  for (const name of names) charts[name] ??= new Chart(parent, { marks: marksOf });
  if (isNew) parent.append(...names.map((name) => charts[name].box));
  for (const name of Object.keys(charts)) if (!names.includes(name)) charts[name].box.hidden = true;
}

/** A measure of held-out data, with its standard error above and below where it is known. */
function measured(values, errors, name) {
  if (!isKnown(values)) return [];
  const edge = (sign) => ({ name: say(sign > 0 ? _("+ standard error") : _("− standard error")), colour: COLOURS[0], faint: true, values: values.map((value, at) => (value === null || errors[at] === null ? null : value + sign * errors[at])) });
  const line = { name, values, colour: COLOURS[0], dots: values.filter((value) => value !== null).length < 2 };
  return [line, ...(isKnown(errors) ? [edge(1), edge(-1)] : [])];
}

function showEvents(panel) {
  const seen = [...new Set(marksOf().map(({ event }) => spoken(event)))];
  $("marks").textContent = seen.length ? say("Dashed lines: {names}.", { names: seen.join(", ") }) : "";
  const columns = [{ title: say("time"), name: "time" }, { title: say("step"), number: true }, { title: say("event") }, { title: say("details") }];
  const detail = ({ details }) => Object.entries(details).filter(([, value]) => value !== "").map(([key, value]) => `${key}: ${value}`).join(" · ");
  fillTable(panel.querySelector(".events"), columns, data.events.slice(-MAX_EVENT_ROWS).reverse().map((event) => ({ cells: [dated(event.time), whole(event.version), spoken(event.event), detail(event)] })));
}

// Runs

let runs = [];
const chosen = new Set();
const curves = new Map();
let comparing = null;
let shownRuns = "";

function showRuns() {
  shownRuns = JSON.stringify(runs);
  const trained = runs.filter(({ hands_out }) => !hands_out);
  const table = document.querySelector("#runs .list");
  const columns = [[_("state"), "state"], [_("step"), "version", whole], [_("tokens"), "tokens", whole], [_("loss"), "loss", short], [_("held-out loss"), "val_loss", short], [_("bits per byte"), "val_bits_per_byte", short], [_("tokens/s"), "tokens_per_second", whole], [_("last written"), "updated", dated]];
  head(table, [{ title: say("compare") }, { title: say("Run") }, ...columns.map(([name, , shown]) => ({ title: say(name), number: Boolean(shown) }))]);
  const focused = document.activeElement?.dataset?.focus;
  table.tBodies[0].replaceChildren(...trained.map((run) => {
    const line = make("tr", null, null, { className: run.key === current ? "chosen" : "" });
    const box = make("input", null, make("td", null, line), { type: "checkbox", checked: chosen.has(run.key), disabled: !chosen.has(run.key) && chosen.size >= MAX_COMPARED });
    box.setAttribute("aria-label", `${say("compare")}: ${run.key}`);
    box.dataset.focus = `box ${run.key}`;
    box.addEventListener("change", () => compare(run.key, box.checked));
    const button = make("button", run.key, make("td", null, line), { type: "button" });
    button.dataset.focus = `run ${run.key}`;
    button.addEventListener("click", () => choose(run.key));
    for (const [, key, shown] of columns) {
      const cell = make("td", shown ? shown(run[key]) : null, line, { className: shown ? "number" : "" });
      if (!shown) make("span", spoken(run[key]), cell, { className: `badge ${run[key]}` });
    }
    return line;
  }));
  if (focused) [...table.querySelectorAll("[data-focus]")].find((found) => found.dataset.focus === focused)?.focus({ preventScroll: true });
  showComparison();
}

async function compare(key, wanted) {
  if (!wanted) chosen.delete(key);
  else chosen.add(key);
  await readCurves();
  showRuns();
}

async function readCurves() {
  for (const key of chosen) {
    const found = await ask(`/api/curves?run=${encodeURIComponent(key)}`).then((answer) => answer.json());
    const series = emptySeries();
    if (found.figures) merge(series, found.figures, null);
    curves.set(key, series);
  }
}

/** All versions of those that are compared, and of each its values there. */
function aligned(keys, column, shown) {
  const own = keys.filter((key) => curves.get(key).columns.has(column));
  if (!own.length) return [[], []];
  const [x, ...values] = uPlot.join(own.map((key) => [curves.get(key).x, shown(curves.get(key).columns.get(column))]));
  return [x, own.map((key, index) => ({ name: key, values: values[index].map((value) => value ?? null), colour: COLOURS[keys.indexOf(key) % COLOURS.length] }))];
}

function showComparison() {
  const keys = [...chosen].filter((key) => curves.has(key));
  comparing ??= ["loss", "val_bits_per_byte", "tokens_per_second"].map((column) => [column, new Chart(document.querySelector("#runs .charts"))]);
  const titles = { loss: _("Loss"), val_bits_per_byte: _("Bits per byte of the held-out text"), tokens_per_second: _("Tokens per second") };
  for (const [column, chart] of comparing) {
    const [x, lines] = aligned(keys, column, column === "val_bits_per_byte" ? (values) => values : smoothed);
    const log = column === "loss" && lines.every(({ values }) => values.every((value) => value === null || value > 0));
    chart.show(say(log ? _("Loss (logarithmic)") : titles[column]), x, lines, { log });
  }
}

// Samples

let sampleAt = null; // null: the newest

function showSamples() {
  const { samples } = data;
  const panel = $("samples");
  panel.querySelector(".empty").hidden = samples.length > 0 || !data.head.name;
  panel.querySelector(".bar").hidden = !samples.length;
  panel.querySelector("blockquote").hidden = !samples.length;
  if (!samples.length) return;
  const place = sampleAt === null ? samples.length - 1 : Math.max(0, samples.findIndex((sample) => sample.number === sampleAt));
  const slider = $("sample");
  Object.assign(slider, { min: 0, max: samples.length - 1, value: place });
  const label = say("step {n}", { n: whole(samples[place].version) });
  slider.setAttribute("aria-valuetext", label);
  panel.querySelector("output").textContent = label;
  panel.querySelector("blockquote").textContent = samples[place].text;
}

// Logs

const LEVELS = { "": () => true, warnings: (level) => level !== "info", errors: (level) => level === "error" };

function options(list, values) {
  const shown = [...list.options].map((option) => [option.value, option.textContent]);
  if (JSON.stringify(shown) === JSON.stringify(values)) return; // it may be open
  const before = list.value;
  list.replaceChildren(...values.map(([value, text]) => make("option", text, null, { value })));
  if (values.some(([value]) => value === before)) list.value = before;
}

function showLogs() {
  const names = [...new Set(data.log.map((line) => line.node))].sort();
  options($("of"), [["", say("all machines")], ...names.map((name) => [name, name])]);
  options($("level"), [["", say("all levels")], ["warnings", say("warnings and errors")], ["errors", say("errors")]]);
  const wanted = $("contains").value.toLowerCase();
  const lines = data.log.filter((line) => (!$("of").value || line.node === $("of").value) && LEVELS[$("level").value](line.level) && line.text.toLowerCase().includes(wanted));
  document.querySelector("#logs .empty").hidden = lines.length > 0 || !data.head.name;
  const columns = [{ title: say("time"), name: "time" }, { title: say("machine") }, { title: say("level"), name: "level" }, { title: say("text") }];
  fillTable(document.querySelector("#logs .log"), columns, lines.slice(-MAX_LOG_ROWS).reverse().map((line) => ({
    name: line.level,
    cells: [dated(line.time), line.node, spoken(line.level), line.dropped ? say("… {n} lines were left out: there were too many", { n: whole(line.dropped) }) : line.text],
  })));
}

// About a run: its data, its settings, the software of its coordinator

let about = null;

function showAbout() {
  const { data: texts = {}, values = {}, changed = [], environment = {}, parameters = null } = about ?? {};
  const { sources = [], splits = {}, vocabulary = 0 } = texts;
  const { packages = {}, schema: _schema, ...software } = environment;
  const table = (name, columns, rows) => fillTable(document.querySelector(`#about .${name}`), columns, rows);
  const pairs = (rows) => rows.map((cells) => ({ cells }));
  const ofTokens = splits.train?.num_tokens ? [say("bytes per token ({n} tokens)", { n: whole(vocabulary) }), short(splits.train.num_bytes / splits.train.num_tokens)] : null;
  const what = [{ title: say("what") }, { title: say("value") }];
  table("facts", what, pairs([parameters ? [say("parameters"), whole(parameters)] : null, ofTokens].filter(Boolean)));
  const counted = [{ title: say("source or split") }, { title: say("licence") }, { title: say("bytes"), number: true }, { title: say("documents"), number: true }, { title: say("tokens"), number: true }];
  table("data", counted, [
    ...sources.map(({ name, licence, num_bytes }) => ({ cells: [name, licence ?? "", whole(num_bytes), "", ""] })),
    ...Object.entries(splits).map(([name, split]) => ({ name: "set", cells: [name, "", whole(split.num_bytes), whole(split.num_documents), whole(split.num_tokens)] })),
  ]);
  table("settings", [{ title: say("key") }, { title: say("value") }], Object.entries(values).map(([key, value]) => ({ name: changed.includes(key) ? "set" : "", cells: [key, JSON.stringify(value)] })));
  const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  table("environment", what, pairs([...Object.entries(software), ...Object.entries(packages)].map(([name, value]) => [name, shown(value)])));
}
