"""`cuadrilla data`: prepare text for training, and look at what was prepared."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

import typer

from cuadrilla.cli.get import get_command
from cuadrilla.cli.output import emit, emit_json, emit_table, options, say
from cuadrilla.cli.pools import (
    LOCAL,
    CaOption,
    CertificateOption,
    EngineOption,
    InsecureOption,
    KeyOption,
    SchedulerOption,
    chosen_pool,
)
from cuadrilla.cli.stages import shown_progress
from cuadrilla.data import overlap
from cuadrilla.data.corpus import AUTO
from cuadrilla.data.duplicates import DEFAULT_SIMILARITY
from cuadrilla.data.fertility import fits
from cuadrilla.data.formats.record import DEFAULT_FIELD, Reading
from cuadrilla.data.options import (
    DEFAULT_FILTER,
    DEFAULT_MIN_CHARACTERS,
    DEFAULT_VAL_FRACTION,
    PrepareOptions,
)
from cuadrilla.data.prepare import CHECKED, DROPPED, OVERLAPPING, WORK, Prepared, prepare
from cuadrilla.data.shards import Manifest, Portion, Source, read_manifest, verify_folder
from cuadrilla.data.sources import Found, open_sources
from cuadrilla.messages import Message
from cuadrilla.rundir import read_jsonl

MAX_ROWS = 20
MAX_NAMES = 5
SOURCES_HELP = (
    "Files and folders (text as .txt, .md, .jsonl, .parquet or TEI .xml, also packed (.gz, .zst, .xz, .bz2), .zip or"
    " .tar), or cuentos:N for N built-in stories."
)

app = typer.Typer(no_args_is_help=True)
app.command("get")(get_command)

JsonOption = Annotated[bool, typer.Option("--json", help="The result as JSON.")]
VocabOption = Annotated[
    int | None, typer.Option("--vocab", help="Tokens of the vocabulary to train (8192 if not given).")
]
ValFractionOption = Annotated[float, typer.Option("--val-fraction", help="Fraction of the text to hold out.")]
TokenizerOption = Annotated[
    Path | None, typer.Option("--tokenizer", help="Use this tokenizer.json instead of training one.")
]
MinCharactersOption = Annotated[int, typer.Option("--min-characters", help="Drop documents shorter than this.")]
FilterOption = Annotated[
    str, typer.Option("--filter", help="Which documents to drop: books (the fewest), web (FineWeb-2's rules), none.")
]
ValByOption = Annotated[
    str, typer.Option("--val-by", help="Hold out whole texts (source) or parts (document); auto: whole if 20 or more.")
]
ValOption = Annotated[
    list[str] | None, typer.Option("--val", help="A file or folder to hold out, instead of a random part.")
]
NearOption = Annotated[
    float,
    typer.Option(
        "--near-duplicates", help="Drop documents this similar to earlier ones, or contained in them; 0 keeps them."
    ),
]
AddOption = Annotated[
    bool, typer.Option("--add", help="Add text to this folder and keep its tokenizer: give the old and the new text.")
]
KeepOption = Annotated[
    bool, typer.Option("--keep-work", help="Keep the cleaned text on disk, so that --add only processes new text.")
]
ProcessesOption = Annotated[
    int | None, typer.Option("--processes", help="Processes that share the work (one for each core).")
]
EncoderOption = Annotated[str, typer.Option("--encoder", help="auto, gigatoken, tokenizers; ids are the same.")]
HeldOutOption = Annotated[
    list[str] | None,
    typer.Option(
        "--held-out", help="A file that must be new to the model; shows how much of it is in the training text."
    ),
]
CompareOption = Annotated[
    list[Path] | None,
    typer.Option("--compare-tokenizer", help="Another tokenizer.json to compare with, such as GPT-2's."),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Check all files, say what they are and what is wrong, then stop.")
]
RepairOption = Annotated[
    bool, typer.Option("--repair", help="Repair text that was encoded twice, or is in two encodings.")
]
DroppedOption = Annotated[bool, typer.Option("--show-dropped", help="Show examples of what was dropped, and why.")]


@app.command("prepare")
def prepare_command(
    sources: Annotated[list[str], typer.Argument(help=SOURCES_HELP)],
    out: Annotated[Path, typer.Option("--out", help="The data folder to write.")],
    vocab: VocabOption = None,
    val_fraction: ValFractionOption = DEFAULT_VAL_FRACTION,
    val_by: ValByOption = AUTO,
    val: ValOption = None,
    tokenizer: TokenizerOption = None,
    min_characters: MinCharactersOption = DEFAULT_MIN_CHARACTERS,
    field: Annotated[
        str, typer.Option("--field", help="The .jsonl field or .parquet column that holds the text.")
    ] = DEFAULT_FIELD,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip and count broken files and records without usable text.")
    ] = False,
    repair: RepairOption = False,
    filter_rules: FilterOption = DEFAULT_FILTER,
    near_duplicates: NearOption = DEFAULT_SIMILARITY,
    force: Annotated[bool, typer.Option("--force", help="Replace a folder prepared from other text.")] = False,
    add: AddOption = False,
    keep_work: KeepOption = False,
    processes: ProcessesOption = None,
    encoder: EncoderOption = "auto",
    engine: EngineOption = LOCAL,
    scheduler: SchedulerOption = None,
    tls_ca_file: CaOption = None,
    tls_cert: CertificateOption = None,
    tls_key: KeyOption = None,
    insecure_scheduler: InsecureOption = False,
    show_dropped: DroppedOption = False,
    held_out: HeldOutOption = None,
    compare: CompareOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Detect encodings, clean, remove duplicates, hold out a part, train a tokenizer and write token shards."""
    options.json |= json
    wanted = PrepareOptions(
        vocab=vocab,
        tokenizer=tokenizer,
        val_fraction=val_fraction,
        val_by=val_by,
        val=tuple(val or ()),
        min_characters=min_characters,
        reading=Reading(field=field, skip_bad=skip_bad, repair=repair),
        filter=filter_rules,
        near_duplicates=near_duplicates,
        force=force,
        add=add,
        keep_work=keep_work,
        processes=processes,
        encoder=encoder,
    )
    tls = (tls_ca_file, tls_cert, tls_key)
    chosen = chosen_pool(engine, scheduler, tls, insecure=insecure_scheduler, options=wanted)
    if dry_run:
        with shown_progress() as progress:
            found = open_sources(sources, exclude=out, progress=progress, reading=wanted.reading, held_out=wanted.val)
        _emit_found(found)
        _say_damaged(found.damaged, repaired=repair)
        return
    try:
        with shown_progress() as progress, chosen as pool:
            prepared = prepare(sources, out=out, options=wanted, progress=progress, pool=pool)
    except KeyboardInterrupt:
        say("interrupted; the same command continues from here (finished work is in {folder})", folder=out / WORK)
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
    _say_skipped(prepared.skipped, prepared.broken)
    _say_damaged(prepared.damaged, repaired="repair" in manifest.options)
    for text in prepared.repeats[:MAX_ROWS]:
        say("{text}", text=text)
    if len(prepared.repeats) > MAX_ROWS:
        say("... and {more:,} more such sources (--json shows all)", more=len(prepared.repeats) - MAX_ROWS)
    for note in prepared.notes:
        say("{note}", note=note)
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
            "broken": dict(prepared.broken),
            "damaged": dict(prepared.damaged),
            "repeats": prepared.repeats,
            "manifest_hash": manifest.hash(),
            **({"dropped": dropped} if show_dropped else {}),
        },
        extra,
    )
    if show_dropped and not options.json:
        _emit_dropped(dropped)
    say(
        "{folder}: already prepared, nothing done ({tokens:,} tokens to train on)"
        if prepared.already
        else "{folder}: prepared ({tokens:,} tokens to train on)",
        folder=out,
        tokens=manifest.splits["train"].num_tokens,
    )


