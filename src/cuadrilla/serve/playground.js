// Text from the service, including its models' output, enters the page only as `textContent`.

/** An error: the reason in our words, and the service's own message. */
class Failure extends Error {
  constructor(key, { values = {}, detail = "" } = {}) {
    super(key);
    Object.assign(this, { key, values, detail });
  }

  static of(error) {
    return error instanceof Failure ? error : new Failure(_("The answer cannot be read."), { detail: String(error?.message ?? error) });
  }

  showIn(element) {
    element.replaceChildren();
    make("strong", say(this.key, this.values), element);
    if (this.detail) make("span", this.detail, element, { lang: "en" });
  }
}

// Asking

const BROKEN = _("The answer broke off: the connection was lost.");
const FAILED = {
  401: _("The key is no longer right. Load the page again to type it."),
  429: _("The service is full. Try again in a moment."),
  503: _("The service is not ready, or is ending. Try again in a moment."),
};

async function ask(path, body, signal) {
  let answer;
  try {
    answer = await fetch(location.origin + path, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
    });
  } catch (error) {
    throw signal?.aborted ? error : new Failure(_("The service does not answer: it has ended, or the network is down."));
  }
  if (answer.ok) return answer;
  const { status } = answer;
  const told = await answer.json().then((found) => found?.error ?? {}, () => ({})); // a proxy's error may be HTML
  const detail = typeof told.message === "string" ? told.message : "";
  throw new Failure(FAILED[status] ?? _("The service has answered with an error ({status})."), { values: { status }, detail });
}

/** The events of a completion, to its end. */
async function* completed(asked, signal) {
  const answer = await ask("/v1/completions", asked, signal);
  try {
    for await (const data of streamed(answer)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event?.error) throw new Failure(_("The service has given up this answer."), { detail: String(event.error.message ?? "") });
      yield event;
    }
  } catch (error) {
    throw error instanceof TypeError && !signal.aborted ? new Failure(BROKEN) : error; // as a network's errors are
  }
  throw new Failure(BROKEN);
}

/** For each new token, the model's likeliest tokens in its place, in order. */
function likelyOf(logprobs) {
  return (logprobs?.tokens ?? []).map((token, place) => ({
    token: String(token),
    top: Object.entries(logprobs.top_logprobs?.[place] ?? {}).sort((one, other) => other[1] - one[1]),
  }));
}

// A column: the prompt, and one model's continuation of it

const PARTS = ["name", "speed", "first", "count", "seed", "more", "edit", "paper", "prompt", "out", "state", "error"];

class Column {
  constructor() {
    this.root = $("column").content.firstElementChild.cloneNode(true);
    this.parts = Object.fromEntries(PARTS.map((name) => [name, this.root.querySelector(`.${name}`)]));
    this.follows = true;
    this.clear("");
    const { paper, out, more, edit } = this.parts;
    paper.addEventListener("scroll", () => {
      this.follows = paper.scrollTop + paper.clientHeight > paper.scrollHeight - 30;
    });
    more.addEventListener("click", () => generateFrom(this.text));
    edit.addEventListener("click", () => takeOver(this.text));
    out.addEventListener("click", (event) => {
      if (getSelection().isCollapsed) card.open(this, [...out.children].indexOf(event.target));
    });
    out.addEventListener("keydown", (event) => this.step(event));
  }

  get text() {
    return this.prompt + this.pieces.map((piece) => piece.text).join("");
  }

  clear(prompt) {
    Object.assign(this, { pieces: [], pending: [], count: 0, began: 0, first: 0, last: 0, reason: "", state: "" });
    Object.assign(this, { failure: null, busy: false });
    this.parts.out.replaceChildren();
    this.setPrompt(prompt);
  }

  setPrompt(prompt) {
    this.prompt = prompt;
    this.parts.prompt.textContent = prompt;
  }

