// Asking, following, and what a person does

const FROZEN = JSON.parse($("frozen").textContent); // a run as it was when this page was saved; null: it is followed
const TABS = ["crew", "train", "runs", "samples", "logs", "about"].filter((name) => !FROZEN || name !== "runs");
const SHOW = { crew: showCrew, train: showTrain, runs: showRuns, samples: showSamples, logs: showLogs, about: showAbout };
/** What of the news a page shows. */
const SHOWS = { crew: ["crew", "points", "head"], train: ["figures", "shares", "events", "head"], runs: [], samples: ["samples"], logs: ["log"], about: ["about"] };
const CONNECTING = _("connecting…"), LIVE = _("live"), WRITTEN = _("as of {time}");
const LOST = _("The dashboard does not answer; trying again…");
const NO_RUN = _("There is no run here yet. One that begins is shown by itself.");
const GONE = _("{run} is not there any more; what was read of it is still shown. Choose another run above.");
const RUNS_SECONDS = 4, AGAIN_SECONDS = 2, PRESS_MILLISECONDS = 500;
const KEPT = (() => { try { return sessionStorage; } catch { return {}; } })(); // of this tab, for when it is loaded again

let token = "";
let tab = "train";
let current = null;
let following = null; // the AbortController of its stream
let problem = null;

async function ask(path, { signal, method = "GET", body } = {}) {
  const headers = { Authorization: `Bearer ${token}` };
  const answer = await fetch(location.origin + path, { method, body, headers, signal, cache: "no-store", redirect: "error", credentials: "omit" });
  if (!answer.ok) throw Object.assign(new Error(), { status: answer.status });
  return answer;
}

const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

/** What the stream of a run tells, from the beginning again whenever it breaks, until another one is chosen. */
async function follow(key) {
  following?.abort();
  const { signal } = following = new AbortController();
  while (!signal.aborted) {
    showLive(CONNECTING);
    try {
      const answer = await ask(`/api/follow?of=${encodeURIComponent(key)}`, { signal });
      tell(null);
      for await (const news of streamed(answer)) {
        if (signal.aborted) return;
        told(take(JSON.parse(news)));
      }
    } catch (error) {
      if (signal.aborted) return;
      tellOf(error);
      if (error.status === 401) return;
    }
    await pause(AGAIN_SECONDS);
  }
}

let wanted = new Set(), isDrawing = false;

function told(news) {
  for (const name of Object.keys(news)) wanted.add(name);
  showLive(FROZEN ? WRITTEN : LIVE);
  draw();
}

let pressed = 0; // a row that is made anew between a button's going down and up would swallow the click
const isPressed = () => Date.now() - pressed < PRESS_MILLISECONDS;

function draw() {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(async () => {
    while (isPressed()) await pause(PRESS_MILLISECONDS / 1000);
    isDrawing = false;
    const names = wanted;
    wanted = new Set();
    showHead();
    if (SHOWS[tab].some((name) => names.has(name))) SHOW[tab]();
    document.body.dataset.told = "yes";
  });
}

function showLive(key) {
  $("live").dataset.state = key;
  const text = key === LIVE && data.head.state !== "running" ? "" : say(key, { time: FROZEN && dated(FROZEN.made) });
  if ($("live").textContent !== text) $("live").textContent = text;
}

// Trouble

function tellOf(error) {
  if (error.status === 401) return askForToken(token ? _("The token is wrong: the dashboard was started anew, perhaps. Open the link that it printed.") : null);
  if (error.status === 404) return void lookForRuns();
  tell(error.status ? _("The dashboard has answered with an error ({status}).") : LOST, { status: error.status });
}

function tell(key, values = {}) {
  problem = key && [key, values];
  $("trouble").textContent = key ? say(key, values) : "";
  if (key) $("live").textContent = "";
}

function askForToken(key) {
  tell(key);
  $("live").textContent = "";
  following?.abort();
  $("key").hidden = false;
  $("secret").focus();
}

