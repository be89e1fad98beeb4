// The queue of this machine, or a search: its runs in their order, and the machines that do them

const freshQueue = () => ({ head: {}, jobs: new Map(), crew: [], points: new Map() });
let queued = freshQueue(); // what the stream has told of the one that is shown
let queues = [];
let currentQueue = null;
let followed = null; // the key and the AbortController of its stream
const visited = new Set(); // runs that were opened from here; the list of runs need not have them

const JOB = { key: "job", name: "job", of: (machine) => (machine.jobs ?? []).map((name) => queued.jobs.get(name)).filter(Boolean).map((job) => [job.title, stepOf(job)].filter(Boolean).join("  ")).join(", ") };
const queueTable = new MachineTable("#queue", [JOB, PHASE, ...USAGE, LINK, SEEN]);

function takeQueue(news) {
  if (news.anew) queued = freshQueue();
  for (const name of ["head", "crew"]) if (news[name]) queued[name] = news[name];
  if (news.jobs) queued.jobs = new Map(news.jobs.map((job) => [job.name, job]));
  addPoints(queued, news);
}

/** Is told of it while the page is open. */
function followQueue() {
  const key = tab === "queue" && token && $("key").hidden ? currentQueue : null;
  if (key === (followed?.key ?? null)) return;
  followed?.control.abort();
  followed = key === null ? null : { key, control: new AbortController() };
  if (!followed) return;
  hear(`/api/jobs?of=${encodeURIComponent(key)}`, followed.control.signal, (news) => {
    takeQueue(news);
    wanted.add("queue");
    draw();
  });
}

function takeQueues(found) {
  queues = found;
  if (!queues.some(({ key }) => key === currentQueue)) chooseQueue(queues[0]?.key ?? null);
  followQueue();
  if (tab === "queue") showQueues();
}

function chooseQueue(key) {
  currentQueue = key;
  queued = freshQueue();
  queueTable.opened.clear();
  followQueue();
  if (tab === "queue") showQueue();
}

function showQueues() {
  options($("of-queue"), queues.map(({ key, title }) => [key, title ? say("searchOf", { name: title }) : say("thisQueue")]));
  if (currentQueue !== null) $("of-queue").value = currentQueue;
  $("of-queue").closest("label").hidden = queues.length < 2;
}

const stepOf = (job) => (known(job.step) ? (known(job.steps) ? `${whole(job.step)} / ${whole(job.steps)}` : whole(job.step)) : "");
const figureOf = (value) => (known(value) ? short(value) : "");

/** Who has a run, had it last, or may have it. */
function machineOf(job) {
  if (job.place) return job.place;
  const { on, device } = job.wants;
  return [on.join(", "), device].filter(Boolean).join(" · ");
}

const JOB_COLUMNS = [
  { key: "state", of: (job) => named(job.state), fill: (cell, job) => cell.replaceChildren(make("span", named(job.state), null, { className: `badge ${job.state in NAMES ? job.state : ""}` })) },
  { key: "machine", of: machineOf, fill: (cell, job) => cell.classList.toggle("faint", job.state !== "running") },
  { key: "step", number: true, of: stepOf, fill: (cell, job) => { if (known(job.step) && job.steps) bar(cell, job.step / job.steps); } },
  { key: "loss", number: true, of: (job) => figureOf(job.loss) },
  { key: "bits", number: true, of: (job) => figureOf(job.bits_per_byte) },
  { key: "score", number: true, of: (job) => figureOf(job.score) },
  { key: "began", number: true, of: (job) => moment(job.began) },
  { key: "settings", name: "values", of: (job) => job.values },
  { key: "reasonOf", name: "why", of: (job) => job.reason },
];

function showQueue() {
  const { head: now } = queued;
  const jobs = [...queued.jobs.values()];
  const panel = $("queue");
  showQueues();
  panel.querySelector(".empty").hidden = jobs.length > 0 || (queues.length > 0 && now.number === undefined);
  $("queued").textContent = now.number ? say("endedOf", { n: whole(now.ended), all: whole(now.number) }) + (now.hidden ? ` ${say("leftOut", { n: whole(now.hidden) })}` : "") : "";
  $("handed").textContent = now.number === undefined ? "" : say(now.running ? "handedOut" : "notHandedOut");
  $("handed").className = `badge ${now.running ? "running" : ""}`;
  $("handed").hidden = now.number === undefined;
  const waits = !now.running && now.ended < now.number;
  $("goes-on").textContent = waits ? say(now.kind === "search" ? "searchGoesOn" : "queueGoesOn") : "";
  $("goes-on").hidden = !waits;
  showJobs(panel.querySelector(".jobs"), jobs, say(now.kind === "search" ? "trial" : "run"));
  queueTable.show(queued, { isRunning: Boolean(now.running) });
  panel.querySelector("h2").hidden = !queued.crew.length;
}

function showJobs(table, jobs, title) {
  const shown = JOB_COLUMNS.filter(({ of }) => jobs.some((job) => of(job)));
  const focused = table.contains(document.activeElement) ? document.activeElement.dataset.job : undefined;
  table.hidden = !jobs.length;
  head(table, [{ title }, ...shown.map(({ key, number, name }) => ({ title: say(key), number, name }))]);
  table.tBodies[0].replaceChildren(...jobs.map((job) => jobRow(job, shown)));
  if (focused !== undefined) [...table.querySelectorAll("button")].find(({ dataset }) => dataset.job === focused)?.focus({ preventScroll: true });
}

function jobRow(job, shown) {
  const line = make("tr", null, null, { className: job.state });
  const first = make("td", job.key ? null : job.title, line, { className: "first" });
  if (job.key) {
    const button = make("button", job.title, first, { type: "button" });
    button.dataset.job = job.name;
    button.addEventListener("click", () => openRun(job.key));
  }
  for (const { key, number, name, of, fill } of shown) {
    const text = of(job);
    const cell = make("td", text, line, { className: `${number ? "number" : ""} ${name ?? ""} ${text ? "" : "blank"}` });
    cell.dataset.label = say(key);
    if (text) fill?.(cell, job);
  }
  return line;
}

function openRun(key) {
  visited.add(key);
  showRunList();
  choose(key);
  openTab("train", { focus: true });
}
