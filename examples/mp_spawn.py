"""Two processes train one model with `torch.multiprocessing.spawn` and DistributedDataParallel, on this machine.

    python mp_spawn.py
    python mp_spawn.py --nprocs 1 --epochs 3    # the same model, up to rounding

This is what many guides begin with, on the data of mlp_regression.py. Each process gets every second example; DDP takes
the mean of their gradients, so all have the same weights after each step, and a hash of them is printed to show it.
Gloo meets on 127.0.0.1, where no other machine reaches it. Everything else is left to whoever writes such a file: a
process that dies, a checkpoint, a slower machine. `cuadrilla train mlp.toml` has these; examples/README.md compares.
"""

import argparse
import hashlib
import os
import socket
import sys

import torch
import torch.distributed as dist
from mlp_regression import Examples, Regression
from torch.nn.parallel import DistributedDataParallel

BATCH = 64  # examples in a step, over all processes together


def train(rank: int, nprocs: int, port: int, epochs: int) -> None:
    """One process. `spawn` imports this file anew and calls this function with a number of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=nprocs)
    torch.manual_seed(0)  # the same first weights everywhere; DDP would send those of number 0 anyway
    task = Regression()
    model = DistributedDataParallel(task.model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    examples = task.data("train")
    x, y = torch.from_numpy(examples.x), torch.from_numpy(examples.y)
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for step in order[: len(x) // BATCH * BATCH].split(BATCH):
            mine = step[rank::nprocs]
            loss, _ = task.loss(model, {"x": x[mine], "y": y[mine]})
            optimizer.zero_grad()
            (loss / len(mine)).backward()  # here the processes add up their gradients
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch + 1}/{epochs}  held-out loss {held_out_loss(task, model.module):.4f}", flush=True)
    report(rank, nprocs, model.module)
    dist.destroy_process_group()
    sys.stdout.flush()
    # DDP keeps Gloo's threads beyond the end of its group. One that frees a tensor while Python shuts down can abort
    # the process (`terminate called without an active exception`), so it ends without that.
    os._exit(0)


def held_out_loss(task: Regression, model: torch.nn.Module) -> float:
    held_out: Examples = task.data("val")
    with torch.no_grad():
        loss, count = task.loss(model, {"x": torch.from_numpy(held_out.x), "y": torch.from_numpy(held_out.y)})
    return float(loss) / count


def report(rank: int, nprocs: int, model: torch.nn.Module) -> None:
    """SHA-256 over the weights of each process, printed by the first one: they must be equal."""
    digest = hashlib.sha256(b"".join(weights.detach().numpy().tobytes() for weights in model.parameters())).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    hashes = [torch.empty_like(mine) for _ in range(nprocs)]
    dist.all_gather(hashes, mine)
    if rank == 0:
        for number, each in enumerate(hashes):
            print(f"process {number}: weights {each.numpy().tobytes().hex()[:16]}")
        if any(not torch.equal(each, mine) for each in hashes):
            raise SystemExit("the processes have different weights")


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    if not 1 <= arguments.nprocs <= BATCH:
        parser.error(f"--nprocs {arguments.nprocs} is out of range: 1 to {BATCH}, since each process needs an example")
    given = (arguments.nprocs, free_port(), arguments.epochs)
    torch.multiprocessing.spawn(train, args=given, nprocs=arguments.nprocs)


if __name__ == "__main__":
    main()
