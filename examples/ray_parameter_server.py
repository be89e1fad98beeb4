"""A parameter server in plain Ray: `python ray_parameter_server.py`, on the running cluster or on this machine alone.

`python ray_parameter_server.py 2` without cards: Ray is told that there are two, and the computing is the processor's.
Each worker computes gradients on its own device; the server adds them up by their numbers of examples, as machines of
unequal speed need it. One worker reserves a card, one reserves two processors. This is all that it does: a worker that
dies ends the run, and nothing is saved. A crew does the rest, on a Ray cluster by `ray_crew.py`.
"""

import sys
from typing import Any

import ray
import torch
from torch import nn


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))


class Worker:
    def __init__(self, seed: int, examples: int) -> None:
        self.device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        self.model, self.random = make_model().to(self.device), torch.Generator().manual_seed(seed)
        self.examples = examples

    def gradients(self, weights: dict[str, torch.Tensor]) -> tuple[int, float, list[torch.Tensor]]:
        """Number of examples, sum of their losses, gradients of that sum."""
        self.model.load_state_dict(weights)
        x = torch.randn(self.examples, 8, generator=self.random).to(self.device)
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().sum()
        found = torch.autograd.grad(loss, list(self.model.parameters()))
        return self.examples, loss.item(), [gradient.cpu() for gradient in found]


def train(workers: list[Any], steps: int) -> list[float]:
    """The mean loss at each step."""
    model, losses = make_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        weights = ray.put(model.state_dict())
        counts, sums, gradients = zip(*ray.get([worker.gradients.remote(weights) for worker in workers]), strict=True)
        for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack(parts).sum(0) / sum(counts)
        optimizer.step()
        losses.append(sum(sums) / sum(counts))
    return losses


if __name__ == "__main__":
    ray.init(num_gpus=int(sys.argv[1]) if len(sys.argv) > 1 else None)
    gpu, cpu = ray.remote(num_gpus=1, num_cpus=0)(Worker), ray.remote(num_cpus=2)(Worker)
    both = [gpu.remote(seed=1, examples=48), cpu.remote(seed=2, examples=16)]
    found, total, free = train(both, steps=100), ray.cluster_resources(), ray.available_resources()
    print(f"loss {found[0]:.3f} -> {found[-1]:.3f}")
    print(
        *(f"{name}: {total[name] - free.get(name, 0):g} of {total[name]:g} reserved" for name in ("CPU", "GPU")),
        sep=", ",
    )
