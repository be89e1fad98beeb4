"""The README.md of an exported model: what it was trained on, for how long, how good it is, how to use it.

Everything is read from the run; missing facts are left out, and so is on whose machines it was trained.
"""

import json
from collections.abc import Mapping

from cuadrilla.data.shards import Manifest, read_manifest
from cuadrilla.errors import DataError
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.pretrained import ORIGIN
from cuadrilla.rundir import last_rows
from cuadrilla.train.trained import ModelSource
from cuadrilla.version import __version__

MAX_SOURCES = 40
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- gpt2
- cuadrilla
---

# {name}

A GPT-2 language model trained with cuadrilla {cuadrilla}. It continues text; it does not follow instructions.

| | |
|---|---|
{facts}

## Data

{data}

## Use

```python
from transformers import pipeline

write = pipeline("text-generation", model="PATH_OF_THIS_FOLDER")
print(write("Había una vez", max_new_tokens=50)[0]["generated_text"])
```

## En español

Modelo de lenguaje GPT-2, entrenado con cuadrilla. Continúa textos; no sigue instrucciones.
"""


def model_card(model: GPT2, source: ModelSource) -> str:
    """Markdown with the front matter that model hubs read."""
    return CARD.format(
        name=source.run.path.resolve().name,
        cuadrilla=__version__,
        facts="\n".join(f"| {key} | {value} |" for key, value in _facts(model, source).items()),
        data="\n".join(_data(manifest_of(source))),
    )


def num_parameters(model: GPT2) -> int:
    """All weights; an embedding that is the head, too, counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def manifest_of(source: ModelSource) -> Manifest | None:
    """That of the data a model was trained on; None once the data folder has gone away."""
    try:
        return read_manifest(source.run.path / source.config.data.folder)
    except DataError:
        return None


def licences(manifest: Manifest | None) -> list[str]:
    """The licences of the sources, without repetition, in their order."""
    return list(dict.fromkeys(source.licence for source in manifest.sources)) if manifest else []


def _facts(model: GPT2, source: ModelSource) -> Mapping[str, str]:
    """What the run's files say about this model."""
    shape, config = model.config, source.config
    facts = {
        "parameters": f"{num_parameters(model):,}",
        "layers, heads, width": f"{shape.layers}, {shape.heads}, {shape.width}",
        "context": f"{shape.context:,} tokens",
        "vocabulary": f"{shape.vocab_size:,} (byte-level BPE)",
        "begun from": _origin(source) if config.model.init else "random weights",
        "steps": f"{source.step.version:,}",
        "settings": f"{config.optim.kind}, learning rate {config.optim.lr:g}, "
        f"{config.train.batch_sequences} sequences in a batch, seed {config.run.seed}",
    }
    rows = [row for row in last_rows(source.run.metrics) if row["version"] <= source.step.version]
    if rows:
        facts["tokens seen in training"] = f"{rows[-1]['tokens']:,}"
    if measured := [row["val_bits_per_byte"] for row in rows if "val_bits_per_byte" in row]:
        facts["bits per byte, held-out text"] = f"{measured[-1]:.4f}"
    return facts


def _data(manifest: Manifest | None) -> list[str]:
    if manifest is None:
        return ["The data folder was not there when this card was written."]
    train, sources = manifest.splits["train"], manifest.sources
    counted = f"{train.num_documents:,} documents, {train.num_bytes:,} bytes, {train.num_tokens:,} tokens to train on."
    table = ["", "| source | documents | bytes | licence |", "|---|---|---|---|"]
    table += [f"| {it.name} | {it.num_documents:,} | {it.num_bytes:,} | {it.licence} |" for it in sources[:MAX_SOURCES]]
    rest = len(sources) - MAX_SOURCES
    return [
        counted,
        *table,
        *(["", f"and {rest:,} more; licences: {', '.join(licences(manifest))}"] if rest > 0 else []),
    ]


def _origin(source: ModelSource) -> str:
    """What `cuadrilla import` has noted about the weights that the run began with."""
    folder = source.run.path / source.config.model.init
    try:
        values = json.loads((folder / ORIGIN).read_bytes())
        return f"{values['name']} (licence {values['licence']}; SHA-256 of its weights {values['sha256']})"
    except (OSError, ValueError, KeyError):
        return f"the weights in {folder.name}"
