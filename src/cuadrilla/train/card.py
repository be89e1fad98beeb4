"""The README.md of an exported model: what it was trained on, where, for how long, how good it is, how to use it.

Everything is read from the run: nothing is said that the run does not know. Missing facts are left out.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cuadrilla.data.shards import Manifest, Source, read_manifest
from cuadrilla.errors import DataError
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.pretrained import ORIGIN
from cuadrilla.rundir import RunDir, last_rows, read_jsonl, read_regular
from cuadrilla.train.trained import Stored
from cuadrilla.version import __version__

MAX_SOURCES = 40


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What the card says. `bits_per_byte` is that of the version that is exported, if it was evaluated."""

    name: str
    shape: GPT2Config
    num_parameters: int
    version: int
    tokens: int | None
    bits_per_byte: float | None
    manifest: Manifest | None
    begun_from: str
    machine: str
    workers: tuple[str, ...]
    settings: str


def gather(stored: Stored) -> CardFacts:
    """What the run's files say about this model. A data folder that has gone away leaves its part out."""
    run, config = stored.run, stored.run_config
    rows = [row for row in last_rows(run.metrics) if row.get("version", 0) <= stored.step.version]
    measured = [row["val_bits_per_byte"] for row in rows if "val_bits_per_byte" in row]
    try:
        manifest = read_manifest(run.path / config.data.folder)
    except DataError:
        manifest = None
    workers = {str(event.get("worker")) for event in read_jsonl(run.events) if event.get("event") == "joined"}
    train, optim = config.train, config.optim
    return CardFacts(
        name=run.path.resolve().name,
        shape=stored.config,
        num_parameters=num_parameters(stored.config),
        version=stored.step.version,
        tokens=rows[-1].get("tokens") if rows else None,
        bits_per_byte=measured[-1] if measured else None,
        manifest=manifest,
        begun_from=_origin(run.path / config.model.init) if config.model.init else "",
        machine=_machine(run),
        workers=tuple(sorted(workers)),
        settings=f"{optim.kind}, learning rate {optim.lr:g}, {train.batch_sequences} sequences in a batch, "
        f"seed {config.run.seed}",
    )


def num_parameters(shape: GPT2Config) -> int:
    """All weights of a GPT-2; an embedding that is the head, too, counts once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT2(shape).parameters())


def licences(manifest: Manifest | None) -> list[str]:
    """The licences of the sources, without repetition, in their order."""
    return list(dict.fromkeys(source.licence for source in manifest.sources)) if manifest else []


def model_card(facts: CardFacts) -> str:
    """Markdown with the front matter that model hubs read."""
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- gpt2\n- cuadrilla\n---",
        f"# {facts.name}",
        f"A GPT-2 language model trained with cuadrilla {__version__}. It continues text; it does not follow "
        "instructions.",
        _table(_rows(facts)),
        "## Data",
        *_data(facts.manifest),
        "## Use",
        "```python\nfrom transformers import pipeline\n\n"
        'write = pipeline("text-generation", model="PATH_OF_THIS_FOLDER")\n'
        'print(write("Había una vez", max_new_tokens=50)[0]["generated_text"])\n```',
        "## En español",
        _spanish(facts),
    ]
    return "\n\n".join(parts) + "\n"


def _rows(facts: CardFacts) -> list[tuple[str, str]]:
    shape = facts.shape
    rows = [
        ("parameters", f"{facts.num_parameters:,}"),
        ("layers, heads, width", f"{shape.layers}, {shape.heads}, {shape.width}"),
        ("context", f"{shape.context:,} tokens"),
        ("vocabulary", f"{shape.vocab_size:,} (byte-level BPE)"),
        ("begun from", facts.begun_from or "random weights"),
        ("steps", f"{facts.version:,}"),
    ]
    if facts.tokens is not None:
        rows.append(("tokens seen in training", f"{facts.tokens:,}"))
    if facts.bits_per_byte is not None:
        rows.append(("bits per byte, held-out text", f"{facts.bits_per_byte:.4f}"))
    rows.append(("settings", facts.settings))
    if facts.machine:
        rows.append(("coordinator", facts.machine))
    if facts.workers:
        rows.append(("workers", f"{len(facts.workers)}: {', '.join(facts.workers[:MAX_SOURCES])}"))
    return rows


def _data(manifest: Manifest | None) -> list[str]:
    if manifest is None:
        return ["The data folder was not there when this card was written."]
    train = manifest.splits["train"]
    shown = manifest.sources[:MAX_SOURCES]
    table = "\n".join(
        ["| source | documents | bytes | licence |", "|---|---|---|---|", *(_source_row(source) for source in shown)]
    )
    parts = [
        f"{train.num_documents:,} documents, {train.num_bytes:,} bytes, {train.num_tokens:,} tokens to train on.",
        table,
    ]
    rest = manifest.sources[MAX_SOURCES:]
    if rest:
        counted = Counter(source.licence for source in rest)
        parts.append(f"and {len(rest):,} more: " + ", ".join(f"{n:,} × {licence}" for licence, n in counted.items()))
    if "unknown" in licences(manifest):
        parts.append("*Unknown* means that the text did not say: find out before you publish the model.")
    return parts


def _source_row(source: Source) -> str:
    return f"| {_cell(source.name)} | {source.num_documents:,} | {source.num_bytes:,} | {_cell(source.licence)} |"


def _spanish(facts: CardFacts) -> str:
    sentences = [
        f"Modelo de lenguaje GPT-2 de {_dotted(facts.num_parameters)} parámetros, entrenado con cuadrilla.",
        "Continúa textos; no sigue instrucciones.",
    ]
    if facts.tokens is not None:
        sentences.append(f"Ha visto {_dotted(facts.tokens)} tokens.")
    if facts.bits_per_byte is not None:
        bits = f"{facts.bits_per_byte:.4f}".replace(".", ",")
        sentences.append(f"Necesita {bits} bits por byte en texto reservado.")
    if found := licences(facts.manifest):
        sentences.append(f"Licencias de los textos: {', '.join(found)}.")
    return " ".join(sentences)


def _dotted(number: int) -> str:
    return f"{number:,}".replace(",", ".")


def _origin(folder: Path) -> str:
    """What `cuadrilla import` has noted about the weights in this folder."""
    try:
        values: Any = json.loads(read_regular(folder / ORIGIN))
        return f"{values['name']} (licence {values['licence']}; SHA-256 of its weights {values['sha256']})"
    except (OSError, ValueError, KeyError, TypeError):
        return f"the weights in {folder.name}"


def _machine(run: RunDir) -> str:
    try:
        values: Any = json.loads(read_regular(run.env))
    except (OSError, ValueError):
        return ""
    known = (values.get("cpu"), values.get("system")) if isinstance(values, dict) else ()
    return ", ".join(str(value) for value in known if value)


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {_cell(value)} |" for key, value in rows)])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
