"use strict";
// Everything that comes from the test is put in as text (textContent), never as HTML.

const report = JSON.parse(document.getElementById("report").textContent);
const COLOURS = ["#1f6feb", "#d9480f", "#2b8a3e", "#9c36b5", "#e8a300", "#0b7285"];
const level = (stage) => (stage.mode === "open" ? stage.rate : stage.clients);
const stages = report.stages.toSorted((one, other) => level(one) - level(other));
const isOpen = stages.length > 0 && stages[0].mode === "open";

const language = document.documentElement.lang;
const WORDS = new Map(Object.entries(report.words));
const say = (words, ...values) => (WORDS.get(words) ?? words).replace(/%s/g, (blank) => values.shift() ?? blank);
const decimal = (text) => (language === "es" ? text.replace(".", ",") : text);
const short = (value) => (value === null || value === undefined ? "–" : decimal(Number(value.toPrecision(4)).toString()));
const rough = (value) => decimal(value >= 100 ? value.toFixed(0) : Number(value.toPrecision(3)).toString());
const millis = (seconds) => (seconds === null || seconds === undefined ? null : 1000 * seconds);
const percent = (part) => (part === null || part === undefined ? "–" : `${decimal((100 * part).toFixed(1))} %`);
const nameOf = (stage) => (stage.mode === "open" ? say("%s/s", short(stage.rate)) : say(stage.clients === 1 ? "1 client" : "%s clients", stage.clients));

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
  for (const [name, number] of columns) head.append(element("th", name, number ? "number" : ""));
  table.append(head);
  for (const cells of rows) {
    const line = element("tr");
    cells.forEach((cell, index) => line.append(element("td", cell, columns[index][1] ? "number" : "")));
    table.append(line);
  }
}

// -- head ------------------------------------------------------------------------------------------------------------

function kneeInWords({ rate, broken_rate: broken, broken_by: reason }) {
  const why = (word) => say({
    goodput: "less than 90 % of the requests were answered within the limits",
    backlog: "requests came faster than answers",
    ttft: "p99 of the time to the first token was over its limit",
    client: "this client was the limit, not the server",
  }[word] ?? "");
  if (rate === null) return broken === null ? "–" : say("below %s requests/s: %s", short(broken), why(reason));
  return broken === null ? say("none up to %s requests/s", short(rate)) : say("%s requests/s; at %s %s", short(rate), short(broken), why(reason));
}

function showHead() {
  const { url, model, api } = report.target;
  document.title = `${model || url} · ${say("Load test")}`;
  const made = new Date(report.made * 1000).toISOString().slice(0, 16).replace("T", " ");
  const how = say(isOpen ? "open loop: requests arrive at random, at a rate" : "closed loop: each client waits for its answer");
  document.getElementById("about").textContent = say("%s, %s; %s; written %s UTC by cuadrilla %s", url, model || api, how, made, report.client.cuadrilla);
  const limited = stages.filter((stage) => stage.client.saturated).map(nameOf).join(", ");
  document.getElementById("warning").textContent = [
    report.complete ? "" : say("The test was interrupted: these are the figures until then."),
    limited ? say("At %s this client was a limit itself: its figures are not the server's.", limited) : "",
  ].join(" ").trim();
  const best = (key) => Math.max(0, ...stages.map((stage) => stage[key]));
  const figures = [["requests/s", short(best("requests_per_second"))], ["tokens/s", short(best("tokens_per_second"))]];
  if (report.knee) figures.unshift(["the knee", kneeInWords(report.knee)]);
  for (const [name, value] of figures) {
    const card = element("div");
    card.append(element("dt", say(name)), element("dd", value));
    document.getElementById("figures").append(card);
  }
}

function showStages() {
  const three = (values) => (values ? ["p50", "p90", "p99"].map((name) => rough(millis(values[name]))).join(" · ") : "–");
  const columns = [
    [say("stage")], [say("answered"), true], [say("errors"), true], [say("requests/s"), true], [say("tokens/s"), true], [say("within the limits"), true],
    ...["first token", "between tokens", "whole answer"].map((name) => [say(name), true]),
  ];
  fillTable("stages", columns, stages.map((stage) => [
    nameOf(stage), String(stage.counts.answered), String(stage.counts.failed), short(stage.requests_per_second),
    short(stage.tokens_per_second), percent(stage.attained), three(stage.ttft_seconds), three(stage.itl_seconds), three(stage.e2e_seconds),
  ]));
}

// -- curves ----------------------------------------------------------------------------------------------------------