  async run(asked, signal) {
    this.clear(asked.prompt);
    Object.assign(this, { began: performance.now(), seed: asked.seed, state: _("Waiting for the first token…"), busy: true, follows: true });
    this.show();
    try {
      for await (const event of completed(asked, signal)) this.take(event);
      if (this.reason === "error") throw new Failure(_("The model has failed (error): its numbers are not finite, or the memory is full."));
      this.state = "ended";
    } catch (error) {
      this.state = signal.aborted ? _("Stopped by you.") : "";
      this.failure = signal.aborted ? null : Failure.of(error);
    }
    this.busy = false;
    this.show();
  }

  take(event) {
    if (Number.isFinite(event?.usage?.completion_tokens)) this.count = event.usage.completion_tokens;
    const choice = event?.choices?.[0];
    if (!choice) return;
    const text = typeof choice.text === "string" ? choice.text : "";
    const likely = likelyOf(choice.logprobs);
    this.pending.push(...likely);
    if (text || likely.length || !(this.first || choice.finish_reason)) {
      this.last = performance.now();
      this.first ||= this.last;
      this.count += likely.length || 1; // until the usage comes: a part of a character is not told
    }
    this.state = _("Generating…");
    if (choice.finish_reason) this.reason = String(choice.finish_reason);
    if (text) {
      this.pieces.push({ text, likely: this.pending.splice(0) });
      make("span", text, this.parts.out, { className: "piece" });
    }
    this.showSoon();
  }

  showSoon() {
    if (this.soon) return;
    this.soon = true;
    requestAnimationFrame(() => {
      this.soon = false;
      this.show();
    });
  }

  show() {
    const { speed, first, count, seed, more, edit, paper, out, state, error } = this.parts;
    const seconds = (this.last - this.first) / 1000;
    speed.textContent = seconds > 0 && this.count > 1 ? say("{n} tokens/s", { n: decimals((this.count - 1) / seconds) }) : "";
    first.textContent = this.first ? say("first token after {n} ms", { n: decimals(this.first - this.began) }) : "";
    count.textContent = this.first ? say("{n} tokens", { n: decimals(this.count) }) : "";
    seed.textContent = this.first ? say("seed {seed}", { seed: this.seed }) : "";
    const told = this.state === "ended" ? this.ending : this.state && say(this.state);
    if (state.textContent !== told) state.textContent = told;
    if (this.failure) this.failure.showIn(error);
    else error.replaceChildren();
    out.setAttribute("aria-busy", String(this.busy));
    out.tabIndex = this.pieces.length ? 0 : -1;
    more.disabled = edit.disabled = this.busy || !this.pieces.length;
    if (this.busy && this.follows) paper.scrollTop = paper.scrollHeight;
  }

  get ending() {
    if (this.reason === "stop") return say("Ended: the text is complete, or a stop text came (stop).");
    if (this.reason === "length") return say("Ended: as many tokens as asked for, or as the model reads (length).");
    return say("Ended ({reason}).", { reason: this.reason });
  }

  /** The arrow keys move from piece to piece; Enter moves to the buttons of the piece's card. */
  step(event) {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const here = card.column === this ? card.place : -1;
    if (by) card.open(this, Math.min(Math.max(here + by, 0), this.pieces.length - 1));
    else if (event.key === "Enter" && !event.ctrlKey && !event.metaKey && here >= 0) card.focus();
    else return;
    event.preventDefault();
  }
}

// The card beside a piece of a continuation: the likeliest tokens there, each a button to go on with it

