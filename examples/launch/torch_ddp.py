"""A regression with torch's DistributedDataParallel: each process has its part of the data, all have one model.

torchrun --standalone --nproc-per-node 2 torch_ddp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 200


def main() -> None:
    use_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_gpu else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")

    random = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 20, generator=random)
    y = torch.sin(x[:, :1]) + 0.1 * torch.randn(4096, 1, generator=random)
    x, y = x[rank::num_ranks].to(device), y[rank::num_ranks].to(device)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(1, STEPS + 1):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}/{STEPS}  loss of this part {loss.item():.4f}")

    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    least, most = weights.clone(), weights.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if rank == 0:
        print(f"{num_ranks} processes, weights differ by {(most - least).max().item():g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
