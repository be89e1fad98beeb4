"""What the product's loop costs: its whole path against a bare hand-written loop of the same model and precision.

    python -m bench.loop --size mini

Same model, precision, fused AdamW, batches and threads; one step of each in turn. `ratio` is bare seconds per step over
ours (1.0: no cost; the target is 0.98).
"""

import argparse
import tempfile
from pathlib import Path

import torch

from bench.common import Turns, configure, random_data, ratios, report, run_ours, summary, timed
from bench.train import RUN, SIZES
from cuadrilla.config import Config
from cuadrilla.data.loader import collate
from cuadrilla.data.order import sequence_indices
from cuadrilla.train.precision import choose_device, choose_precision
from cuadrilla.train.setup import make_model, make_task


class BareLoop:
    """A training step as one would write it in a script of twenty lines."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.task = make_task(config, folder)
        self.device = choose_device("auto")
        self.model = make_model(self.task, seed=0).to(self.device)
        choose_precision("auto", device=self.device).apply(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.data = self.task.data("train")
        self.batch = config.train.batch_sequences
        self.position = 0

    def step(self) -> None:
        indices = sequence_indices(0, start=self.position, count=self.batch, length=len(self.data))
        self.position += self.batch
        batch = {k: v.to(self.device) for k, v in collate([self.data[int(i)] for i in indices]).items()}
        self.optimizer.zero_grad()
        loss, tokens = self.task.loss(self.model, batch)
        torch.autograd.backward([loss / tokens])
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="mini")
    parser.add_argument("--steps", type=int, default=40, help="pairs of steps; the first five are not counted")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    vocab, context, batch = SIZES[arguments.size]
    torch.set_num_threads(arguments.threads)
    text = RUN.format(
        size=arguments.size, context=context, batch=batch, steps=arguments.steps, threads=arguments.threads
    )
    config = configure(text)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_data(folder / "data", vocab_size=vocab, num_tokens=context * batch * 40)
        peer = BareLoop(config, folder)
        turns = Turns(lambda: timed(peer.step))
        run_ours(folder, config, turns)
    ours, bare = turns.ours[5:], turns.theirs[5:]
    report(
        "loop",
        size=arguments.size,
        batch=batch,
        context=context,
        ours_seconds=summary(ours),
        bare_seconds=summary(bare),
        ratio=ratios(bare, ours),
    )


if __name__ == "__main__":
    main()
