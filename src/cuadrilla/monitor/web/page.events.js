// What happened, in sentences. A run writes events and reasons in English.

const AGAIN = _("An answer of {worker} was computed again: {why}.");
/** What is said of an event, by its kind; its details are the fields. */
const TOLD = {
  joined: () => _("{worker} joined."),
  left: ({ reason }) => (reason ? _("{worker} left: {reason}.") : _("{worker} left.")),
  assigned: () => _("{worker} trains {job}."),
  returned: ({ state }) => (state === "complete" ? _("{worker} has trained {job}.") : _("{worker} has given {job} back: {state}.")),
  evicted: () => _("{worker} was sent away ({reason})."),
  died: () => _("The process {worker} died: {reason}."),
  late: () => _("{worker} is late: its work was given to others, too."),
  discarded: () => _("An answer came too late and was not used: others had done its work."),
  redone: ({ steps }) => (steps === 1 ? _("1 step was redone from the journal.") : _("{steps} steps were redone from the journal.")),
  rounds: () => _("From the next step on: {reason}."),
  finished: ({ complete }) => (complete ? _("The run is complete.") : _("Stopped: {reason}.")),
  failed: () => _("The run failed: {reason}."),
  alarm: () => _("Not saved: {message}."),
  "coordinator restarted": () => _("The coordinator was killed ({reason}) and started again."),
  "units skipped": ({ count }) => (count === 1 ? _("1 unit of the data was skipped: nobody could compute it.") : _("{count} units of the data were skipped: nobody could compute them.")),
  "update skipped": () => _("The weights were left as they were: this step's loss or gradient was out of range (loss {loss}, highest at {highest})."),
  "rolled back to the last checkpoint": () => _("The weights went back to the last checkpoint (loss {loss}, highest at {highest})."),
  "gave up": () => _("The training gave up: the loss kept jumping (loss {loss}, highest at {highest})."),
  "the gradient is exactly zero": () => _("The gradient is exactly zero (loss {loss})."),
  "non-finite": () => AGAIN,
  outlier: () => AGAIN,
  confirmed: () => _("Two machines got the same, so it holds: {what}."),
};

/** What a machine or a file says in English, in the language of who looks: the dashboard knows its own texts. */
const reasonOf = (text) => (language === "es" && Object.hasOwn(data.spanish, text) ? data.spanish[text] : text);

/** A detail of an event; names of machines are not translated. */
function detail(key, value) {
  if (typeof value !== "string") return known(value) ? short(value) : String(value);
  return ["worker", "job", "highest"].includes(key) ? value : reasonOf(value).replace(/\.$/, "");
}

function sentence({ event, details }) {
  const fields = Object.fromEntries(Object.entries(details).map(([key, value]) => [key, detail(key, value)]));
  if (Object.hasOwn(TOLD, event)) return say(TOLD[event](details), { worker: "?", reason: "?", message: "?", loss: MISSING, highest: "?", why: spoken(event), ...fields }).replace(/\?\.$/, "?");
  return [spoken(event), ...Object.entries(fields).filter(([, value]) => value).map(([key, value]) => `${key}: ${value}`)].join(" · ");
}
