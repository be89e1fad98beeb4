"""`train --show-config`, and options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from cuadrilla.cli.output import emit_table, options
from cuadrilla.messages import language, shown
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import dump, leaves, meaning, read_run_file, resolve

EXAMPLE = '[data]\nfolder = "data"\n[train]\nsteps = 1\n'
SIZES = ("layers", "heads", "width", "context")

RunFile = Annotated[Path, typer.Argument(help="A run file, or the folder that holds run.toml.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="section.key=value; overrides the run file.")]
Preset = Literal["gpt2-micro", "gpt2-mini", "gpt2-small"]
AllowChanges = Annotated[
    bool, typer.Option("--allow-changes", help="Resume with another learning rate, schedule or length.")
]


def folder_of(run: Path) -> RunDir:
    """The folder of a run, from its own path or from that of its run file."""
    return RunDir(run.parent.resolve() / run.name)  # of a link to a run file, the folder of the link


def show_config(run: Path | None, sets: list[str]) -> None:
    """Print every value of a run and its origin: default, file, --set, or the reason of the rule that chose it. No
    `run`: every key with its default and its meaning."""
    from cuadrilla.plan.decide import decide

    resolved = resolve(EXAMPLE, sets=sets) if run is None else read_run_file(run, sets=sets)
    config, decisions = decide(resolved.config, folder_of(run or Path()))
    filled = dict(zip([f"model.{size}" for size in SIZES], config.model.shape, strict=True))
    reasons = {decision.key: decision.reason for decision in decisions}
    rows = []
    for name, value in leaves(dump(config)).items():
        origin = resolved.origins[name]
        if name.startswith("tune.space.") and origin == "default":  # defaults within a search: nobody needs them
            continue
        if name in filled and not value:
            value, origin = filled[name], f"preset {resolved.config.model.preset}"
        means = meaning(config, name)
        said = means if options.json else shown(means, language()).replace("\n", " ")
        more = {"meaning": said} if run is None else {"origin": reasons.get(name, origin)}
        rows.append({"key": name, "value": value if options.json else repr(value), **more})
    emit_table(rows, folded=("value", "meaning"))
