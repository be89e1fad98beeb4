"""A GPT-2 as one GGUF file, which llama.cpp and what is built on it open: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

The architecture `gpt2` of llama.cpp reads linear weights as (out, in), which is how ours are kept: nothing is
transposed (`hf.py` does it for transformers). A tied head is not stored, since llama.cpp takes the embedding for it.

Invariants
* One tensor is in memory at a time, however large the model.
* The file appears whole: temporary name, fsync, rename.
* A tokenizer that llama.cpp would split differently is refused, for the ids would silently be others.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import CheckpointError, DataError, EnvironmentProblem
from cuadrilla.messages import Message
from cuadrilla.model.gpt2 import GPT2, INNER, GPT2Config
from cuadrilla.rundir import fsync_folder, storage_errors

if TYPE_CHECKING:
    from gguf import GGUFWriter

PRE_TOKENIZER = "gpt-2"
NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_BLOCK = re.compile(r"transformer\.h\.(\d+)\.(.+)")
_ALWAYS_FP32 = ("position_embd.weight",)  # as llama.cpp's converter: it is added, never multiplied

Read = Callable[[str], Tensor]
"""One of our parameters by its name, in fp32 on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a reader shows of the file."""

    name: str
    description: str = ""
    licence: str = ""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A byte-level BPE as GGUF lists it: one entry for each row of the embedding."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    end_of_text: int


def write_gguf(
    path: Path, *, config: GPT2Config, tokenizer_path: Path, read: Read, half: bool, about: Description
) -> None:
    """Write the file; matrices in fp16 if `half`, everything else in fp32.

    Raises EnvironmentProblem without the `gguf` package, DataError for a tokenizer that cannot be expressed,
    CheckpointError for weights that fp16 cannot hold, ResourceError.
    """
    try:
        import gguf
    except ImportError as error:
        raise EnvironmentProblem("the package gguf is not installed", hint='pip install "cuadrilla[export]"') from error

    _check_model(config)
    vocabulary = vocabulary_of(tokenizer_path, num_rows=config.vocab_size)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    writer = gguf.GGUFWriter(temporary, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.GPT2])
    _describe(writer, config, about)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if half else gguf.LlamaFileType.ALL_F32)
    _add_vocabulary(writer, vocabulary)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_tensors(writer, config, read=read, half=half)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            fsync_folder(path.parent)
        finally:
            writer.close()
            temporary.unlink(missing_ok=True)


def gguf_name(name: str) -> str:
    """`transformer.h.3.mlp.c_fc.weight` is `blk.3.ffn_up.weight` there."""
    stem, _, kind = name.rpartition(".")
    block = _BLOCK.fullmatch(stem)
    return f"blk.{block[1]}.{NAMES[block[2]]}.{kind}" if block else f"{NAMES[stem]}.{kind}"


def vocabulary_of(path: Path, *, num_rows: int) -> Vocabulary:
    """What a tokenizer.json holds; rows that no token has are marked as unused. Raises DataError."""
    from gguf import TokenType

    tokenizer = Tokenizer.load(path)
    values = json.loads(path.read_bytes())
    _check_splitting(values)
    if tokenizer.vocab_size > num_rows:
        raise DataError(
            "the tokenizer has {tokens:,} tokens, the model {rows:,}",
            tokens=tokenizer.vocab_size,
            rows=num_rows,
            hint="export with the tokenizer that the model was trained with",
        )
    ids = {int(number): token for token, number in values["model"]["vocab"].items()}
    types = dict.fromkeys(ids, int(TokenType.NORMAL))
    for added in values.get("added_tokens") or []:
        ids[added["id"]] = added["content"]
        types[added["id"]] = int(TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED)
    types[tokenizer.end_of_text] = int(TokenType.CONTROL)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in values["model"]["merges"]]
    return Vocabulary(
        tokens=[ids.get(number, f"[PAD{number}]") for number in range(num_rows)],
        types=[types.get(number, int(TokenType.UNUSED)) for number in range(num_rows)],
        merges=merges,
        end_of_text=tokenizer.end_of_text,
    )


def _check_splitting(values: Mapping[str, Any]) -> None:
    """Refuse all but GPT-2's own way of cutting a text into words and bytes."""
    model, pre = values["model"], values.get("pre_tokenizer") or {}
    wrong = {
        Message("is not a BPE"): model.get("type", "BPE") != "BPE",
        Message("normalises text"): values.get("normalizer") is not None,
        Message("does not split text as GPT-2 does"): pre.get("type") != "ByteLevel" or not pre.get("use_regex", True),
        Message("puts a space before a text"): bool(pre.get("add_prefix_space")),
        Message("marks parts of words"): any(
            model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix")
        ),
        Message("ignores merges"): bool(model.get("ignore_merges")),
    }
    found = [reason for reason, applies in wrong.items() if applies]
    if found:
        raise DataError(
            "GGUF cannot express this tokenizer: it {reasons}",
            reasons=reduce(_and, found),
            hint="cuadrilla export hf keeps any tokenizer as it is",
        )


def _check_model(config: GPT2Config) -> None:
    """Refuse what llama.cpp's gpt2 would compute otherwise."""
    wrong = {
        Message("exact GELU"): config.exact_gelu,
        Message("attention that is not scaled"): not config.scale_attention,
        Message("attention that is scaled by layer"): config.scale_by_layer,
    }
    if found := [what for what, applies in wrong.items() if applies]:
        raise CheckpointError(
            "GGUF cannot express this model: it has {parts}",
            parts=reduce(_and, found),
            hint="cuadrilla export hf keeps it",
        )


def _and(one: Message, other: Message) -> Message:
    return Message("{one} and {other}", one=one, other=other)


def _describe(writer: "GGUFWriter", config: GPT2Config, about: Description) -> None:
    writer.add_name(about.name)
    if about.description:
        writer.add_description(about.description)
    if about.licence:
        writer.add_license(about.licence)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.inner or INNER * config.width)
    writer.add_head_count(config.heads)
    writer.add_layer_norm_eps(config.epsilon)


def _add_vocabulary(writer: "GGUFWriter", vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.end_of_text)
    writer.add_eos_token_id(vocabulary.end_of_text)
    writer.add_add_bos_token(False)  # a prompt is read here without one, too


def _write_tensors(writer: "GGUFWriter", config: GPT2Config, *, read: Read, half: bool) -> None:
    """Names and shapes first, then the tensors one by one in the same order."""
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in GPT2(config).named_parameters()}
    dtypes = {name: _dtype(gguf_name(name), shape, half=half) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        num_bytes = int(np.prod(shape)) * dtypes[name].itemsize
        writer.add_tensor_info(gguf_name(name), shape, dtypes[name], num_bytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in shapes.items():
        writer.write_tensor_data(_array(read(name), name=name, shape=shape, dtype=dtypes[name]))


def _dtype(name: str, shape: tuple[int, ...], *, half: bool) -> np.dtype[Any]:
    return np.dtype(np.float16 if half and len(shape) == 2 and name not in _ALWAYS_FP32 else np.float32)


def _array(tensor: Tensor, *, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            "{name} is {found} instead of {expected}",
            name=name,
            found=tuple(tensor.shape),
            expected=shape,
            hint="use the run's own weights",
        )
    limit = float(np.finfo(dtype).max)
    if not bool((tensor.abs() <= limit).all()):  # nan compares as false
        raise CheckpointError(
            "{name} contains numbers that {dtype} cannot represent",
            name=name,
            dtype=dtype,
            hint="export without --f16, or use an earlier checkpoint",
        )
    return np.ascontiguousarray(tensor.numpy(), dtype=dtype)
