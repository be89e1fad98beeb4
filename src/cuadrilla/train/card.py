"""The README.md of an exported model: what it was trained on, for how long, how good it is, how to use it.

Everything is read from the run. Missing facts are left out. The card does not say on whose machines it was trained.
"""

from contextlib import suppress

from cuadrilla.data.folder import Manifest, read_manifest
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
    assert found.run is not None
    facts = "\n".join(f"| {key} | {value} |" for key, value in _facts(found).items() if value)
    return CARD.format(name=found.run.path.resolve().name, cuadrilla=__version__, facts=facts)


def num_parameters(model: GPT2) -> int:
    """Number of weights. An embedding that is also the head counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def licences(found: LanguageModel) -> str:
    """The licences of the data's sources; "" if the data folder is gone."""
    manifest = _manifest(found)
    return ", ".join(dict.fromkeys(each.licence for each in manifest.sources)) if manifest else ""


def _manifest(found: LanguageModel) -> Manifest | None:
    assert found.run is not None
    assert found.config is not None
    with suppress(DataError):
        return read_manifest(found.run.path / found.config.data.folder)
    return None


def _facts(found: LanguageModel) -> dict[str, str]:
    """What the run's files say about this model; "" where they say nothing."""
    run, config, step = found.run, found.config, found.step
    assert run is not None
    assert config is not None
    assert step is not None
    rows = [row for row in last_rows(run.metrics) if row["version"] <= step.version]
    bits = [row["val_bits_per_byte"] for row in rows if "val_bits_per_byte" in row]
    manifest, origin = _manifest(found), read_object(run.path / config.model.init / ORIGIN) if config.model.init else {}
    return {
        "parameters": f"{num_parameters(found.model):,}",
        "steps": f"{step.version:,}",
        "tokens seen in training": f"{rows[-1]['tokens']:,}" if rows else "",
        "bits per byte, held-out text": f"{bits[-1]:.4f}" if bits else "",
        "begun from": f"{origin['name']} (licence {origin.get('licence', 'unknown')})" if origin else "",
        "sources": ", ".join(each.name for each in manifest.sources[:40]) if manifest else "",
        "licences of the data": licences(found),
    }
