"""The plan's predictions beside simulated training: three crews on three links each, and up to 64 machines.

    python -m bench.scale [--rounds 20] [--nodes 2 8 32 64]

The coordinator is the product's, under a virtual clock; machines and links are modelled. A worker downloads the
version, computes and uploads; transfers in one direction share the coordinator's link fairly. So the load of this
machine does not matter. `error of …`: the relative error of the predicted tokens per second. `chosen is best`: no
other simulated strategy gains 2 % more than the chosen one. `auto`: the gain of `sync.kind = "auto"` over the best
machine alone, after WARM_UP rounds. `auto ends with`: the steps of its last round.
"""

import heapq
import itertools
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from bench.common import options, report
from cuadrilla.link.base import Contribution, Hello, Lease, Version
from cuadrilla.plan.predict import TEACHES, Crew, MachineSpec, Workload, predict, predict_alone, predict_crew
from cuadrilla.sync.auto import AutoRounds
from cuadrilla.sync.coordinator import Coordinator
from cuadrilla.sync.events import Action, Event, Finish, Merge, Merged, Received, Send, Tick
from cuadrilla.sync.membership import Rules
from cuadrilla.sync.work import Rounds

TFLOPS = {"4070 Ti": 40.0, "3050": 4.8, "M2": 1.25, "CPU": 0.2}
"""Assumed speed in training, in TFLOP/s."""
CREWS = {"unequal": ("4070 Ti", "3050", "M2", "CPU"), "equal": ("3050",) * 4, "apart": ("3050", "M2", "CPU")}
"""The first machine also coordinates. In `apart` another machine coordinates, which does not train."""
LINKS = {"100 Mbit/s": 11.75e6, "1 Gbit/s": 117.5e6, "10 Gbit/s": 1175e6}
WEIGHTS = 124e6  # of the model; bytes and operations are both proportional to them
UNIT_TOKENS, UNITS_PER_STEP, NUM_STEPS = 4096, 64, 10**9
WARM_UP = 10
"""Rounds in which the coordinator measures its crew; they do not count."""


@dataclass(kw_only=True)
class Flow:
    """A transfer. `left`: bytes; `most`: bytes per second of the machine's own link; `then` is called at the end."""

    left: float
    most: float
    then: Callable[[], None]
    rate: float = 0.0


@dataclass(kw_only=True)
class World:
    """A virtual clock with its future events, and the coordinator's link in both directions."""

    bytes_per_second: float
    now: float = 0.0
    later: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    flows: dict[str, list[Flow]] = field(default_factory=lambda: {"down": [], "up": []})
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self.later, (self.now + seconds, next(self.numbers), then))

    def transfer(self, direction: str, num_bytes: float, *, most: float, then: Callable[[], None]) -> None:
        if math.isinf(most):
            return self.after(0.0, then)
        self.flows[direction].append(Flow(left=num_bytes, most=most, then=then))
        self._share(direction)

    def step(self) -> None:
        """Advance the clock to the next event or to the end of a transfer."""
        flowing = [(flow.left / flow.rate, name, flow) for name, flows in self.flows.items() for flow in flows]
        first = min(flowing, key=lambda each: each[0], default=None)
        at = self.later[0][0] - self.now if self.later else math.inf
        seconds = min(at, first[0] if first else math.inf)
        for _, _, flow in flowing:
            flow.left -= flow.rate * seconds
        self.now += seconds
        if first and first[0] <= at:
            self.flows[first[1]].remove(first[2])
            self._share(first[1])
            first[2].then()
        else:
            heapq.heappop(self.later)[2]()

    def _share(self, direction: str) -> None:
        """Divide the link fairly: what a transfer cannot use of its part goes to the others."""
        left, flows = self.bytes_per_second, sorted(self.flows[direction], key=lambda flow: flow.most)
        for index, flow in enumerate(flows):
            flow.rate = min(flow.most, left / (len(flows) - index))
            left -= flow.rate


