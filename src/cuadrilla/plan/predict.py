"""Predicts before a training how much sooner a crew reaches a loss, by which strategy and with which machines.

    round    = max over workers of (transfer + units / speed) + the coordinator's step        units dealt as in training
    transfer = (version + contribution) / the slower of the worker's link and its part of the coordinator's + 2 delays
    gain     = tokens per second · loss lowered per token / the same for the best machine alone, in smaller steps

In a window every worker also runs the optimizer's steps, and the loss falls less than in as many exact steps
(`TEACHES`). Transfers do not overlap with computing, as in training. Pure; times in seconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cuadrilla.plan.share import Pace, share_units

TEACHES = {1: 1.0, 2: 0.99, 4: 0.98, 8: 0.94, 16: 0.87, 32: 0.81, 64: 0.73}
"""The lengths of rounds that are tried, in steps (1: exact), and how fast the loss falls with them, relative to `exact`
at equal tokens per second: measured (docs/experiments.md), except 2. Longer ones were not."""
MIN_WINDOWS = 6
"""The fewest windows of a run. Fewer were not measured."""
CREW_STEP = 4
"""Tokens of a crew's step / tokens of a single machine's step. In a crew's steps 1 M tokens lower the loss as much as
about 0.88 M in the machine's (read off between measured lengths), and 3 M as much as 3 M. In steps of 16 times as many
tokens, 1 M lower it as much as 0.47 M."""
CRITICAL_TOKENS, CRITICAL_RUN = 16_384, 3_000_000
"""In a step of this many tokens, a token lowers the loss half as much as in a small step (McCandlish et al. 2018, arXiv
1812.06162). This fits the steps measured in runs of 1 M and 3 M tokens. Assumed: the number grows with the square root
of a run that is longer than the second constant."""
SMALL = 8
"""Steps of 1/8 of the critical tokens use a token nearly as well as smaller ones, which need more optimizer time."""
MIN_GAIN = 0.02
"""A machine is left out if it adds less than this part to the crew's speed."""


@dataclass(frozen=True, kw_only=True)
class MachineSpec:
    """The link to the coordinator has `bytes_per_second` each way; infinite, with delay 0, on its own machine."""

    name: str
    tokens_per_second: float
    bytes_per_second: float = math.inf
    delay_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Crew:
    """`bytes_per_second`: of the coordinator's own link, which all other machines share."""

    machines: Sequence[MachineSpec]
    bytes_per_second: float = math.inf

    @property
    def best(self) -> MachineSpec:
        return max(self.machines, key=lambda machine: machine.tokens_per_second)

    @property
    def coordinator(self) -> MachineSpec:
        """The machine that coordinates: the best without a link. In practice all have links: then the best of all."""
        here = [machine for machine in self.machines if math.isinf(machine.bytes_per_second)]
        return replace(self, machines=here).best if here else self.best

    @property
    def ceiling(self) -> float:
        """Speed of all machines together / speed of the best one, as if they had no network between them."""
        return sum(machine.tokens_per_second for machine in self.machines) / self.best.tokens_per_second


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a run has to compute. `step_cost_tokens`: an optimizer step takes as long as the passes of so many tokens.
    `exact_bytes`, `window_bytes`: size of a version and a contribution together.
    """

    num_steps: int
    units_per_step: int
    unit_tokens: int
    step_cost_tokens: float
    exact_bytes: int
    window_bytes: int

    def alone_teaches(self) -> float:
        """By what factor a token lowers the loss more in the smaller steps of a machine alone than in the crew's."""
        tokens = self.units_per_step * self.unit_tokens
        parts = parts_alone(self.units_per_step, step_tokens=tokens, num_steps=self.num_steps)
        return smaller_steps_teach(tokens, parts=parts, num_steps=self.num_steps)

    def bytes_of(self, steps: int) -> int:
        return self.exact_bytes if steps == 1 else self.window_bytes


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """`steps` of a round; 0: the best machine alone. `shares`: units of a round by machine. `waiting`: part of the
    machines' time, weighted by their speeds. `bytes_per_second`: at the coordinator. `gain`: see the formula above.
    """

    steps: int
    shares: dict[str, int]
    tokens_per_second: float
    waiting: float
    bytes_per_second: float
    gain: float


def predict(crew: Crew, work: Workload) -> list[Prediction]:
    """The best machine alone, exact steps and windows, each with the machines that are worth it; the best first."""
    alone = predict_alone(crew.best, work)
    worth = alone.tokens_per_second * work.alone_teaches()
    crews = [_worth_it(crew, work, steps=steps, alone=worth) for steps in lengths(work.num_steps)]
    found = [alone, *(prediction for prediction in crews if len(prediction.shares) > 1)]
    return sorted(found, key=lambda prediction: (-prediction.gain, prediction.steps))


