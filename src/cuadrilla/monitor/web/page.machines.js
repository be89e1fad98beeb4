// The machines of a run, or of a queue: a row for each, which opens.

const gpusOf = (machine) => (Array.isArray(machine.usage?.gpus) ? machine.usage.gpus : []);
const most = (values) => values.filter(known).reduce((one, other) => (one === null || other > one ? other : one), null);
const hot = (machine) => most([machine.usage?.temperature_celsius, ...gpusOf(machine).map((gpu) => gpu.temperature_celsius)]);
const memoryOf = (usage) => ofBytes(usage?.memory_used_bytes, usage?.memory_bytes);
const ratio = (value, scale = 100) => (known(value) ? percent(value / scale) : "");
const HOT_CELSIUS = 90;

/** Columns: what a machine has there, as text; `fill` puts more into a cell that has some. */
const JOB = { title: _("job"), name: "job", of: (machine) => machine.job };
const PHASE = { title: _("phase"), of: (machine) => (machine.phase ? spoken(machine.phase) : "") };
const SHARE = { title: _("share"), number: true, of: (machine) => (machine.here && known(machine.share) ? percent(machine.share) : ""), fill: (cell, machine) => bar(cell, machine.share) };
const SPEED = { title: _("tokens/s"), number: true, of: (machine) => (machine.here && machine.tokens_per_second ? whole(machine.tokens_per_second) : "") };
const WAITS = { title: _("waits"), number: true, of: (machine) => ratio(machine.waiting_part, 1) };
const USAGE = [
  { title: _("CPU"), number: true, of: (machine) => ratio(machine.usage?.cpu_percent) },
  { title: _("memory"), number: true, of: (machine) => memoryOf(machine.usage) },
  { title: _("GPU"), number: true, of: (machine) => ratio(most(gpusOf(machine).map((gpu) => gpu.busy_percent))) },
  { title: _("temp."), number: true, of: (machine) => (known(hot(machine)) ? `${whole(hot(machine))} °C` : ""), fill: (cell, machine) => cell.classList.toggle("hot", hot(machine) >= HOT_CELSIUS) },
];
const LINK = { title: _("link"), number: true, of: (machine) => (known(machine.round_trip_seconds) ? duration(machine.round_trip_seconds) : "") };
const SEEN = { title: _("heard of"), number: true, of: (machine, now) => (machine.seen ? ago(machine.seen, now) : "") };

function ago(time, now) {
  const seconds = Math.max(0, now - time);
  return seconds > 86400 * 30 ? dated(time) : say("{time} ago", { time: seconds < 10 ? "< 10 s" : duration(Math.round(seconds)) });
}

function bar(cell, part) {
  const box = make("span", null, cell, { className: "part" });
  make("i", null, box).style.width = `${Math.min(100, 100 * part)}%`;
}

class MachineTable {
  /** Of a panel with a table of the class `machines`. */
  constructor(panel, columns) {
    this.table = document.querySelector(`${panel} .machines`);
    this.columns = columns;
    this.rows = new Map();
    this.opened = new Set();
  }

  /** `told`: its machines (`crew`) and how busy each was (`points`). `isRunning`: it goes on. */
  show(told, { isRunning }) {
    const { crew, points } = told;
    this.table.hidden = !crew.length;
    const newest = Math.max(...crew.map((machine) => machine.seen ?? 0));
    this.now = isRunning ? (FROZEN?.made ?? Date.now() / 1000) : newest;
    // What one said before it left a run that goes on is not how it is now.
    this.asOfNow = (machine) => (machine.here || !isRunning ? machine : { ...machine, usage: undefined, waiting_part: null, round_trip_seconds: null });
    const shown = this.columns.filter(({ of }) => crew.some((machine) => of(this.asOfNow(machine), this.now) !== ""));
    const parts = { shown, points: points.size > 0 ? points : null, hasWords: crew.some((machine) => machine.word) };
    const titles = [{ title: say("machine") }, ...shown.map(({ title, number }) => ({ title: say(title), number }))];
    if (parts.points) titles.push({ title: say("busy, last minutes") });
    if (parts.hasWords) titles.push({ title: say("last word") });
    head(this.table, titles);
    const used = new Set(crew.map((machine) => machine.name));
    for (const name of this.rows.keys()) if (!used.has(name)) this.rows.delete(name);
    const focused = this.table.contains(document.activeElement) ? document.activeElement.dataset.machine : undefined;
    const lines = crew.flatMap((machine) => {
      const line = this.row(machine, parts);
      return this.opened.has(machine.name) ? [line, aloneRow(machine, titles.length)] : [line];
    });
    this.table.tBodies[0].replaceChildren(...lines);
    this.again = () => this.show(told, { isRunning });
    if (focused !== undefined) this.rows.get(focused)?.button.focus({ preventScroll: true });
  }

