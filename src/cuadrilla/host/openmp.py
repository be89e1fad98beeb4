"""Threads of OpenMP, by which torch computes on several cores (libgomp's, on Linux)."""

import os
from collections.abc import MutableMapping

SPINS = "4000"
"""A tenth of a millisecond, as long as torch needs from one product to the next; libgomp's own choice is 300,000."""


def sleep_early(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let a thread that waits for the others of its pass sleep soon. To be called before torch is loaded.

    A thread that spins keeps the core which the others need. With libgomp's usual milliseconds each product, beside
    another program that computes, waits for the end of a time slice: small steps took up to fifty times as long there,
    with these three times (docs/experiments.md). What the user has set stays.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)
