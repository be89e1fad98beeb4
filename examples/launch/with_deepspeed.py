"""The same regression with DeepSpeed's ZeRO, stage 2: gradients and optimizer state divided among the processes.

deepspeed --num_gpus 2 with_deepspeed.py
On CPUs: DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 with_deepspeed.py
"""

import os

import deepspeed
import torch
from torch import nn

STEPS, BATCH = 200, 64
SETTINGS = {
    "train_batch_size": BATCH,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},  # its own one is compiled first
    "zero_optimization": {"stage": 2},
}


def main() -> None:
    deepspeed.init_distributed()
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    random = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 20, generator=random)
    y = torch.sin(x[:, :1]) + 0.1 * torch.randn(4096, 1, generator=random)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=SETTINGS)
    x, y = x[rank::num_ranks].to(engine.device), y[rank::num_ranks].to(engine.device)
    size = BATCH // num_ranks
    for step in range(1, STEPS + 1):
        first = step * size % (len(x) - size)
        loss = nn.functional.mse_loss(engine(x[first : first + size]), y[first : first + size])
        engine.backward(loss)
        engine.step()
        if step % 50 == 0:
            print(f"step {step}/{STEPS}  loss of this part {loss.item():.4f}")
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"{num_ranks} processes, weights sum to {total:.6f}")


if __name__ == "__main__":
    main()