  row(machine, { shown, points, hasWords }) {
    const row = this.rows.get(machine.name) ?? this.newRow(machine.name);
    this.rows.set(machine.name, row);
    const { line, button, svg } = row;
    line.className = machine.here ? "" : "gone";
    button.setAttribute("aria-expanded", this.opened.has(machine.name));
    const cells = [row.first];
    for (const { title, number, name, of, fill } of shown) {
      const text = of(this.asOfNow(machine), this.now);
      const cell = make("td", text, null, { className: `${number ? "number" : (name ?? "plain")} ${text ? "" : "blank"}` });
      cell.dataset.label = say(title);
      if (text) fill?.(cell, machine);
      cells.push(cell);
    }
    if (points) cells.push(historyCell(points.get(machine.name) ?? [], svg));
    if (hasWords) {
      const { text = "", level = "" } = machine.word ?? {};
      cells.push(make("td", text, null, { className: `word ${level} ${text ? "" : "blank"}` }));
    }
    line.replaceChildren(...cells);
    return line;
  }

  newRow(name) {
    const line = make("tr");
    const first = make("td", null, null, { className: "first" });
    const button = make("button", name, first, { className: "name", type: "button" });
    button.dataset.machine = name;
    button.addEventListener("click", () => {
      if (!this.opened.delete(name)) this.opened.add(name);
      this.again();
    });
    return { line, first, button, svg: document.createElementNS(SVG, "svg") };
  }
}

function historyCell(points, svg) {
  const cell = make("td", null, null, { className: `history ${points.length ? "" : "blank"}` });
  cell.dataset.label = say("busy, last minutes");
  const at = points.some((point) => point[2] !== null) ? 2 : 1;
  const values = points.map((point) => point[at]);
  const real = values.filter(known);
  const mean = real.length ? real.reduce((one, other) => one + other, 0) / real.length : null;
  spark(svg, values, say(at === 2 ? _("GPU busy: {now} now, {mean} on average") : _("CPU busy: {now} now, {mean} on average"), { now: percent(values.at(-1)), mean: percent(mean) }));
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
    ...gpusOf(machine).map((gpu) => [`${say("GPU")} ${gpu.index}`, [gpu.name, ratio(gpu.busy_percent), memoryOf(gpu), known(gpu.temperature_celsius) ? `${whole(gpu.temperature_celsius)} °C` : "", known(gpu.power_watts) ? say("{n} W", { n: whole(gpu.power_watts) }) : ""].filter(Boolean).join(" · ")]),
    [say("disk free"), known(usage.disk_free_bytes) ? bytes(usage.disk_free_bytes) : ""],
    [say("disk read / written"), pair(usage.disk_read_bytes_per_second, usage.disk_written_bytes_per_second, rate)],
    [say("network sent / received"), pair(usage.network_sent_bytes_per_second, usage.network_received_bytes_per_second, rate)],
    [say("to / from the coordinator"), pair(machine.sent_bytes_per_second, machine.received_bytes_per_second, rate)],
    [say("battery"), known(usage.battery_percent) ? (usage.on_battery ? say("{n}, not plugged in", { n: ratio(usage.battery_percent) }) : ratio(usage.battery_percent)) : ""],
    [say("joined"), machine.joined ? say("{n}×", { n: machine.joined }) : ""],
    [say("lost"), machine.lost ? say("{n}×", { n: machine.lost }) : ""],
    [say("last reason"), machine.reason],
  ];
  for (const [name, value] of facts.filter(([, text]) => text)) {
    make("dt", name, list);
    make("dd", value, list);
  }
  return line;
}
