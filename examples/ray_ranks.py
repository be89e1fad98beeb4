"""Equal cards of a Ray cluster as the ranks of one run: Ray Train starts them, and they train as under torchrun.

`python ray_ranks.py RUN 4`: four ranks. The run folder is at the same path on all machines. If a rank dies, Ray starts
all of them again, and the run goes on from its newest checkpoint.
"""

import os
import socket
import sys
from functools import partial

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import cuadrilla


def train(run: str) -> None:
    with socket.create_server(("", 0)) as free:
        port = torch.tensor(free.getsockname()[1])
    torch.distributed.broadcast(port, 0)
    torch.distributed.destroy_process_group()  # Ray Train's; cuadrilla forms its own, at this port of rank 0
    os.environ["MASTER_PORT"] = str(int(port))
    cuadrilla.open_run(run).train(tell=print)


if __name__ == "__main__":
    ray.init(address="auto")
    run, cards = os.path.abspath(sys.argv[1]), "GPU" in ray.cluster_resources()
    scaling = ScalingConfig(num_workers=int(sys.argv[2]), use_gpu=cards)
    kept = RunConfig(storage_path=f"{run}/ray", failure_config=FailureConfig(max_failures=3))
    trainer = TorchTrainer(
        partial(train, run), torch_config=TorchConfig("gloo"), scaling_config=scaling, run_config=kept
    )
    trainer.fit()
