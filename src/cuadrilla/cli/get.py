"""`cuadrilla data get`: corpora from the catalogue and the web."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuadrilla.cli.output import emit, emit_json, emit_table, options, say
from cuadrilla.cli.stages import shown_progress
from cuadrilla.errors import ConfigError
from cuadrilla.rundir import typed

if TYPE_CHECKING:  # the other verbs of `data` do without HTTP
    from cuadrilla.data.download import Fetched

MAX_ROWS = 20


def get_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME|ADDRESS",
            help="Names from the catalogue (--list), https:// addresses.",
        ),
    ] = None,
    to: Annotated[Path, typer.Option("--to", help="The folder to put files in.")] = Path("corpus"),
    sha256: Annotated[str, typer.Option("--sha256", help="What the file's SHA-256 must be.")] = "",
    show: Annotated[bool, typer.Option("--list", help="Show the catalogue.")] = False,
) -> None:
    """Fetch corpora: resumed where they were cut, checked, and recorded in SOURCE.json beside the data."""
    if show:
        _show_catalogue()
        return
    if not names:
        raise ConfigError("name what to fetch", hint="`cuadrilla data get --list` shows the known corpora")
    _report(fetched(names, to=to, sha256=sha256.strip().lower()))


def fetched(names: Sequence[str], *, to: Path, sha256: str = "") -> "list[Fetched]":
    """What these names and addresses stand for, below the folder `to`. Raises as `fetch`, and ConfigError."""
    from cuadrilla.data.catalogue import resolve
    from cuadrilla.data.download import fetch

    wanted = [resolve(name, sha256=sha256) for name in names]
    try:
        with shown_progress() as progress:
            return [fetch(each, to=to, progress=progress, report=say) for each in wanted]
    except KeyboardInterrupt:
        say(
            "interrupted; what has arrived is kept in {folder} if the server can resume; run the same command",
            folder=typed(to),
        )
        raise


def _show_catalogue() -> None:
    from cuadrilla.data.catalogue import CATALOGUE

    if options.json:
        keys = ("what", "url", "licence", "about_bytes", "size", "inside")
        rows = [{"name": name, **{key: getattr(corpus, key) for key in keys}} for name, corpus in CATALOGUE.items()]
        emit_json(rows)
        return
    for name, corpus in CATALOGUE.items():
        emit("{name:15}{what}", name=name, what=corpus.what)
        emit("               {size}; {licence}", size=corpus.size, licence=corpus.licence)
        emit("               {address}", address=corpus.url)


def _report(done: "Sequence[Fetched]") -> None:
    emit_table([_row(each) for each in done], most=MAX_ROWS)
    folders = sorted({each.folder for each in done})
    say("now: cuadrilla data prepare {folders} --out data", folders=" ".join(typed(folder) for folder in folders))


def _row(fetched: "Fetched") -> dict[str, Any]:
    first, *others = fetched.records
    num_bytes = sum(record.num_bytes for record in fetched.records)
    shown: dict[str, Any] = {
        "file": f"{len(others) + 1:,} files" if others else str(fetched.folder / first.name),
        "bytes": num_bytes,
        "sha256": first.sha256 if options.json else first.sha256[:12],
        "licence": first.licence,
        "state": "already there" if fetched.already else "fetched",
    }
    return {**shown, "folder": str(fetched.folder), "url": first.url} if options.json else shown
