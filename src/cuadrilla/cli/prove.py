"""`cuadrilla prove`: unequal workers train to the same bits as one machine, shown on a run's own model and data.

The run is trained for a few steps in strict mode, in temporary folders, by one worker in this process and by a practice
crew; then the SHA-256 of weights and optimizer state must be equal.
"""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from cuadrilla.cli.config import RunFile, Sets, folder_of
from cuadrilla.cli.output import answered, emit
from cuadrilla.cli.train import practice_sets, train_and_show
from cuadrilla.config import Config
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, ConfigError, GuardError
from cuadrilla.plan.decide import decide
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import Resolved, dump, read_run_file


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
    read = read_run_file(run, sets=[*(sets or []), *practice_sets(crew, option="--crew")])
    folder = folder_of(run)
    config, _ = decide(read.config, folder)
    if config.train.batch_sequences // config.train.unit_sequences < 2:
        hint = "make units smaller for the proof: --set train.unit_sequences=1"
        raise ConfigError("a step of this run is a single unit of work: there is nothing to share", hint=hint)
    one, many = (_train(_settings(config, folder.path, steps=steps, alone=alone)) for alone in (True, False))
    if one != many:
        hint = "find out with --set train.device=cpu whether the device is the cause"
        raise GuardError(
            "the crew's bits are not those of one worker: {many}, not {one}", many=many, one=one, hint=hint
        )
    if not answered({"equal": True, "steps": steps, "sha256": one}):
        emit(
            "Equal: in strict mode {number} unequal workers and one worker have the same weights and optimizer state "
            "after {steps} steps, bit for bit.\nSHA-256    {hash}",
            number=len(config.engine.workers),
            steps=steps,
            hash=one,
        )


def _settings(config: Config, folder: Path, *, steps: int, alone: bool) -> Config:
    """The settings of a short training in another folder; `alone`: by one worker in this process."""
    values: dict[str, Any] = dump(config.moved(lambda path: str((folder / path).resolve())))
    values["model"]["init"] = ""  # any weights will do
    values["train"] |= {"steps": steps, "tokens": 0, "epochs": 0.0, "threads": config.train.threads or 1, "teacher": []}
    values["sync"] = {"kind": "exact"} if config.sync.kind == "auto" else values["sync"]
    values["sync"]["strict"] = True
    values["engine"] = {"kind": "local"} if alone else values["engine"] | {"listen": "127.0.0.1:0"}
    values["checkpoint"] |= {"every_seconds": 0.0, "every_steps": 0, "journal": "off"}
    values["sample"]["tokens"] = 0
    return Config.model_validate(values)


def _train(config: Config) -> str:
    """Train in a temporary folder. Returns the SHA-256 of weights and optimizer state, or raises typer.Exit."""
    from cuadrilla.model.weights import WEIGHTS, read_tensors
    from cuadrilla.train.checkpoint import OPTIMIZER, list_checkpoints, tensors_sha256

    with tempfile.TemporaryDirectory(prefix="cuadrilla-prove-", ignore_cleanup_errors=True) as name:
        run = RunDir(Path(name))
        if train_and_show(Resolved(config=config, origins={}), run).interrupted:
            raise typer.Exit(INTERRUPTED_EXIT_CODE)
        *_, last = list_checkpoints(run.checkpoints)
        model, optimizer = (read_tensors(last / file) for file in (WEIGHTS, OPTIMIZER))
        return tensors_sha256({**model, **{f"optimizer {name}": tensor for name, tensor in optimizer.items()}})
