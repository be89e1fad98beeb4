"""Ray Train around an existing PyTorch loop: the CNN of mnist_cnn.py, on two workers, by DDP.

    pip install "cuadrilla[ray]"
    python ray_train_torch.py                                                 # two processes of this machine
    ray job submit --working-dir . -- python ray_train_torch.py --workers 4 --gpu --out /shared/ray

Each epoch ends with a checkpoint: two files of safetensors. The same command with more epochs continues from the last.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Ray reads them when it is imported. A cluster of this machine alone has a token, and its ports on the loopback.
os.environ.setdefault("RAY_AUTH_MODE", "token")
if "RAY_ADDRESS" not in os.environ:
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

import ray
import torch
from mnist_cnn import Digits, mnist, mnist_10k
from ray import train
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

TASKS: dict[str, Callable[[], Digits]] = {"mnist": mnist, "mnist_10k": mnist_10k}
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


def train_loop(settings: dict[str, Any]) -> None:
    """What each worker runs: the loop as it was, but for the two `prepare_` calls, the sampler's epoch and `report`."""
    torch.manual_seed(settings["seed"])
    context = train.get_context()
    task = TASKS[settings["data"]]()
    network = task.model()
    model = prepare_model(network)  # on its device, and in DDP if there are several workers
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings["lr"], weight_decay=0.01)
    begin = resume(network, optimizer)
    loader = prepare_data_loader(DataLoader(task.data("train"), batch_size=settings["batch"], shuffle=True))
    for epoch in range(begin, settings["epochs"]):
        if context.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)  # else every epoch has the order of the first
        for batch in loader:
            loss, count = task.loss(model, batch)
            optimizer.zero_grad()
            (loss / count).backward()
            optimizer.step()
        if context.get_world_rank() != 0:
            train.report({"epoch": epoch + 1})  # every worker reports, or the others wait for it
            continue
        with saved(network, optimizer, epoch=epoch + 1) as checkpoint:
            train.report({"epoch": epoch + 1, **held_out(task, network)}, checkpoint=checkpoint)


@torch.no_grad()
def held_out(task: Digits, network: nn.Module) -> dict[str, float]:
    device = next(network.parameters()).device
    batches = DataLoader(task.data("val"), batch_size=256)
    moved = ({name: tensor.to(device) for name, tensor in batch.items()} for batch in batches)
    return task.evaluate(network, moved)


@contextmanager
def saved(network: nn.Module, optimizer: torch.optim.Optimizer, *, epoch: int) -> Iterator[train.Checkpoint]:
    """A checkpoint without a pickle. The optimizer's other settings are in the code."""
    state: dict[int, dict[str, Tensor]] = optimizer.state_dict()["state"]
    tensors = {f"{number}.{name}": value for number, values in state.items() for name, value in values.items()}
    with tempfile.TemporaryDirectory() as folder:
        save_file(network.state_dict(), Path(folder) / MODEL)
        save_file(tensors, Path(folder) / OPTIMIZER)
        checkpoint = train.Checkpoint.from_directory(folder)
        checkpoint.set_metadata({"epoch": epoch})
        yield checkpoint


def resume(network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take up the last checkpoint of this run, if there is one; how many epochs it has seen."""
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return 0
    state: dict[int, dict[str, Tensor]] = {}
    with checkpoint.as_directory() as folder:
        network.load_state_dict(load_file(Path(folder) / MODEL))
        for key, tensor in load_file(Path(folder) / OPTIMIZER).items():
            number, _, name = key.partition(".")
            state.setdefault(int(number), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return int(checkpoint.get_metadata()["epoch"])


def connect() -> None:
    """The cluster whose job this is, or whose address is in RAY_ADDRESS; else one of this machine, for now."""
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:
        ray.init("local", dashboard_host="127.0.0.1", _node_ip_address="127.0.0.1")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the CNN of mnist_cnn.py with Ray Train.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a card for each worker")
    parser.add_argument("--data", choices=sorted(TASKS), default="mnist_10k")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="images of a worker in a step")
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("ray-results"), help="a folder that all machines share")
    settings = parser.parse_args()
    connect()
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={name: getattr(settings, name) for name in ("data", "epochs", "batch", "lr", "seed")},
        scaling_config=train.ScalingConfig(num_workers=settings.workers, use_gpu=settings.gpu),
        run_config=train.RunConfig(
            name="mnist",
            storage_path=str(settings.out.resolve()),
            failure_config=train.FailureConfig(max_failures=3),  # all workers start again from the last checkpoint
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    ray.shutdown()
    assert result.checkpoint is not None
    print(json.dumps({**result.metrics, "checkpoint": result.checkpoint.path}))


if __name__ == "__main__":
    main()
