"""`cuadrilla data`: prepare text for training, and look at what was prepared."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuadrilla.cli.get import get_command
from cuadrilla.cli.output import emit, emit_json, emit_table, options, say
from cuadrilla.cli.stages import shown_progress
from cuadrilla.data.prepare import DEFAULT_VAL_FRACTION, DEFAULT_VOCAB, Prepared, PrepareOptions, prepare
from cuadrilla.data.shards import Manifest, Portion, Source, read_manifest, verify_folder
from cuadrilla.data.sources import DEFAULT_FIELD
from cuadrilla.data.tokenizer import MAX_VOCAB, MIN_VOCAB
from cuadrilla.errors import EnvironmentProblem

if TYPE_CHECKING:
    from cuadrilla.data.executor import Workers

MAX_ROWS = 20
MAX_NAMES = 5
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
    out: Annotated[Path, typer.Option("--out", help="The data folder to write.")],
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
    """Detect encodings, clean, remove duplicates, hold out a part, train a tokenizer and write token shards."""
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
    """What a data folder holds: documents, bytes and tokens of each split and source."""
    manifest = read_manifest(folder)
    verify_folder(folder, manifest, hashes=verify)
    _emit_manifest(manifest, {"folder": str(folder), "manifest_hash": manifest.hash()})


def _report(prepared: Prepared, *, out: Path) -> None:
    manifest = prepared.manifest
    if prepared.skipped:
        names = ", ".join(prepared.skipped[:MAX_NAMES])
        told = "skipped, no text that can be read: {names} ({number:,} in all)"
        say(told, names=names, number=len(prepared.skipped))
    if prepared.note:
        say("{note}", note=prepared.note)
    vocab = manifest.options.get("vocab", manifest.vocab_size)
    if manifest.vocab_size != vocab:
        say(
            "this text yields a vocabulary of only {size:,}; you asked for {vocab:,}",
            size=manifest.vocab_size,
            vocab=vocab,
        )
    _emit_manifest(
        manifest,
        {
            "folder": str(out),
            "already_prepared": prepared.already,
            "skipped": list(prepared.skipped),
            "manifest_hash": manifest.hash(),
        },
    )
    say(
        "{folder}: already prepared, nothing done ({tokens:,} tokens to train on)"
        if prepared.already
        else "{folder}: prepared ({tokens:,} tokens to train on)",
        folder=out,
        tokens=manifest.splits["train"].num_tokens,
    )


def _emit_manifest(manifest: Manifest, head: Mapping[str, Any]) -> None:
    splits = [_row(name, [source.portions.get(name) for source in manifest.sources]) for name in manifest.splits]
    by_source = [_source_row(source) for source in manifest.sources]
    if options.json:
        tail = {"vocab_size": manifest.vocab_size, "dtype": manifest.dtype, "options": manifest.options}
        emit_json({**head, **tail, "splits": splits, "sources": by_source, "counts": manifest.counts})
        return
    emit_table([_readable(row) for row in splits])
    emit("")
    shown = ("name", "documents", "tokens", "val_tokens", "bytes_per_token", "encoding")
    emit_table([_readable({key: row[key] for key in shown}) for row in by_source], most=MAX_ROWS)
    if manifest.counts:
        emit("")
        emit_table([{"cleaning": name.replace("_", " "), "": f"{n:,}"} for name, n in manifest.counts.items()])
    emit("")
    emit(
        "vocabulary {size:,} ({dtype}), manifest {hash}",
        size=manifest.vocab_size,
        dtype=manifest.dtype,
        hash=manifest.hash()[:12],
    )


def _row(name: str, portions: list[Portion | None]) -> dict[str, Any]:
    """Sums over some portions; the same keys for splits and sources."""
    given = [portion for portion in portions if portion]
    num_bytes = sum(portion.num_bytes for portion in given)
    num_tokens = sum(portion.num_tokens for portion in given)
    return {
        "name": name,
        "documents": sum(portion.num_documents for portion in given),
        "characters": sum(portion.num_characters for portion in given),
        "bytes": num_bytes,
        "tokens": num_tokens,
        "bytes_per_token": round(num_bytes / num_tokens, 3) if num_tokens else None,
    }


def _source_row(source: Source) -> dict[str, Any]:
    val = source.portions.get("val")
    return {
        **_row(source.name, list(source.portions.values())),
        "val_tokens": val.num_tokens if val else 0,
        "encoding": source.encoding,
        "licence": source.licence,
    }


def _readable(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("_", " "): f"{value:,}" if isinstance(value, int) else value for key, value in row.items()}
