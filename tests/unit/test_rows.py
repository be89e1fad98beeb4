"""Rows that join and leave a batch at any step get the tokens that each would get alone."""

from dataclasses import replace

import pytest
import torch

from cuadrilla.errors import ConfigError
from cuadrilla.model import rows as module
from cuadrilla.model.generate import generate
from cuadrilla.model.inference import InferenceModel
from cuadrilla.model.rows import Row, Rows, Score
from cuadrilla.model.sampling import Sampling
from tests.decided import decided_model

VOCABULARY, CONTEXT = 97, 24
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def model() -> InferenceModel:
    return decided_model(vocabulary=VOCABULARY, context=CONTEXT)


def alone(model: InferenceModel, prompt: list[int], sampling: Sampling) -> list[int]:
    return list(generate(model, prompt, sampling=sampling))


def test_who_generates_waits_for_part_of_a_prompt_only(model: InferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_every_bit_of_a_seed_counts() -> None:
    seeds = [3, *(3 + 2**bit for bit in range(3, 64)), -3, -(2**63), 2**63 - 1]
    found = {seed: Row([1], Sampling(seed=seed)).draw() for seed in seeds}
    assert len(set(found.values())) == len(seeds)
    assert all(0 <= number < 1 for number in found.values())
    assert Row([1], Sampling(seed=3)).draw() == found[3]


def finished(rows: Rows, *joining: Row) -> None:
    for row in joining:
        rows.join(row)
    while len(rows):
        rows.step()


def test_scores_are_the_models_log_probabilities(model: InferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a prompt that is read in parts, beside rows without scores, and with any sampling."""
    monkeypatch.setattr(module, "READ_TOKENS", 5)
    sampling = Sampling(temperature=0.7, top_k=5, max_tokens=6, seed=3, presence_penalty=1.0, frequency_penalty=0.5)
    row = Row([5, 6, 7, 8, 9, 10, 11], sampling, num_top=3, scores_prompt=True)
    finished(Rows(model, slots=3), Row([4] * 9, GREEDY), row, Row([2], Sampling(temperature=1.2, top_p=0.7)))
    with torch.no_grad():
        logprobs_TV = torch.log_softmax(model.model(torch.tensor([row.tokens]))[0], -1)
    expected = [
        Score(token, float(logprobs_V[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
        for token, logprobs_V in zip(row.tokens[1:], logprobs_TV, strict=False)
        for values, ids in [logprobs_V.topk(3)]
    ]
    assert [score.token for score in [*row.prompt_scores, *row.scores]] == row.tokens[1:]
    for found, wanted in zip([*row.prompt_scores, *row.scores], expected, strict=True):
        assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
        assert [value for _, value in found.top] == pytest.approx([value for _, value in wanted.top], abs=1e-4)


def test_a_prompt_alone_is_scored(model: InferenceModel) -> None:
    assert Row([1], replace(GREEDY, max_tokens=0)).reason == "length"
    row = Row([5, 6, 7], Sampling(max_tokens=0), num_top=0, scores_prompt=True)
    finished(Rows(model, slots=1), row)
    assert (row.reason, row.generated, len(row.prompt_scores), row.scores) == ("length", [], 2, [])


def test_penalties_lower_what_was_generated(model: InferenceModel) -> None:
    logits_V = torch.zeros(VOCABULARY)
    row = Row([5], Sampling(presence_penalty=0.5, frequency_penalty=0.25))
    for token in (7, 8, 7):
        row.take(token)
    row.penalize(logits_V)
    assert {place: value for place, value in enumerate(logits_V.tolist()) if value} == {7: -1.0, 8: -0.75}
    greedy = replace(GREEDY, max_tokens=20)
    assert len(set(alone(model, [5], replace(greedy, frequency_penalty=2.0, presence_penalty=2.0)))) > len(
        set(alone(model, [5], greedy))
    )
    with pytest.raises(ConfigError, match="frequency_penalty"):
        Sampling(frequency_penalty=float("nan"))


def test_numbers_that_are_not_finite_end_their_row_only(model: InferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(model, slots=2)
    good, bad = Row([5, 6], Sampling(temperature=0, max_tokens=8)), Row([7, 8], Sampling(temperature=0, max_tokens=8))
    rows.join(good)
    rows.join(bad)
    rows.step()
    rows._cache.v_LBHSD[:, bad.slot] = float("nan")
    while len(rows):
        rows.step()
    assert (bad.reason, len(bad.generated)) == ("error", 1)
    assert (good.reason, good.generated) == ("length", alone(model, [5, 6], good.sampling))
