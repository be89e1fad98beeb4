"use strict";
// What the pages have in common. Everything that comes from elsewhere is put in as text (textContent), never as HTML.

const report = JSON.parse(document.getElementById("report").textContent);
const COLOURS = ["#1f6feb", "#d9480f", "#2b8a3e", "#9c36b5", "#e8a300", "#0b7285", "#c2255c", "#5f3dc4"];

const language = document.documentElement.lang;
const WORDS = new Map(Object.entries(report.words));
const say = (words, ...values) => (WORDS.get(words) ?? words).replace(/%s/g, (blank) => values.shift() ?? blank);
const whole = (value) => Math.round(value).toLocaleString(language);
const decimal = (text) => (language === "es" ? text.replace(".", ",") : text);
const short = (value) => (value === null || value === undefined ? "–" : decimal(Number(value.toPrecision(4)).toString()));
const rough = (value) => decimal(Number(value.toPrecision(2)).toString());
const percent = (part) => (part === null ? "–" : `${decimal((100 * part).toFixed(1))} %`);

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

function showFigures(figures) {
  for (const [name, value] of figures) {
    const card = element("div");
    card.append(element("dt", say(name)), element("dd", value));
    document.getElementById("figures").append(card);
  }
}

/** A box with a plot of lines over the numbers `x`. A line of one value is a dot: a stroke between no two points is none. */
function drawChart(parent, title, series, { x, label, log = false, ticks, options = {} }) {
  const box = element("div", undefined, "chart");
  box.append(element("h3", title));
  parent.append(box);
  const style = getComputedStyle(document.documentElement);
  const axis = { stroke: style.getPropertyValue("--faint"), grid: { stroke: style.getPropertyValue("--line") } };
  const lines = series.map(({ name, values, dots, faint, stepped }, index) => ({
    label: name,
    stroke: COLOURS[index % COLOURS.length] + (faint ? "66" : ""),
    width: faint ? 1 : 2,
    spanGaps: true,
    paths: dots ? () => null : stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
    points: { show: Boolean(dots) || values.filter((value) => value !== null && value !== undefined).length === 1, size: 7, fill: COLOURS[index % COLOURS.length] },
    value: (_plot, value) => short(value),
  }));
  const size = () => ({ width: box.clientWidth - 16, height: 260 });
  const plot = new uPlot(
    {
      ...size(),
      scales: { x: { time: false }, y: log ? { distr: 3 } : {} },
      axes: [
        { ...axis, ...(ticks ? { values: (_plot, at) => at.map(ticks) } : {}) },
        { ...axis, size: 64, values: (_plot, at) => at.map((tick) => (tick === null ? "" : short(tick))) },
      ],
      series: [{ label, ...(ticks ? { value: (_plot, value) => (value === null ? "–" : whole(value)) } : {}) }, ...lines],
      ...options,
    },
    [x, ...series.map(({ values }) => values)],
    box,
  );
  new ResizeObserver(() => plot.setSize(size())).observe(box);
}

