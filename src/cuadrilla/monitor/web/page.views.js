// The pages. `data` is what the stream has told of the run that is shown.

const MOST_EVENTS = 500, MOST_SAMPLES = 100, MOST_LOG = 1000, MOST_POINTS = 120, MOST_COMPARED = 6;
const MOST_EVENT_ROWS = 150, MOST_LOG_ROWS = 400;
const fresh = () => ({ head: {}, crew: [], figures: emptySeries(), shares: emptySeries(), points: new Map(), events: [], samples: [], log: [] });
let data = fresh();

function take(news) {
  if (news.anew) data = fresh();
  if (news.head) data.head = news.head;
  if (news.crew) data.crew = news.crew;
  if (news.figures) merge(data.figures, news.figures, null);
  if (news.shares) merge(data.shares, news.shares, 0);
  addPoints(data, news);
  data.events = [...data.events, ...(news.events ?? [])].slice(-MOST_EVENTS);
  data.samples = [...data.samples, ...(news.samples ?? [])].slice(-MOST_SAMPLES);
  data.log = [...data.log, ...(news.log ?? [])].sort((one, other) => one.time - other.time || one.number - other.number).slice(-MOST_LOG);
  return news;
}

/** Of machines: how busy they were. */
function addPoints({ points }, news) {
  for (const [name, more] of Object.entries(news.points ?? {})) points.set(name, [...(points.get(name) ?? []), ...more].slice(-MOST_POINTS));
}

function head(table, columns) {
  const row = make("tr");
  for (const { title, number, name } of columns) make("th", title, row, { className: [number ? "number" : "", name ?? ""].join(" ").trim(), scope: "col" });
  table.tHead.replaceChildren(row);
}

// Head

const FIGURES = [["step", "version", whole], ["tokens", "tokens", whole], ["loss", "loss", short], ["heldOut", "val_loss", short], ["bits", "val_bits_per_byte", short], ["speed", "tokens_per_second", whole], ["stepTime", "seconds", duration]];

function showHead() {
  const { head: now } = data;
  const state = now.state ?? "";
  $("state").textContent = state && named(state);
  $("state").className = `badge ${state in NAMES ? state : ""}`;
  $("state").hidden = !state;
  $("why").textContent = now.reason ?? "";
  $("why").hidden = $("figures").hidden || !now.reason;
  document.title = now.name ? `${now.name} · cuadrilla` : "cuadrilla";
  const here = data.crew.filter((machine) => machine.here && machine.works).length;
  const figures = FIGURES.filter(([, key]) => known(now[key])).map(([name, key, shown]) => [say(name), shown(now[key])]);
  if (here) figures.push([say("machines"), whole(here)]);
  $("figures").replaceChildren(...figures.map(([name, value]) => {
    const card = make("div");
    make("dt", name, card);
    make("dd", value, card);
    return card;
  }));
}

// Crew

const crewTable = new MachineTable("#crew", [PHASE, SHARE, SPEED, WAITS, ...USAGE, LINK, SEEN]);

function showCrew() {
  document.querySelector("#crew .empty").hidden = data.crew.length > 0 || !data.head.name;
  crewTable.show(data, { isRunning: data.head.state === "running" });
}

// Run

let charts = null;
const marksOf = () => data.events.filter((event) => event.event in MARKS && event.version > 0).slice(-MOST_MARKS);

function showTrain() {
  const { figures, shares } = data;
  const panel = $("train");
  panel.querySelector(".empty").hidden = figures.x.length > 0 || !data.head.name;
  const parent = panel.querySelector(".charts");
  charts ??= Object.fromEntries(["loss", "bits", "speed", "shares", "norm"].map((name) => [name, new Chart(parent, { marks: marksOf })]));
  const column = (key) => figures.columns.get(key) ?? [];
  const loss = column("loss"), heldOut = column("val_loss");
  const lines = loss.length ? [{ name: say("each"), values: loss, colour: COLOURS[0], faint: true }, { name: say("smooth"), values: smoothed(loss), colour: COLOURS[0] }] : [];
  if (heldOut.some((value) => value !== null)) lines.push({ name: say("held"), values: heldOut, colour: COLOURS[1], dots: true });
  const log = lines.every(({ values }) => values.every((value) => value === null || value > 0));
  charts.loss.show(say(log ? "lossLog" : "lossChart"), figures.x, lines, { log });
  const bits = column("val_bits_per_byte");
  charts.bits.show(say("bitsChart"), figures.x, bits.some((value) => value !== null) ? [{ name: say("bits"), values: bits, colour: COLOURS[0], dots: bits.filter((value) => value !== null).length < 2 }] : []);
  const speed = column("tokens_per_second");
  charts.speed.show(say("speedChart"), figures.x, speed.length ? [{ name: say("speed"), values: speed, colour: COLOURS[0], faint: true }, { name: say("smooth"), values: smoothed(speed), colour: COLOURS[0] }] : []);
  charts.shares.show(say("sharesChart"), shares.x, shares.columns.size > 1 ? stacked(shares) : [], { filled: true, most: 100 });
  const norm = column("grad_norm");
  charts.norm.show(say("normChart"), figures.x, norm.length ? [{ name: say("norm"), values: norm, colour: COLOURS[0] }] : []);
  showEvents(panel);
}

function showEvents(panel) {
  const seen = [...new Set(marksOf().map(({ event }) => named(event)))];
  $("marks").textContent = seen.length ? say("marks", { names: seen.join(", ") }) : "";
  const table = panel.querySelector(".events");
  head(table, [{ title: say("time") }, { title: say("step"), number: true }, { title: say("event") }, { title: say("details") }]);
  table.tBodies[0].replaceChildren(...data.events.slice(-MOST_EVENT_ROWS).reverse().map((event) => {
    const line = make("tr");
    make("td", dated(event.time), line, { className: "time" });
    make("td", whole(event.version), line, { className: "number" });
    make("td", named(event.event), line);
    make("td", Object.entries(event.details).filter(([, value]) => value !== "").map(([key, value]) => `${key}: ${value}`).join(" · "), line);
    return line;
  }));
}

