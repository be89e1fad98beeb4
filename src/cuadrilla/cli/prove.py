"""`cuadrilla prove`: the user-run proof that k unequal workers give what one machine gives."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuadrilla.cli.config import RunFile, Sets
from cuadrilla.cli.output import emit, emit_json, emit_table, error_data, options, report_error, say
from cuadrilla.cli.train import practice_sets
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, GuardError
from cuadrilla.log import set_up_logging
from cuadrilla.messages import Message
from cuadrilla.plan.decide import decide
from cuadrilla.rundir import RunDir, typed
from cuadrilla.runfile import read_run_file

if TYPE_CHECKING:
    from cuadrilla.engines.prove import Proof
    from cuadrilla.train.setup import RunContext
    from cuadrilla.train.sinks import Sink

SHOWN_HASH = 12
NUM_TRAININGS = 4


def prove(
    run: RunFile = Path("run.toml"),
    crew: Annotated[
        str, typer.Option(metavar="SPEEDS[@LINK]", help="The practice crew: a worker process for each speed.")
    ] = "1.0,0.5,0.25",
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="How many steps each training takes.")] = 20,
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """Prove that a crew of unequal workers trains this run's model to the same bits as one machine.

    Trains in temporary folders; the run's own is not touched. Exit code 0: the same bits; 7: not.
    """
    options.json = options.json or as_json
    read = read_run_file(run, sets=[*(sets or []), *practice_sets(crew, option="--crew")], processes=True)
    folder = (run if run.is_dir() else run.parent).resolve()
    config, _ = decide(read.config, RunDir(folder))
    from cuadrilla.engines.prove import prove as run_proof

    set_up_logging(None, worker="prove", verbose=options.debug)
    began: list[str] = []

    def begin(what: str, context: "RunContext") -> "list[Sink]":
        from cuadrilla.cli.progress import ProgressSink

        began.append(what)
        length = context.length
        say(
            "{number}/{all}  {what}: {steps} steps, {device}, {precision}",
            number=len(began),
            all=NUM_TRAININGS,
            what=what,
            steps=length.num_versions,
            device=context.device,
            precision=context.precision,
        )
        return [ProgressSink(total_versions=length.num_versions, done=0, total_tokens=length.total_tokens)]

    try:
        strict, free = run_proof(config, folder, steps=steps, begin=begin)
    except KeyboardInterrupt:
        say("interrupted; nothing is left behind")
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
    report(strict, free, steps=steps, speeds=config.engine.workers, run=run)


def report(strict: "Proof", free: "Proof | None", *, steps: int, speeds: list[float], run: Path) -> None:
    """Say what was found. Raises GuardError, or typer.Exit with its code, when the bits differ."""
    error = None
    if not strict.equal:
        error = GuardError(
            "the crew's bits are not those of one worker: {summary}",
            summary=strict.summary(),
            hint="find out with --set train.device=cpu whether the device is the cause; report it with the "
            "output of `cuadrilla env freeze`",
        )
    if options.json:
        result: dict[str, Any] = {"equal": strict.equal, "steps": steps, "speeds": speeds}
        result |= {"strict": as_row(strict), "not_strict": as_row(free) if free else None}
        if error is not None:
            result |= error_data(error)
        emit_json(result)
    else:
        emit_table([shown(pair, number=len(speeds)) for pair in (strict, free) if pair])
    if error is not None:
        if not options.json:
            raise error
        options.json = False  # it has been said as data
        report_error(error)
        raise typer.Exit(error.exit_code)
    if free is not None and not options.json:
        emit(sentence(strict, free, steps=steps, number=len(speeds)))
    say("\nnext: cuadrilla train {run}; in strict mode with --set sync.strict=true", run=typed(run))


def sentence(strict: "Proof", free: "Proof", *, steps: int, number: int) -> Message:
    """The result in plain words."""
    all_took_part = Message("all {number} workers took part in a step", number=number)
    some_took_part = Message(
        "up to {most} of {number} workers took part in a step", most=strict.most_workers, number=number
    )
    return Message(
        "\nEqual: in strict mode {number} unequal workers and one worker have the same weights and optimizer state "
        "after {steps} steps, bit for bit ({shared}).\n"
        "Without strict mode their weights differ by {difference:.1e} (relative).",
        number=number,
        steps=steps,
        shared=some_took_part if strict.most_workers < number else all_took_part,
        difference=free.relative_difference,
    )


def shown(pair: "Proof", *, number: int) -> dict[str, str]:
    return {
        "mode": "strict" if pair.strict else "not strict",
        "one worker": pair.one_sha256[:SHOWN_HASH],
        f"crew of {number}": pair.crew_sha256[:SHOWN_HASH],
        "same bits": "yes" if pair.equal else "no",
        "difference": f"{pair.relative_difference:.1e}" if pair.relative_difference else "0",
        "seconds": f"{pair.one_seconds:.1f} / {pair.crew_seconds:.1f}",
    }


def as_row(pair: "Proof") -> dict[str, Any]:
    return {
        "equal": pair.equal,
        "sha256_one": pair.one_sha256,
        "sha256_crew": pair.crew_sha256,
        "relative_difference": pair.relative_difference,
        "seconds_one": round(pair.one_seconds, 3),
        "seconds_crew": round(pair.crew_seconds, 3),
        "most_workers_in_a_step": pair.most_workers,
        "differing": list(pair.differing),
    }
