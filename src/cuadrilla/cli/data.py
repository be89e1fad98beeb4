"""`cuadrilla data`: prepare text for training, and look at what was prepared."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cuadrilla.cli.get import get_command
from cuadrilla.cli.output import emit, emit_json, emit_table, options, say
from cuadrilla.cli.stages import shown_progress
from cuadrilla.data import overlap
from cuadrilla.data.duplicates import DEFAULT_SIMILARITY
from cuadrilla.data.fertility import fits
from cuadrilla.data.formats.form import ACCEPTED
from cuadrilla.data.formats.record import DEFAULT_FIELD, Reading
from cuadrilla.data.options import (
    DEFAULT_FILTER,
    DEFAULT_MIN_CHARACTERS,
    DEFAULT_VAL_FRACTION,
    DEFAULT_VOCAB,
    Options,
)
from cuadrilla.data.prepare import CHECKED, DROPPED, OVERLAPPING, WORK, Prepared, prepare
from cuadrilla.data.shards import Manifest, Portion, Source, read_manifest, verify_folder
from cuadrilla.rundir import read_jsonl

MAX_ROWS = 20

app = typer.Typer(no_args_is_help=True)
app.command("get")(get_command)

JsonOption = Annotated[bool, typer.Option("--json", help="The result as JSON.")]
FilterOption = Annotated[
    str, typer.Option("--filter", help="Which documents to drop: books (the least), web (FineWeb-2's rules), none.")
]
NearOption = Annotated[
    float, typer.Option("--near-duplicates", help="Drop documents this similar to an earlier one; 0 keeps them.")
]
AddOption = Annotated[
    bool, typer.Option("--add", help="Old and new text into a folder made of the old, with the same tokenizer.")
]
KeepOption = Annotated[
    bool, typer.Option("--keep-work", help="Keep the clean text on disk, so that --add works on the new only.")
]
ProcessesOption = Annotated[
    int | None, typer.Option("--processes", help="Processes that share the work (one for each core).")
]
EncoderOption = Annotated[str, typer.Option("--encoder", help="auto, gigatoken, words, tokenizers; ids are the same.")]
HeldOutOption = Annotated[
    list[str] | None,
    typer.Option("--held-out", help="A file that must be new to the model: how much of it is in the training text."),
]
CompareOption = Annotated[
    list[Path] | None, typer.Option("--compare-tokenizer", help="Another tokenizer.json, such as GPT-2's.")
]
DroppedOption = Annotated[bool, typer.Option("--show-dropped", help="Show examples of what was dropped, and why.")]


@app.command("prepare")
def prepare_command(
    sources: Annotated[
        list[str], typer.Argument(help=f"Files and folders ({ACCEPTED}), or cuentos:N for N built-in stories.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The data folder to write.")],
    vocab: Annotated[
        int | None, typer.Option("--vocab", help=f"Tokens of the vocabulary to train ({DEFAULT_VOCAB} if not given).")
    ] = None,
    val_fraction: Annotated[
        float, typer.Option("--val-fraction", help="Part of the documents to hold out.")
    ] = DEFAULT_VAL_FRACTION,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="Use this tokenizer.json instead of training one.")
    ] = None,
    min_characters: Annotated[
        int, typer.Option("--min-characters", help="Drop documents that are shorter.")
    ] = DEFAULT_MIN_CHARACTERS,
    field: Annotated[
        str, typer.Option("--field", help="The field of .jsonl and column of .parquet that holds the text.")
    ] = DEFAULT_FIELD,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out and count records without a usable text and broken XML.")
    ] = False,
    filter_rules: FilterOption = DEFAULT_FILTER,
    near_duplicates: NearOption = DEFAULT_SIMILARITY,
    force: Annotated[bool, typer.Option("--force", help="Replace a folder prepared from other text.")] = False,
    add: AddOption = False,
    keep_work: KeepOption = False,
    processes: ProcessesOption = None,
    encoder: EncoderOption = "auto",
    show_dropped: DroppedOption = False,
    held_out: HeldOutOption = None,
    compare: CompareOption = None,
    json: JsonOption = False,
) -> None:
    """Detect encodings, clean, remove duplicates, hold out a part, train a tokenizer and write token shards."""
    options.json |= json
    wanted = Options(
        vocab=vocab,
        tokenizer=tokenizer,
        val_fraction=val_fraction,
        min_characters=min_characters,
        reading=Reading(field=field, skip_bad=skip_bad),
        filter=filter_rules,
        near_duplicates=near_duplicates,
        force=force,
        add=add,
        keep_work=keep_work,
        processes=processes,
        encoder=encoder,
    )
    try:
        with shown_progress() as progress:
            prepared = prepare(sources, out=out, options=wanted, progress=progress)
    except KeyboardInterrupt:
        say(f"interrupted; the same command goes on from here (what is finished is in {out / WORK})")
        raise
    _report(prepared, out=out, show_dropped=show_dropped, extra=_measures(out, prepared.manifest, held_out, compare))


@app.command("stats")
def stats_command(
    folder: Annotated[Path, typer.Argument(help="A folder written by `cuadrilla data prepare`.")],
    verify: Annotated[bool, typer.Option("--verify", help="Check the hash of every file as well.")] = False,
    held_out: HeldOutOption = None,
    compare: CompareOption = None,
    json: JsonOption = False,
) -> None:
    """What a data folder holds: documents, bytes and tokens of each split and source."""
    options.json |= json
    manifest = read_manifest(folder)
    verify_folder(folder, manifest, hashes=verify)
    extra = _measures(folder, manifest, held_out, compare)
    _emit_manifest(manifest, {"folder": str(folder), "manifest_hash": manifest.hash()}, extra)


def _measures(
    folder: Path, manifest: Manifest, held_out: list[str] | None, compare: list[Path] | None
) -> dict[str, list[dict[str, Any]]]:
    """How the tokenizer fits the held-out text, and how much of what should be new is not."""
    windows, found = manifest.counts.get(CHECKED, 0), manifest.counts.get(OVERLAPPING, 0)
    rows = [{"name": "val", "checked": windows, "found": found, "share": found / windows if windows else 0.0}]
    for each in overlap.of_files(folder, manifest, held_out) if held_out else ():
        rows.append({"name": each.name, "checked": each.checked, "found": each.found, "share": each.share})
    return {"tokenizers": [asdict(fit) for fit in fits(folder, manifest, compare or [])], "overlap": rows}


def _report(prepared: Prepared, *, out: Path, show_dropped: bool, extra: dict[str, list[dict[str, Any]]]) -> None:
    manifest = prepared.manifest
    dropped = list(read_jsonl(out / DROPPED)) if show_dropped else []
    state = "already prepared, nothing done" if prepared.already else "prepared"
    if prepared.skipped:
        shown = ", ".join(prepared.skipped[:5])
        more = len(prepared.skipped) - 5
        say(f"skipped, no text that can be read: {shown}" + (f" and {more:,} more" if more > 0 else ""))
    for note in prepared.notes:
        say(note)
    vocab = manifest.options.get("vocab", manifest.vocab_size)
    if manifest.vocab_size != vocab:
        say(f"the text has merges for a vocabulary of {manifest.vocab_size:,} only, {vocab:,} were asked for")
    _emit_manifest(
        manifest,
        {
            "folder": str(out),
            "already_prepared": prepared.already,
            "skipped": list(prepared.skipped),
            "manifest_hash": manifest.hash(),
            **({"dropped": dropped} if show_dropped else {}),
        },
        extra,
    )
    if show_dropped and not options.json:
        _emit_dropped(dropped)
    say(f"{out}: {state} ({manifest.splits['train'].num_tokens:,} tokens to train on)")


def _emit_dropped(rows: list[dict[str, Any]]) -> None:
    """Some examples of each reason."""
    for row in rows:
        like = f", like one of {row['like']}" if "like" in row else ""
        emit(f"{row['reason'].replace('_', ' ')}: {row['source']}, {row['characters']:,} characters{like}")
        emit(f"    {row['begins'][:100]}")


def _emit_manifest(manifest: Manifest, head: Mapping[str, Any], extra: Mapping[str, list[dict[str, Any]]]) -> None:
    splits = [_row(name, [source.portions.get(name) for source in manifest.sources]) for name in manifest.splits]
    by_source = [_source_row(source) for source in manifest.sources]
    if options.json:
        tail = {"vocab_size": manifest.vocab_size, "dtype": manifest.dtype, "options": manifest.options}
        emit_json({**head, **tail, "splits": splits, "sources": by_source, "counts": manifest.counts, **extra})
        _warn_overlap(extra["overlap"])
        return
    emit_table([_readable(row) for row in splits])
    emit("")
    shown = ("name", "documents", "tokens", "val_tokens", "bytes_per_token", "encoding")
    emit_table([_readable({key: row[key] for key in shown}) for row in by_source[:MAX_ROWS]])
    if len(by_source) > MAX_ROWS:
        encodings = Counter(source.encoding for source in manifest.sources)
        kinds = ", ".join(f"{count:,} in {encoding}" for encoding, count in sorted(encodings.items()))
        emit(f"... and {len(by_source) - MAX_ROWS:,} more (--json shows all); of all, {kinds}")
    if manifest.counts:
        emit("")
        emit_table([{"cleaning": name.replace("_", " "), "": f"{n:,}"} for name, n in manifest.counts.items()])
    emit("")
    emit_table([_readable({"tokenizer": row.pop("name"), **row}) for row in map(dict, extra["tokenizers"])])
    emit("")
    for row in extra["overlap"]:
        emit(f"{row['name']}: {row['share']:.2%} of {row['checked']:,} stretches of 50 characters are in train")
    _warn_overlap(extra["overlap"])
    emit(f"vocabulary {manifest.vocab_size:,} ({manifest.dtype}), manifest {manifest.hash()[:12]}")


def _warn_overlap(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["share"] >= overlap.WORTH_A_WARNING:
            say(f"warning: {row['share']:.1%} of {row['name']} is in the training text; its loss will look too good")


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