def _emit_found(found: Found) -> None:
    """What a preparation would read."""
    rows = [
        {"name": each.name, "text_bytes": each.num_bytes, "encoding": each.encoding, "licence": each.licence}
        for each in found.sources
    ]
    if options.json:
        emit_json({"sources": rows, "skipped": found.skipped, "broken": dict(found.broken), "counts": found.counts})
    else:
        emit_table([_readable(row) for row in rows])
    _say_skipped(found.skipped, found.broken)
    total = sum(each.num_bytes for each in found.sources)
    say("{number:,} sources, {size:,.1f} MB of text; nothing was written", number=len(rows), size=total / 1e6)


def _say_damaged(damaged: Mapping[str, str], *, repaired: bool) -> None:
    if damaged:
        files = _some([Message("{name} ({why})", name=name, why=why) for name, why in sorted(damaged.items())])
        say("repaired: {files}" if repaired else "damaged, can be fixed with --repair: {files}", files=files)


def _say_skipped(skipped: Sequence[str], broken: Mapping[str, str]) -> None:
    if others := [name for name in skipped if name not in broken]:
        say("skipped, no text that can be read: {files}", files=_some(others))
    if broken:
        say("skipped, broken: {files}", files=_some([broken[name] for name in sorted(broken)]))


def _some(texts: Sequence[str]) -> str:
    """The first of them in a line, and how many more there are."""
    joined = _joined(texts[:MAX_NAMES], "; ")
    more = len(texts) - MAX_NAMES
    return Message("{texts}; and {more:,} more", texts=joined, more=more) if more > 0 else joined


def _joined(texts: Iterable[str], between: str) -> str:
    """Messages stay messages in it."""
    return reduce(lambda done, text: Message("{done}{between}{text}", done=done, between=between, text=text), texts)


def _emit_dropped(rows: list[dict[str, Any]]) -> None:
    """Some examples of each reason."""
    for row in rows:
        emit(
            "{reason}: {source}, {characters:,} characters, like one of {like}"
            if "like" in row
            else "{reason}: {source}, {characters:,} characters",
            reason=row["reason"].replace("_", " "),
            source=row["source"],
            characters=row["characters"],
            like=row.get("like"),
        )
        emit("    {begins}", begins=row["begins"][:100])


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
        kinds = [Message("{count:,} in {encoding}", count=n, encoding=name) for name, n in sorted(encodings.items())]
        emit(
            "... and {more:,} more (--json shows all); in total: {kinds}",
            more=len(by_source) - MAX_ROWS,
            kinds=_joined(kinds, ", "),
        )
    if manifest.counts:
        emit("")
        emit_table([{"cleaning": name.replace("_", " "), "": f"{n:,}"} for name, n in manifest.counts.items()])
    emit("")
    emit_table([_readable({"tokenizer": row.pop("name"), **row}) for row in map(dict, extra["tokenizers"])])
    emit("")
    for row in extra["overlap"]:
        emit(
            "{name}: {share:.2%} of {checked:,} stretches of 50 characters are in train",
            name=row["name"],
            share=row["share"],
            checked=row["checked"],
        )
    _warn_overlap(extra["overlap"])
    emit(
        "vocabulary {size:,} ({dtype}), manifest {hash}",
        size=manifest.vocab_size,
        dtype=manifest.dtype,
        hash=manifest.hash()[:12],
    )


def _warn_overlap(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["share"] >= overlap.WORTH_A_WARNING:
            say(
                "warning: {share:.1%} of {name} is in the training text; its loss will look too good",
                share=row["share"],
                name=row["name"],
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
