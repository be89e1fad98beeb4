// Tables; and the machines of a run, or of a queue: a row for each, which opens.

const classOf = ({ number, name = "" }) => `${number ? "number" : ""} ${name}`.trim();

/**
 * A table of these rows. A column: `title`, or a `heading` that is not translated; `of`, the text of a row; `fill`, which puts more
 * into a cell that has some; `number`; `name`, a class. Columns without any text are left out. `below`: more rows after one.
 */
function fillTable(table, columns, rows, { nameOf = () => "", below = () => [] } = {}) {
  const shown = columns.filter(({ of }) => rows.some((row) => of(row) !== ""));
  const focused = table.contains(document.activeElement) ? document.activeElement.dataset.focus : undefined;
  const titles = make("tr");
  for (const column of shown) make("th", column.heading ?? spoken(column.title), titles, { className: column.number ? "number" : "", scope: "col" });
  table.tHead.replaceChildren(titles);
  table.hidden = !rows.length;
  table.tBodies[0].replaceChildren(...rows.flatMap((row) => {
    const line = make("tr", null, null, { className: nameOf(row) });
    for (const column of shown) {
      const text = column.of(row);
      const cell = make("td", text, line, { className: `${classOf(column)} ${text === "" ? "blank" : ""}`.trim() });
      cell.dataset.label = column.heading ?? spoken(column.title);
      if (text !== "") column.fill?.(cell, row);
    }
    return [line, ...below(row, shown.length)];
  }));
  if (focused !== undefined) [...table.querySelectorAll("[data-focus]")].find(({ dataset }) => dataset.focus === focused)?.focus({ preventScroll: true });
}

/** The text of a cell becomes a button, which keeps the focus when its table is made anew. */
function pressable(cell, act, attributes = {}) {
  const button = make("button", cell.textContent, null, { type: "button", ...attributes });
  button.dataset.focus = cell.textContent;
  button.addEventListener("click", act);
  cell.replaceChildren(button);
}

function bar(cell, part) {
  const box = make("span", null, cell, { className: "part" });
  make("i", null, box).style.width = `${Math.min(100, 100 * part)}%`;
}

const badge = (cell, state) => cell.replaceChildren(make("span", spoken(state), null, { className: `badge ${state}` }));

// Machines

const gpusOf = (machine) => (Array.isArray(machine.usage?.gpus) ? machine.usage.gpus : []);
const most = (values) => values.filter(known).reduce((one, other) => (one === null || other > one ? other : one), null);
const hot = (machine) => most([machine.usage?.temperature_celsius, ...gpusOf(machine).map((gpu) => gpu.temperature_celsius)]);
const celsius = (value) => (known(value) ? `${whole(value)} °C` : "");
const memoryOf = (usage) => ofBytes(usage?.memory_used_bytes, usage?.memory_bytes);
const ratio = (value, scale = 100) => (known(value) ? percent(value / scale) : "");
const HOT_CELSIUS = 90;
const opened = new Set();

const MACHINE_COLUMNS = [
  { title: _("machine"), name: "first", of: ({ name }) => name, fill: (cell, { name }) => pressable(cell, () => toggle(name), { className: "name", ariaExpanded: String(opened.has(name)) }) },
  { title: _("job"), name: "job", of: ({ job }) => job },
  { title: _("phase"), name: "plain", of: ({ phase }) => (phase ? spoken(phase) : "") },
  { title: _("share"), number: true, of: ({ share }) => (known(share) ? percent(share) : ""), fill: (cell, { share }) => bar(cell, share) },
  { title: _("tokens/s"), number: true, of: ({ tokens_per_second: speed }) => (speed ? whole(speed) : "") },
  { title: _("waits"), number: true, of: (machine) => ratio(machine.waiting_part, 1) },
  { title: _("CPU"), number: true, of: (machine) => ratio(machine.usage?.cpu_percent) },
  { title: _("memory"), number: true, of: (machine) => memoryOf(machine.usage) },
  { title: _("GPU"), number: true, of: (machine) => ratio(most(gpusOf(machine).map((gpu) => gpu.busy_percent))) },
  { title: _("temp."), number: true, of: (machine) => celsius(hot(machine)), fill: (cell, machine) => cell.classList.toggle("hot", hot(machine) >= HOT_CELSIUS) },
  { title: _("link"), number: true, of: ({ round_trip_seconds: seconds }) => (known(seconds) ? duration(seconds) : "") },
  { title: _("heard of"), number: true, of: ({ seen }) => (seen ? ago(seen) : "") },
  { title: _("busy, last minutes"), name: "history", of: busy, fill: (cell, machine) => cell.replaceChildren(spark(busyParts(machine), busy(machine))) },
  { title: _("last word"), name: "word", of: ({ word }) => (word ? reasonOf(word.text) : ""), fill: (cell, { word }) => { cell.className += ` ${word.level}`; } },
];

