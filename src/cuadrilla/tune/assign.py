"""The place of each job: the longest goes to the fastest, and a place that would only end last waits. Pure.

What is tried, and what comes of it, does not depend on this: only when it is done.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GAIN = 0.9
"""A slow place waits where a faster one would be done in this part of its time, or sooner."""


@dataclass(frozen=True, kw_only=True)
class AtJob:
    """A place that works: how many seconds it still needs for its job, as far as anybody knows."""

    place: str
    seconds_left: float


def assign(
    tokens: Sequence[float],
    *,
    free: Sequence[str],
    busy: Sequence[AtJob],
    speeds: Mapping[str, float],
    more: int,
) -> dict[int, str]:
    """Number of a job → the place that begins it now. Jobs that are not in it wait.

    `tokens`: of each job that can begin. `speeds`: tokens per second, of places that are known; one of which nothing is
    known is taken for as fast as the fastest. `more`: jobs that will come beside these.
    """
    fastest = max(speeds.values(), default=1.0)
    speed = {place: speeds.get(place) or fastest for place in [*free, *(each.place for each in busy)]}
    ready = {each.place: each.seconds_left for each in busy} | dict.fromkeys(free, 0.0)
    waiting = sorted(range(len(tokens)), key=lambda number: (-tokens[number], number))
    found: dict[int, str] = {}
    for place in sorted(free, key=lambda place: (-speed[place], place)):
        while waiting:
            number = waiting.pop(0)
            alone = tokens[number] / speed[place]
            elsewhere = min(
                (ready[other] + tokens[number] / speed[other] for other in ready if speed[other] > speed[place]),
                default=math.inf,
            )
            if more == 0 and elsewhere <= GAIN * alone:
                continue  # a faster one takes it when it is free
            found[number] = place
            ready[place] = alone
            break
    return found