// Runs

let runs = [];
const chosen = new Set();
const curves = new Map();
let comparing = null;
let shownRuns = "";

function showRuns() {
  shownRuns = JSON.stringify(runs);
  const table = document.querySelector("#runs .list");
  const columns = [["state", "state"], ["step", "version", whole], ["tokens", "tokens", whole], ["loss", "loss", short], ["heldOut", "val_loss", short], ["bits", "val_bits_per_byte", short], ["speed", "tokens_per_second", whole], ["machines", "here", whole], ["updated", "updated", dated]];
  head(table, [{ title: say("compare") }, { title: say("run") }, ...columns.map(([name, , shown]) => ({ title: say(name), number: Boolean(shown) }))]);
  const focused = document.activeElement?.dataset?.focus;
  table.tBodies[0].replaceChildren(...runs.map((run) => {
    const line = make("tr", null, null, { className: run.key === current ? "chosen" : "" });
    const box = make("input", null, make("td", null, line), { type: "checkbox", checked: chosen.has(run.key), disabled: !chosen.has(run.key) && chosen.size >= MOST_COMPARED });
    box.setAttribute("aria-label", `${say("compare")}: ${run.key}`);
    box.dataset.focus = `box ${run.key}`;
    box.addEventListener("change", () => compare(run.key, box.checked));
    const button = make("button", run.key, make("td", null, line), { type: "button" });
    button.dataset.focus = `run ${run.key}`;
    button.addEventListener("click", () => choose(run.key));
    for (const [, key, shown] of columns) {
      const cell = make("td", shown ? shown(run[key]) : null, line, { className: shown ? "number" : "" });
      if (!shown) make("span", named(run[key]), cell, { className: `badge ${run[key] in NAMES ? run[key] : ""}` });
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
  const x = [...new Set(keys.flatMap((key) => curves.get(key).x))].sort((one, other) => one - other);
  const places = new Map(x.map((version, place) => [version, place]));
  const lines = keys.map((key, index) => {
    const { x: own, columns } = curves.get(key);
    const values = new Array(x.length).fill(null);
    shown(columns.get(column) ?? []).forEach((value, at) => { values[places.get(own[at])] = value; });
    return { name: key, values, colour: COLOURS[index % COLOURS.length] };
  });
  return [x, lines.filter(({ values }) => values.some((value) => value !== null))];
}

function showComparison() {
  const keys = [...chosen].filter((key) => curves.has(key));
  comparing ??= ["loss", "val_bits_per_byte", "tokens_per_second"].map((column) => [column, new Chart(document.querySelector("#runs .charts"))]);
  const titles = { loss: "lossChart", val_bits_per_byte: "bitsChart", tokens_per_second: "speedChart" };
  for (const [column, chart] of comparing) {
    const [x, lines] = aligned(keys, column, column === "val_bits_per_byte" ? (values) => values : smoothed);
    const log = column === "loss" && lines.every(({ values }) => values.every((value) => value === null || value > 0));
    chart.show(say(log ? "lossLog" : titles[column]), x, lines, { log });
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
  const label = say("ofStep", { n: whole(samples[place].version) });
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
  options($("of"), [["", say("all")], ...names.map((name) => [name, name])]);
  options($("level"), [["", say("allLevels")], ["warnings", say("warnings")], ["errors", say("errors")]]);
  const wanted = $("contains").value.toLowerCase();
  const lines = data.log.filter((line) => (!$("of").value || line.node === $("of").value) && LEVELS[$("level").value](line.level) && line.text.toLowerCase().includes(wanted));
  const table = document.querySelector("#logs .log");
  document.querySelector("#logs .empty").hidden = lines.length > 0 || !data.head.name;
  table.hidden = !lines.length;
  head(table, [{ title: say("time") }, { title: say("machine") }, { title: say("level"), name: "level" }, { title: say("text") }]);
  table.tBodies[0].replaceChildren(...lines.slice(-MOST_LOG_ROWS).reverse().map((line) => {
    const row = make("tr", null, null, { className: line.level });
    make("td", dated(line.time), row, { className: "time" });
    make("td", line.node, row);
    make("td", named(line.level), row, { className: "level" });
    make("td", line.dropped ? say("cut", { n: whole(line.dropped) }) : line.text, row);
    return row;
  }));
}

// Doctor

let examined = null;
let isExamining = false;

function showDoctor() {
  $("examine").disabled = isExamining;
  $("examined").textContent = isExamining ? say("examining") : examined ? say("examinedAt", { time: clock(examined.at) }) : "";
  const list = document.querySelector("#doctor .checks");
  list.replaceChildren();
  if (!examined || isExamining) return;
  if (examined.failed) return void make("li", say(`doctor_${examined.failed}`), list);
  const order = ["failure", "warning", "ok"];
  for (const finding of [...examined.found].sort((one, other) => order.indexOf(one.level) - order.indexOf(other.level))) {
    const line = make("li", null, list);
    make("span", named(finding.level), line, { className: `badge ${order.includes(finding.level) ? finding.level : ""}` });
    const { cause, remedy, place } = finding.texts[language];
    make("strong", cause, line);
    make("small", ` ${finding.check}`, line);
    if (remedy) make("p", remedy, line);
    if (finding.command) {
      make("small", `${place}:`, line, { className: "place" });
      make("code", finding.command, line);
    }
  }
}
