"""`cuadrilla demo`: the whole way in a few minutes, without a network: stories, tokenizer, training, evaluation."""

import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuadrilla.cli.output import emit, emit_json, options, say
from cuadrilla.cli.parent import under_a_parent
from cuadrilla.cli.stages import shown_progress
from cuadrilla.cli.train import train_and_show
from cuadrilla.data.options import PrepareOptions
from cuadrilla.data.prepare import prepare
from cuadrilla.errors import INTERRUPTED_EXIT_CODE
from cuadrilla.host.facts import read_facts
from cuadrilla.messages import Message
from cuadrilla.monitor.web.page import save_page
from cuadrilla.rundir import RunDir, last_rows, make_private, read_jsonl, typed, write_atomic
from cuadrilla.runfile import read_run_file

if TYPE_CHECKING:
    from cuadrilla.crew.port import OpenCrew

VOCABULARY = 1024
STEPS, LEAST_STEPS = 1100, 1000
BATCHES = (8, 16)
"""Sequences in a step: as many as this machine can take, but no fewer and no more. With 8 the stories are as good as
with 16 (docs/experiments.md); with less it was not tried."""
TRAIN_SECONDS = 150.0
EFFICIENCY = 0.6
"""What three processes and a coordinator make of the cores, beside a model that has them for itself."""
OTHER_SECONDS = 0.6
"""For data, starting and evaluation, to each second of training."""
STORY_TOKENS, CONTEXT = 108, 256
LEAST_STORIES = 2000
RUN_FILE = """\
# The demonstration run of `cuadrilla demo`: a small Spanish GPT-2 on the built-in stories.
schema = 1

[data]
folder = "data"

[model]
preset = "micro"

[train]
steps = {steps}
batch_sequences = {batch}
unit_sequences = 1  # small units: so unequal workers can share a step fairly

[optim]
kind = "muon"
lr = 0.02
adamw_lr = 0.003
weight_decay = 0

[engine]
kind = "crew"
workers = {speeds}

[sample]
tokens = 60
"""
SPEEDS = [1.0, 0.7, 0.3]
VICTIM = "worker-3"


class Accident:
    """A sink that kills one of the workers, as if its plug had been pulled, when half of the steps are done."""

    def __init__(self, *, at: int) -> None:
        self._at = at
        self._pids: Mapping[str, int] = {}
        self.happened_at = 0

    def opened(self, transport: "OpenCrew") -> None:
        self._pids = transport.pids

    def log(self, version: int, _scalars: Mapping[str, Any]) -> None:
        if version >= self._at and VICTIM in self._pids and not self.happened_at:
            say("                now {victim} is killed, on purpose", victim=VICTIM)
            os.kill(self._pids[VICTIM], signal.SIGTERM if os.name == "nt" else signal.SIGKILL)
            self.happened_at = version

    def close(self) -> None:
        pass

    def report(self, run: RunDir) -> str:
        """What became of the run, as its own files tell it."""
        if not self.happened_at:
            return ""
        versions = [row["version"] for row in last_rows(run.metrics)]
        lost = len(set(range(1, max(versions) + 1)) - set(versions))
        left = any(row["event"] == "left" and row["worker"] == VICTIM for row in read_jsonl(run.events))
        return Message(
            "                {victim} was killed at step {step}; the others took over its units; {lost} of "
            "{number} steps lost"
            if left
            else "                {victim} was killed at step {step}; {lost} of {number} steps lost",
            victim=VICTIM,
            step=self.happened_at,
            lost=lost,
            number=len(versions),
        )


@dataclass(frozen=True)
class Size:
    """How large a demonstration is that takes a few minutes at this number of sequences per second."""

    sequences_per_second: float
    steps: int
    batch: int

    @classmethod
    def fit(cls, sequences_per_second: float) -> "Size":
        """Smaller steps on a slower machine; fewer only when they cannot be smaller."""
        affordable = TRAIN_SECONDS * sequences_per_second
        least, most = BATCHES
        batch = min(most, max(least, int(affordable / STEPS)))
        steps = min(STEPS, max(LEAST_STEPS, int(affordable / batch)))
        return cls(sequences_per_second=sequences_per_second, steps=steps, batch=batch)

    @property
    def stories(self) -> int:
        """As many as make one epoch."""
        return self.steps * self.batch * CONTEXT // STORY_TOKENS

    @property
    def minutes(self) -> int:
        return math.ceil((1 + OTHER_SECONDS) * self.steps * self.batch / self.sequences_per_second / 60)


