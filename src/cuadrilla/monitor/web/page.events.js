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

/** Reasons, and what machines write to their logs most often, in the templates from which they were made. */
const REASONS = [
  _("the run is complete"), _("the run has ended"), _("the run failed"), _("interrupted"), _("the run was stopped by {what}"), _("step {step} reached"),
  _("held-out loss was lowest at step {step}, {evaluations} evaluations ago (evaluate.patience)"), _("another rank was asked to stop"), _("the connection ended"), _("a newer session of the same node has begun"),
  _("lost: nothing heard for {seconds:.1f} s"), _("hung: no progress for {seconds:.1f} s"), _("not a member of this run any more"),
  _("it sent a message that cannot be handled ({kind})"), _("it was kicked"), _("it has left the crew"), _("this machine has left the crew"), _("this machine leaves"),
  _("this machine was removed from the crew (`cuadrilla kick` where the coordinator runs)"), _("on battery"), _("the machine is being used"),
  _("paused by this machine's owner; to resume: cuadrilla pause --off"), _("excluded: its contributions were unusable in {rounds} rounds; to let it in again, restart the coordinator (cuadrilla stop, then cuadrilla up RUN)"), _("signal {number} ({name}): was there enough memory?"), _("signal {number} ({name})"), _("exit code {code}"),
  _("{error} (exit code {code})"), _("only the fastest machine trains, because over this network that is faster"), _("all machines together in each step"), _("the only machine trains, in smaller steps"),
  _("each machine makes {steps} steps by itself before a merge, because over this network that is faster"), _("non-finite"), _("outlier"), _("waiting: {reason}"), _("working again"), _("back at work"),
  _("out of the crew for now: {reason}"), _("{name} joined"), _("{name} left: {reason}"), _("{name} died: {reason}"), _("from step {step} on: {how}"), _("step {step}: {what} (loss {loss})"),
  _("unusually large loss or gradient: this update is skipped, and training continues"), _("too many updates were skipped: back to the last checkpoint, without the data in between"),
].map((template) => {
  const names = [...template.matchAll(/\{(\w+)[^}]*\}/g)].map(([, name]) => name);
  const pattern = template.split(/\{\w+[^}]*\}/).map((part) => part.replace(/[.*+?^$()|[\]\\]/g, "\\$&")).join("(.*?)");
  return { template, names, pattern: new RegExp(`^${pattern}$`, "s") };
});

/** A reason in the language of who looks. */
function reasonOf(text) {
  for (const { template, names, pattern } of language === "en" ? [] : REASONS) {
    const found = pattern.exec(text);
    if (found) return say(template, Object.fromEntries(names.map((name, at) => [name, ["reason", "what", "how"].includes(name) ? reasonOf(found[at + 1]) : found[at + 1]])));
  }
  return spoken(text);
}

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
