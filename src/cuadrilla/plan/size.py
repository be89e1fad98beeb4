"""Which size of model a text and the time are enough for, and how many tokens it is trained on. Pure but for `rate`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

MANY_READINGS = 16.0
"""A text that is read more often than that teaches hardly more (docs/experiments.md, little text)."""
ENOUGH_TOKENS = 2.0
"""For each weight in its blocks: from so many tokens on, a larger model is worth its time. Assumed: a tenth of what is
best for a given computation (arXiv 2203.15556)."""
ENOUGH_READINGS, MAX_WEIGHTS = 5.5, 40.0
"""Or if it reads the text so often, and has at most so many weights for each token of it: `mini` had fewer bits after
5.8 readings than `micro` after 16, and more after 4 (docs/experiments.md, little text). More weights were not tried."""
FEW_READINGS, FEW_WEIGHTS = 6.0, 10.0
"""How often a larger model than the smallest reads a text, unless it has at most so many weights for each token of it:
`mini`, with 18, had more bits after 16 readings than after 5.8. How often is best was not measured."""
SPEEDUP = 0.25
"""A size trains at most at this part of the speed of the size before it: others are not measured in vain."""
TRAINING = 0.85
"""Part of the time that steps take; evaluations, samples and checkpoints take the rest."""
MIN_TOKENS = 10_000


@dataclass(frozen=True, kw_only=True)
class SizeChoice:
    """`readings`: how often the text is read. `seconds`: of the training, evaluations included."""

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
    """One of the sizes, by the number of weights in their blocks, the smallest first; `text`: its tokens.

    `rate(size, tokens)`: tokens per second in a training of so many tokens, measured here.
    """
    best: SizeChoice | None = None
    for size, number in weights.items():
        needed = ENOUGH_TOKENS * number
        if number <= MAX_WEIGHTS * text:
            needed = min(needed, ENOUGH_READINGS * text)
        if best and best.tokens_per_second * SPEEDUP * seconds_left() * TRAINING < needed:
            break
        most = text * (MANY_READINGS if best is None or number <= FEW_WEIGHTS * text else FEW_READINGS)
        found = _in_time(size, round(needed), text=text, most=most, seconds_left=seconds_left, rate=rate)
        if best and found.tokens < needed:
            break
        best = found
    assert best is not None
    return best


def _in_time(
    size: str,
    guess: int,
    *,
    text: int,
    most: float,
    seconds_left: Callable[[], float],
    rate: Callable[[str, int], float],
) -> SizeChoice:
    speed = rate(size, guess)
    tokens = max(round(min(speed * seconds_left() * TRAINING, most)), MIN_TOKENS)
    return SizeChoice(size=size, tokens=tokens, tokens_per_second=speed, readings=tokens / max(text, 1))
