"""`cuadrilla demo`: the whole way in a few minutes, without a network: stories, tokenizer, training, evaluation."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuadrilla.cli.evaluate import evaluate
from cuadrilla.cli.model import generate
from cuadrilla.cli.output import options, say
from cuadrilla.cli.parent import under_a_parent
from cuadrilla.cli.progress import shown_progress
from cuadrilla.cli.train import PAGE, train_and_show
from cuadrilla.data.prepare import PrepareOptions, prepare
from cuadrilla.errors import INTERRUPTED_EXIT_CODE
from cuadrilla.monitor.web.page import save_page
from cuadrilla.rundir import RunDir, make_private, typed
from cuadrilla.runfile import make_run, read_run_file, run_file_text
from cuadrilla.train.sinks import Sink

if TYPE_CHECKING:
    from cuadrilla.link.server import CrewServer

VOCABULARY = 1024
STEPS = 1100
STORIES_PER_STEP, MIN_STORIES = 19, 2000
"""Stories to generate: `STORIES_PER_STEP` for each step make one epoch."""
NUM_STORIES, NUM_PAIRS = 200, 500
SETTINGS = {
    "data.folder": "data",
    "model.preset": "micro",
    "train.batch_sequences": 8,  # with 16 the stories are no better (docs/experiments.md)
    "train.unit_sequences": 1,  # small units, so that unequal workers can share a step fairly
    "optim.adamw_lr": 0.003,
    "optim.weight_decay": 0.0,
    "engine.kind": "crew",
    "engine.workers": [1.0, 0.7, 0.3],
    "sample.tokens": 60,
}
VICTIM = "worker-3"


class Accident(Sink):
    """A sink that kills one of the workers at step `at`, as if its plug had been pulled."""

    def __init__(self, *, at: int) -> None:
        self._at = at
        self._pids: dict[str, int] = {}

    def opened(self, _crew: "CrewServer", pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)

    def log(self, version: int, _scalars: Mapping[str, Any]) -> None:
        if version >= self._at and (pid := self._pids.pop(VICTIM, 0)):
            say("                now {victim} is killed, on purpose; the others go on", victim=VICTIM)
            os.kill(pid, signal.SIGTERM if os.name == "nt" else signal.SIGKILL)


def demo(
    folder: Annotated[Path, typer.Option(help="Where to put the data and the run.")] = Path("demo"),
    steps: Annotated[
        int,
        typer.Option(
            min=2,
            help="How many steps to train. With only a few steps the model learns nothing, but every part is shown.",
        ),
    ] = STEPS,
) -> None:
    """Train a small Spanish GPT-2 on built-in stories, evaluate it and read what it writes (3 to 5 minutes)."""
    began = time.monotonic()
    run = RunDir(folder)
    make_private(folder)
    under_a_parent(run)
    if not run.run_file.exists():
        make_run(folder, run_file_text({**SETTINGS, "train.steps": steps}))
    resolved = read_run_file(run.run_file)  # a resumed run keeps its first run file
    stories = max(MIN_STORIES, STORIES_PER_STEP * resolved.config.train.steps)
    say("1/4 data        {stories:,} built-in stories, tokenizer of {size:,}", stories=stories, size=VOCABULARY)
    with shown_progress() as progress:
        prepared = prepare(
            [f"cuentos:{stories}"], out=folder / "data", options=PrepareOptions(vocab=VOCABULARY), progress=progress
        )
    tokens = {name: split.num_tokens for name, split in prepared.manifest.splits.items()}
    say("                {train:,} tokens to train on, {val:,} held out", train=tokens["train"], val=tokens["val"])
    say("\n2/4 train       on three unequal practice workers; Ctrl-C saves and stops; the same command continues")
    accident = Accident(at=resolved.config.train.steps // 2)
    from cuadrilla.crew.up import Opening

    outcome = train_and_show(resolved, run, opening=Opening(opened=accident.opened), more_sinks=[accident])
    if not outcome.complete:
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
    say("\n3/4 evaluate    200 new stories, 500 minimal pairs")
    evaluate([folder], stories=NUM_STORIES, pairs=NUM_PAIRS)
    if not options.json:
        say("\n4/4 three of its stories")
        generate(folder, num=3)
    page = run.path / PAGE
    save_page(run, page)
    say(
        "\ncurves, machines, samples: {page}\n"
        "done in {minutes:.1f} minutes. What to type next:\n"
        '  cuadrilla generate {folder} "Había una vez una niña"\n'
        "  cuadrilla train your-texts/ --time 20m",
        page=typed(page),
        minutes=(time.monotonic() - began) / 60,
        folder=typed(folder),
    )
