"""All commands: the module of each one, and its line in `cuadrilla --help`, which is shown without importing them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """`module`: its file in this folder. `name`: the function there, or the Typer group, that is the command.

    `help`: at most 64 characters; the command's own docstring has room for more. `panel`: its heading; "" hides it.
    """

    module: str
    name: str
    panel: str
    help: str


START, CREW, DATA, MODELS, LOOK = "Start", "Crew", "Data", "Models", "Look"
VERBS = {
    "demo": Verb("demo", "demo", START, "Train a small Spanish GPT-2 on built-in stories, in minutes."),
    "new": Verb("train", "new", START, "Make a run folder with a commented run.toml."),
    "plan": Verb("plan", "plan", START, "What a crew would bring to a run, before it trains."),
    "train": Verb("train", "train", START, "Train a run, or make a model of texts; go on where it stopped."),
    "tune": Verb("jobs", "tune", START, "Search for better settings by trials; go on where it stopped."),
    "up": Verb("crew", "up", CREW, "Coordinate a crew on this machine and train."),
    "join": Verb("crew", "join", CREW, "Work for a crew's coordinator."),
    "invite": Verb("crew", "invite", CREW, "Make an invite for the crew that runs on this machine."),
    "kick": Verb("crew", "kick", CREW, "Remove a machine from this machine's crew."),
    "pause": Verb("crew", "pause", CREW, "Let this machine wait while the others do its work, or go on."),
    "queue": Verb("jobs", "queue", CREW, "Train the runs that a text file names, each on one machine."),
    "stop": Verb("crew", "stop", CREW, "Stop the coordinator that runs on this machine."),
    "standby": Verb("standby", "standby", CREW, "Keep a copy of a crew's run and keys, ready to take over."),
    "promote": Verb("standby", "promote", CREW, "Coordinate the crew from this standby."),
    "work": Verb("crew", "work", "", "What a coordinator, or `join`, starts for each device."),
    "data": Verb("data", "app", DATA, "Fetch text and prepare it for training."),
    "generate": Verb("model", "generate", MODELS, "Generate text with a trained model."),
    "eval": Verb("evaluate", "evaluate", MODELS, "Bits per byte of held-out or other text; compares models."),
    "export": Verb("model", "export", MODELS, "Write a run's model in formats that other programs open."),
    "import": Verb("model", "import_model", MODELS, "Make a run that continues from a published model."),
    "serve": Verb("serve", "serve", MODELS, "Serve a model over HTTP: OpenAI's API, and a page to try it."),
    "monitor": Verb("monitor", "monitor", LOOK, "How busy this machine is, its crew, or the machines of a run."),
    "dashboard": Verb("serve", "dashboard", LOOK, "Watch runs in a browser, or save a run as one HTML page."),
    "doctor": Verb("doctor", "doctor", LOOK, "What will go wrong on this machine, and what repairs it."),
    "prove": Verb("prove", "prove", LOOK, "Prove that a crew trains to the same bits as one machine."),
}
"""By the word that is typed, in the order of `cuadrilla --help`."""
INSTEAD = {
    "ps": "monitor", "ls": "monitor", "list": "monitor", "status": "monitor", "top": "monitor", "nodes": "monitor",
    "run": "train RUN", "resume": "train RUN", "start": "train RUN", "init": "new NAME", "create": "new NAME",
    "chat": "generate RUN", "predict": "serve RUN", "evaluate": "eval RUN", "prepare": "data prepare TEXTS",
    "get": "data get", "kill": "stop", "info": "monitor", "logs": "monitor",
    "leave": "join --forget", "down": "stop",
}  # fmt: skip
"""What to type instead of words that other programs use."""