async function useToken(event) {
  event?.preventDefault();
  const typed = $("secret").value.trim().replace(/^.*#token=/, "");
  if (!/^[\x21-\x7e]+$/.test(typed)) return; // a header cannot carry it
  token = typed;
  $("secret").value = "";
  $("key").hidden = true;
  await start();
}

// Runs

async function lookForRuns() {
  let found;
  try {
    found = await ask("/api/runs").then((answer) => answer.json());
  } catch (error) {
    tellOf(error);
    return;
  }
  if (problem && [LOST, NO_RUN, GONE].includes(problem[0])) tell(null);
  runs = found.runs;
  showRunList();
  const isThere = runs.some(({ key }) => key === current);
  if (!isThere && current !== null) tell(GONE, { run: current }); // what was shown of it stays
  else if (!isThere && !runs.length) return tell(NO_RUN);
  else if (!isThere) choose(runs[0].key);
  $("run").value = current;
  showHead();
  if (tab === "runs" && !isPressed() && JSON.stringify(runs) !== shownRuns) {
    if (runs.some(({ key, state }) => chosen.has(key) && state === "running")) await readCurves().catch(tellOf);
    showRuns();
  }
}

/** With the one that is shown, which may be gone. */
function showRunList() {
  const keys = new Set([...runs.map(({ key }) => key), ...(current === null ? [] : [current])]);
  options($("run"), [...keys].map((key) => [key, key]));
}

function choose(key) {
  if (key === current) return;
  current = key;
  data = fresh();
  opened.clear();
  sampleAt = null;
  $("notes").value = shownNotes = "";
  showRunList();
  $("run").value = key;
  showTab();
  follow(key);
}

/** A run is changed: it is stopped, or noted of. */
const change = (what, body = "") => ask(`/api/${what}?of=${encodeURIComponent(current)}`, { method: "POST", body }).catch(tellOf);

async function watchRuns() {
  while (true) {
    await pause(RUNS_SECONDS);
    if (token && $("key").hidden && (!document.hidden || !current)) await lookForRuns();
  }
}

// The page

function openTab(name, { focus = false } = {}) {
  tab = name;
  history.replaceState(null, "", `#/${name}`); // `#crew` would be an element, and get the focus
  showTab();
  if (focus) $(`tab-${name}`).focus();
  if (name === "runs") lookForRuns();
}

function showTab() {
  for (const name of TABS) {
    $(name).hidden = name !== tab;
    const button = $(`tab-${name}`);
    button.setAttribute("aria-selected", name === tab);
    button.tabIndex = name === tab ? 0 : -1;
  }
  $(`tab-${tab}`).scrollIntoView({ block: "nearest", inline: "nearest" });
  $("figures").hidden = tab === "runs";
  $("choices").hidden = !["train", "runs"].includes(tab);
  showHead();
  SHOW[tab]();
}

function moveTab(event) {
  const at = TABS.indexOf(tab);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: TABS.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  openTab(TABS[(to + TABS.length) % TABS.length], { focus: true });
}

function show() {
  sayAll();
  if (problem) tell(...problem);
  showLive($("live").dataset.state ?? CONNECTING);
  showTab();
}

const isDark = matchMedia("(prefers-color-scheme: dark)");

function listen() {
  for (const name of TABS) $(`tab-${name}`).addEventListener("click", () => openTab(name));
  $("tabs").addEventListener("keydown", moveTab);
  $("run").addEventListener("change", () => choose($("run").value));
  $("key").addEventListener("submit", useToken);
  $("language").addEventListener("click", () => {
    language = language === "es" ? "en" : "es";
    show();
  });
  isDark.addEventListener("change", show);
  $("sample").addEventListener("input", () => {
    const place = Number($("sample").value);
    sampleAt = place === data.samples.length - 1 ? null : data.samples[place].version;
    showSamples();
  });
  for (const kind of ["input", "change"]) $("logs").addEventListener(kind, showLogs);
  $("axis").addEventListener("change", showTab);
  $("smoothing").addEventListener("input", () => {
    $("choices").querySelector("output").textContent = decimals(Number($("smoothing").value), 2);
    showTab();
  });
  $("stop").addEventListener("click", () => {
    if (confirm(say("Stop {run}? It is saved, and the same command goes on from there.", { run: current }))) change("stop");
  });
  $("notes").addEventListener("input", showNotes);
  $("note").addEventListener("click", () => change("notes", $("notes").value));
  addEventListener("hashchange", () => {
    if (!readAddress()) return;
    $("key").hidden = true; // a new link in the same tab
    tell(null);
    start();
  });
  addEventListener("pointerdown", () => { pressed = Date.now(); }, true);
}

/** `#token=…` is taken out of the address at once, so that it is neither bookmarked nor shown. */
function readAddress() {
  const given = location.hash.slice(1);
  if (given.startsWith("token=") && !FROZEN) {
    token = given.slice(6);
    history.replaceState(null, "", `#/${tab}`);
    return true;
  }
  const name = given.replace("/", "");
  if (TABS.includes(name) && name !== tab) openTab(name);
  return false;
}

async function start() {
  KEPT.token = token;
  current = null;
  await lookForRuns();
}

/** A page that was saved shows what it holds, and asks nobody. */
function thaw() {
  $("tab-runs").hidden = $("runs").hidden = true;
  take(FROZEN.news);
  options($("run"), [["", data.head.name]]);
  readAddress();
  show();
  told(FROZEN.news);
}

function look() {
  if (!readAddress()) token = KEPT.token ?? "";
  show();
  if (token) start();
  else askForToken(null);
  watchRuns();
}

listen();
if (FROZEN) thaw();
else look();
