"""The README.md of an exported model: what it was trained on, for how long, how good it is, how to use it.

Everything is read from the run. Missing facts are left out. The card does not say on whose machines it was trained.
"""

from collections.abc import Sequence
from contextlib import suppress

from cuadrilla.data.folder import Source, read_manifest
from cuadrilla.errors import DataError
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.pretrained import ORIGIN
from cuadrilla.rundir import last_rows, read_object
from cuadrilla.train.trained import LanguageModel
from cuadrilla.version import __version__

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

```python
from transformers import pipeline

write = pipeline("text-generation", model="PATH_OF_THIS_FOLDER")
print(write("Había una vez", max_new_tokens=50)[0]["generated_text"])
```

Modelo de lenguaje GPT-2, entrenado con cuadrilla. Continúa textos; no sigue instrucciones.
"""


def model_card(found: LanguageModel) -> str:
    """Markdown with the front matter that model hubs read, for the model of a run."""
    run, config, step = found.run, found.config, found.step
    assert run is not None
    assert config is not None
    assert step is not None
    rows = [row for row in last_rows(run.metrics) if row["version"] <= step.version]
    bits = [row["val_bits_per_byte"] for row in rows if "val_bits_per_byte" in row]
    origin = read_object(run.path / config.model.init / ORIGIN) if config.model.init else {}
    facts = {
        "parameters": f"{num_parameters(found.model):,}",
        "steps": f"{step.version:,}",
        "tokens seen in training": f"{rows[-1]['tokens']:,}" if rows else "",
        "bits per byte, held-out text": f"{bits[-1]:.4f}" if bits else "",
        "begun from": f"{origin['name']} (licence {origin.get('licence', 'unknown')})" if origin else "",
        "sources": ", ".join(each.name for each in _sources(found)[:40]),
        "licences of the data": licences(found),
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in facts.items() if value)
    return CARD.format(name=run.path.resolve().name, cuadrilla=__version__, facts=table)


def num_parameters(model: GPT2) -> int:
    """Number of weights. An embedding that is also the head counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def licences(found: LanguageModel) -> str:
    """The licences of the data's sources; "" if the data folder is gone."""
    return ", ".join(dict.fromkeys(each.licence for each in _sources(found)))


def _sources(found: LanguageModel) -> Sequence[Source]:
    """The sources of the data; none if the data folder is gone."""
    assert found.run is not None
    assert found.config is not None
    with suppress(DataError):
        return read_manifest(found.run.path / found.config.data.folder).sources
    return ()
