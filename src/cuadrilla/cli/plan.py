"""`cuadrilla plan`: what a crew would bring to a run, before anything is installed or trained."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuadrilla.cli.config import RunFile, Sets, folder_of
from cuadrilla.cli.output import advise, answered, emit, emit_table, say
from cuadrilla.config import CrewEngine, LocalEngine
from cuadrilla.messages import Message
from cuadrilla.monitor.screen import duration
from cuadrilla.plan.decide import decide
from cuadrilla.plan.machines import described, practised, read_crew
from cuadrilla.plan.predict import Crew, MachineSpec, Prediction, predict
from cuadrilla.rundir import typed
from cuadrilla.runfile import read_run_file

if TYPE_CHECKING:
    from cuadrilla.train.measure import Measured

MANY = 4
"""Of this many machines of one kind, or more, only the first and the last are named."""
LITTLE = 1.1
"""A crew that is less than this many times as fast as its best machine is not worth its cables."""


def plan(
    run: RunFile = Path("run.toml"),
    crew: Annotated[
        str,
        typer.Option(
            metavar="FILE|NAME", help="Machines that you describe, or 4070ti+m2-wifi, 5x3050-1gbe, classroom-30."
        ),
    ] = "",
    sets: Sets = None,
) -> None:
    """Say how fast a run would train on a crew, with which settings, and which machines to leave out.

    Measures this machine with the run's own model and data, for about ten seconds. Without --crew: the practice crew
    of the run file, or this machine alone.
    """
    from cuadrilla.train.measure import measure

    config, folder = read_run_file(run, sets=sets or []).config, folder_of(run)
    file = read_crew(crew) if crew else None
    if file is not None and isinstance(config.engine, LocalEngine):
        config = config.model_copy(update={"engine": CrewEngine(kind="crew")})  # a crew's steps are larger
    config, _ = decide(config, folder)
    say("measuring this machine with {run}: about ten seconds", run=typed(run))
    found = measure(config, folder.path)
    operations = 6.0 * found.num_weights
    machines = (
        described(file, here=found.tokens_per_second, operations=operations)
        if file is not None
        else practised(config.engine, here=found.tokens_per_second)
    )
    predictions = predict(machines, found.work)
    if not answered(_as_json(machines, predictions, found)):
        _report(machines, predictions, found, run=run, is_practice=file is None)


def _report(crew: Crew, predictions: list[Prediction], found: "Measured", *, run: Path, is_practice: bool) -> None:
    best = _chosen(predictions)
    units = sum(best.shares.values())
    emit_table(
        [
            {
                "machine": _names(group),
                "tokens/s": round(group[0].tokens_per_second),
                "share": Message("{percent:.1f} %", percent=100 * best.shares.get(group[0].name, 0) / units),
            }
            for group in _alike(crew, best)
        ]
    )
    emit("")
    emit_table(
        [
            {
                "sync": _kind(each),
                "tokens/s": round(each.tokens_per_second),
                "waiting": Message("{percent:.0f} %", percent=100 * each.waiting),
                "MB/s at the coordinator": Message("{rate:.1f}", rate=each.bytes_per_second / 1e6),
                "as fast as the best alone": Message("{gain:.2f}", gain=each.gain),
            }
            for each in predictions
        ]
    )
    emit(
        "\nhere: {rate:,.0f} tokens/s on {device}, {memory:.1f} GB of memory; a checkpoint has {saved:.2f} GB\n"
        "{tokens:,} tokens take about {time}\n"
        "all machines without a network between them: {ceiling:.2f} times the best alone",
        rate=found.tokens_per_second,
        device=found.device,
        memory=found.used_bytes / 1e9,
        saved=found.saved_bytes / 1e9,
        tokens=found.total_tokens,
        time=duration(found.total_tokens / best.tokens_per_second),
        ceiling=crew.ceiling,
    )
    for line in _advice(crew, predictions):
        emit(line)
    advise(f"{'up' if best.steps and not is_practice else 'train'} {typed(run)}")


def _alike(crew: Crew, best: Prediction) -> list[list[MachineSpec]]:
    """Groups of machines of the same kind and share. Each group is a row of the table."""
    groups: dict[tuple[MachineSpec, int], list[MachineSpec]] = {}
    for machine in crew.machines:
        groups.setdefault((replace(machine, name=""), best.shares.get(machine.name, 0)), []).append(machine)
    return list(groups.values())


def _names(group: list[MachineSpec]) -> str:
    names = [machine.name for machine in group]
    return ", ".join(names) if len(names) < MANY else f"{names[0]} … {names[-1]} ({len(names)})"


def _kind(prediction: Prediction) -> Message:
    named = {0: Message("the best alone"), 1: Message("exact")}
    return named.get(prediction.steps) or Message("windows of {steps} steps", steps=prediction.steps)


def _chosen(predictions: list[Prediction]) -> Prediction:
    """The best prediction, or the one for training alone where a crew is hardly faster (`LITTLE`)."""
    return next(each for each in predictions if each.steps == 0 or each.gain >= LITTLE)


def _advice(crew: Crew, predictions: list[Prediction]) -> list[Message]:
    """Advice from the plan: train alone, or leave out machines that bring nothing."""
    best = _chosen(predictions)
    if len(crew.machines) == 1:
        return []
    if best.steps == 0:
        percent = 100 * (predictions[0].gain - 1)
        return [
            Message(
                "train alone on {name}: the others would bring {percent:.0f} %", name=crew.best.name, percent=percent
            )
        ]
    idle = [_names(group) for group in _alike(crew, best) if group[0].name not in best.shares]
    problem = "leave out {names}, or give them other work: they would add hardly any speed"
    return [Message(problem, names=", ".join(idle))] if idle else []


def _as_json(crew: Crew, predictions: list[Prediction], found: "Measured") -> dict[str, Any]:
    best = _chosen(predictions)
    return {
        "machines": [
            {"name": each.name, "tokens_per_second": each.tokens_per_second, "units": best.shares.get(each.name, 0)}
            for each in crew.machines
        ],
        "ceiling": crew.ceiling,
        "chosen": vars(best),
        "predictions": [vars(each) for each in predictions],
        "measured": {**vars(found), "work": vars(found.work)},
        "seconds": found.total_tokens / best.tokens_per_second,
    }