const card = {
  column: null, place: -1,

  open(column, place) {
    const piece = column.pieces[place];
    if (!piece || running) return;
    this.close();
    Object.assign(this, { column, place });
    const [title, list] = $("card").children;
    const top = piece.likely[0]?.top.slice(0, 5) ?? [];
    title.textContent = top.length ? say("Likely here (choose one to go on with it)") : "";
    list.replaceChildren(...top.map((likely) => this.choice(likely, { picked: likely[0] === piece.likely[0].token })));
    const element = column.parts.out.children[place];
    element.classList.add("chosen");
    $("card").hidden = false;
    this.put(element.getClientRects()[0]);
  },

  choice([token, logprob], { picked }) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", className: picked ? "picked" : "", disabled: token.startsWith("bytes:") });
    make("code", token.replaceAll(" ", "␣").replaceAll("\n", "↵"), button);
    make("span", percent(Math.min(Math.exp(logprob), 1), 1), button);
    button.addEventListener("click", () => generateFrom(this.before + token));
    return button;
  },

  put(beside) {
    const { style, offsetWidth, offsetHeight } = $("card");
    const below = beside.bottom + 4 + offsetHeight < innerHeight;
    style.left = `${Math.max(8, Math.min(beside.left, innerWidth - offsetWidth - 8))}px`;
    style.top = `${below ? beside.bottom + 4 : Math.max(8, beside.top - offsetHeight - 4)}px`;
  },

  /** The text up to the card's piece. */
  get before() {
    return this.column.prompt + this.column.pieces.slice(0, this.place).map((piece) => piece.text).join("");
  },

  focus() {
    $("card").querySelector("button:enabled").focus();
  },

  close() {
    this.column?.parts.out.children[this.place]?.classList.remove("chosen");
    if ($("card").contains(document.activeElement)) this.column.parts.out.focus();
    $("card").hidden = true;
    Object.assign(this, { column: null, place: -1 });
  },
};

// Generating

const columns = [new Column(), new Column()];
const prompt = document.createElement("textarea");
const values = $("values").elements;
let running = null;

const shownColumns = () => columns.filter((column) => !column.root.hidden);

/** The settings as fields of a request; null if one is invalid, which is then shown. */
function settings() {
  if (!$("values").checkValidity()) {
    $("settings").open = true;
    $("values").reportValidity();
    return null;
  }
  const number = (name) => values[name].valueAsNumber;
  const stop = values.stop.value.split("\n").filter(Boolean).map((text) => text.replaceAll("\\n", "\n"));
  return {
    max_tokens: number("max_tokens"),
    temperature: number("temperature"),
    top_p: number("top_p"),
    top_k: number("top_k"),
    seed: values.seed.value ? number("seed") : Math.floor(Math.random() * 1e6),
    ...(stop.length ? { stop } : {}),
    ...(values.logprobs.checked ? { logprobs: 5 } : {}),
    stream: true,
    stream_options: { include_usage: true },
  };
}

async function generate() {
  const asked = running ? null : settings();
  if (!asked) return;
  card.close();
  running = new AbortController();
  show();
  const { signal } = running;
  await Promise.all(shownColumns().map((column) =>
    column.run({ model: column.name, prompt: prompt.value, ...asked }, signal)));
  running = null;
  show();
}

function generateFrom(text) {
  if (running) return;
  setPrompt(text);
  generate();
}

function setPrompt(text) {
  prompt.value = text;
  for (const column of columns) column.setPrompt(text);
}

function clear() {
  card.close();
  for (const column of columns) {
    column.clear(prompt.value);
    column.show();
  }
}

/** Makes the text the prompt, to go on from. */
function takeOver(text) {
  setPrompt(text);
  clear();
  prompt.focus();
}

const stop = () => running?.abort();

// Users' tasks

const tasks = {
  state: "", values: {}, failure: null, asking: false,

  choose() {
    const { inputs, outputs } = TASKS[$("task").value];
    $("takes").textContent = JSON.stringify(inputs, null, 1);
    $("gives").textContent = JSON.stringify(outputs, null, 1);
  },

  async ask() {
    if (this.asking || !TASKS.length) return;
    Object.assign(this, { asking: true, state: _("Predicting…"), failure: null });
    $("outputs").hidden = true;
    this.show();
    const began = performance.now();
    try {
      const body = { model: TASKS[$("task").value].model, inputs: this.inputs };
      $("outputs").textContent = JSON.stringify((await (await ask("/v1/predict", body)).json())?.outputs, null, 1);
      $("outputs").hidden = false;
      Object.assign(this, { state: _("Answered in {n} ms."), values: { n: decimals(performance.now() - began) } });
    } catch (error) {
      Object.assign(this, { state: "", failure: Failure.of(error) });
    }
    this.asking = false;
    this.show();
  },

  get inputs() {
    try {
      return JSON.parse($("inputs").value);
    } catch (error) {
      throw new Failure(_("This is not JSON: {reason}"), { values: { reason: error.message } });
    }
  },

  show() {
    $("predicted").textContent = this.state && say(this.state, this.values);
    $("predict").disabled = this.asking;
    if (this.failure) this.failure.showIn($("unpredicted"));
    else $("unpredicted").replaceChildren();
  },
};

