"""Learning rate as a function of global tokens: machines that join or leave move nothing."""

from collections.abc import Callable

from cuadrilla.config import ScheduleSection


def make_schedule(section: ScheduleSection, *, total_tokens: int) -> Callable[[int], float]:
    """A function from tokens counted so far (this step's included) to a factor in [0, 1].

    Rises linearly over `warmup`, stays at 1, falls linearly to `final` over `cooldown`, stays there.
    """
    warmup = section.warmup * total_tokens
    begin = (1 - section.cooldown) * total_tokens

    def factor(tokens: int) -> float:
        if tokens < warmup:
            return tokens / warmup
        if tokens <= begin or section.cooldown == 0:
            return 1.0
        done = min(1.0, (tokens - begin) / (total_tokens - begin))
        return 1.0 - done * (1.0 - section.final)

    return factor
