"""How much loss windows cost beside exact steps: one process plays all lanes, so the network has no influence.

    python -m bench.lanes DATA_FOLDER [--speeds 8 4 2 1] [--steps 800] [--windows 4 8 16] [--bits 8]

`--speeds` are the units that each machine computes in a step of the crew. `alone` is the fastest machine, whose steps
have only its own units and take the same time. It also makes longer runs, each with its own schedule. They are the
scale: a `speed` is how many times longer the fastest machine alone trains for the same held-out loss. The `speed` of
`exact` is the ideal. A run in windows begins with exact steps; `--exact` is their part of the steps. Losses are in nats
per token, over 256 held-out sequences at the end. `--bits` on the wire: 8 or 32. `--optim`: muon or adamw.
"""

import copy
import itertools
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.common import configure, options, report, run_text
from cuadrilla.data.loader import UnitLoader
from cuadrilla.link.base import Contribution, Lease
from cuadrilla.model.task import loss_of
from cuadrilla.sync.events import Answer
from cuadrilla.sync.kinds import windows
from cuadrilla.sync.ledger import Grant
from cuadrilla.sync.strategy import Stepper, Sums, trainable
from cuadrilla.train.loop import add_loss
from cuadrilla.train.setup import equip, make_task

LONGER = (1.0, 1.5, 2.0)
"""Lengths of the runs of the fastest machine alone, as multiples of the crew's time."""
HELD_OUT = 256

SHAPE = {"model.layers": 3, "model.heads": 4, "model.width": 128}


class Play:
    """Model, optimizer and data of one run. `lanes`: the units of each lane in a step."""

    def __init__(self, data: Path, *, lanes: Sequence[int], steps: int, seed: int, length: int, optim: str) -> None:
        train = {"train.steps": steps, "train.batch_sequences": sum(lanes), "optim.kind": optim}
        more = {"run.seed": seed, "data.folder": data, "model.context": length}
        config = configure(run_text(SHAPE | train | more))
        self.lanes, self.steps = lanes, steps
        made = equip(config, make_task(config, data), device="cpu")
        self.task, self.model, self.recipe = made.task, made.model, made.recipe
        self.params, self.step_tokens, device = trainable(self.model), made.length.step_tokens, made.device
        self.loader = UnitLoader(self.task.data("train"), seed=seed, unit_sequences=1, device=device)
        self.held_out = UnitLoader(self.task.data("val"), seed=0, unit_sequences=1, device=device)

    def new_optimizer(self) -> Stepper:
        return self.recipe.make_optimizer(self.params)

    def step(self, optimizer: Stepper, units: range, *, step: int) -> int:
        """Make one optimizer step over these units, and return the number of their tokens."""
        for parameter in self.params.values():
            parameter.grad = None
        loss, tokens = loss_of(self.task, self.model, self.loader.batch(self.loader.indices(units)))
        (loss / tokens).backward()
        if self.recipe.clip_norm:
            nn.utils.clip_grad_norm_(self.params.values(), self.recipe.clip_norm)
        optimizer.step(self.recipe.lr_factor(step + 1))
        return tokens

    @torch.no_grad()
    def loss(self) -> float:
        """Held-out loss in nats per token."""
        self.model.eval()
        total = count = 0.0
        for first in range(0, HELD_OUT, 32):
            batch = self.held_out.batch(self.held_out.indices(range(first, first + 32)))
            with torch.enable_grad():
                loss, tokens = loss_of(self.task, self.model, batch)
            total, count = total + float(loss.detach()), count + tokens
        self.model.train()
        return total / count


def train(play: Play, *, window: int = 0, bits: int = 8, exact_part: float = 1.0) -> float:
    """Train, and return the held-out loss. After the exact part come windows of `window` steps; 0 means only exact."""
    play.model.train()
    optimizer, step, size = play.new_optimizer(), 0, sum(play.lanes)
    exact_until = math.ceil(exact_part * play.steps / window) * window if window else play.steps
    while step < exact_until:
        play.step(optimizer, range(step * size, (step + 1) * size), step=step)
        step += 1
    lanes = Lanes(play, optimizer, steps=max(window, 1), bits=bits)
    while step < play.steps:
        steps = min(window, play.steps - step)
        lanes.window(step=step, steps=steps)
        step += steps
    return play.loss()


