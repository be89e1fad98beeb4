"""What holds a language model back that reads its text many times: a weight decay that follows the number of epochs.

The rule was measured with `gpt2-micro` on a quarter of Don Quijote (docs/experiments.md, 2026-11-23).
"""

DECAYS = ((6.0, 0.3), (2.0, 0.1))
"""From so many epochs on, the decay, times the learning rate. Read once, each sequence is new: none."""


def weight_decay(epochs: float) -> float:
    return next((decay for least, decay in DECAYS if epochs >= least), 0.0)
