"""`cuadrilla prove`: unequal workers train to the same bits as one machine, shown on a run's own model and data.

The run is trained for a few steps in temporary folders, by one worker in this process and by a practice crew: in strict
mode, where the SHA-256 of weights and optimizer state must be equal, and not strict, where rounding may differ.
"""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuadrilla.cli.config import RunFile, Sets
from cuadrilla.cli.output import emit, emit_json, emit_table, options, say
from cuadrilla.cli.train import practice_sets, train_and_show
from cuadrilla.config import Config
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, ConfigError, GuardError
from cuadrilla.messages import Message
from cuadrilla.plan.decide import decide
from cuadrilla.rundir import RunDir, typed, write_atomic
from cuadrilla.runfile import dump, read_run_file, to_toml

if TYPE_CHECKING:
    from cuadrilla.train.checkpoint import Checkpoint

SHOWN_HASH, SHOWN_NAMES = 12, 4


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
    options.json |= as_json
    read = read_run_file(run, sets=[*(sets or []), *practice_sets(crew, option="--crew")], processes=True)
    folder = (run if run.is_dir() else run.parent).resolve()
    config, _ = decide(read.config, RunDir(folder))
    if config.train.batch_sequences // config.train.unit_sequences < 2:
        hint = "make units smaller for the proof: --set train.unit_sequences=1"
        raise ConfigError("a step of this run is a single unit of work: there is nothing to share", hint=hint)
    rows = []
    for strict in (True, False):
        one, many = (
            _train(_settings(config, folder, strict=strict, steps=steps, alone=alone)) for alone in (True, False)
        )
        rows.append({"strict": strict, **compare(one, many)})
        if not rows[0]["equal"]:
            break
    _report(rows, steps=steps, number=len(config.engine.workers), run=run)


def _settings(config: Config, folder: Path, *, strict: bool, steps: int, alone: bool) -> str:
    """The run file of a short training in another folder; `alone`: by one worker in this process."""
    values: dict[str, Any] = dump(config.moved(lambda path: str((folder / path).resolve())))
    values["model"]["init"] = ""  # any weights will do
    values["train"] |= {"steps": steps, "tokens": 0, "epochs": 0.0, "threads": config.train.threads or 1, "teacher": []}
    values["sync"] = {"kind": "exact"} if config.sync.kind == "auto" else values["sync"]
    values["sync"]["strict"] = strict
    values["engine"] = {"kind": "local"} if alone else values["engine"] | {"listen": "127.0.0.1:0"}
    values["checkpoint"] |= {"every_seconds": 0.0, "every_steps": 0, "journal": "off"}
    values["sample"]["tokens"] = 0
    return to_toml(Config.model_validate(values))


def _train(settings: str) -> "Checkpoint":
    """The last checkpoint of one training in a folder that is gone afterwards. Raises typer.Exit when interrupted."""
    from cuadrilla.train.checkpoint import load_newest

    with tempfile.TemporaryDirectory(prefix="cuadrilla-prove-", ignore_cleanup_errors=True) as name:
        run = RunDir(Path(name))
        write_atomic(run.run_file, settings)
        outcome = train_and_show(read_run_file(run.run_file), run)
        found = load_newest(run.checkpoints)
    if outcome.interrupted:
        say("interrupted; nothing is left behind")
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
    assert found is not None, "a run ends with a checkpoint"
    return found


def compare(one: "Checkpoint", crew: "Checkpoint") -> dict[str, Any]:
    """SHA-256 over weights and optimizer state of both, the relative distance of the weights, and what differs."""
    from cuadrilla.train.checkpoint import tensors_sha256

    states = [
        {**found.model, **{f"optimizer {name}": x for name, x in found.optimizer.items()}} for found in (one, crew)
    ]
    apart = sum(float((crew.model[name].double() - x.double()).square().sum()) for name, x in one.model.items())
    norm = sum(float(x.double().square().sum()) for x in one.model.values())
    hashes = [tensors_sha256(state) for state in states]
    return {
        "equal": hashes[0] == hashes[1],
        "sha256_one": hashes[0],
        "sha256_crew": hashes[1],
        "relative_difference": (apart / norm if norm else apart) ** 0.5,
        "differing": sorted(name for name, x in states[0].items() if not x.equal(states[1][name])),
    }


def _report(rows: list[dict[str, Any]], *, steps: int, number: int, run: Path) -> None:
    """Say what was found. Raises GuardError when the bits differ."""
    strict, equal = rows[0], rows[0]["equal"]
    if options.json:
        emit_json({"equal": equal, "steps": steps, "strict": strict, "not_strict": rows[1] if equal else None})
    else:
        emit_table([_shown(row, number=number) for row in rows])
    if not equal:
        raise GuardError(
            "the crew's bits are not those of one worker: {count} tensors differ, such as {names}",
            count=len(strict["differing"]),
            names=", ".join(strict["differing"][:SHOWN_NAMES]),
            hint="find out with --set train.device=cpu whether the device is the cause",
        )
    if not options.json:
        emit(
            Message(
                "\nEqual: in strict mode {number} unequal workers and one worker have the same weights and optimizer "
                "state after {steps} steps, bit for bit.\n"
                "Without strict mode their weights differ by {difference:.1e} (relative).",
                number=number,
                steps=steps,
                difference=rows[1]["relative_difference"],
            )
        )
    say("\nnext: cuadrilla train {run}; in strict mode with --set sync.strict=true", run=typed(run))


def _shown(row: dict[str, Any], *, number: int) -> dict[str, str]:
    return {
        "mode": "strict" if row["strict"] else "not strict",
        "one worker": row["sha256_one"][:SHOWN_HASH],
        f"crew of {number}": row["sha256_crew"][:SHOWN_HASH],
        "same bits": "yes" if row["equal"] else "no",
        "difference": f"{row['relative_difference']:.1e}" if row["relative_difference"] else "0",
    }
