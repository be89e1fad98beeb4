"""The commands: where each one is, and its line in the list that `cuadrilla --help` shows, without importing it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """`module` of this folder, and in it the function, or the group of functions, that is the command.

    `help`: one line of 64 characters at most; what the command itself says has room for more. `panel` "": not shown.
    """

    module: str
    name: str
    panel: str
    help: str


START, CREW, DATA, MODELS, LOOK = "Start", "Crew", "Data", "Models", "Look"
VERBS = {
    "demo": Verb("demo", "demo", START, "Train a small Spanish GPT-2 on built-in stories, in minutes."),
    "new": Verb("train", "new", START, "Make a run folder with a commented run.toml."),
    "train": Verb("train", "train", START, "Train, or go on where a run stopped."),
    "tune": Verb("tune", "tune", START, "Search for better settings by trials; go on where it stopped."),
    "up": Verb("crew", "up", CREW, "Coordinate a crew on this machine and train."),
    "join": Verb("crew", "join", CREW, "Work for a crew's coordinator."),
    "invite": Verb("crew", "invite", CREW, "Make an invite for the crew that runs on this machine."),
    "nodes": Verb("nodes", "nodes", CREW, "List the machines of this machine's crew, or of a Ray cluster."),
    "kick": Verb("crew", "kick", CREW, "Remove a machine from this machine's crew."),
    "pause": Verb("pause", "pause", CREW, "Let a machine wait: the others do its work."),
    "unpause": Verb("pause", "unpause", CREW, "Let a paused machine work again."),
    "queue": Verb("queue", "queue", CREW, "Runs that wait for a machine of the crew: add, stop, hand out."),
    "trust": Verb("trust", "trust", CREW, "Approve the code of a run, once it has been read."),
    "leave": Verb("crew", "leave", CREW, "Leave a crew that this machine has joined."),
    "down": Verb("crew", "down", CREW, "Stop the coordinator that runs on this machine."),
    "standby": Verb("standby", "standby", CREW, "Keep a copy of a crew's run and keys, ready to take over."),
    "promote": Verb("standby", "promote", CREW, "Coordinate the crew from this standby."),
    "compose": Verb("compose", "compose", CREW, "Write the crew as containers: a compose file, by role."),
    "launch": Verb("launch", "launch", CREW, "Start any program with the variables of torch, TensorFlow, ..."),
    "work": Verb("crew", "work", "", "What `train` starts for each practice worker."),
    "work-with": Verb("crew", "work_with", "", "What `join` starts for each device of several."),
    "work-on": Verb("jobs", "work_on", "", "What `tune` and `join` start for whole runs."),
    "call-function": Verb("calls", "call_function", "", "What `tune` starts for each call of a function."),
    "data": Verb("data", "app", DATA, "Fetch text and prepare it for training."),
    "generate": Verb("model", "generate", MODELS, "Generate text with a trained model."),
    "eval": Verb("evaluate", "evaluate", MODELS, "Held-out loss and bits per byte; a table of several models."),
    "export": Verb("export", "app", MODELS, "Write a run's model in formats that other programs open."),
    "import": Verb("imported", "import_model", MODELS, "Make a run that continues from a published model."),
    "serve": Verb("serve", "serve", MODELS, "Serve a model over HTTP: OpenAI's API, and a page to try it."),
    "gateway": Verb("gateway", "gateway", MODELS, "One address for several services of one model."),
    "load": Verb("load", "load", MODELS, "Measure how a service answers under load."),
    "monitor": Verb("monitor", "monitor", LOOK, "How busy this machine is, or the machines of a run."),
    "report": Verb("report", "report", LOOK, "Write one HTML page: curves, machines, samples."),
    "dashboard": Verb("dashboard", "dashboard", LOOK, "Watch runs and their machines in a browser."),
    "doctor": Verb("doctor", "doctor", LOOK, "What will go wrong on this machine, and what repairs it."),
    "bug-report": Verb("bug_report", "bug_report", LOOK, "Collect what is needed to look into a problem."),
    "devices": Verb("devices", "devices", LOOK, "This machine's devices; a broken one with the remedy."),
    "config": Verb("config", "app", LOOK, "See the settings that a run file results in."),
    "check": Verb("check", "app", LOOK, "Test what training will need."),
    "prove": Verb("prove", "prove", LOOK, "Prove that a crew trains to the same bits as one machine."),
    "env": Verb("env", "app", LOOK, "The installed versions, now and when a run was made."),
}
"""By what is typed, in the order of the help."""
