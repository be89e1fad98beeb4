"""Read and write GPT-2 in Hugging Face's layout: a folder that `transformers` opens and llama.cpp converts.

    model.safetensors  config.json  generation_config.json  tokenizer.json  tokenizer_config.json

transformers keeps the weights of GPT-2's linear layers as (in, out), a relic of `Conv1D`; ours are (out, in).

Invariants
* Another architecture, or weights that do not fit their config.json, are refused; the error names what does not fit.
* A field that config.json leaves out has transformers' default.
* A model that was saved and loaded again has the same weights, bit for bit.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import safetensors.torch
import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from cuadrilla.data.tokenizer import END_OF_TEXT, Tokenizer
from cuadrilla.errors import CheckpointError, DataError
from cuadrilla.messages import Message
from cuadrilla.model.gpt2 import GPT2, INNER, LAYER_NORM_EPSILON, GPT2Config
from cuadrilla.model.weights import NAME_FOLDER, PICKLES, WEIGHTS, read_pickled, read_tensors
from cuadrilla.rundir import replacing, storage_errors, write_atomic

FILES = (WEIGHTS, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
PREFIX = "transformer."
MAX_REASON = 500

_NAMES = {
    "vocab_size": "vocab_size", "context": "n_positions", "layers": "n_layer", "heads": "n_head", "width": "n_embd",
}  # fmt: skip
"""Fields of `GPT2Config`, and their names in config.json."""
_TRANSPOSED = re.compile(r"\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")
_BUFFER = re.compile(r"\.attn\.(masked_)?bias$")  # causal masks that old versions stored
_EXACT_GELU = ("gelu", "gelu_python")

Size = Annotated[int, Field(gt=0, le=10**7)]


class Configuration(BaseModel):
    """The fields of config.json for a GPT-2 that writes text, within the bounds that are accepted."""

    model_config = ConfigDict(strict=True)

    model_type: Literal["gpt2"] = "gpt2"
    architectures: list[Literal["GPT2LMHeadModel", "GPT2Model"]] | None = None
    vocab_size: Size
    n_positions: Size = Field(validation_alias=AliasChoices("n_positions", "n_ctx"))
    n_layer: Size
    n_head: Size
    n_embd: Size
    n_inner: int | None = None
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu", "gelu_python"] = "gelu_new"
    layer_norm_epsilon: Annotated[float, Field(ge=LAYER_NORM_EPSILON, le=LAYER_NORM_EPSILON)] = LAYER_NORM_EPSILON
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    tie_word_embeddings: Literal[True] = True
    add_cross_attention: Literal[False] = False

    @model_validator(mode="after")
    def _widths_fit(self) -> "Configuration":
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}")
        if self.n_inner not in (None, INNER * self.n_embd):
            raise ValueError(f"n_inner {self.n_inner} is not {INNER} times n_embd {self.n_embd}")
        return self


def load_hf(folder: Path, *, weights: Path | None = None) -> GPT2:
    """The model in a folder, on the CPU in fp32. `weights` may name another file or pickle. Raises CheckpointError."""
    config = config_from_hf(_read_json(folder / "config.json"), name=str(folder / "config.json"))
    path = weights or folder / WEIGHTS
    tensors = read_pickled(path) if path.suffix in PICKLES else read_tensors(path)
    with torch.device("meta"):
        model = GPT2(config)
    try:
        model.load_state_dict(state_from_hf(tensors), assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            "{path} does not fit its config.json: {reason}",
            path=path,
            reason=" ".join(str(error).split())[:MAX_REASON],
            hint="config.json and the weights must belong together, and to a GPT-2",
        ) from error
    return model


def save_hf(model: GPT2, folder: Path, *, tokenizer: Tokenizer | None = None) -> None:
    """Write the folder, with weights in fp32. Raises DataError, ResourceError."""
    if tokenizer:
        require_rows(tokenizer.vocab_size, rows=model.config.vocab_size)
    end = tokenizer.end_of_text if tokenizer else None
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / WEIGHTS) as temporary:
        safetensors.torch.save_file(state_to_hf(model.state_dict()), temporary, metadata={"format": "pt"})
    if tokenizer:
        tokenizer.save(folder / "tokenizer.json")
        values = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # reads tokenizer.json as it is; GPT-2's own would not
            "model_max_length": model.config.context,
            "clean_up_tokenization_spaces": False,
            **dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT),
        }
        _write_json(folder / "tokenizer_config.json", values)
    _write_json(folder / "generation_config.json", dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end))
    _write_json(folder / "config.json", config_to_hf(model.config, end_of_text=end))


def require_rows(tokens: int, *, rows: int) -> None:
    """Raises DataError if a tokenizer has more tokens than the embedding has rows."""
    if tokens > rows:
        hint = "use the model's own tokenizer.json; cuadrilla data prepare --tokenizer encodes text with it"
        raise DataError("the tokenizer has {tokens:,} tokens, the model {rows:,}", tokens=tokens, rows=rows, hint=hint)


def state_to_hf(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters in transformers' layout: fp32 on the CPU, contiguous, without the tied head."""
    return {
        name: (value.t() if _TRANSPOSED.search(name) else value).detach().to("cpu", torch.float32).contiguous()
        for name, value in state.items()
    }


def state_from_hf(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """transformers' parameters in our layout, in fp32. Names may lack the prefix `transformer.`. A stored head is
    ignored, as transformers does where it is tied to the embedding."""
    named = {key if key.startswith((PREFIX, "lm_head.")) else PREFIX + key: value for key, value in tensors.items()}
    return {
        key: (value.t() if _TRANSPOSED.search(key) and value.dim() == 2 else value).float().contiguous()
        for key, value in named.items()
        if not _BUFFER.search(key) and key != "lm_head.weight"
    }


def config_from_hf(values: Mapping[str, Any], *, name: str = "config.json") -> GPT2Config:
    """The configuration in a config.json. Raises CheckpointError unless it describes a GPT-2 that writes text."""
    try:
        found = Configuration.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key, value = ".".join(map(str, first["loc"])), f"{first['input']!r:.100}"
        raise CheckpointError(
            "{name} does not describe a supported GPT-2: {problem}",
            name=name,
            problem=Message("{key} is missing", key=key)
            if first["type"] == "missing"  # then the input is the whole file
            else f"{key} = {value}: {first['msg']}",
            hint='other models are trained with [task] kind = "file"',
        ) from error
    return GPT2Config(
        **{ours: getattr(found, theirs) for ours, theirs in _NAMES.items()},
        exact_gelu=found.activation_function in _EXACT_GELU,
    )


def config_to_hf(config: GPT2Config, *, end_of_text: int | None) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(config, ours) for ours, theirs in _NAMES.items()},
        "n_ctx": config.context,
        "n_inner": None,
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
        "activation_function": "gelu" if config.exact_gelu else "gelu_new",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": "float32",
    }


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError("cannot read {path}: {reason}", path=path, reason=reason, hint=NAME_FOLDER) from error


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_atomic(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
