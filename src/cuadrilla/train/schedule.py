"""Learning rate as a function of the run's steps: machines that join or leave move nothing."""

from collections.abc import Callable

from cuadrilla.config import ScheduleSection


def make_schedule(section: ScheduleSection, *, num_steps: int) -> Callable[[float], float]:
    """A function from a step, the first of which is 1, or from a part of one, to a factor in [0, 1].

    Rises linearly over `warmup`, stays at 1, falls linearly to `final` over `cooldown`, stays there.
    """
    warmup = section.warmup * num_steps
    begin = (1 - section.cooldown) * num_steps

    def factor(step: float) -> float:
        if step < warmup:
            return step / warmup
        if step <= begin or section.cooldown == 0:
            return 1.0
        done = min(1.0, (step - begin) / (num_steps - begin))
        return 1.0 - done * (1.0 - section.final)

    return factor
