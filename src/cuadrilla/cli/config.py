"""`train --show-config` and `--explain-config`, and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from cuadrilla.cli.output import emit_table, options
from cuadrilla.config import Config, Section
from cuadrilla.messages import Message, language, shown
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import dump, leaves, read_run_file, resolve

SIZES = ("layers", "heads", "width", "context")

RunFile = Annotated[Path, typer.Argument(help="A run file, or the folder that holds run.toml.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="section.key=value; overrides the run file.")]
AllowChanges = Annotated[
    bool, typer.Option("--allow-changes", help="Resume with another learning rate, schedule or length.")
]


def folder_of(run: Path) -> RunDir:
    """The folder of a run, from its own path or from that of its run file."""
    return RunDir((run.parent if run.is_file() else run).resolve())


def show_config(run: Path, sets: list[str]) -> None:
    """Print every value of a run and its origin: default, file, --set, or the reason of the rule that chose it."""
    from cuadrilla.plan.decide import decide

    resolved = read_run_file(run, sets=sets)
    config, decisions = decide(resolved.config, folder_of(run))
    filled = dict(zip([f"model.{size}" for size in SIZES], config.model.shape, strict=True))
    reasons = {decision.key: decision.reason for decision in decisions}
    rows = []
    for name, value in leaves(dump(config)).items():
        origin = resolved.origins[name]
        if name.startswith("tune.space.") and origin == "default":  # defaults within a search: nobody needs them
            continue
        if name in filled and not value:
            value, origin = filled[name], f"preset {resolved.config.model.preset}"
        rows.append({"key": name, "value": value if options.json else repr(value), "origin": reasons.get(name, origin)})
    emit_table(rows, folded=("value",))


def explain_config() -> None:
    """Print every key with its default and its help text."""
    example = resolve('[data]\nfolder = "data"\n[train]\nsteps = 1\n').config
    rows = []
    for section in Config.model_fields:
        value = getattr(example, section)
        if isinstance(value, Section):
            for key, field in type(value).model_fields.items():
                text = Message(field.description or "")
                meaning = text if options.json else shown(text, language()).replace("\n", " ")
                rows.append({"key": f"{section}.{key}", "default": repr(getattr(value, key)), "meaning": meaning})
    emit_table(rows)