function showCrew() {
  const { crew } = data, isRunning = data.head.state === "running";
  document.querySelector("#crew .empty").hidden = crew.length > 0 || !data.head.name;
  // What one said before it left a run that goes on is not how it is now.
  const machines = crew.map((machine) => (machine.here || !isRunning ? machine : { ...machine, usage: undefined, waiting_part: null, round_trip_seconds: null }));
  const nameOf = ({ here }) => (here ? "" : "gone"), below = (machine, width) => (opened.has(machine.name) ? [aloneRow(machine, width)] : []);
  fillTable(document.querySelector("#crew .machines"), MACHINE_COLUMNS, machines, { nameOf, below });
}

function toggle(name) {
  if (!opened.delete(name)) opened.add(name);
  showCrew();
}

/** Since a time: until now, or until the last machine of a run that has ended was heard. */
function ago(time) {
  const now = data.head.state === "running" ? (FROZEN?.made ?? Date.now() / 1000) : Math.max(...data.crew.map(({ seen }) => seen ?? 0));
  const seconds = Math.max(0, now - time);
  return seconds > 86400 * 30 ? dated(time) : say("{time} ago", { time: seconds < 10 ? "< 10 s" : duration(Math.round(seconds)) });
}

/** How busy its GPU was, or its processor if it has none. */
function busyParts({ name }) {
  const points = data.points.get(name) ?? [];
  return points.map((point) => point[points.some(([, , gpu]) => gpu !== null) ? 2 : 1]);
}

function busy(machine) {
  const real = busyParts(machine).filter(known);
  if (!real.length) return "";
  const mean = real.reduce((one, other) => one + other, 0) / real.length;
  return say(_("busy: {now} now, {mean} on average"), { now: percent(real.at(-1)), mean: percent(mean) });
}

function aloneRow(machine, width) {
  const line = make("tr", null, null, { className: "alone" });
  const list = make("dl", null, make("td", null, line, { colSpan: width }));
  const usage = machine.usage ?? {};
  const pair = (one, other, shown) => (known(one) || known(other) ? `${shown(one)} / ${shown(other)}` : "");
  const facts = [
    ...Object.entries(machine.facts ?? {}).map(([name, fact]) => [spoken(name), fact]),
    ...gpusOf(machine).map((gpu) => [`${say("GPU")} ${gpu.index}`, [gpu.name, ratio(gpu.busy_percent), memoryOf(gpu), celsius(gpu.temperature_celsius), known(gpu.power_watts) ? say("{n} W", { n: whole(gpu.power_watts) }) : ""].filter(Boolean).join(" · ")]),
    [say("disk free"), known(usage.disk_free_bytes) ? bytes(usage.disk_free_bytes) : ""],
    [say("network sent / received"), pair(usage.network_sent_bytes_per_second, usage.network_received_bytes_per_second, rate)],
    [say("to / from the coordinator"), pair(machine.sent_bytes_per_second, machine.received_bytes_per_second, rate)],
    [say("battery"), known(usage.battery_percent) ? (usage.on_battery ? say("{n}, not plugged in", { n: ratio(usage.battery_percent) }) : ratio(usage.battery_percent)) : ""],
    [say("joined"), machine.joined ? say("{n}×", { n: machine.joined }) : ""],
    [say("lost"), machine.lost ? say("{n}×", { n: machine.lost }) : ""],
    [say("last reason"), reasonOf(machine.reason ?? "")],
  ];
  for (const [name, value] of facts.filter(([, text]) => text)) {
    make("dt", name, list);
    make("dd", value, list);
  }
  return line;
}
