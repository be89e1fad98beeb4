"""Chooses the model's size for a text and a time, and how many tokens it is trained on. Pure, except for `rate`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

MANY_READINGS = 16.0
"""A text is read at most this often: more readings lower the loss hardly further (docs/experiments.md, little text)."""
ENOUGH_TOKENS = 2.0
"""A larger model is worth its time if it trains on this many tokens for each weight in its blocks. Assumed: a tenth of
the best number for a given amount of computation (arXiv 2203.15556)."""
ENOUGH_READINGS, MAX_WEIGHTS = 5.5, 40.0
"""It is also worth its time if it reads the text this often and has at most this many weights per token of the text.
`mini` had fewer bits after 5.8 readings than `micro` after 16, and more after 4 (docs/experiments.md, little text).
More weights were not tried."""
FEW_READINGS, FEW_WEIGHTS = 6.0, 10.0
"""A model larger than the smallest reads the text at most this often, unless it has at most this many weights per token
of the text. `mini`, with 18 weights, had more bits after 16 readings than after 5.8. The best number is not known."""
SPEEDUP = 0.25
"""Assumed largest speed of a size, as a part of the speed of the next smaller size. A size that would be too slow even
then is not measured."""
TRAINING = 0.85
"""Part of the time that optimizer steps take; evaluations, samples and checkpoints take the rest."""
MIN_TOKENS = 10_000


@dataclass(frozen=True, kw_only=True)
class SizeChoice:
    """`readings`: how often the text is read; `seconds`: length of the training, with evaluations."""

    size: str
    tokens: int
    tokens_per_second: float
    readings: float

    @property
    def seconds(self) -> float:
        return self.tokens / self.tokens_per_second / TRAINING


def choose(
    weights: Mapping[str, int], *, text: int, seconds_left: Callable[[], float], rate: Callable[[str, int], float]
) -> SizeChoice:
    """The largest size that is worth its time. `weights`: of each size's blocks, the smallest first; `text`: tokens of
    the text; `rate(size, tokens)` measures the tokens per second of a training of so many tokens on this machine.
    """
    best: SizeChoice | None = None
    for size, number in weights.items():
        needed = ENOUGH_TOKENS * number
        if number <= MAX_WEIGHTS * text:
            needed = min(needed, ENOUGH_READINGS * text)
        if best and best.tokens_per_second * SPEEDUP * seconds_left() * TRAINING < needed:
            break
        most = text * (MANY_READINGS if best is None or number <= FEW_WEIGHTS * text else FEW_READINGS)
        speed = rate(size, round(needed))
        tokens = max(round(min(speed * seconds_left() * TRAINING, most)), MIN_TOKENS)
        if best and tokens < needed:
            break
        best = SizeChoice(size=size, tokens=tokens, tokens_per_second=speed, readings=tokens / max(text, 1))
    assert best is not None
    return best