@dataclass(kw_only=True)
class Worker:
    spec: MachineSpec
    waiting: "deque[Lease]" = field(default_factory=deque)
    has_version: bool = True
    busy: bool = False


class Run:
    """A simulated training of this crew with the product's coordinator."""

    def __init__(self, crew: Crew, work: Workload, *, rounds: Rounds) -> None:
        self.world, self.work = World(bytes_per_second=crew.bytes_per_second), work
        self.workers = {machine.name: Worker(spec=machine) for machine in crew.machines}
        self.step_seconds = work.step_cost_tokens / crew.coordinator.tokens_per_second
        self.committed: list[tuple[float, int, float]] = []
        """Time and steps of each commit, and how much they lower the loss beside exact steps (1 if of one machine)."""
        rules = Rules(
            units_per_step=work.units_per_step,
            step_tokens=work.units_per_step * work.unit_tokens,
            num_steps=NUM_STEPS,
            quorum=len(self.workers),
        )
        self.coordinator = Coordinator(rules=rules, rounds=rounds)

    def train(self, *, rounds: int) -> tuple[float, float]:
        """Tokens per second after the warm-up; the same with each round weighted by how much it lowers the loss."""
        self._do(self.coordinator.start())
        for name, worker in self.workers.items():
            self._hear(Received(worker=name, message=Hello(speed_hint=worker.spec.tokens_per_second)))
        self._tick()
        while len(self.committed) < WARM_UP + rounds:
            self.world.step()
        seconds = self.committed[-1][0] - self.committed[WARM_UP - 1][0]
        tokens = self.work.units_per_step * self.work.unit_tokens / seconds
        rounds_made = self.committed[WARM_UP:]
        learned = sum(steps * taught for _, steps, taught in rounds_made)
        return tokens * sum(steps for _, steps, _ in rounds_made), tokens * learned

    def _tick(self) -> None:
        self._hear(Tick())
        self.world.after(1.0, self._tick)

    def _hear(self, event: Event) -> None:
        self._do(self.coordinator.handle(event, self.world.now))

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send(message=Version()):
                    self.workers[action.worker].has_version = False
                case Send(message=Lease() as lease):
                    self.workers[action.worker].waiting.append(lease)
                    self._go_on(self.workers[action.worker])
                case Merge():
                    self.world.after(self.step_seconds, partial(self._merged, action))
                case Finish():
                    raise AssertionError("the run is complete")

    def _merged(self, merge: Merge) -> None:
        several = len({answer.grant.worker for answer in merge.answers}) > 1
        self.committed.append((self.world.now, merge.steps, TEACHES[merge.steps] if several else 1.0))
        self._hear(Merged())

    def _go_on(self, worker: Worker) -> None:
        if worker.busy or not worker.waiting:
            return
        worker.busy, spec = True, worker.spec
        lease, began = worker.waiting.pop(), self.world.now
        worker.waiting.clear()
        tokens = len(lease.units) * self.work.unit_tokens
        local_steps = lease.steps * self.work.step_cost_tokens if lease.steps > 1 else 0.0
        num_bytes = (self.work.window_bytes if lease.steps > 1 else self.work.exact_bytes) / 2
        computing = (tokens + local_steps) / spec.tokens_per_second
        most = spec.bytes_per_second

        def compute() -> None:
            worker.has_version = True
            self.world.after(computing + 2 * spec.delay_seconds, upload)

        def upload() -> None:
            self.world.transfer("up", num_bytes, most=most, then=answer)

        def answer() -> None:
            worker.busy, seconds = False, self.world.now - began
            said = Contribution(
                lease_id=lease.lease_id, tokens=tokens, loss_sum=0.0, tensors={}, transfer_seconds=seconds - computing
            )
            self._hear(Received(worker=spec.name, message=said))
            self._go_on(worker)

        if worker.has_version:
            compute()
        else:
            self.world.transfer("down", num_bytes, most=most, then=compute)


