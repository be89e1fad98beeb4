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
  for (const [name, points] of Object.entries(news.points ?? {})) data.points.set(name, [...(data.points.get(name) ?? []), ...points].slice(-MOST_POINTS));
  data.events = [...data.events, ...(news.events ?? [])].slice(-MOST_EVENTS);
  data.samples = [...data.samples, ...(news.samples ?? [])].slice(-MOST_SAMPLES);
  data.log = [...data.log, ...(news.log ?? [])].sort((one, other) => one.time - other.time || one.number - other.number).slice(-MOST_LOG);
  return news;
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

const opened = new Set();
const gpusOf = (machine) => (Array.isArray(machine.usage?.gpus) ? machine.usage.gpus : []);
const most = (values) => values.filter(known).reduce((one, other) => (one === null || other > one ? other : one), null);
const hot = (machine) => most([machine.usage?.temperature_celsius, ...gpusOf(machine).map((gpu) => gpu.temperature_celsius)]);
const memoryOf = (usage) => ofBytes(usage?.memory_used_bytes, usage?.memory_bytes);
const ratio = (value, scale = 100) => (known(value) ? percent(value / scale) : "");
const HOT_CELSIUS = 90;

const CREW_COLUMNS = [
  { key: "phase", of: (machine) => (machine.phase ? named(machine.phase) : "") },
  { key: "share", number: true, of: (machine) => (machine.here && machine.works ? percent(machine.share) : "") },
  { key: "speed", number: true, of: (machine) => (machine.here && machine.tokens_per_second ? whole(machine.tokens_per_second) : "") },
  { key: "waits", number: true, of: (machine) => ratio(machine.usage?.waiting_part, 1) },
  { key: "processor", number: true, of: (machine) => ratio(machine.usage?.cpu_percent) },
  { key: "memory", number: true, of: (machine) => memoryOf(machine.usage) },
  { key: "gpu", number: true, of: (machine) => ratio(most(gpusOf(machine).map((gpu) => gpu.busy_percent))) },
  { key: "temperature", number: true, of: (machine) => (known(hot(machine)) ? `${whole(hot(machine))} °C` : "") },
  { key: "link", number: true, of: (machine) => (known(machine.usage?.round_trip_seconds) ? duration(machine.usage.round_trip_seconds) : "") },
  { key: "lastSeen", number: true, of: (machine) => (machine.seen ? seenAgo(machine.seen) : "") },
];

function seenAgo(seen) {
  const newest = Math.max(...data.crew.map((machine) => machine.seen ?? 0));
  const reference = data.head.state === "running" ? Date.now() / 1000 : newest;
  const seconds = Math.max(0, reference - seen);
  return seconds > 86400 * 30 ? dated(seen) : say("ago", { time: seconds < 10 ? "< 10 s" : duration(Math.round(seconds)) });
}

const rows = new Map();

function showCrew() {
  const table = document.querySelector(".machines");
  document.querySelector("#crew .empty").hidden = data.crew.length > 0 || !data.head.name;
  table.hidden = !data.crew.length;
  const shown = CREW_COLUMNS.filter(({ of }) => data.crew.some((machine) => of(asOfNow(machine)) !== ""));
  const hasHistory = data.points.size > 0;
  const hasWords = data.crew.some((machine) => machine.word_level || machine.reason);
  const titles = [{ title: say("machine") }, ...shown.map(({ key, number }) => ({ title: say(key), number }))];
  if (hasHistory) titles.push({ title: say("history") });
  if (hasWords) titles.push({ title: say("word") });
  head(table, titles);
  const used = new Set(data.crew.map((machine) => machine.name));
  for (const name of rows.keys()) if (!used.has(name)) rows.delete(name);
  const focused = document.activeElement?.dataset?.machine;
  const lines = data.crew.flatMap((machine) => {
    const line = crewRow(machine, shown, { hasHistory, hasWords });
    return opened.has(machine.name) ? [line, aloneRow(machine, titles.length)] : [line];
  });
  table.tBodies[0].replaceChildren(...lines);
  if (focused !== undefined) rows.get(focused)?.button.focus({ preventScroll: true });
}

/** What one said before it left a run that goes on is not how it is now. */
const asOfNow = (machine) => (machine.here || data.head.state !== "running" ? machine : { ...machine, usage: undefined });