// The page

function show() {
  sayAll();
  $("go").textContent = say(running ? _("Stop") : _("Generate"));
  prompt.placeholder = say("Write the beginning of a text…");
  prompt.setAttribute("aria-label", say("Text to be continued"));
  prompt.readOnly = Boolean(running);
  values.seed.placeholder = say("random");
  $("other").options[0].textContent = say("none");
  for (const control of [$("model"), $("other")]) control.disabled = Boolean(running);
  for (const field of values) if (field.type === "range") showValue(field);
  for (const column of columns) column.show();
  tasks.show();
}

const showValue = (field) => {
  field.parentElement.querySelector("output").textContent = decimals(field.valueAsNumber, 2);
};

function showModels() {
  const [one, other] = [$("model").value, $("other").value];
  for (const option of $("other").options) option.disabled = option.value === one;
  if (other === one) $("other").value = "";
  [one, $("other").value].forEach((name, place) => {
    columns[place].name = name;
    columns[place].parts.name.textContent = name;
    columns[place].root.hidden = !name;
  });
  document.querySelector(".columns").classList.toggle("two", !columns[1].root.hidden);
}

function begin() {
  document.querySelector(".columns").append(...columns.map((column) => column.root));
  Object.assign(prompt, { id: "prompt", spellcheck: false });
  columns[0].root.querySelector(".stack").prepend(prompt);
  columns[1].root.classList.add("mirror");
  make("option", "", $("other"), { value: "" });
  for (const name of MODELS) for (const list of [$("model"), $("other")]) make("option", name, list, { value: name });
  $("comparing").hidden = MODELS.length < 2;
  for (const id of ["texts", "settings"]) $(id).hidden = !MODELS.length;
  document.querySelector("main").classList.toggle("texts", MODELS.length > 0);
  $("settings").open = matchMedia("(min-width: 900px)").matches;
  TASKS.forEach((task, place) => make("option", task.model, $("task"), { value: place }));
  $("tasks").hidden = !TASKS.length;
  if (TASKS.length) tasks.choose();
  listen();
  showModels();
  show();
  (MODELS.length ? prompt : $("inputs")).focus();
}

function listen() {
  prompt.addEventListener("input", () => {
    setPrompt(prompt.value);
    if (!prompt.value) clear();
  });
  $("go").addEventListener("click", (event) => {
    if (event.detail > 1) return; // the second half of a double click
    if (running) stop();
    else generate();
  });
  for (const list of [$("model"), $("other")]) list.addEventListener("change", () => {
    showModels();
    clear();
  });
  $("values").addEventListener("input", (event) => {
    if (event.target.type === "range") showValue(event.target);
  });
  $("values").addEventListener("submit", (event) => event.preventDefault());
  $("language").addEventListener("click", () => {
    language = language === "es" ? "en" : "es";
    card.close();
    show();
  });
  $("again").addEventListener("click", () => generateFrom(card.before));
  $("task").addEventListener("change", () => tasks.choose());
  $("predict").addEventListener("click", () => tasks.ask());
  document.addEventListener("pointerdown", (event) => {
    if (!event.target.closest("#card, .piece")) card.close();
  });
  addEventListener("resize", () => card.close());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return $("card").hidden ? stop() : card.close();
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    if ($("tasks").contains(event.target) || !MODELS.length) tasks.ask();
    else generate();
  });
}