def crew_of(names: Sequence[str], *, bytes_per_second: float, apart: bool = False) -> Crew:
    machines = [
        MachineSpec(
            name=f"{number} {name}",
            tokens_per_second=TFLOPS[name] * 1e12 / (6 * WEIGHTS),
            **({} if number == 0 and not apart else {"bytes_per_second": bytes_per_second, "delay_seconds": 0.001}),
        )
        for number, name in enumerate(names)
    ]
    return Crew(machines=machines, bytes_per_second=bytes_per_second)


def workload() -> Workload:
    """Bytes as `train/measure.py` finds them for a GPT-2: per weight 4 + 4 in exact steps, about 5.2 in windows."""
    return Workload(
        num_steps=NUM_STEPS,
        units_per_step=UNITS_PER_STEP,
        unit_tokens=UNIT_TOKENS,
        step_cost_tokens=0.01 * UNITS_PER_STEP * UNIT_TOKENS,
        exact_bytes=round(8 * WEIGHTS),
        window_bytes=round(5.2 * WEIGHTS),
    )


def cell(crew: Crew, work: Workload, *, rounds: int) -> dict[str, float | int | bool]:
    """Predicted and simulated figures of one crew on one link."""
    alone = predict_alone(crew.best, work).tokens_per_second
    gains, errors = {0: 1.0}, {}
    for steps in TEACHES:
        fixed = Run(crew, work, rounds=Rounds(steps=steps))
        rate, learned = fixed.train(rounds=rounds)
        errors[steps] = predict_crew(crew, work, steps=steps, alone=alone).tokens_per_second / rate - 1
        gains[steps] = learned / alone
    chosen = predict(crew, work)[0].steps
    auto = Run(crew, work, rounds=AutoRounds(window_bytes=work.window_bytes / work.exact_bytes))
    _, learned = auto.train(rounds=rounds)
    return {
        "chosen": chosen,
        "gain": gains[chosen],
        "ceiling": crew.ceiling,
        "chosen is best": gains[chosen] * 1.02 >= max(gains.values()),
        "auto": learned / alone,
        "auto ends with": auto.committed[-1][1],
        "best": max(gains.values()),
        "error of exact": errors[1],
        "error of windows of 8": errors[8],
    }


def main() -> None:
    given = options(__doc__, rounds=20, nodes=[2, 8, 32, 64])
    cells, many = {}, {}
    for (crew, names), (link, rate) in itertools.product(CREWS.items(), LINKS.items()):
        made = crew_of(names, bytes_per_second=rate, apart=crew == "apart")
        name = f"{crew}, {link}"
        cells[name] = cell(made, workload(), rounds=given.rounds)
        print(name, cells[name], file=sys.stderr, flush=True)
    for number in given.nodes:
        began = time.perf_counter()
        made = crew_of(("3050",) * number, bytes_per_second=LINKS["1 Gbit/s"])
        run = Run(made, workload(), rounds=Rounds(steps=16))
        many[str(number)] = run.train(rounds=3)[0] / made.best.tokens_per_second
        print(number, many[str(number)], f"{time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    errors = [abs(each[key]) for each in cells.values() for key in ("error of exact", "error of windows of 8")]
    report(
        "scale",
        cells=cells,
        auto_of_the_best={
            "median": statistics.median(each["auto"] / each["best"] for each in cells.values()),
            "least": min(each["auto"] / each["best"] for each in cells.values()),
        },
        auto_never_slower_than_alone=all(each["auto"] >= 0.98 for each in cells.values()),
        chosen_is_best=sum(bool(each["chosen is best"]) for each in cells.values()) / len(cells),
        error={"median": statistics.median(errors), "most": max(errors)},
        times_one_machine_windows_of_16=many,
    )


if __name__ == "__main__":
    main()
