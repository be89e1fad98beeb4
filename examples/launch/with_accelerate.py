"""The same regression with Hugging Face's Accelerate (pip install accelerate), which shares out the batches.

accelerate launch --multi_gpu --num_processes 2 with_accelerate.py
On CPUs: ACCELERATE_USE_CPU=true torchrun --standalone --nproc-per-node 2 with_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


def main() -> None:
    accelerator = Accelerator()
    random = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 20, generator=random)
    y = torch.sin(x[:, :1]) + 0.1 * torch.randn(4096, 1, generator=random)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    for epoch in range(1, EPOCHS + 1):
        for inputs, targets in batches:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        print(f"epoch {epoch}/{EPOCHS}  {len(batches)} batches here, loss of the last one {loss.item():.4f}")
    accelerator.print(f"{accelerator.num_processes} processes, {accelerator.distributed_type.value}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
