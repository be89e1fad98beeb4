"""Training speed: cuadrilla's whole path against transformers' GPT2LMHeadModel in its usual fp32 loop.

    python -m bench.train --size small      # 124M, vocabulary 50,257
    python -m bench.train --size mini       # about 10M, vocabulary 8,192

AdamW in both, the same batch, vocabulary, length and threads; no dropout; one step of each in turn. Ours in the
precision it chooses by itself, with fused AdamW, as a user gets it; theirs as in its documentation: fp32,
`loss.backward()`, `clip_grad_norm_`, `torch.optim.AdamW`. Prints one JSON object; `speedup` is the median of the
pairwise ratios of seconds per step.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from bench.common import Turns, configure, random_data, ratios, report, run_ours, summary, timed
from cuadrilla.config import PRESETS

SIZES = {  # vocabulary, context, sequences in a batch
    "micro": (1024, 256, 16),
    "mini": (8192, 512, 8),
    "small": (50_257, 512, 4),
}

RUN = """
[data]
folder = "data"
[model]
preset = "{size}"
context = {context}
[train]
steps = {steps}
batch_sequences = {batch}
unit_sequences = {batch}
threads = {threads}
[optim]
kind = "adamw"
[checkpoint]
every_seconds = 0
[evaluate]
every_tokens = 1_000_000_000_000
sequences = 1
[sample]
tokens = 0
"""


class TransformersLoop:
    """The loop of the transformers documentation, one step at a time."""

    def __init__(self, size: str, *, vocab: int, context: int, batch: int) -> None:
        layers, heads, width, _ = PRESETS[size]  # type: ignore[index]
        config = GPT2Config(
            vocab_size=vocab, n_positions=context, n_layer=layers, n_head=heads, n_embd=width,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        self.ids = torch.randint(0, vocab, (batch, context))

    def step(self) -> None:
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="mini")
    parser.add_argument("--steps", type=int, default=12, help="pairs of steps; the first two are not counted")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    vocab, context, batch = SIZES[arguments.size]
    torch.set_num_threads(arguments.threads)
    peer = TransformersLoop(arguments.size, vocab=vocab, context=context, batch=batch)
    turns = Turns(lambda: timed(peer.step))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_data(folder / "data", vocab_size=vocab, num_tokens=context * batch * 40)
        text = RUN.format(
            size=arguments.size, context=context, batch=batch, steps=arguments.steps, threads=arguments.threads
        )
        run_ours(folder, configure(text), turns)
    ours, theirs = turns.ours[2:], turns.theirs[2:]
    tokens = batch * context
    report(
        "train",
        size=arguments.size,
        batch=batch,
        context=context,
        vocabulary=vocab,
        ours_tokens_per_second=summary([tokens / seconds for seconds in ours]),
        transformers_tokens_per_second=summary([tokens / seconds for seconds in theirs]),
        speedup=ratios(theirs, ours),
    )


if __name__ == "__main__":
    main()
