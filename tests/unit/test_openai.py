"""Requests to a service: every field with values that it may not have, and how valid requests are understood."""

import json
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from cuadrilla.model.sampling import Sampling, choose
from cuadrilla.serve.openai import (
    MAX_CHOICES,
    MAX_PROMPTS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    Asked,
    ChatRequest,
    CompletionRequest,
    PredictRequest,
)

MAX_ERRORS = 8
"""Errors of one list that are reported at most. Reporting a million would take seconds, while all clients wait."""
SAID = {"messages": [{"role": "user", "content": "Hola"}]}
WRONG: dict[str, list[Any]] = {
    "model": [1, ["a"]],
    "temperature": [-1e-9, 100.5, 1e999, float("nan"), "x"],
    "top_p": [0, 1.0001, float("nan")],
    "top_k": [-2, 2**40, 1.0, "4", True],
    "n": [0, MAX_CHOICES + 1, 1.0, "2", True],
    "seed": [2**63, -(2**63) - 1, 10**400, 1.5],
    "stop": [
        1, [["a"]], ["a", 1], "", ["a", ""], ["a"] * 100_000, "x" * (MAX_STOP_CHARACTERS + 1), ["x" * 10**6],
        ["a"] * (MAX_STOPS + 1),
    ],
    "stream": ["x", 2],
    "stream_options": [1, {"include_usage": None}],
    "presence_penalty": [-2.1, float("nan")],
    "frequency_penalty": [2.1, 1e999],
    "ignore_eos": ["x"],
    "max_tokens": [-1, 2**20 + 1, 1.0, "5", True],
    "logit_bias": [{"50256": -100}],
}  # fmt: skip
WRONG_COMPLETION: dict[str, list[Any]] = {
    **WRONG,
    "prompt": [
        None, {}, True, [None], [-1], [2**31], [True], ["a", 1], [[1], "a"], [[-1]], [[["a"]]], [],
        ["a"] * (MAX_PROMPTS + 1), [[1]] * (MAX_PROMPTS + 1), "\ud800", ["\ud800"],
    ],
    "echo": ["x"],
    "logprobs": [-1, 21, True],
    "suffix": ["end"],
    "best_of": [3],
}  # fmt: skip
WRONG_CHAT: dict[str, list[Any]] = {
    "messages": [
        None, [], "a", [1], [{"role": "user"}], [{"content": "a"}], [{"role": "god", "content": "a"}],
        [{"role": "user", "content": {}}], [{"role": "user", "content": "a"}] * 1001,
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    ],
    "logprobs": [5],
    "top_logprobs": [-1, 21, True],
    "max_completion_tokens": [-1, 10**9],
    "tools": [[{"type": "function"}]],
    "functions": [[{}]],
    "response_format": [{"type": "json_object"}],
    "tool_choice": ["required"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        *((CompletionRequest, name, values) for name, values in WRONG_COMPLETION.items()),
        *((ChatRequest, name, values) for name, values in WRONG_CHAT.items()),
    ],
)
def test_a_wrong_field_is_named(kind: type[Asked], name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValidationError) as caught:
            kind.model_validate({**({"prompt": "Hola"} if kind is CompletionRequest else SAID), name: value})
        assert {error["loc"][0] for error in caught.value.errors()} == {name}, str(value)[:30]


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        (CompletionRequest, {"prompt": [None] * 100_000}),
        (CompletionRequest, {"prompt": [[None] * 100_000]}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 100_000}]}),
        (PredictRequest, {"inputs": [None] * 100_000}),
        (PredictRequest, {"inputs": []}),
    ],
)
def test_a_long_list_has_few_errors(kind: type[BaseModel], asked: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(asked)
    assert 1 <= caught.value.error_count() <= MAX_ERRORS


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("", [""]), ("a\0", ["a\0"]), (["a", ""], ["a", ""]), ([1, 2], [[1, 2]]), ([[1], []], [[1], []])],
)
def test_prompts(prompt: Any, expected: list[Any]) -> None:
    assert list(CompletionRequest.model_validate({"prompt": prompt}).prompts) == expected


def test_what_asks_for_nothing_is_let_through() -> None:
    CompletionRequest.model_validate({"logit_bias": {}, "suffix": None, "best_of": 1, "metadata": {}})
    ChatRequest.model_validate({**SAID, "tools": [], "functions": None, "response_format": None})
    ChatRequest.model_validate({**SAID, "tool_choice": "none", "response_format": {"type": "text"}})


UNKNOWN = {
    "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "min_tokens": 8,  # GuideLLM
    "metadata": {"user_id": "1", "features": {}}, "session_id": "s", "files": None,  # Open WebUI
    "\x1b[31m": 1, "__class__": "x", "model_config": {}, "extra": None,
}  # fmt: skip


def test_unknown_fields_are_ignored() -> None:
    """As vLLM, llama.cpp and SGLang do. Unknown fields of a message and of its parts are ignored, too."""
    part = {"type": "text", "text": "a", "cache_control": {}}
    message = {"role": "user", "content": [part], "id": "1", "timestamp": 0}
    for asked in (
        CompletionRequest.model_validate({"prompt": "a", **UNKNOWN}),
        ChatRequest.model_validate({"messages": [message], **UNKNOWN}),
    ):
        assert set(asked.model_dump(exclude_unset=True)) <= set(type(asked).model_fields)
        assert list(asked.prompts) == ["a"]


def sampling(**asked: Any) -> Sampling:
    return CompletionRequest.model_validate(asked).sampling(max_tokens=5, end_of_text=7)


def test_sampling_of_a_call_that_says_nothing() -> None:
    found = sampling()
    assert (found.temperature, found.top_k, found.top_p, found.max_tokens, found.stop) == (1.0, 0, 1.0, 5, ())
    assert found.stop_ids == (7,)
    assert sampling().seed != found.seed
    assert sampling(ignore_eos=True).stop_ids == ()
    nothing = {name: None for name in Asked.model_fields if name != "stream_options"}
    assert sampling(**nothing).temperature == 1.0


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 100),
            "top_p": st.floats(0, 1, exclude_min=True),
            "top_k": st.integers(-1, 2**31),
            "seed": st.integers(-(2**63), 2**63 - 1),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "stop": st.lists(st.text(min_size=1, max_size=MAX_STOP_CHARACTERS), max_size=MAX_STOPS),
        },
    )
)
@example({"temperature": 1e-46})
@example({"temperature": 5e-324, "top_k": 3})
@example({"top_p": 1e-46})
@example({"top_p": 5e-324, "top_k": 3})
def test_whatever_is_within_the_bounds_can_be_sampled(asked: dict[str, Any]) -> None:
    """A token that does not exist would end all rows of its step. (fp32 cannot represent 1e-46.)"""
    found = sampling(**json.loads(json.dumps(asked)))
    logits_BV, draws_B = torch.randn(3, 11, generator=torch.Generator().manual_seed(1)), torch.tensor([0.0, 0.5, 0.999])
    assert all(0 <= token < 11 for token in choose(logits_BV, sampling=found, draws_B=draws_B).tolist())
