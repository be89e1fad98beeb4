"""Which worker has which units, when a round is complete, and how contributions become the next version.

It moves named tensors and counts tokens, and knows nothing of models, data or training.
"""
