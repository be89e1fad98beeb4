"""Write a GPT-2 as one GGUF file, for llama.cpp and programs built on it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. llama.cpp's architecture `gpt2` reads linear weights
as (out, in), like ours, so nothing is transposed (`hf.py` transposes for transformers). The head is not stored,
because llama.cpp then uses the embedding. The file is complete or absent. A tokenizer that llama.cpp would split
differently is refused: the token ids would silently be wrong.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import CheckpointError, DataError, EnvironmentProblem
from cuadrilla.model.gpt2 import GPT2, INNER, LAYER_NORM_EPSILON, GPT2Config
from cuadrilla.model.hf import require_rows
from cuadrilla.rundir import replacing, storage_errors

if TYPE_CHECKING:
    from gguf import GGUFWriter

ALWAYS_FP32 = ("position_embd.weight",)  # as in llama.cpp's converter: it is added, never multiplied
HINT = "cuadrilla export hf keeps it as it is"


def write_gguf(path: Path, *, model: GPT2, tokenizer_path: Path, half: bool, about: Mapping[str, str]) -> None:
    """Write the file. Matrices are fp16 if `half` is set; everything else is fp32. `about`: name, description, license.

    Raises EnvironmentProblem without the package `gguf`, DataError if GGUF cannot express the tokenizer,
    CheckpointError if it cannot express the model, ResourceError.
    """
    try:
        import gguf
    except ImportError as error:
        raise EnvironmentProblem("the package gguf is not installed", hint='pip install "cuadrilla[export]"') from error

    config = model.config
    if config.exact_gelu:
        raise CheckpointError("GGUF cannot express this model: it has exact GELU", hint=HINT)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.layers)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        writer = gguf.GGUFWriter(temporary, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.GPT2])
        _describe(writer, config, about)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if half else gguf.LlamaFileType.ALL_F32)
        _add_vocabulary(writer, tokenizer_path, num_rows=config.vocab_size)
        for name, tensor in model.state_dict().items():
            theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert theirs is not None
            is_narrow = half and tensor.dim() == 2 and theirs not in ALWAYS_FP32
            writer.add_tensor(theirs, tensor.cpu().numpy().astype(np.float16 if is_narrow else np.float32, copy=False))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _describe(writer: "GGUFWriter", config: GPT2Config, about: Mapping[str, str]) -> None:
    for key, value in about.items():
        writer.add_string(f"general.{key}", value)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(INNER * config.width)
    writer.add_head_count(config.heads)
    writer.add_layer_norm_eps(LAYER_NORM_EPSILON)


def _add_vocabulary(writer: "GGUFWriter", path: Path, *, num_rows: int) -> None:
    """Add the tokens of a tokenizer.json. Rows of the embedding without a token are marked unused. Raises DataError."""
    from gguf import TokenType

    tokenizer = Tokenizer.load(path)
    require_rows(tokenizer.vocab_size, rows=num_rows)
    values = json.loads(path.read_bytes())
    if not _splits_as_gpt2(values):
        raise DataError("GGUF cannot express this tokenizer: it does not split text as GPT-2 does", hint=HINT)
    ids = {int(number): token for token, number in values["model"]["vocab"].items()}
    types = dict.fromkeys(ids, TokenType.NORMAL)
    for added in values.get("added_tokens") or []:
        ids[added["id"]] = added["content"]
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    types[tokenizer.end_of_text] = TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([ids.get(number, f"[PAD{number}]") for number in range(num_rows)])
    writer.add_token_types([types.get(number, TokenType.UNUSED) for number in range(num_rows)])
    if merges := [pair if isinstance(pair, str) else " ".join(pair) for pair in values["model"]["merges"]]:
        writer.add_token_merges(merges)
    writer.add_bos_token_id(tokenizer.end_of_text)
    writer.add_eos_token_id(tokenizer.end_of_text)
    writer.add_add_bos_token(False)  # as in `generate.py`, where no token is put before a prompt


def _splits_as_gpt2(values: Mapping[str, Any]) -> bool:
    """Whether a tokenizer splits text as GPT-2's does: BPE over bytes, with GPT-2's regular expression for words."""
    model, pre = values["model"], values.get("pre_tokenizer") or {}
    marks = ("continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    return (
        model.get("type", "BPE") == "BPE"
        and values.get("normalizer") is None
        and pre.get("type") == "ByteLevel"
        and pre.get("use_regex", True)
        and not pre.get("add_prefix_space")
        and not any(model.get(key) for key in marks)
    )