function chart(place, title, xName, xs, series, { log = false } = {}) {
  if (series.every(({ values }) => values.every((value) => value === null || value === undefined))) return;
  const box = element("div", undefined, "chart");
  box.append(element("h3", say(title)));
  document.querySelector(`#${place} .charts`).append(box);
  const style = getComputedStyle(document.documentElement);
  const axis = { stroke: style.getPropertyValue("--faint"), grid: { stroke: style.getPropertyValue("--line") } };
  const positive = (values) => values.map((value) => (value > 0 ? value : null)); // a logarithmic axis has no 0
  const lines = series.map(({ name, dashed }, index) => ({
    label: say(name), stroke: COLOURS[index % COLOURS.length], width: dashed ? 1 : 2, dash: dashed ? [4, 4] : undefined,
    spanGaps: true, points: { show: !dashed && xs.length < 40, size: 6 }, value: (_plot, value) => short(value),
  }));
  const size = () => ({ width: box.clientWidth - 16, height: 260 });
  const numbers = (_plot, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick)));
  const plot = new uPlot(
    {
      ...size(),
      scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (_plot, _least, most) => [0, 1.05 * (most || 1)] } },
      axes: [{ ...axis, values: numbers }, { ...axis, size: 64, values: numbers }],
      series: [{ label: say(xName), value: (_plot, value) => short(value) }, ...lines],
    },
    [xs, ...series.map(({ values }) => (log ? positive(values) : values))],
    box,
  );
  new ResizeObserver(() => plot.setSize(size())).observe(box);
}

function showOver() {
  if (stages.length < 2) return document.getElementById("over").classList.add("empty");
  const xs = stages.map(level);
  const xName = isOpen ? "requests/s offered" : "clients";
  const of = (key, name) => ({ name, values: stages.map((stage) => millis(stage[key]?.[name] ?? null)) });
  const all = (key) => ["p50", "p90", "p95", "p99"].map((name) => of(key, name));
  chart("over", "Time to the first token, ms", xName, xs, all("ttft_seconds"), { log: true });
  chart("over", "Between two tokens, ms", xName, xs, all("itl_seconds"), { log: true });
  chart("over", "Whole answer, ms", xName, xs, all("e2e_seconds"), { log: true });
  const rates = [
    { name: "requests/s", values: stages.map((stage) => stage.requests_per_second) },
    { name: "goodput/s", values: stages.map((stage) => stage.goodput_per_second) },
  ];
  if (isOpen) rates.push({ name: "as offered", values: xs, dashed: true });
  chart("over", "Requests per second", xName, xs, rates);
  chart("over", "Tokens per second", xName, xs, [{ name: "tokens/s", values: stages.map((stage) => stage.tokens_per_second) }]);
}

function showStage(stage) {
  document.querySelector("#stage .charts").replaceChildren();
  const { curves, timeline } = stage;
  const at = (values) => (values.length ? values.map(millis) : curves.percent.map(() => null));
  chart("stage", "Percentiles, ms (logarithmic)", "percentile", curves.percent, [
    { name: "first token", values: at(curves.ttft) }, { name: "between tokens", values: at(curves.itl) }, { name: "whole answer", values: at(curves.e2e) },
  ].filter(({ values }) => values.some((value) => value !== null)), { log: true });
  const column = (key) => timeline.map((row) => millis(row[key]));
  chart("stage", "By the second of arrival, ms", "second", timeline.map((row) => row.second), [
    { name: "first token p50", values: column("ttft_p50") }, { name: "first token, slowest", values: column("ttft_max") },
    { name: "whole answer, slowest", values: column("e2e_max") },
  ]);
}

function showPicker() {
  if (!stages.length) return document.getElementById("stage").classList.add("empty");
  const picker = document.querySelector("#stage select");
  stages.forEach((stage, index) => picker.append(Object.assign(element("option", nameOf(stage)), { value: index })));
  picker.hidden = stages.length < 2;
  picker.setAttribute("aria-label", say("stage"));
  const knee = stages.findIndex((stage) => report.knee && stage.rate === report.knee.rate);
  picker.value = Math.max(knee, 0);
  picker.addEventListener("change", () => showStage(stages[Number(picker.value)]));
  showStage(stages[Number(picker.value)]);
}

// -- the rest --------------------------------------------------------------------------------------------------------

showHead();
showStages();
showOver();
showPicker();
fillTable("errors", [[say("stage")], [say("kind")], [say("count"), true], [say("example")]], stages.flatMap((stage) =>
  Object.entries(stage.errors).map(([kind, { count, example }]) => [nameOf(stage), say(kind), String(count), example])));
fillTable("options", [[say("setting")], [say("value")]],
  Object.entries({ ...report.options, ...report.client }).filter(([, value]) => value !== null && value !== "" && value !== false)
    .map(([key, value]) => [key, String(value)]));
document.body.dataset.ready = "yes";