class Lanes:
    """Both halves of the product's strategy. One worker half computes lane after lane; then the merge half merges."""

    def __init__(self, play: Play, optimizer: Stepper, *, steps: int, bits: int) -> None:
        self._play, strategy, recipe = play, windows(steps=steps, bits=bits), play.recipe
        self._model = copy.deepcopy(play.model)
        self._worker = strategy.worker(play.model, recipe)
        self._merge = strategy.merge(self._model, recipe)
        self._merge.load_state_tensors(optimizer.state_tensors())

    def window(self, *, step: int, steps: int) -> None:
        """Compute all lanes of a window, merge them, and load the merged weights into the model."""
        play, answers, first = self._play, list[Answer](), step * sum(self._play.lanes)
        planned = steps * play.step_tokens
        self._worker.apply(self._merge.version(steps=steps))
        for number, lane in enumerate(play.lanes):
            units = tuple(range(first, first + steps * lane))
            first += steps * lane
            lease = Lease(
                lease_id=number, version=step, units=units, planned_tokens=planned, steps=steps,
                whole=len(play.lanes) == 1,
            )  # fmt: skip
            self._worker.begin(lease)
            sums = Sums()
            for begin in range(0, len(units), lane):
                add_loss(sums, *self._pass(units[begin : begin + lane], planned))
                self._worker.local_step(sums)
            said = Contribution(
                lease_id=number, tokens=sums.tokens, loss_sum=sums.loss, tensors=self._worker.contribute()
            )
            answers.append(Answer(grant=Grant(lease_id=number, worker=str(number), units=units), contribution=said))
        norm = self._merge.reduce(answers, planned_tokens=planned).norm
        self._merge.step(norm=norm, version=step + steps, steps=steps)
        play.model.load_state_dict(self._model.state_dict())

    def _pass(self, units: Sequence[int], planned: int) -> tuple[Tensor, int]:
        play = self._play
        loss, tokens = loss_of(play.task, play.model, play.loader.batch(play.loader.indices(units)))
        torch.autograd.backward([loss / planned])
        return loss, tokens


def times_longer(loss: float, alone: Mapping[float, float]) -> float:
    """How many times longer the fastest machine alone trains for this loss. `alone`: its losses by length of the run.
    They are interpolated over the logarithm of time; beyond the first and the last run their line is extended."""
    points = sorted(alone.items())
    pairs = list(itertools.pairwise(points))
    outside = pairs[0 if loss > points[0][1] else -1]
    (t0, l0), (t1, l1) = next((pair for pair in pairs if pair[0][1] >= loss >= pair[1][1]), outside)
    return math.exp(math.log(t0) + (l0 - loss) / (l0 - l1) * (math.log(t1) - math.log(t0)))


def main() -> None:
    given = options(
        __doc__, data=Path, speeds=[8, 4, 2, 1], steps=800, length=128, seeds=3, first_seed=0, exact=0.05,
        windows=[4, 8, 16], bits=8, optim="muon",
    )  # fmt: skip
    lanes, results = given.speeds, dict[str, list[float]]()
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        play = partial(Play, given.data.resolve(), seed=seed, length=given.length, optim=given.optim)
        alone = {}
        for times in LONGER:
            alone[times] = train(play(steps=round(times * given.steps), lanes=[max(lanes)]))
            print(f"seed {seed} alone x {times}: {alone[times]:.4f}", file=sys.stderr, flush=True)
        results.setdefault("alone", []).append(alone[1.0])
        for window in (0, *given.windows):
            name = f"windows of {window}" if window else "exact"
            run = play(steps=given.steps, lanes=lanes)
            loss = train(run, window=window, bits=given.bits, exact_part=given.exact)
            results.setdefault(name, []).append(loss)
            speed = times_longer(loss, alone)
            print(f"seed {seed} {name}: {loss:.4f}, speed {speed:.3f}", file=sys.stderr, flush=True)
            results.setdefault(f"speed of {name}", []).append(speed)
    report(
        "lanes",
        speeds=lanes,
        ceiling=sum(lanes) / max(lanes),
        steps=given.steps,
        tokens=given.steps * sum(lanes) * given.length,
        results={name: {"mean": statistics.mean(values), "each": values} for name, values in results.items()},
    )


if __name__ == "__main__":
    main()
