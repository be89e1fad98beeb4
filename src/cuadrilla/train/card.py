"""The README.md of an exported model: what it was trained on, for how long, how good it is, how to use it.

Everything is read from the run: nothing is said that the run does not know. Missing facts are left out, and so is what
a model that is published should not tell: on whose machines it was trained.
"""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from cuadrilla.data.shards import Manifest, read_manifest
from cuadrilla.errors import DataError
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.pretrained import ORIGIN
from cuadrilla.rundir import last_rows, read_regular
from cuadrilla.train.trained import Stored
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


def model_card(stored: Stored) -> str:
    """Markdown with the front matter that model hubs read."""
    return CARD.format(
        name=stored.name,
        cuadrilla=__version__,
        facts="\n".join(f"| {key} | {_cell(value)} |" for key, value in _facts(stored).items()),
        data="\n\n".join(_data(manifest_of(stored))),
    )


def num_parameters(shape: GPT2Config) -> int:
    """All weights of a GPT-2; an embedding that is the head, too, counts once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT2(shape).parameters())


def manifest_of(stored: Stored) -> Manifest | None:
    """That of the data a model was trained on; None once the data folder has gone away."""
    try:
        return read_manifest(stored.run.path / stored.run_config.data.folder)
    except DataError:
        return None


def licences(manifest: Manifest | None) -> list[str]:
    """The licences of the sources, without repetition, in their order."""
    return list(dict.fromkeys(source.licence for source in manifest.sources)) if manifest else []


def _facts(stored: Stored) -> Mapping[str, str]:
    """What the run's files say about this model."""
    shape, config = stored.config, stored.run_config
    facts = {
        "parameters": f"{num_parameters(shape):,}",
        "layers, heads, width": f"{shape.layers}, {shape.heads}, {shape.width}",
        "context": f"{shape.context:,} tokens",
        "vocabulary": f"{shape.vocab_size:,} (byte-level BPE)",
        "begun from": _origin(stored) if config.model.init else "random weights",
        "steps": f"{stored.step.version:,}",
        "settings": f"{config.optim.kind}, learning rate {config.optim.lr:g}, "
        f"{config.train.batch_sequences} sequences in a batch, seed {config.run.seed}",
    }
    rows = [row for row in last_rows(stored.run.metrics) if row.get("version", 0) <= stored.step.version]
    if rows:
        facts["tokens seen in training"] = f"{rows[-1]['tokens']:,}"
    if measured := [row["val_bits_per_byte"] for row in rows if "val_bits_per_byte" in row]:
        facts["bits per byte, held-out text"] = f"{measured[-1]:.4f}"
    return facts


def _data(manifest: Manifest | None) -> list[str]:
    if manifest is None:
        return ["The data folder was not there when this card was written."]
    train, shown, rest = manifest.splits["train"], manifest.sources[:MAX_SOURCES], manifest.sources[MAX_SOURCES:]
    table = ["| source | documents | bytes | licence |", "|---|---|---|---|"]
    table += [f"| {_cell(it.name)} | {it.num_documents:,} | {it.num_bytes:,} | {_cell(it.licence)} |" for it in shown]
    parts = [
        f"{train.num_documents:,} documents, {train.num_bytes:,} bytes, {train.num_tokens:,} tokens to train on.",
        "\n".join(table),
    ]
    if rest:
        counted = Counter(source.licence for source in rest)
        parts.append(f"and {len(rest):,} more: " + ", ".join(f"{n:,} × {licence}" for licence, n in counted.items()))
    if "unknown" in licences(manifest):
        parts.append("*Unknown* means that the text did not say: find out before you publish the model.")
    return parts


def _origin(stored: Stored) -> str:
    """What `cuadrilla import` has noted about the weights that the run began with."""
    folder = stored.run.path / stored.run_config.model.init
    try:
        values: Any = json.loads(read_regular(folder / ORIGIN))
        return f"{values['name']} (licence {values['licence']}; SHA-256 of its weights {values['sha256']})"
    except (OSError, ValueError, KeyError, TypeError):
        return f"the weights in {folder.name}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
