"""`cuadrilla data`: fetch corpora, and prepare text for training."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cuadrilla.cli.output import advise, answered, emit, emit_table, say
from cuadrilla.cli.progress import shown_progress
from cuadrilla.data.catalogue import CATALOGUE
from cuadrilla.data.prepare import DEFAULT_VAL_FRACTION, DEFAULT_VOCAB, Prepared, PrepareOptions, prepare
from cuadrilla.data.record import read_record
from cuadrilla.data.sources import DEFAULT_FIELD
from cuadrilla.data.tokenizer import MAX_VOCAB, MIN_VOCAB
from cuadrilla.errors import ConfigError
from cuadrilla.rundir import typed

MAX_NAMES = 5
LEFT_OUT = ("documents_", "filtered_", "records_")
"""Prefixes of the counts in a manifest that say how many documents were left out."""
SOURCES_HELP = (
    "Files and folders (text as .txt, .md, .jsonl, .parquet or TEI .xml, also packed as .gz, .zst, .xz or .bz2), or"
    " cuentos:N for N built-in stories."
)

app = typer.Typer(no_args_is_help=True)


@app.command("get")
def get_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Names from the catalogue.")] = None,
    to: Annotated[Path, typer.Option(help="The folder to put a folder for each corpus in.")] = Path("corpus"),
) -> None:
    """Fetch corpora by name: checked, and recorded in SOURCE.json beside the data. Without a name: list them."""
    if not names:
        _show_catalogue()
        return
    found = fetched(names, to=to)
    emit_table([_fetched_row(to / name, is_new=is_new) for name, is_new in found.items()])
    advise(f"data prepare {' '.join(typed(to / name) for name in found)} --out data")


def fetched(names: Sequence[str], *, to: Path) -> dict[str, bool]:
    """Fetch corpora by name, each into a folder of its name in `to`. False for those that are there already.

    Raises ConfigError for an unknown name, and the errors of `fetch`.
    """
    from cuadrilla.data.download import fetch  # it loads HTTP libraries

    if unknown := [name for name in names if name not in CATALOGUE]:
        hint = "`cuadrilla data get` lists the known corpora; fetch other files with: curl -L -C - -O ADDRESS"
        raise ConfigError("{name!r} is not a known corpus", name=unknown[0], hint=hint)
    with shown_progress() as progress:
        return {name: fetch(CATALOGUE[name], to / name, progress=progress) for name in dict.fromkeys(names)}


def _fetched_row(folder: Path, *, is_new: bool) -> dict[str, Any]:
    record = read_record(folder)
    assert record is not None
    return {
        "folder": str(folder),
        "files": len(record.files),
        "bytes": sum((folder / name).stat().st_size for name in record.files),
        "licence": record.licence,
        "state": "fetched" if is_new else "already there",
    }


def _show_catalogue() -> None:
    if answered([{"name": name, **vars(corpus)} for name, corpus in CATALOGUE.items()]):
        return
    for name, corpus in CATALOGUE.items():
        emit("{name:15}{what}", name=name, what=corpus.what, fill=True)
        emit("               {size}; {licence}", size=corpus.size, licence=corpus.licence, fill=True)
        emit("               {address}", address=corpus.url)


@app.command("prepare")
def prepare_command(
    sources: Annotated[list[str], typer.Argument(help=SOURCES_HELP)],
    out: Annotated[Path, typer.Option(help="The data folder to write.")] = Path("data"),
    vocab: Annotated[
        int, typer.Option(min=MIN_VOCAB, max=MAX_VOCAB, help="Tokens of the vocabulary to train.")
    ] = DEFAULT_VOCAB,
    val_fraction: Annotated[
        float, typer.Option(min=0.0001, max=0.5, help="Fraction of the text to hold out.")
    ] = DEFAULT_VAL_FRACTION,
    tokenizer: Annotated[Path | None, typer.Option(help="Use this tokenizer.json instead of training one.")] = None,
    field: Annotated[
        str, typer.Option(help="The .jsonl field or .parquet column that holds the text.")
    ] = DEFAULT_FIELD,
    keep_all: Annotated[
        bool, typer.Option("--keep-all", help="Keep near-duplicates, and documents that look like no text.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a folder prepared from other text.")] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, max=256, help="Processes that share the work (one for each core).")
    ] = None,
) -> None:
    """Detect encodings, clean, remove duplicates, hold out a part, train a tokenizer and write tokens."""
    wanted = PrepareOptions(
        vocab=vocab,
        tokenizer=tokenizer,
        val_fraction=val_fraction,
        field=field,
        keep_all=keep_all,
        force=force,
        processes=processes,
    )
    with shown_progress() as progress:
        prepared = prepare(sources, out=out, options=wanted, progress=progress)
    _report(prepared, out=out)


def report_left_out(prepared: Prepared) -> None:
    """Say which files were skipped, and how many documents were left out."""
    if prepared.skipped:
        names = ", ".join(prepared.skipped[:MAX_NAMES])
        template = "skipped, no text that can be read: {names} ({number:,} in all)"
        say(template, names=names, number=len(prepared.skipped))
    if prepared.note:
        say("{note}", note=prepared.note)
    if left_out := sum(n for name, n in prepared.manifest.counts.items() if name.startswith(LEFT_OUT)):
        say(
            "left out: {number:,} documents, or parts of them: copies of others, empty ones, hardly text",
            number=left_out,
        )


def _report(prepared: Prepared, *, out: Path) -> None:
    manifest = prepared.manifest
    report_left_out(prepared)
    head = {"folder": str(out), "already_prepared": prepared.already, "skipped": list(prepared.skipped)}
    answered({**head, "manifest_hash": manifest.hash(), **asdict(manifest)})
    say(
        "{folder}: {tokens:,} tokens to train on, {held_out:,} held out; vocabulary {size:,}",
        folder=typed(out),
        tokens=manifest.splits["train"].num_tokens,
        held_out=manifest.num_held_out,
        size=manifest.vocab_size,
    )
    if prepared.already:
        say("it was prepared already: nothing done")
    advise(f"new mi-gpt2 --data {typed(out)}")