def sequences_per_second() -> float:
    """How many sequences the crew will train on in a second."""
    from cuadrilla.config import ModelSection
    from cuadrilla.train.pace import passes_per_second

    batch = BATCHES[0]
    cores = min(read_facts().usable_cores or 1.0, sum(SPEEDS))
    return cores * EFFICIENCY * batch * passes_per_second(ModelSection(preset="micro"), tokens=VOCABULARY, batch=batch)


def demo(
    folder: Annotated[Path, typer.Option(help="Where to put the data and the run.")] = Path("demo"),
    steps: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="How many steps to train (default: as many as fit in a few minutes here). With only a few "
            "steps the model learns nothing, but every part is shown.",
        ),
    ] = None,
    stories: Annotated[
        int | None, typer.Option(min=200, help="How many built-in stories to train on (default: as needed).")
    ] = None,
) -> None:
    """Train a small Spanish GPT-2 on built-in stories, evaluate it and read what it writes (3 to 5 minutes).

    How much it trains depends on how fast this machine is; it says so, and how long it will take.
    """
    began = time.monotonic()
    run = RunDir(folder)
    make_private(folder)
    under_a_parent(run)
    size = Size.fit(sequences_per_second())
    if not run.run_file.exists():
        write_atomic(run.run_file, RUN_FILE.format(steps=steps or size.steps, batch=size.batch, speeds=SPEEDS))
    resolved = read_run_file(run.run_file)  # of the first time, if this goes on
    size = replace(size, steps=resolved.config.train.steps, batch=resolved.config.train.batch_sequences)
    stories = stories or max(LEAST_STORIES, size.stories)
    say(
        "                {speed:,.0f} sequences/s here: about {minutes} min in all",
        speed=size.sequences_per_second,
        minutes=size.minutes,
    )
    say("1/4 data        {stories:,} built-in stories, tokenizer of {size:,}", stories=stories, size=VOCABULARY)
    with shown_progress() as progress:
        prepared = prepare(
            [f"cuentos:{stories}"], out=folder / "data", options=PrepareOptions(vocab=VOCABULARY), progress=progress
        )
    tokens = {name: split.num_tokens for name, split in prepared.manifest.splits.items()}
    say("                {train:,} tokens to train on, {val:,} held out", train=tokens["train"], val=tokens["val"])
    say("\n2/4 train       on three unequal practice workers; Ctrl-C saves and stops; the same command continues")
    accident = Accident(at=size.steps // 2)
    from cuadrilla.crew.up import Opening

    outcome = train_and_show(resolved, run, opening=Opening(opened=accident.opened), more_sinks=[accident])
    if not outcome.complete:
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
    say(accident.report(run))
    say("\n3/4 evaluate    200 new stories, 500 minimal pairs")
    result = _evaluate(run)
    say("\n4/4 three of its stories")
    if options.json:
        emit_json({**result, "seconds": time.monotonic() - began})
    else:
        for text in result["examples"]:
            emit("\n{text}", text=text)
    page = run.path / "report.html"
    save_page(run, page)
    say(
        "\ncurves, machines, samples: {page}\n"
        "done in {minutes:.1f} minutes. What to type next:\n"
        '  cuadrilla generate {folder} "Había una vez una niña"\n'
        "  cuadrilla data prepare your-texts/ --out data && cuadrilla new my-gpt2 && cuadrilla train my-gpt2",
        page=typed(page),
        minutes=(time.monotonic() - began) / 60,
        folder=typed(folder),
    )


def _evaluate(run: RunDir) -> dict[str, Any]:
    from cuadrilla.model.gpt2 import GPT2
    from cuadrilla.model.language import LanguageTask
    from cuadrilla.train.evaluate import judge_stories
    from cuadrilla.train.trained import load_trained

    trained = load_trained(run)
    assert isinstance(trained.task, LanguageTask)
    assert isinstance(trained.model, GPT2)
    held_out = trained.evaluate(sequences=trained.config.evaluate.sequences)
    report = judge_stories(
        trained.model, trained.task.tokenizer, num_stories=200, num_pairs=500, temperature=0.8, seed=0
    )
    say(
        "held-out         {bits:.3f} bits per byte\n"
        "stories right    {stories_right:.1%} of {stories}\n"
        "pairs right      {pairs_right:.1%} of {pairs}",
        bits=held_out["bits_per_byte"],
        stories_right=report["stories_right"],
        stories=report["num_stories"],
        pairs_right=report["pairs_right"],
        pairs=report["num_pairs"],
    )
    return {
        "bits_per_byte": held_out["bits_per_byte"],
        "stories_right": report["stories_right"],
        "pairs_right": report["pairs_right"],
        "examples": report["examples"],
    }
