"""`cuadrilla data`: prepare text for training, and look at what was prepared."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuadrilla.cli.get import get_command
from cuadrilla.cli.output import emit, emit_json, emit_table, options, say
from cuadrilla.cli.stages import shown_progress
from cuadrilla.data.folder import Manifest, Source, Split, read_manifest, verify_folder
from cuadrilla.data.prepare import DEFAULT_VAL_FRACTION, DEFAULT_VOCAB, Prepared, PrepareOptions, prepare
from cuadrilla.data.sources import DEFAULT_FIELD
from cuadrilla.data.tokenizer import MAX_VOCAB, MIN_VOCAB
from cuadrilla.errors import EnvironmentProblem
from cuadrilla.rundir import typed

if TYPE_CHECKING:
    from cuadrilla.data.executor import Workers

MAX_ROWS = 20
MAX_NAMES = 5
LEFT_OUT = ("documents_", "filtered_", "records_")
"""How the names of such counts in a manifest begin."""
SOURCES_HELP = (
    "Files and folders (text as .txt, .md, .jsonl, .parquet or TEI .xml, also packed (.gz, .zst, .xz, .bz2), .zip or"
    " .tar), or cuentos:N for N built-in stories."
)

app = typer.Typer(no_args_is_help=True)
app.command("get")(get_command)

VocabOption = Annotated[
    int, typer.Option("--vocab", min=MIN_VOCAB, max=MAX_VOCAB, help="Tokens of the vocabulary to train.")
]
ValFractionOption = Annotated[
    float, typer.Option("--val-fraction", min=0.0001, max=0.5, help="Fraction of the text to hold out.")
]
TokenizerOption = Annotated[
    Path | None, typer.Option("--tokenizer", help="Use this tokenizer.json instead of training one.")
]
ValOption = Annotated[
    list[str] | None, typer.Option("--val", help="A file or folder to hold out, instead of a random part.")
]
ProcessesOption = Annotated[
    int | None, typer.Option("--processes", min=1, max=256, help="Processes that share the work (one for each core).")
]
DaskOption = Annotated[
    str | None, typer.Option("--dask", metavar="HOST:PORT", help="A Dask scheduler whose workers do the work.")
]


@app.command("prepare")
def prepare_command(
    sources: Annotated[list[str], typer.Argument(help=SOURCES_HELP)],
    out: Annotated[Path, typer.Option("--out", help="The data folder to write.")] = Path("data"),
    vocab: VocabOption = DEFAULT_VOCAB,
    val_fraction: ValFractionOption = DEFAULT_VAL_FRACTION,
    val: ValOption = None,
    tokenizer: TokenizerOption = None,
    field: Annotated[
        str, typer.Option("--field", help="The .jsonl field or .parquet column that holds the text.")
    ] = DEFAULT_FIELD,
    keep_all: Annotated[
        bool, typer.Option("--keep-all", help="Keep near-duplicates, and documents that look like no text.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a folder prepared from other text.")] = False,
    processes: ProcessesOption = None,
    dask: DaskOption = None,
) -> None:
    """Detect encodings, clean, remove duplicates, hold out a part, train a tokenizer and write tokens."""
    wanted = PrepareOptions(
        vocab=vocab,
        tokenizer=tokenizer,
        val_fraction=val_fraction,
        val=tuple(val or ()),
        field=field,
        keep_all=keep_all,
        force=force,
        processes=processes,
    )
    with shown_progress() as progress, _workers(dask) as workers:
        prepared = prepare(sources, out=out, options=wanted, progress=progress, workers=workers)
    _report(prepared, out=out)


def _workers(dask: str | None) -> "AbstractContextManager[Workers | None]":
    """None: processes of this machine."""
    if dask is None:
        return nullcontext()
    try:
        from cuadrilla.data.dask import dask_workers
    except ImportError as error:
        raise EnvironmentProblem(
            "Dask is not installed: {error}", error=error, hint='pip install "cuadrilla[dask]"'
        ) from error
    return dask_workers(dask)


@app.command("stats")
def stats_command(
    folder: Annotated[Path, typer.Argument(help="A folder written by `cuadrilla data prepare`.")],
    verify: Annotated[bool, typer.Option("--verify", help="Check the hash of every file as well.")] = False,
) -> None:
    """What a data folder holds: documents, bytes and tokens of each split, and its sources."""
    manifest = read_manifest(folder)
    verify_folder(folder, manifest, hashes=verify)
    _emit_manifest(manifest, folder=folder)


def _report(prepared: Prepared, *, out: Path) -> None:
    manifest = prepared.manifest
    if prepared.skipped:
        names = ", ".join(prepared.skipped[:MAX_NAMES])
        template = "skipped, no text that can be read: {names} ({number:,} in all)"
        say(template, names=names, number=len(prepared.skipped))
    if prepared.note:
        say("{note}", note=prepared.note)
    if options.json:
        head = {"already_prepared": prepared.already, "skipped": list(prepared.skipped)}
        _emit_manifest(manifest, folder=out, head=head)
    say(
        "{folder}: {tokens:,} tokens to train on, {held_out:,} held out; vocabulary {size:,}",
        folder=typed(out),
        tokens=manifest.splits["train"].num_tokens,
        held_out=manifest.num_held_out,
        size=manifest.vocab_size,
    )
    if left_out := sum(n for name, n in manifest.counts.items() if name.startswith(LEFT_OUT)):
        say("{number:,} documents left out: copies of others, empty ones, or hardly text", number=left_out)
    if prepared.already:
        say("it was prepared already: nothing done")
    say("\nnext: cuadrilla new my-gpt2 --data {folder}", folder=typed(out))
    say("      cuadrilla data stats {folder}", folder=typed(out))


def _emit_manifest(manifest: Manifest, *, folder: Path, head: Mapping[str, Any] | None = None) -> None:
    splits = [_split_row(name, split) for name, split in manifest.splits.items()]
    by_source = [_source_row(source) for source in manifest.sources]
    if options.json:
        about = {"folder": str(folder), "manifest_hash": manifest.hash(), "vocab_size": manifest.vocab_size}
        more = {"dtype": manifest.dtype, "options": manifest.options, "counts": manifest.counts}
        emit_json({**about, **(head or {}), **more, "splits": splits, "sources": by_source})
        return
    emit_table(splits)
    emit("")
    shown = ("name", "documents", "held_out_documents", "bytes", "encoding")
    emit_table([{key: row[key] for key in shown} for row in by_source], most=MAX_ROWS)
    if manifest.counts:
        emit("")
        emit_table([{"cleaning": name.replace("_", " "), "number": number} for name, number in manifest.counts.items()])
    emit("")
    emit(
        "vocabulary {size:,} ({dtype}), manifest {hash}",
        size=manifest.vocab_size,
        dtype=manifest.dtype,
        hash=manifest.hash()[:12],
    )


def _split_row(name: str, split: Split) -> dict[str, Any]:
    return {
        "name": name,
        "documents": split.num_documents,
        "bytes": split.num_bytes,
        "tokens": split.num_tokens,
        "bytes_per_token": round(split.num_bytes / max(1, split.num_tokens), 3),
    }


def _source_row(source: Source) -> dict[str, Any]:
    return {
        "name": source.name,
        "documents": sum(source.documents.values()),
        "held_out_documents": source.documents.get("val", 0),
        "bytes": source.num_bytes,
        "encoding": source.encoding,
        "licence": source.licence,
    }