function crewRow(machine, shown, { hasHistory, hasWords }) {
  const row = rows.get(machine.name) ?? newCrewRow(machine.name);
  rows.set(machine.name, row);
  const { line, button, svg } = row;
  line.className = machine.here ? "" : "gone";
  button.setAttribute("aria-expanded", opened.has(machine.name));
  const cells = [row.first];
  for (const { key, number, of } of shown) {
    const text = of(asOfNow(machine));
    const cell = make("td", text, null, { className: `${number ? "number" : "plain"} ${text ? "" : "blank"}` });
    cell.dataset.label = say(key);
    if (key === "temperature" && hot(machine) >= HOT_CELSIUS) cell.classList.add("hot");
    if (key === "share" && text) bar(cell, machine.share);
    cells.push(cell);
  }
  if (hasHistory) cells.push(historyCell(machine, row, svg));
  if (hasWords) {
    const text = machine.word_dropped ? say("cut", { n: whole(machine.word_dropped) }) : machine.word || (machine.here ? "" : machine.reason);
    cells.push(make("td", text, null, { className: `word ${machine.word_level ?? ""} ${text ? "" : "blank"}` }));
  }
  line.replaceChildren(...cells);
  return line;
}

function bar(cell, part) {
  const box = make("span", null, cell, { className: "part" });
  make("i", null, box).style.width = `${Math.min(100, 100 * part)}%`;
}

function newCrewRow(name) {
  const line = make("tr");
  const first = make("td", null, null, { className: "first" });
  const button = make("button", name, first, { className: "name", type: "button" });
  button.dataset.machine = name;
  button.addEventListener("click", () => {
    if (!opened.delete(name)) opened.add(name);
    showCrew();
  });
  return { line, first, button, svg: document.createElementNS(SVG, "svg") };
}

function historyCell(machine, row, svg) {
  const points = data.points.get(machine.name) ?? [];
  const cell = make("td", null, null, { className: `history ${points.length ? "" : "blank"}` });
  cell.dataset.label = say("history");
  const at = points.some((point) => point[2] !== null) ? 2 : 1;
  const values = points.map((point) => point[at]);
  const real = values.filter(known);
  const mean = real.length ? real.reduce((one, other) => one + other, 0) / real.length : null;
  spark(svg, values, say(at === 2 ? "sparkGpu" : "sparkCpu", { now: percent(values.at(-1)), mean: percent(mean) }));
  cell.append(svg);
  return cell;
}

function aloneRow(machine, width) {
  const line = make("tr", null, null, { className: "alone" });
  const list = make("dl", null, make("td", null, line, { colSpan: width }));
  const usage = machine.usage ?? {};
  const pair = (one, other, shown) => (known(one) || known(other) ? `${shown(one)} / ${shown(other)}` : "");
  const facts = [
    ...Object.entries(machine.facts ?? {}),
    ...gpusOf(machine).map((gpu) => [`${say("gpu")} ${gpu.index}`, [gpu.name, ratio(gpu.busy_percent), memoryOf(gpu), known(gpu.temperature_celsius) ? `${whole(gpu.temperature_celsius)} °C` : "", known(gpu.power_watts) ? say("power", { n: whole(gpu.power_watts) }) : ""].filter(Boolean).join(" · ")]),
    [say("disk"), known(usage.disk_free_bytes) ? bytes(usage.disk_free_bytes) : ""],
    [say("diskRate"), pair(usage.disk_read_bytes_per_second, usage.disk_written_bytes_per_second, rate)],
    [say("network"), pair(usage.network_sent_bytes_per_second, usage.network_received_bytes_per_second, rate)],
    [say("linkRate"), pair(usage.sent_bytes_per_second, usage.received_bytes_per_second, rate)],
    [say("battery"), known(usage.battery_percent) ? (usage.on_battery ? say("onBattery", { n: ratio(usage.battery_percent) }) : ratio(usage.battery_percent)) : ""],
    [say("joins"), machine.joined ? say("times", { n: machine.joined }) : ""],
    [say("losses"), machine.lost ? say("times", { n: machine.lost }) : ""],
    [say("reason"), machine.reason],
  ];
  for (const [name, value] of facts.filter(([, text]) => text)) {
    make("dt", name, list);
    make("dd", value, list);
  }
  return line;
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
