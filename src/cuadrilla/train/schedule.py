"""Learning rate as a function of the run's steps. Machines that join or leave do not change it."""

from collections.abc import Callable

from cuadrilla.config import ScheduleSection


def make_schedule(section: ScheduleSection, *, num_steps: int) -> Callable[[float], float]:
    """A function from a step to a factor in [0, 1]. The first step is 1; steps may be fractions.

    The factor rises linearly over `warmup`, stays at 1, falls linearly to `final` over `cooldown`, and stays there.
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
