"""What holds a language model back that reads its text many times: a weight decay that follows the number of epochs.

The rule was measured with `gpt2-micro` on Don Quijote (docs/experiments.md, 2026-11-23).
"""

FEW_EPOCHS = 2.0
"""Below this each sequence is as good as new."""
DECAY = 0.3
"""Decoupled, times the learning rate: some three times what is usual for a text that is read once."""


def weight_decay(epochs: float) -> float:
    return DECAY if epochs >= FEW_EPOCHS else 0.0
