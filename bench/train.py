"""Training speed of cuadrilla beside transformers' GPT2LMHeadModel in its usual fp32 loop.

    python -m bench.train --size small      # 124M, vocabulary 50,257
    python -m bench.train --size mini       # about 10M, vocabulary 8,192

Both use AdamW, the same batch, vocabulary, length and threads, and no dropout. They make steps by turns: cuadrilla of
stories, transformers of random tokens, which does not matter to speed. Cuadrilla runs as a user gets it, in the
precision that it chooses, with fused AdamW. Transformers runs as in its documentation: fp32, `loss.backward()`,
`clip_grad_norm_`, `torch.optim.AdamW`. The first two of `--steps` pairs do not count. `speedup`: median of the ratios
of seconds, pair by pair.
"""

import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from bench.common import options, ratios, report, run_text, stories, summary, timed
from cuadrilla.config import PRESETS
from cuadrilla.crew.local import run_local
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import resolve
from cuadrilla.train.setup import assemble, make_task
from cuadrilla.train.sinks import Scalars, Sink

SIZES = {  # vocabulary, context, sequences in a batch
    "micro": (1024, 256, 16),
    "mini": (8192, 512, 8),
    "small": (50_257, 512, 4),
}


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


class Turns(Sink):
    """A sink that makes a step of `peer` after each of our steps, and keeps the seconds of both."""

    def __init__(self, peer: TransformersLoop) -> None:
        self._peer = peer
        self.ours: list[float] = []
        self.theirs: list[float] = []

    def log(self, _step: int, scalars: Scalars) -> None:
        self.ours.append(float(scalars["seconds"]))
        self.theirs.append(timed(self._peer.step))


def main() -> None:
    given = options(__doc__, size="mini", steps=12, threads=torch.get_num_threads())
    vocab, context, batch = SIZES[given.size]
    torch.set_num_threads(given.threads)
    turns = Turns(TransformersLoop(given.size, vocab=vocab, context=context, batch=batch))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stories(folder / "data", number=2000)
        model = {"model.preset": given.size, "model.vocab": vocab, "model.context": context}
        length = {"train.steps": given.steps, "train.batch_sequences": batch, "train.unit_sequences": batch}
        as_usual = {"train.threads": given.threads, "train.precision": "auto", "checkpoint.every_seconds": 0}
        rest = {"data.folder": "data", "evaluate.sequences": 1, "sync.kind": "exact"}
        config = resolve(run_text(model | length | as_usual | rest)).config
        run_local(assemble(config, RunDir(folder), task=make_task(config, folder), sinks=[turns]))
    ours, theirs = turns.ours[2:], turns.theirs[2:]
    tokens = batch * context
    report(
        "train",
        size=given.size,
        batch=batch,
        context=context,
        vocabulary=vocab,
        ours_tokens_per_second=summary([tokens / seconds for seconds in ours]),
        transformers_tokens_per_second=summary([tokens / seconds for seconds in theirs]),
        speedup=ratios(theirs, ours),
    )


if __name__ == "__main__":
    main()
