// The pages. `data` is what the stream has told of the run that is shown.

const MAX_LOG_ROWS = 400, MAX_COMPARED = 6;
const byName = (columns) => new Map(Object.entries(columns)); // a name may be that of a property that each object has
const seriesOf = ({ x, columns }) => ({ x, columns: byName(columns) });
const NO_CURVES = { x: [], columns: {} };
const fresh = () => ({ head: {}, crew: [], about: {}, figures: seriesOf(NO_CURVES), shares: seriesOf(NO_CURVES), points: new Map(), events: [], samples: [], log: [], spanish: {} });
let data = fresh();

/** Parts of the page that have changed, each of them whole. */
function take(news) {
  Object.assign(data, news);
  for (const name of ["figures", "shares"]) if (news[name]) data[name] = seriesOf(news[name]);
  if (news.points) data.points = byName(news.points);
  return news;
}

// Head

const FIGURES = [[_("tokens"), "tokens", whole], [_("loss"), "loss", short], [_("tokens/s"), "tokens_per_second", whole], [_("time of a step"), "seconds", duration]];
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
  $("why").textContent = [reasonOf(now.reason ?? ""), state === "stopped" && known(now.version) ? say("the same command goes on from there") : ""].filter(Boolean).join(" · ");
  $("why").hidden = $("figures").hidden || !$("why").textContent;
  $("stop").hidden = state !== "running" || !runs.some(({ key, stops }) => key === current && stops);
  document.title = now.name ? `${now.name} · cuadrilla` : "cuadrilla";
  const here = data.crew.filter((machine) => machine.here && machine.works).length;
  const figures = FIGURES.filter(([, key]) => known(now[key])).map(([name, key, shown]) => [say(name), shown(now[key])]);
  const part = known(now.num_steps) && state !== "complete" ? (now.version ?? 0) / now.num_steps : null;
  if (known(now.left_seconds)) figures.unshift([say("time left"), duration(now.left_seconds)]);
  if (known(now.version)) figures.unshift([say("step"), known(now.num_steps) ? `${whole(now.version)} / ${whole(now.num_steps)}` : whole(now.version), part]);
  for (const key of Object.keys(now).filter((name) => isMeasure(name) && known(now[name]))) {
    const error = now[`${key}_error`];
    figures.push([measure(key), short(now[key]) + (known(error) ? ` ± ${error.toLocaleString(language, { maximumSignificantDigits: 2 })}` : "")]);
  }
  if (known(now.best_loss)) figures.push([say("lowest held-out loss"), say("{value} at step {n}", { value: short(now.best_loss), n: whole(now.best_version) })]);
  if (here) figures.push([say("machines"), whole(here)]);
  $("figures").replaceChildren(...figures.map(([name, value, done]) => {
    const card = make("div");
    make("dt", known(done) ? `${name} · ${percent(done)}` : name, card);
    const cell = make("dd", value, card);
    if (known(done)) bar(cell, done);
    return card;
  }));
}

// Run

const charts = {};

function marksOf() {
  const marked = data.events.filter(({ event, version }) => Object.hasOwn(MARKS, event) && version > 0).slice(-MAX_MARKS);
  const places = placed(marked.map(({ version }) => version), data.figures);
  return marked.map(({ event }, at) => ({ event, place: places[at] }));
}

const isKnown = (values) => values.some((value) => value !== null);

