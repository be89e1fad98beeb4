"""Which size of model is chosen for a text and a time, at given speeds."""

import pytest

from cuadrilla.cli.texts import seconds_of
from cuadrilla.cli.train import count_of
from cuadrilla.errors import ConfigError
from cuadrilla.plan.size import TRAINING, SizeChoice, choose

WEIGHTS = {"micro": 800_000, "mini": 7_400_000, "small": 85_000_000}
SPEEDS = {"micro": 30_000.0, "mini": 5_000.0, "small": 600.0}


def chosen(*, text: int, minutes: float) -> tuple[SizeChoice, list[str]]:
    """And which sizes were measured."""
    measured: list[str] = []

    def rate(size: str, _tokens: int) -> float:
        measured.append(size)
        return SPEEDS[size]

    return choose(WEIGHTS, text=text, seconds_left=lambda: 60 * minutes, rate=rate), measured


def test_a_short_time_is_filled_with_the_smallest() -> None:
    choice, measured = chosen(text=7_000_000, minutes=5)
    assert choice.size == "micro"
    assert choice.seconds == pytest.approx(300)
    assert choice.readings == pytest.approx(300 * 30_000 * TRAINING / 7_000_000, rel=1e-3)
    assert measured == ["micro"]


@pytest.mark.parametrize(("text", "minutes"), [(410_000, 20), (7_000_000, 120)])
def test_a_larger_one_where_it_reads_enough(text: int, minutes: float) -> None:
    """A model reads a short text several times; of a long text it reads twice as many tokens as it has weights."""
    choice, measured = chosen(text=text, minutes=minutes)
    assert choice.size == "mini"
    assert measured[:2] == ["micro", "mini"]


def test_a_short_text_is_not_for_many_weights() -> None:
    assert chosen(text=100_000, minutes=60)[0].size == "micro"
    assert chosen(text=410_000, minutes=600)[0].size == "mini"


def test_a_text_is_not_read_for_ever() -> None:
    choice, _ = chosen(text=20_000, minutes=600)
    assert choice.readings == pytest.approx(16)
    assert choice.seconds < 36_000
    choice, _ = chosen(text=410_000, minutes=600)
    assert (choice.size, choice.readings) == ("mini", pytest.approx(6))


def test_times_as_people_write_them() -> None:
    assert [seconds_of(text) for text in ("90s", "20m", "1h30m", "2h")] == [90, 1200, 5400, 7200]
    assert [count_of(text) for text in ("1000", "300k", "1.5M")] == [1000, 300_000, 1_500_000]
    for text in ("", "soon", "20", "m", "-5m", "5m2h"):
        with pytest.raises(ConfigError):
            seconds_of(text)
    for text in ("many", "1 M", "-1"):
        with pytest.raises(ConfigError):
            count_of(text)
