"""`cuadrilla data get`: corpora from the catalogue, the web, object stores and the Hugging Face hub."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuadrilla.cli.output import ask, emit, emit_json, emit_table, options, say
from cuadrilla.cli.stages import shown_progress
from cuadrilla.errors import ConfigError
from cuadrilla.messages import Message
from cuadrilla.rundir import typed

if TYPE_CHECKING:  # the other verbs of `data` do without HTTP
    from cuadrilla.data.get.download import DownloadRequest, Fetched, TooLargeError

MAX_ROWS = 20


def get_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME|ADDRESS",
            help="Names from the catalogue (--list), https:// addresses, s3:// and other stores, hf:OWNER/NAME/CONFIG.",
        ),
    ] = None,
    to: Annotated[Path, typer.Option("--to", help="The folder to put files in.")] = Path("corpus"),
    sha256: Annotated[str, typer.Option("--sha256", help="What the file's SHA-256 must be.")] = "",
    split: Annotated[str, typer.Option("--split", help="hf: which split (default: train).")] = "",
    revision: Annotated[str, typer.Option("--revision", help="hf: branch, tag or commit (default: main).")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Fetch more than 100 MB without asking.")] = False,
    show: Annotated[bool, typer.Option("--list", help="Show the catalogue.")] = False,
    json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """Fetch corpora: resumed where they were cut, checked, and recorded in SOURCE.json beside the data."""
    options.json |= json
    if show:
        _show_catalogue()
        return
    if not names:
        raise ConfigError("name what to fetch", hint="`cuadrilla data get --list` shows the known corpora")
    sha256 = sha256.strip().lower()
    if sha256 and (len(names) > 1 or len(sha256) != 64 or set(sha256) - set("0123456789abcdef")):
        raise ConfigError("--sha256 is 64 hexadecimal digits, for one file", hint="get the file's from its owner")
    wanted = [
        each for name in names for each in _gather(name, agreed=yes, sha256=sha256, split=split, revision=revision)
    ]
    try:
        done = [_fetch(each, to=to, agreed=agreed) for each, agreed in wanted]
    except KeyboardInterrupt:
        say(
            "interrupted; what has arrived is kept in {folder} if the server can resume; run the same command",
            folder=typed(to),
        )
        raise
    _report(done)


def _gather(name: str, *, agreed: bool, **wishes: str) -> "list[tuple[DownloadRequest, bool]]":
    """The files that a name stands for, and whether they may be as large as they like."""
    from cuadrilla.data.get.catalogue import CATALOGUE, resolve
    from cuadrilla.data.get.download import LARGE_BYTES

    corpus = next((each for each in CATALOGUE if each.name == name), None)
    if corpus is not None and corpus.asks and not corpus.address.startswith("hf:"):  # the hub knows exact sizes
        agreed = agreed or _agree(_large(name, corpus.size))
    wanted = resolve(name, **wishes)
    total = sum(each.num_bytes or 0 for each in wanted)
    if total > LARGE_BYTES:
        size = Message("{total:,} bytes in {number:,} files", total=total, number=len(wanted))
        agreed = agreed or _agree(_large(name, size))
    return [(each, agreed) for each in wanted]


def _fetch(wanted: "DownloadRequest", *, to: Path, agreed: bool) -> "Fetched":
    from cuadrilla.data.get.download import LARGE_BYTES, DownloadPolicy, TooLargeError, fetch

    policy = DownloadPolicy(report=say)
    while True:
        try:
            with shown_progress() as progress:
                limit = None if agreed else LARGE_BYTES
                return fetch(wanted, to=to, policy=replace(policy, progress=progress, limit_bytes=limit))
        except TooLargeError as problem:
            agreed = _agree(problem)


def _large(name: str, size: str) -> "TooLargeError":
    from cuadrilla.data.get.download import TooLargeError

    return TooLargeError("{name} is large: {size}", name=name, size=size, hint="add --yes to fetch it without asking")


def _agree(problem: "TooLargeError") -> bool:
    """Ask at the terminal. Raises the problem when there is none, or the answer is no."""
    if not sys.stdin.isatty() or options.json:
        raise problem
    if not ask(Message("{problem}. Fetch it?", problem=problem.message)):
        raise problem
    return True


def _show_catalogue() -> None:
    from cuadrilla.data.get.catalogue import CATALOGUE

    if options.json:
        keys = ("name", "what", "address", "licence", "about_bytes", "size", "asks", "split", "inside")
        emit_json([{key: getattr(corpus, key) for key in keys} for corpus in CATALOGUE])
        return
    for corpus in CATALOGUE:
        emit("{name:15}{what}", name=corpus.name, what=corpus.what)
        emit(
            "               {size}, asks first; {licence}" if corpus.asks else "               {size}; {licence}",
            size=corpus.size,
            licence=corpus.licence,
        )
        emit(
            "               {address} --split {split}" if corpus.split else "               {address}",
            address=corpus.address,
            split=corpus.split,
        )


def _report(done: "Sequence[Fetched]") -> None:
    from cuadrilla.data.get.address import RECORD

    rows = [_row(each) for each in done]
    emit_table(rows if options.json else rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS and not options.json:
        emit("... and {more:,} more (--json shows all)", more=len(rows) - MAX_ROWS)
    for each in done:
        if each.record.vouched_by == "first use" and not each.already:
            say(
                "no published SHA-256 for {name}; the one of this download is now in {record}, for the next time",
                name=each.record.name,
                record=each.folder / RECORD,
            )
    folders = sorted({each.folder for each in done})
    say("now: cuadrilla data prepare {folders} --out data", folders=" ".join(typed(folder) for folder in folders))


def _row(fetched: "Fetched") -> dict[str, Any]:
    record = fetched.record
    files = f"{len(record.unpacked):,} files" if record.unpacked else str(fetched.folder / record.name)
    shown: dict[str, Any] = {
        "file": files,
        "bytes": record.num_bytes if options.json else f"{record.num_bytes:,}",
        "sha256": record.sha256 if options.json else record.sha256[:12],
        "vouched_by": record.vouched_by,
        "licence": record.licence,
        "state": "already there" if fetched.already else "fetched",
    }
    return {**shown, "folder": str(fetched.folder), "url": record.url} if options.json else shown