def predict_alone(machine: MachineSpec, work: Workload) -> Prediction:
    """The prediction for one machine without a network."""
    here = Crew(machines=[MachineSpec(name=machine.name, tokens_per_second=machine.tokens_per_second)])
    return replace(predict_crew(here, work, steps=1, alone=1.0), steps=0, waiting=0.0, gain=1.0)


def predict_crew(crew: Crew, work: Workload, *, steps: int, alone: float) -> Prediction:
    """The prediction for all machines that get a share, in rounds of `steps` steps. `alone`: the best machine's speed
    alone, as the tokens per second in steps of the crew that lower the loss as fast.
    """
    paces = _paces(crew, work, steps=steps)
    shares = {name: share for name, share in share_units(work.units_per_step, paces=paces).items() if share}
    round_seconds = max(paces[name].seconds(share) for name, share in shares.items())
    round_seconds += work.step_cost_tokens / crew.coordinator.tokens_per_second
    tokens_per_second = steps * work.units_per_step * work.unit_tokens / round_seconds
    members = [machine for machine in crew.machines if machine.name in shares]
    remote = [machine for machine in members if math.isfinite(machine.bytes_per_second)]
    return Prediction(
        steps=steps,
        shares={name: steps * share for name, share in shares.items()},
        tokens_per_second=tokens_per_second,
        waiting=1 - tokens_per_second / sum(machine.tokens_per_second for machine in members),
        bytes_per_second=len(remote) * work.bytes_of(steps) / round_seconds,
        gain=tokens_per_second * TEACHES[steps] / alone,
    )


def _worth_it(crew: Crew, work: Workload, *, steps: int, alone: float) -> Prediction:
    """Of the crews of the machines that finish their first units soonest, the smallest whose gain is within `MIN_GAIN`
    of the highest."""
    paces, sizes = _paces(crew, work, steps=steps), [len(crew.machines)]
    useful = sorted(crew.machines, key=lambda machine: paces[machine.name].seconds(1))
    while sizes[-1] > 1:  # of large crews not every size: it takes too long
        sizes.append(sizes[-1] - max(1, sizes[-1] // 16))
    crews = [replace(crew, machines=useful[:size]) for size in sizes]
    found = [predict_crew(each, work, steps=steps, alone=alone) for each in crews]
    most = max(prediction.gain for prediction in found)
    return next(prediction for prediction in reversed(found) if prediction.gain * (1 + MIN_GAIN) >= most)


def _paces(crew: Crew, work: Workload, *, steps: int) -> dict[str, Pace]:
    """The pace of each machine in a round, in groups of `steps` units."""
    remote = sum(math.isfinite(machine.bytes_per_second) for machine in crew.machines)
    part = crew.bytes_per_second / max(remote, 1)

    def pace(machine: MachineSpec) -> Pace:
        fixed = steps * work.step_cost_tokens / machine.tokens_per_second if steps > 1 else 0.0
        if math.isfinite(machine.bytes_per_second):
            fixed += work.bytes_of(steps) / min(machine.bytes_per_second, part) + 2 * machine.delay_seconds
        return Pace(units_per_second=machine.tokens_per_second / work.unit_tokens / steps, fixed_seconds=fixed)

    return {machine.name: pace(machine) for machine in crew.machines}


def lengths(num_steps: int) -> tuple[int, ...]:
    """The lengths of rounds that are tried in a run of `num_steps` steps; 1 is exact."""
    return tuple(steps for steps in TEACHES if steps == 1 or MIN_WINDOWS * steps <= num_steps)


def parts_alone(units_per_step: int, *, step_tokens: int, num_steps: int) -> int:
    """The number of smaller steps, of whole units, that one machine takes for each step of a crew."""
    most = min(CREW_STEP, round(SMALL * step_tokens / _critical(step_tokens * num_steps)))
    return next((parts for parts in range(most, 1, -1) if units_per_step % parts == 0), 1)


def smaller_steps_teach(step_tokens: int, *, parts: int, num_steps: int) -> float:
    """By what factor a token lowers the loss more if each step is split into `parts` smaller ones."""
    critical = _critical(step_tokens * num_steps)
    return (1 + step_tokens / critical) / (1 + step_tokens / parts / critical)


def _critical(run_tokens: int) -> float:
    return CRITICAL_TOKENS * math.sqrt(max(run_tokens / CRITICAL_RUN, 1.0))
