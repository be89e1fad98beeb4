"""A search's space: drawn values lie in it, and what cannot be searched is refused with the key and a remedy."""

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.config import DimensionSection
from cuadrilla.errors import ConfigError
from cuadrilla.runfile import resolve
from cuadrilla.tune.space import Space, Values

BASE = """
[data]
folder = "data"
[train]
steps = 100
[optim]
kind = "adamw"
"""


def space_of(text: str, more: str = "") -> Space:
    whole = f"{BASE}\n[tune]\n{more}\n[tune.space]\n{text}"
    return Space(resolve(whole).config.tune, text=whole)


def drawn_from(space: Space, seed: int) -> Values:
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed)).ask()
    space.suggest(trial)
    return trial.params


@given(seed=st.integers(0, 1000))
def test_what_is_drawn_lies_in_the_space(seed: int) -> None:
    space = space_of(
        """
        optim.lr = {low = 0.001, high = 0.1, log = true}
        optim.beta2 = {low = 0.9, high = 0.99}
        optim.weight_decay = {low = 0.0, high = 0.3, step = 0.1}
        model.layers = {low = 1, high = 64, log = true}
        train.batch_sequences = {choices = [8, 16]}
        """
    )
    drawn = drawn_from(space, seed)
    assert 0.001 <= float(drawn["optim.lr"]) <= 0.1
    assert 0.9 <= float(drawn["optim.beta2"]) <= 0.99
    assert round(float(drawn["optim.weight_decay"]), 9) in (0.0, 0.1, 0.2, 0.3)
    assert drawn["model.layers"] in range(1, 65)
    assert drawn["train.batch_sequences"] in (8, 16)


def test_a_setting_counts_only_where_the_kind_has_it() -> None:
    space = space_of(
        """
        optim.momentum = {low = 0.8, high = 0.99}
        optim.beta1 = {low = 0.8, high = 0.99}
        optim.kind = {choices = ["muon", "adamw"]}
        """
    )
    assert next(iter(space.dimensions)) == "optim.kind"
    seen = set()
    for seed in range(40):
        drawn = drawn_from(space, seed)
        seen.add(drawn["optim.kind"])
        assert ("optim.momentum" in drawn) == (drawn["optim.kind"] == "muon")
        assert "optim.beta1" in drawn
    assert seen == {"muon", "adamw"}


def test_a_grid_has_each_combination_once() -> None:
    found = space_of(
        """
        optim.kind = {choices = ["muon", "adamw"]}
        optim.momentum = {low = 0.8, high = 0.9, step = 0.05}
        run.seed = {low = 0, high = 1}
        """
    ).grid()
    assert len(found) == (1 + 3) * 2
    assert len({tuple(each.items()) for each in found}) == len(found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "tune.space is empty"),
        ("optim.lt = {low = 0.1, high = 0.2}", "unknown key optim.lt"),
        ("optim.lr = {low = 0.2, high = 0.1}", "low 0.2 is not below high 0.1"),
        ("optim.lr = {low = 0.0, high = 0.1, log = true}", "log needs a low above 0"),
        ("optim.lr = {low = 0.1}", "needs either choices, or low and high"),
        ("optim.lr = {low = 0.1, high = 200.0}", "tune.space.optim.lr: 200.0 cannot be tried"),
        ("model.width = {choices = [128, 130]}", "130 cannot be tried: run.toml: model: width 130 is not divisible"),
        ("model.layers = {low = 1, high = 8, step = 1.5}", "step 1.5 does not fit"),
        ("optim.lr = {low = 0.2, high = 0.85, step = 0.2}", "step 0.2 does not fit"),
        ("engine.kind = {choices = [\"crew\"]}", "not what a search chooses"),
        ("optim.lr = 0.1", "optim.lr: should be a table"),
        ("optim.lr = {low = 0.1, hihg = 0.2}", "unknown key tune.space.optim.lr.hihg"),
    ],
)  # fmt: skip
def test_a_bad_space_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        space_of(text)
    assert said in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize(
    ("more", "said"), [("", "a grid needs choices, or a step"), (", step = 0.001", "more than 10,000 combinations")]
)
def test_a_grid_that_cannot_be(more: str, said: str) -> None:
    text = "\n".join(f"{key} = {{low = 0.0, high = 1.0{more}}}" for key in ("optim.beta1", "optim.beta2"))
    with pytest.raises(ConfigError, match=said):
        space_of(text).grid()


def test_keys_may_be_nested_or_quoted() -> None:
    nested = space_of(
        "[tune.space.optim]\nlr = {low = 0.1, high = 0.2}\n[tune.space.model]\nlayers = {choices = [1, 2]}"
    )
    quoted = space_of('"optim.lr" = {low = 0.1, high = 0.2}\n"model.layers" = {choices = [1, 2]}')
    assert nested.dimensions == quoted.dimensions
    assert nested.dimensions["model.layers"] == DimensionSection(choices=[1, 2])
