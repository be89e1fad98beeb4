"""Who has which units, when a round is complete, and how contributions become the next version.

Moves named tensors and counts tokens; knows nothing of models, data or training.
"""
