"""GPT-2 in and out of Hugging Face's layout: a folder that `transformers` opens, and that llama.cpp converts.

    model.safetensors  config.json  generation_config.json  tokenizer.json  tokenizer_config.json

transformers keeps the weights of GPT-2's linear layers as (in, out), a relic of `Conv1D`; ours are (out, in).

Invariants
* Nothing is ever unpickled. A file is refused, with the reason, before its numbers are used: wrong format, other
  architecture or activation, missing, unknown or differently shaped tensors, integers for weights, nan or infinity.
* What a configuration leaves out is transformers' default.
* `load_hf(save_hf(model))` has the same weights, bit for bit.
"""

import json
import os
import re
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from cuadrilla.data.tokenizer import END_OF_TEXT, Tokenizer
from cuadrilla.errors import CheckpointError
from cuadrilla.messages import Message
from cuadrilla.model.gpt2 import GPT2, INNER, LAYER_NORM_EPSILON, GPT2Config
from cuadrilla.model.weights import WEIGHTS, read_tensors, weights_of
from cuadrilla.rundir import fsync_folder, storage_errors, write_atomic

FILES = (WEIGHTS, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
PREFIX = "transformer."
HEAD = "lm_head.weight"
EMBEDDING = "transformer.wte.weight"
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

_TRANSPOSED = re.compile(r"\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")
_BUFFER = re.compile(r"\.attn\.(masked_)?bias$")  # causal masks that old versions stored
_ARCHITECTURES = ("GPT2LMHeadModel", "GPT2Model")
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_EXACT_GELU = ("gelu", "gelu_python")
_FLAGS = ("tie_word_embeddings", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention")
_LARGEST = {
    **{"vocab_size": 10**7, "n_positions": 10**6, "n_layer": 1000, "n_head": 1000, "n_embd": 10**5},
    "n_inner": 10**6,
}
MOST_EPSILON = 0.1


def load_hf(folder: Path, *, weights: Path | None = None) -> GPT2:
    """The model of a folder, on the CPU in fp32; `weights` may lie elsewhere. Raises CheckpointError."""
    config = config_from_hf(_read_json(folder / "config.json"), name=str(folder / "config.json"))
    path = weights or weights_of(folder)
    state = state_from_hf(read_tensors(path), name=str(path), tied=config.tied)
    with torch.device("meta"):
        model = GPT2(config)
    _check(state, expected=model.state_dict(), name=str(path))
    model.load_state_dict(state, assign=True)
    return model


def save_hf(model: GPT2, folder: Path, *, tokenizer_path: Path | None = None) -> None:
    """Write the folder, weights in fp32. Raises CheckpointError, DataError, ResourceError."""
    tokenizer = Tokenizer.load(tokenizer_path) if tokenizer_path else None
    if tokenizer and tokenizer.vocab_size > model.config.vocab_size:
        raise CheckpointError(
            "{path} has {tokens:,} tokens, the model {rows:,}",
            path=tokenizer_path,
            tokens=tokenizer.vocab_size,
            rows=model.config.vocab_size,
            hint="export with the tokenizer that the model was trained with",
        )
    end = tokenizer.end_of_text if tokenizer else None
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    _write_tensors(folder / WEIGHTS, state_to_hf(model.state_dict()))
    if tokenizer:
        tokenizer.save(folder / "tokenizer.json")
        _write_json(folder / "tokenizer_config.json", _tokenizer_config(model.config))
    _write_json(folder / "generation_config.json", {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end})
    _write_json(folder / "config.json", config_to_hf(model.config, end_of_text=end))


def state_to_hf(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters as transformers keeps them: fp32 on the CPU, contiguous; the tied head is not among them."""
    return {
        name: (value.t() if _TRANSPOSED.search(name) else value).detach().to("cpu", torch.float32).contiguous()
        for name, value in state.items()
    }


def state_from_hf(tensors: Mapping[str, Tensor], *, name: str = "the file", tied: bool = True) -> dict[str, Tensor]:
    """transformers' parameters as ours, in fp32; with or without the prefix. Raises CheckpointError.

    A stored head must equal the embedding if it is `tied`.
    """
    named = {key if key.startswith((PREFIX, "lm_head.")) else PREFIX + key: value for key, value in tensors.items()}
    narrow = sorted(key for key, value in named.items() if value.dtype not in FLOATS and not _BUFFER.search(key))
    if narrow:
        dtype = str(named[narrow[0]].dtype).removeprefix("torch.")
        raise CheckpointError(
            "{name}: {tensors} of type {dtype}, not floating point",
            name=name,
            tensors=some(narrow),
            dtype=dtype,
            hint="quantized weights cannot be trained; use the original model",
        )
    head = named.pop(HEAD, None) if tied else None
    if head is not None and EMBEDDING in named and not torch.equal(head, named[EMBEDDING]):
        raise CheckpointError(
            "{name}: {head} differs from {embedding}: the head is not tied",
            name=name,
            head=HEAD,
            embedding=EMBEDDING,
            hint='if the model was trained so, write "tie_word_embeddings": false into its config.json',
        )
    return {
        key: (value.t() if _TRANSPOSED.search(key) and value.dim() == 2 else value).float().contiguous()
        for key, value in named.items()
        if not _BUFFER.search(key)
    }


def config_from_hf(values: Mapping[str, Any], *, name: str = "config.json") -> GPT2Config:
    """The sizes in a config.json. Raises CheckpointError if it describes anything but a GPT-2 that writes text."""
    _check_kind(values, name=name)
    sizes = {"n_positions": values.get("n_ctx"), **values}
    sizes["n_inner"] = sizes.get("n_inner") or INNER * (sizes["n_embd"] if type(sizes.get("n_embd")) is int else 0)
    bad = [key for key, most in _LARGEST.items() if type(sizes.get(key)) is not int or not 1 <= sizes[key] <= most]
    if bad or sizes["n_embd"] % sizes["n_head"]:
        found = ", ".join(f"{key} = {sizes.get(key)!r}" for key in bad or ("n_embd", "n_head"))
        raise CheckpointError(
            "{name} has impossible sizes: {sizes}", name=name, sizes=found, hint="copy the original config.json again"
        )
    return GPT2Config(
        vocab_size=sizes["vocab_size"],
        context=sizes["n_positions"],
        layers=sizes["n_layer"],
        heads=sizes["n_head"],
        width=sizes["n_embd"],
        inner=0 if sizes["n_inner"] == INNER * sizes["n_embd"] else sizes["n_inner"],
        exact_gelu=values.get("activation_function") in _EXACT_GELU,
        epsilon=float(values.get("layer_norm_epsilon", LAYER_NORM_EPSILON)),
        scale_attention=values.get("scale_attn_weights", True),
        scale_by_layer=values.get("scale_attn_by_inverse_layer_idx", False),
        tied=values.get("tie_word_embeddings", True),
    )


def _check_kind(values: Mapping[str, Any], *, name: str) -> None:
    """Refuse what is another model, each with its true reason."""
    kind = values.get("model_type", "gpt2")
    if kind != "gpt2":
        raise CheckpointError(
            "{name} describes a {kind}, not a GPT-2",
            name=name,
            kind=repr(kind),
            hint='other models are trained with [task] kind = "file"',
        )
    architectures = values.get("architectures") or [_ARCHITECTURES[0]]
    if not set(_ARCHITECTURES) & set(architectures if isinstance(architectures, list) else ()):
        raise CheckpointError(
            "{name} describes a GPT-2 that does not write text: architectures = {architectures}",
            name=name,
            architectures=repr(architectures),
            hint="use the model that it was made from, a {wanted}",
            wanted=_ARCHITECTURES[0],
        )
    epsilon = values.get("layer_norm_epsilon", LAYER_NORM_EPSILON)
    wrong = [f"{key} = {values[key]!r}" for key in _FLAGS if not isinstance(values.get(key, True), bool)]
    if values.get("activation_function", _TANH_GELU[0]) not in _TANH_GELU + _EXACT_GELU:
        wrong.append(f"activation_function = {values['activation_function']!r}")
    if values.get("add_cross_attention"):
        wrong.append(f"add_cross_attention = {values['add_cross_attention']!r}")
    if type(epsilon) not in (int, float) or not 0 < epsilon <= MOST_EPSILON:
        wrong.append(f"layer_norm_epsilon = {epsilon!r}")
    if wrong:
        raise CheckpointError(
            "{name} describes a GPT-2 that is not supported: {settings}",
            name=name,
            settings=", ".join(wrong),
            hint='a model of another architecture is trained with [task] kind = "file"',
        )


def config_to_hf(config: GPT2Config, *, end_of_text: int | None) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.context,
        "n_ctx": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.inner or None,
        "activation_function": (_EXACT_GELU if config.exact_gelu else _TANH_GELU)[0],
        "layer_norm_epsilon": config.epsilon,
        "scale_attn_weights": config.scale_attention,
        "scale_attn_by_inverse_layer_idx": config.scale_by_layer,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "initializer_range": 0.02,
        "tie_word_embeddings": config.tied,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": "float32",
    }


def _tokenizer_config(config: GPT2Config) -> dict[str, Any]:
    """The generic class reads tokenizer.json as it is; GPT-2's own would build another from its vocabulary."""
    end = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.context,
        "clean_up_tokenization_spaces": False,
        **end,
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            "cannot read {path}: {reason}",
            path=path,
            reason=error.strerror or error,
            hint="name a folder with config.json and model.safetensors",
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            "{path} is not JSON: {reason}", path=path, reason=error, hint="copy the original again"
        ) from error
    if not isinstance(values, dict):
        raise CheckpointError("{path} is not a JSON object", path=path, hint="copy the original again")
    return values


def _check(state: Mapping[str, Tensor], *, expected: Mapping[str, Tensor], name: str) -> None:
    """Raise a CheckpointError that lists what differs."""
    wrong: list[Message] = []
    if lacking := sorted(expected.keys() - state.keys()):
        wrong.append(Message("lacks {tensors}", tensors=some(lacking)))
    if unknown := sorted(state.keys() - expected.keys()):
        wrong.append(Message("has unknown {tensors}", tensors=some(unknown)))
    differing: list[str] = [
        Message(
            "{name} {found} instead of {expected}",
            name=key,
            found=tuple(state[key].shape),
            expected=tuple(value.shape),
        )
        for key, value in expected.items()
        if key in state and state[key].shape != value.shape
    ]
    if differing:
        wrong.append(Message("has differently shaped {tensors}", tensors=some(differing)))
    if wrong:
        raise CheckpointError(
            "{name} {differences}",
            name=name,
            differences=reduce(lambda one, other: Message("{one}; {other}", one=one, other=other), wrong),
            hint="config.json and the weights must belong together, and to a GPT-2",
        )
    broken = [key for key, value in state.items() if not torch.isfinite(value).all()]
    if broken:
        raise CheckpointError(
            "{name} contains nan or infinity in {tensors}",
            name=name,
            tensors=some(broken),
            hint="use an earlier checkpoint",
        )


def some(names: list[str]) -> str:
    """The first of them, and how many more there are."""
    shown = reduce(lambda one, other: Message("{one}, {other}", one=one, other=other), names[:4])
    return Message("{shown} and {more} more", shown=shown, more=len(names) - 4) if len(names) > 4 else shown


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storage_errors(path):
        try:
            try:
                safetensors.torch.save_file(tensors, temporary, metadata={"format": "pt"})
            except safetensors.SafetensorError as error:  # how the library reports a full or failing disk
                raise OSError(None, str(error)) from error
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            fsync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_atomic(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