function showTrain() {
  const { figures, shares } = data;
  const panel = $("train");
  panel.querySelector(".empty").hidden = figures.x.length > 0 || !data.head.name;
  const measures = [...figures.columns.keys()].filter((key) => isMeasure(key) && key !== "val_loss");
  placeCharts(panel.querySelector(".charts"), ["loss", ...measures, "speed", "shares", "norm", "rate"]);
  const column = (key) => figures.columns.get(key) ?? [], x = along(figures);
  const lines = curve(say("loss"), column("loss")), heldOut = column("val_loss");
  if (isKnown(heldOut)) lines.push({ name: say("held-out"), values: heldOut, colour: COLOURS[1], dots: true });
  const log = lines.every(({ values }) => values.every((value) => value === null || value > 0));
  charts.loss.show(say(log ? _("Loss (logarithmic)") : _("Loss")), x, lines, { log });
  for (const key of measures) charts[key].show(key === "val_bits_per_byte" ? say("Bits per byte of the held-out text") : measure(key), x, measured(column(key), column(`${key}_error`), measure(key)));
  charts.speed.show(say("Tokens per second"), x, curve(say("tokens/s"), column("tokens_per_second")));
  charts.shares.show(say("Share of each step, %"), placed(shares.x, figures), shares.columns.size > 1 ? stacked(shares) : [], { filled: true, most: 100 });
  charts.norm.show(say("Gradient norm"), x, curve(say("norm"), column("grad_norm")));
  charts.rate.show(say("Learning rate, part of the highest"), x, isKnown(column("lr_factor")) ? [{ name: say("factor"), values: column("lr_factor"), colour: COLOURS[0] }] : []);
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

const EVENT_COLUMNS = [{ title: _("time"), name: "time", of: ({ time }) => dated(time) }, { title: _("step"), number: true, of: ({ version }) => whole(version) }, { title: _("event"), of: sentence }];

function showEvents(panel) {
  const seen = [...new Set(marksOf().map(({ event }) => event))];
  $("marks").textContent = seen.length ? say("Dashed lines:") : "";
  for (const event of seen) {
    make("b", " ┆ ", $("marks")).style.color = MARKS[event];
    $("marks").append(spoken(event));
  }
  fillTable(panel.querySelector(".events"), EVENT_COLUMNS, data.events.toReversed());
}

// Runs

let runs = [];
const chosen = new Set();
const curves = new Map();
let comparing = null;
let shownRuns = "";

const RUN_COLUMNS = [
  { title: _("compare"), of: () => "✓", fill: fillChoice },
  { title: _("Run"), of: ({ key }) => key, fill: (cell, { key }) => pressable(cell, () => choose(key)) },
  { title: _("state"), of: ({ state }) => state, fill: (cell, { state }) => badge(cell, state) },
  ...[[_("step"), "version", whole], [_("tokens"), "tokens", whole], [_("loss"), "loss", short], [_("held-out loss"), "val_loss", short], [_("bits per byte"), "val_bits_per_byte", short],
    [_("tokens/s"), "tokens_per_second", whole], [_("last written"), "updated", dated]].map(([title, name, shown]) => ({ title, number: true, of: (run) => (run[name] ? shown(run[name]) : "") })),
];

function fillChoice(cell, { key }) {
  cell.textContent = "";
  const box = make("input", null, cell, { type: "checkbox", checked: chosen.has(key), disabled: !chosen.has(key) && chosen.size >= MAX_COMPARED, ariaLabel: `${say("compare")}: ${key}` });
  box.dataset.focus = `box ${key}`;
  box.addEventListener("change", () => compare(key, box.checked));
}

function showRuns() {
  shownRuns = JSON.stringify(runs);
  fillTable(document.querySelector("#runs .list"), RUN_COLUMNS, runs, { nameOf: ({ key }) => (key === current ? "chosen" : "") });
  showComparison();
}

async function compare(key, wanted) {
  if (!wanted) chosen.delete(key);
  else chosen.add(key);
  await readCurves().catch(tellOf);
  showRuns();
}

async function readCurves() {
  for (const key of chosen) {
    const { figures, about } = await ask(`/api/run?of=${encodeURIComponent(key)}`).then((answer) => answer.json());
    curves.set(key, { ...seriesOf(figures), settings: about.values });
  }
}

/** A column of those that are compared: all places on the axis, and the lines of each run there. */
function compared(keys, column) {
  const own = keys.filter((key) => curves.get(key).columns.has(column));
  const lines = own.map((key) => curve(key, curves.get(key).columns.get(column), COLOURS[keys.indexOf(key)]));
  const [x, ...values] = own.length ? uPlot.join(own.map((key, at) => [along(curves.get(key)), ...lines[at].map((line) => line.values)])) : [[]];
  return [x, lines.flat().map((line, at) => ({ ...line, values: values[at].map((value) => value ?? null) }))];
}

function showComparison() {
  const keys = [...chosen].filter((key) => curves.has(key));
  comparing ??= ["loss", "val_bits_per_byte", "tokens_per_second"].map((column) => [column, new Chart(document.querySelector("#runs .charts"))]);
  const titles = { loss: _("Loss"), val_bits_per_byte: _("Bits per byte of the held-out text"), tokens_per_second: _("Tokens per second") };
  for (const [column, chart] of comparing) {
    const [x, lines] = compared(keys, column);
    const log = column === "loss" && lines.every(({ values }) => values.every((value) => value === null || value > 0));
    chart.show(say(log ? _("Loss (logarithmic)") : titles[column]), x, lines, { log });
  }
  showDifferences(keys);
}

/** The settings that are not the same in all of them. */
function showDifferences(keys) {
  const of = (name, key) => JSON.stringify(curves.get(key).settings[name]) ?? MISSING;
  const names = [...new Set(keys.flatMap((key) => Object.keys(curves.get(key).settings)))];
  const columns = [{ title: _("key"), of: (name) => name }, ...keys.map((key) => ({ heading: key, of: (name) => of(name, key) }))];
  fillTable(document.querySelector("#runs .differences"), columns, names.filter((name) => new Set(keys.map((key) => of(name, key))).size > 1));
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
  const place = sampleAt === null ? samples.length - 1 : Math.max(0, samples.findIndex(({ version }) => version === sampleAt));
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

const LOG_COLUMNS = [
  { title: _("time"), name: "time", of: ({ time }) => dated(time) },
  { title: _("machine"), of: ({ node }) => node },
  { title: _("level"), name: "level", of: ({ level }) => spoken(level) },
  { title: _("text"), of: ({ text, dropped }) => (dropped ? say("… {n} lines were left out: there were too many", { n: whole(dropped) }) : reasonOf(text)) },
];

function showLogs() {
  const names = [...new Set(data.log.map((line) => line.node))].sort();
  options($("of"), [["", say("all machines")], ...names.map((name) => [name, name])]);
  options($("level"), [["", say("all levels")], ["warnings", say("warnings and errors")], ["errors", say("errors")]]);
  const wanted = $("contains").value.toLowerCase();
  const lines = data.log.filter((line) => (!$("of").value || line.node === $("of").value) && LEVELS[$("level").value](line.level) && reasonOf(line.text).toLowerCase().includes(wanted));
  const empty = document.querySelector("#logs .empty");
  empty.hidden = lines.length > 0 || !data.head.name;
  empty.textContent = say(data.log.length ? _("No line has what you look for.") : _("No machine has written a line to its log."));
  fillTable(document.querySelector("#logs .log"), LOG_COLUMNS, lines.slice(-MAX_LOG_ROWS).reverse(), { nameOf: ({ level }) => level });
}

// About a run: a person's notes, its data, its settings, the software of its coordinator

let shownNotes = "";

function showNotes() {
  const { notes = "" } = data.about;
  if ($("notes").value === shownNotes) $("notes").value = notes; // what is being written stays
  shownNotes = notes;
  $("notes").readOnly = Boolean(FROZEN);
  for (const part of [$("notes"), $("notes").previousElementSibling]) part.hidden = FROZEN && !notes;
  $("note").hidden = $("notes").value === shownNotes;
}

function showAbout() {
  showNotes();
  const { data: texts = {}, values = {}, changed = [], environment = {}, parameters = null } = data.about;
  const { sources = [], splits = {}, vocab_size: vocabulary = 0 } = texts;
  const { packages = {}, schema: _schema, ...software } = environment;
  const table = (name, titles, rows, how) => fillTable(document.querySelector(`#about .${name}`), titles.map((title, at) => ({ title, number: at > 1, of: (row) => row[at] ?? "" })), rows, how);
  const ofTokens = splits.train?.num_tokens ? [say("bytes per token ({n} tokens)", { n: whole(vocabulary) }), short(splits.train.num_bytes / splits.train.num_tokens)] : null;
  table("facts", [_("what"), _("value")], [parameters ? [say("parameters"), whole(parameters)] : null, ofTokens].filter(Boolean));
  table("data", [_("source or split"), _("licence"), _("bytes"), _("documents"), _("tokens")], [
    ...sources.map(({ name, licence, num_bytes }) => [name, licence, whole(num_bytes)]),
    ...Object.entries(splits).map(([name, split]) => [name, "", whole(split.num_bytes), whole(split.num_documents), whole(split.num_tokens)]),
  ], { nameOf: ([name]) => (Object.hasOwn(splits, name) ? "set" : "") });
  table("settings", [_("key"), _("value")], Object.entries(values).map(([key, value]) => [key, JSON.stringify(value)]), { nameOf: ([key]) => (changed.includes(key) ? "set" : "") });
  table("environment", [_("what"), _("value")], [...Object.entries(software), ...Object.entries(packages)].map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]));
}
