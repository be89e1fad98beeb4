"""Rows that join and leave at any step get what each would get alone."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuadrilla.errors import ConfigError
from cuadrilla.model import rows as module
from cuadrilla.model.generate import for_inference, generate
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.rows import Row, Rows
from cuadrilla.model.sampling import Sampling

pytestmark = pytest.mark.unit

VOCABULARY, CONTEXT = 97, 24
WAYS = (
    Sampling(temperature=0),
    Sampling(temperature=0, stop_ids=(3, 5, 8)),
    Sampling(temperature=0.8, top_k=20),
    Sampling(temperature=1.2, top_p=0.7),
)


@pytest.fixture(scope="module")
def model() -> GPT2:
    """Large weights: the best token leads by far."""
    torch.manual_seed(0)
    made = GPT2(GPT2Config(vocab_size=VOCABULARY, context=CONTEXT, layers=2, heads=4, width=32)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return for_inference(made)


def alone(model: GPT2, prompt: list[int], sampling: Sampling) -> list[int]:
    return list(generate(model, prompt, sampling=sampling))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), slots=st.integers(1, 6), read_tokens=st.sampled_from([1, 7, 2048]))
def test_whoever_joins_and_leaves_beside_it(model: GPT2, seed: int, slots: int, read_tokens: int) -> None:
    """Prompts longer than the context among them, and rows that slide; some leave before their end."""
    chance = random.Random(seed)
    waiting, held, expected, leaving = [], Rows(model, slots=slots), {}, {}
    for number in range(10):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, CONTEXT + 9))]
        sampling = replace(chance.choice(WAYS), max_tokens=chance.randint(1, 2 * CONTEXT), seed=number)
        row = Row(list(prompt), sampling)
        waiting.append(row)
        expected[row] = alone(model, prompt, sampling)
        leaving[row] = chance.randint(0, 20) if chance.random() < 0.3 else -1
    everybody = list(waiting)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "READ_TOKENS", read_tokens)
        while waiting or len(held):
            while waiting and held.free and chance.random() < 0.6:
                held.join(waiting.pop())
            told = held.step()
            assert all(token is None or row.tokens[-1] == token for row, token in told)
            for row in [row for row in everybody if row.reason is None and len(row.generated) == leaving[row]]:
                if row in waiting:
                    waiting.remove(row)
                else:
                    held.leave(row)
                everybody.remove(row)
                assert row.generated == expected[row][: leaving[row]]
    assert held.free == slots
    for row in everybody:
        assert row.generated == expected[row], (row.sampling, len(row.tokens))
        assert row.reason == ("length" if len(row.generated) == row.sampling.max_tokens else "stop")


def test_who_generates_waits_for_a_part_of_a_prompt_only(model: GPT2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_TOKENS", 4)
    rows = Rows(model, slots=2)
    first, second = (Row([1] * length, Sampling(temperature=0, max_tokens=30)) for length in (2, 19))
    rows.join(first)
    rows.step()
    rows.join(second)
    steps = 0
    while not second.generated:
        before = len(first.generated)
        rows.step()
        steps += 1
        assert len(first.generated) == before + 1
    assert steps == 5  # 19 tokens in parts of 4


def test_nothing_is_computed_for_free_slots(model: GPT2, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    whole = model.forward_cached
    monkeypatch.setattr(
        model, "forward_cached", lambda ids, cache, **more: shapes.append(tuple(ids.shape)) or whole(ids, cache, **more)
    )
    rows = Rows(model, slots=8)
    for length in (1, 2, 3):
        rows.join(Row([7] * 5, Sampling(temperature=0, max_tokens=length)))
    while len(rows):
        rows.step()
    assert shapes == [(3, 5), (2, 1), (1, 1)]


def test_what_no_row_can_be(model: GPT2) -> None:
    with pytest.raises(ConfigError, match="no tokens"):
        Row([], WAYS[0])
    with pytest.raises(ConfigError, match="stop strings"):
        Row([1], replace(WAYS[0], stop=("fin",)))
    rows = Rows(model, slots=1)
    with pytest.raises(ConfigError, match="outside of the model's vocabulary of 97"):
        rows.join(Row([VOCABULARY], WAYS[0]))
    assert rows.free == 1
    assert Row([1], replace(WAYS[0], max_tokens=0)).reason == "length"
