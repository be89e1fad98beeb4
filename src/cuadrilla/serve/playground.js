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

// The text: the prompt, and the model's continuation of it

const PARTS = ["speed", "first", "count", "seed", "more", "edit", "paper", "prompt", "out", "state", "error"];

const text = {
  parts: Object.fromEntries(PARTS.map((name) => [name, document.querySelector(`#texts .${name}`)])),
  follows: true,

  get whole() {
    return prompt.value + this.pieces.map((piece) => piece.text).join("");
  },

  clear() {
    Object.assign(this, { pieces: [], pending: [], count: 0, began: 0, first: 0, last: 0, reason: "", state: "" });
    Object.assign(this, { failure: null, busy: false });
    this.parts.out.replaceChildren();
  },

  async run(asked, signal) {
    this.clear();
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
  },

  take(event) {
    if (Number.isFinite(event?.usage?.completion_tokens)) this.count = event.usage.completion_tokens;
    const choice = event?.choices?.[0];
    if (!choice) return;
    const added = typeof choice.text === "string" ? choice.text : "";
    const likely = likelyOf(choice.logprobs);
    this.pending.push(...likely);
    if (added || likely.length || !(this.first || choice.finish_reason)) {
      this.last = performance.now();
      this.first ||= this.last;
      this.count += likely.length || 1; // until the usage comes: a part of a character is not told
    }
    this.state = _("Generating…");
    if (choice.finish_reason) this.reason = String(choice.finish_reason);
    if (added) {
      this.pieces.push({ text: added, likely: this.pending.splice(0) });
      make("span", added, this.parts.out, { className: "piece" });
    }
    this.showSoon();
  },

  showSoon() {
    if (this.soon) return;
    this.soon = true;
    requestAnimationFrame(() => {
      this.soon = false;
      this.show();
    });
  },

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
  },

  get ending() {
    if (this.reason === "stop") return say("Ended: the text is complete, or a stop text came (stop).");
    if (this.reason === "length") return say("Ended: as many tokens as asked for, or as the model reads (length).");
    return say("Ended ({reason}).", { reason: this.reason });
  },

  /** The arrow keys move from piece to piece; Enter moves to the buttons of the piece's card. */
  step(event) {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (by) card.open(Math.min(Math.max(card.place + by, 0), this.pieces.length - 1));
    else if (event.key === "Enter" && !event.ctrlKey && !event.metaKey && card.place >= 0) card.focus();
    else return;
    event.preventDefault();
  },
};

// The card beside a piece of a continuation: the likeliest tokens there, each a button to go on with it

const card = {
  place: -1,

  open(place) {
    const piece = text.pieces[place];
    if (!piece || running) return;
    this.close();
    this.place = place;
    const [title, list] = $("card").children;
    const top = piece.likely[0]?.top.slice(0, 5) ?? [];
    title.textContent = top.length ? say("Likely here (choose one to go on with it)") : "";
    list.replaceChildren(...top.map((likely) => this.choice(likely, { picked: likely[0] === piece.likely[0].token })));
    const element = text.parts.out.children[place];
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
    return prompt.value + text.pieces.slice(0, this.place).map((piece) => piece.text).join("");
  },

  focus() {
    $("card").querySelector("button:enabled").focus();
  },

  close() {
    text.parts.out.children[this.place]?.classList.remove("chosen");
    if ($("card").contains(document.activeElement)) text.parts.out.focus();
    $("card").hidden = true;
    this.place = -1;
  },
};

// Generating

const prompt = $("prompt");
const values = $("values").elements;
let running = null;

/** The settings as fields of a request; null if one is invalid, which is then shown. */
function settings() {
  if (!$("values").checkValidity()) {
    $("settings").open = true;
    $("values").reportValidity();
    return null;
  }
  const number = (name) => values[name].valueAsNumber;
  const stop = values.stop.value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
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
  await text.run({ model: MODEL, prompt: prompt.value, ...asked }, running.signal);
  running = null;
  show();
}

function generateFrom(begun) {
  if (running) return;
  setPrompt(begun);
  generate();
}

function setPrompt(begun) {
  prompt.value = begun;
  text.parts.prompt.textContent = begun;
}

function clear() {
  card.close();
  text.clear();
  text.show();
}

/** Makes the text the prompt, to go on from. */
function takeOver(begun) {
  setPrompt(begun);
  clear();
  prompt.focus();
}

const stop = () => running?.abort();

// A user's task

const predictions = {
  state: "", values: {}, failure: null, asking: false,

  async ask() {
    if (this.asking) return;
    Object.assign(this, { asking: true, state: _("Predicting…"), failure: null });
    $("outputs").hidden = true;
    this.show();
    const began = performance.now();
    try {
      const body = { model: MODEL, inputs: this.inputs };
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
  for (const field of values) if (field.type === "range") showValue(field);
  text.show();
  predictions.show();
}

const showValue = (field) => {
  field.parentElement.querySelector("output").textContent = decimals(field.valueAsNumber, 2);
};

function begin() {
  for (const heading of document.querySelectorAll("h2")) heading.textContent = MODEL;
  for (const id of ["texts", "settings"]) $(id).hidden = Boolean(TASK);
  $("task").hidden = !TASK;
  document.querySelector("main").classList.toggle("texts", !TASK);
  $("settings").open = matchMedia("(min-width: 900px)").matches;
  $("takes").textContent = JSON.stringify(TASK?.inputs, null, 1);
  $("gives").textContent = JSON.stringify(TASK?.outputs, null, 1);
  text.clear();
  listen();
  show();
  (TASK ? $("inputs") : prompt).focus();
}

function listen() {
  const { paper, out, more, edit } = text.parts;
  paper.addEventListener("scroll", () => {
    text.follows = paper.scrollTop + paper.clientHeight > paper.scrollHeight - 30;
  });
  more.addEventListener("click", () => generateFrom(text.whole));
  edit.addEventListener("click", () => takeOver(text.whole));
  out.addEventListener("click", (event) => {
    if (getSelection().isCollapsed) card.open([...out.children].indexOf(event.target));
  });
  out.addEventListener("keydown", (event) => text.step(event));
  prompt.addEventListener("input", () => {
    setPrompt(prompt.value);
    if (!prompt.value) clear();
  });
  $("go").addEventListener("click", (event) => {
    if (event.detail > 1) return; // the second half of a double click
    if (running) stop();
    else generate();
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
  $("predict").addEventListener("click", () => predictions.ask());
  document.addEventListener("pointerdown", (event) => {
    if (!event.target.closest("#card, .piece")) card.close();
  });
  addEventListener("resize", () => card.close());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return $("card").hidden ? stop() : card.close();
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    if (TASK) predictions.ask();
    else generate();
  });
}
