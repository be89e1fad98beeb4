"""Generation: as without a cache, alike in batches, with its own random numbers, and without broken characters."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuadrilla.errors import ConfigError
from cuadrilla.model import inference
from cuadrilla.model.generate import TextStream, generate, generate_batch
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.inference import InferenceModel
from cuadrilla.model.sampling import Sampling, choose
from tests.decided import spread_gpt2

GREEDY = Sampling(temperature=0, max_tokens=20)
VOCABULARY = 259


def make(*, context: int = 64, dtype: torch.dtype = torch.float32) -> GPT2:
    model = spread_gpt2(0.3, vocab_size=VOCABULARY, context=context, layers=2, heads=4, width=32)
    model.compute_dtype = dtype
    return model


def all_of(model: GPT2, prompt: list[int], sampling: Sampling) -> tuple[list[int], str]:
    """The generated tokens, and the reason of their end."""
    found, steps = list[int](), generate(model, prompt, sampling=sampling)
    while True:
        try:
            found.append(next(steps))
        except StopIteration as end:
            return found, end.value


@torch.no_grad()
def without_cache(model: GPT2, prompt: list[int], *, num_tokens: int) -> list[int]:
    """Greedy tokens without a cache: all of the window is read for every token. A full window keeps its last half."""
    context = model.config.context
    window, ids = prompt[-context:], []
    for _ in range(num_tokens):
        if len(window) > context:
            window = window[-(context // 2) :]
        ids.append(int(model(torch.tensor([window]))[0, -1].argmax()))
        window = [*window, ids[-1]]
    return ids


PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8], [250, 3]]


@pytest.mark.parametrize("context", [6, 7, 64])
@pytest.mark.parametrize("length", [1, 5, 7, 30])
def test_the_cache_changes_nothing_and_a_full_context_slides_by_its_half(context: int, length: int) -> None:
    model = make(context=context)
    prompt = [(11 * place + 3) % VOCABULARY for place in range(length)]
    expected = without_cache(model, prompt, num_tokens=25)
    assert len(set(expected)) > 3
    assert all_of(model, prompt, replace(GREEDY, max_tokens=25)) == (expected, "length")


@pytest.mark.parametrize("context", [7, 64])
def test_row_i_of_a_batch_is_continued_as_alone_with_seed_plus_i(context: int) -> None:
    model, sampling = make(context=context), Sampling(max_tokens=15, seed=40)
    batch = generate_batch(model, PROMPTS, sampling=sampling)
    for number, prompt in enumerate(PROMPTS):
        assert all_of(model, prompt, replace(sampling, seed=40 + number))[0] == batch[number]
    assert generate_batch(model, [], sampling=sampling) == []


def test_a_seed_decides_and_torchs_own_generator_is_left_alone() -> None:
    model, sampling = make(), Sampling(max_tokens=15, seed=1)
    state = torch.get_rng_state()
    first = all_of(model, [5], sampling)
    torch.manual_seed(99)
    assert all_of(model, [5], sampling) == first
    assert all_of(model, [5], replace(sampling, seed=2)) != first
    torch.set_rng_state(state)
    list(generate(model, [5], sampling=sampling))
    assert torch.equal(torch.get_rng_state(), state)


def test_stop_ids_and_length_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    ids, _ = all_of(model, [5, 9, 2], GREEDY)
    place = next(n for n in range(3, 20) if ids[n] not in ids[:n])
    assert all_of(model, [5, 9, 2], replace(GREEDY, stop_ids=(ids[place],))) == (ids[:place], "stop")
    monkeypatch.setattr("cuadrilla.model.generate.InferenceModel", None)  # no copy of the model is made for nothing
    assert all_of(model, [5, 9, 2], replace(GREEDY, max_tokens=0)) == ([], "length")


def read_in_parts(copy: InferenceModel, rows: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """The logits after the last position of each row, which is read up to `ends[b]` at once, then token by token."""
    cache = copy.new_cache(len(rows))
    x_NC = copy.read(
        cache, [(slot, row[:end].tolist()) for slot, (row, end) in enumerate(zip(rows, ends, strict=True))]
    )
    last = {slot: x_NC[sum(ends[: slot + 1]) - 1] for slot in range(len(rows))}
    while parts := [
        (slot, [int(row[cache.lengths[slot]])]) for slot, row in enumerate(rows) if cache.lengths[slot] < rows.shape[1]
    ]:
        last |= dict(zip((slot for slot, _ in parts), copy.read(cache, parts), strict=True))
    return copy.logits(torch.stack([last[slot] for slot in range(len(rows))]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_amd", [True, False])
@pytest.mark.parametrize("has_amx", [True, False])
@pytest.mark.parametrize("bytes_per_call", [10**9, 0])
def test_whatever_a_copy_computes_with_gives_the_models_logits(
    monkeypatch: pytest.MonkeyPatch, has_amx: bool, is_amd: bool, dtype: torch.dtype, bytes_per_call: int
) -> None:
    """Rows of unequal lengths, which are read in parts, together and one by one."""
    monkeypatch.setattr(inference, "is_amd", lambda: is_amd)
    monkeypatch.setattr(inference, "BYTES_PER_CALL", bytes_per_call)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    model = make(dtype=dtype)
    copy = InferenceModel(model)
    ids = torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    with torch.no_grad():
        expected = model(ids)[:, -1]
        assert copy.new_cache(3).k_LBHSD.dtype == (dtype if has_amx else torch.float32)
        for ends in ([4, 4, 4], [2, 8, 5], [1, 1, 9]):
            assert (read_in_parts(copy, ids, ends) - expected).norm() < tolerance * expected.norm()
        alone = read_in_parts(copy, ids[:1], [3])
        cache = copy.new_cache(2)
        copy.read(cache, [(1, ids[1, :2].tolist())])
        x_NC = copy.read(cache, [(0, ids[0].tolist()), (1, ids[1, 2:].tolist())])  # the second one's second part
    assert (alone - expected[:1]).norm() < tolerance * expected[:1].norm()
    assert (copy.logits(x_NC[[8, 15]]) - expected[:2]).norm() < tolerance * expected[:2].norm()


def test_generating_leaves_the_model_as_it_was() -> None:
    model = make(dtype=torch.bfloat16).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    list(generate(model, [5, 9], sampling=GREEDY))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.loss(torch.tensor([[1, 2]]), torch.tensor([[2, 3]])).backward()


def frequencies(logits: list[float], **options: Any) -> dict[int, float]:
    draws = (torch.arange(4000) + 0.5) / 4000
    rows = torch.tensor([logits]).expand(4000, -1)
    chosen = choose(rows, sampling=Sampling(**options), draws_B=draws)
    return {token: count / 4000 for token, count in sorted(Counter(chosen.tolist()).items())}


LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}),
        ({"temperature": 0}, {1: 1.0}),
        ({"temperature": 1e-6}, {1: 1.0}),
        ({"temperature": 0.5}, {0: 1 / 30, 1: 16 / 30, 2: 4 / 30, 3: 9 / 30}),
        ({"top_k": 1}, {1: 1.0}),
        ({"top_k": 2}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_k": 99}, {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}),
        ({"top_p": 0.39}, {1: 1.0}),
        ({"top_p": 0.6}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_p": 0.85}, {1: 4 / 9, 2: 2 / 9, 3: 3 / 9}),
        ({"top_k": 2, "top_p": 0.5}, {1: 1.0}),
    ],
)
def test_sampling_follows_the_distribution_it_describes(options: dict[str, Any], expected: dict[int, float]) -> None:
    assert frequencies(LOGITS, **options) == pytest.approx(expected, abs=1e-3)


def test_the_extreme_draws_choose_possible_tokens() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(2, -1)
    chosen = choose(logits, sampling=Sampling(), draws_B=torch.tensor([0.0, 1 - 2**-20]))
    assert chosen.tolist() == [1, 2]


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"max_tokens": -1}, {"stop": ("a", "")}],
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(**options)
    assert caught.value.hint


class Bytes:
    """A tokenizer whose tokens are bytes: every character outside of ASCII takes several."""

    end_of_text = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.bytes_of, ids)).decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        return bytes([token] if token < 256 else [])


def pieces(ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    stream, found = TextStream(Bytes(), stop=stop), []
    for token in ids:
        found.append(stream.push(token))
        if stream.stopped:
            break
    return [*found, stream.finish()], stream.stopped


def test_a_character_comes_when_it_is_whole() -> None:
    assert pieces("ñ🙂a".encode())[0] == ["", "ñ", "", "", "", "🙂", "a", ""]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=40))
def test_pieces_joined_are_the_text_whatever_the_bytes(ids: list[int]) -> None:
    assert "".join(pieces(ids)[0]) == Bytes().decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.text("abñ", max_size=30), st.lists(st.text("abñ", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_stop_string_that_is_complete_first(text: str, stop: list[str]) -> None:
    found, stopped = pieces(text.encode(), stop)
    ends = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
    assert stopped == bool(ends)
    first_end = min(end for end, _ in ends) if ends else 0
    expected = text[: min(start for end, start in ends if end == first_end)] if ends else text
    assert "".join(found) == expected
