"""`cuadrilla prove`: unequal workers train to the same bits as one machine, shown on a run's own model and data.

The run is trained for a few steps in strict mode, in temporary folders, by one worker in this process and by a practice
crew; then the SHA-256 of weights and optimizer state must be equal.
"""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from cuadrilla.cli.config import RunFile, Sets, folder_of
from cuadrilla.cli.output import emit, emit_json, options, say
from cuadrilla.cli.train import practice_sets, train_and_show
from cuadrilla.config import Config
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, ConfigError, GuardError
from cuadrilla.plan.decide import decide
from cuadrilla.rundir import RunDir, typed, write_atomic
from cuadrilla.runfile import dump, read_run_file, to_toml

SHOWN_NAMES = 4


def prove(
    run: RunFile = Path("run.toml"),
    crew: Annotated[
        str, typer.Option(metavar="SPEEDS[@LINK]", help="The practice crew: a worker process for each speed.")
    ] = "1.0,0.5,0.25",
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="How many steps each training takes.")] = 20,
    sets: Sets = None,
) -> None:
    """Prove that a crew of unequal workers trains this run's model to the same bits as one machine.

    Trains in temporary folders; the run's own is not touched. Exit code 0: the same bits; 7: not.
    """
    from cuadrilla.train.checkpoint import tensors_sha256

    read = read_run_file(run, sets=[*(sets or []), *practice_sets(crew, option="--crew")], processes=True)
    folder = folder_of(run)
    config, _ = decide(read.config, folder)
    if config.train.batch_sequences // config.train.unit_sequences < 2:
        hint = "make units smaller for the proof: --set train.unit_sequences=1"
        raise ConfigError("a step of this run is a single unit of work: there is nothing to share", hint=hint)
    one, many = (_train(_settings(config, folder.path, steps=steps, alone=alone)) for alone in (True, False))
    differing = sorted(name for name, x in one.items() if not x.equal(many[name]))
    hashes = tensors_sha256(one), tensors_sha256(many)
    if options.json:
        found = {"equal": hashes[0] == hashes[1], "steps": steps, "sha256_one": hashes[0], "sha256_crew": hashes[1]}
        emit_json({**found, "differing": differing})
    elif hashes[0] == hashes[1]:
        emit(
            "Equal: in strict mode {number} unequal workers and one worker have the same weights and optimizer state "
            "after {steps} steps, bit for bit.\nSHA-256    {hash}",
            number=len(config.engine.workers),
            steps=steps,
            hash=hashes[0],
        )
    if hashes[0] != hashes[1]:
        raise GuardError(
            "the crew's bits are not those of one worker: {count} tensors differ, such as {names}",
            count=len(differing),
            names=", ".join(differing[:SHOWN_NAMES]),
            hint="find out with --set train.device=cpu whether the device is the cause",
        )
    say("\nnext: cuadrilla train {run}; in strict mode with --set sync.strict=true", run=typed(run))


def _settings(config: Config, folder: Path, *, steps: int, alone: bool) -> str:
    """The run file of a short training in another folder; `alone`: by one worker in this process."""
    values: dict[str, Any] = dump(config.moved(lambda path: str((folder / path).resolve())))
    values["model"]["init"] = ""  # any weights will do
    values["train"] |= {"steps": steps, "tokens": 0, "epochs": 0.0, "threads": config.train.threads or 1, "teacher": []}
    values["sync"] = {"kind": "exact"} if config.sync.kind == "auto" else values["sync"]
    values["sync"]["strict"] = True
    values["engine"] = {"kind": "local"} if alone else values["engine"] | {"listen": "127.0.0.1:0"}
    values["checkpoint"] |= {"every_seconds": 0.0, "every_steps": 0, "journal": "off"}
    values["sample"]["tokens"] = 0
    return to_toml(Config.model_validate(values))


def _train(settings: str) -> dict[str, Any]:
    """Train in a temporary folder. Returns weights and optimizer state by name. Raises typer.Exit if interrupted."""
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
    return {**found.model, **{f"optimizer {name}": x for name, x in found.optimizer.items()}}
