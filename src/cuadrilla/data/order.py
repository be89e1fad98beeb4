"""The order of the training data: position i of the run holds sequence f(seed, i), which depends on nothing else.

Each epoch is a keyed permutation of all sequences, computed position by position. It needs no state and no shuffled
list, is the same on every machine, and the place in the data is one integer. The permutation is a balanced Feistel
network of `ROUNDS` rounds over the smallest 2^(2k) that holds the data. A result outside the data is permuted again
until it falls inside (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The round
function is the SplitMix64 finalizer.
"""

import numpy as np
import numpy.typing as npt

ROUNDS = 6
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
GOLDEN = 0x9E3779B97F4A7C15
MASK64 = 2**64 - 1

Integers = npt.NDArray[np.uint64]


def sequence_indices(seed: int, *, start: int, count: int, length: int) -> npt.NDArray[np.int64]:
    """Sequence numbers (below `length`) at positions start .. start + count of the endless stream, shape (count,)."""
    assert min(start, count, length - 1) >= 0
    positions = range(start, start + count)
    result = np.empty(count, dtype=np.int64)
    for epoch in range(start // length, (start + max(count, 1) - 1) // length + 1):
        first = max(positions.start, epoch * length)
        last = min(positions.stop, (epoch + 1) * length)
        inside = np.arange(first - epoch * length, last - epoch * length, dtype=np.uint64)
        result[first - start : last - start] = _permute(inside, key=mix_int(seed ^ mix_int(epoch)), length=length)
    return result


def _permute(values: Integers, *, key: int, length: int) -> npt.NDArray[np.int64]:
    half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
    keys = [np.uint64(mix_int(key + (round_ + 1) * GOLDEN)) for round_ in range(ROUNDS)]
    result = _feistel(values, keys=keys, half_bits=half_bits)
    while (outside := result >= length).any():
        result[outside] = _feistel(result[outside], keys=keys, half_bits=half_bits)
    return result.astype(np.int64)


def _feistel(values: Integers, *, keys: list[np.uint64], half_bits: int) -> Integers:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (mixed(right + key) & mask)
    return (left << bits) | right


def mixed(values: Integers) -> Integers:
    """The finalizer of SplitMix64: every bit depends on every bit."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))


def mix_int(value: int) -> int:
    """The number that a SplitMix64 stream gives in this state; its next state is GOLDEN more."""
    value = (value + GOLDEN) & MASK64
    value = ((value ^ (value >> 30)) * int(_MULTIPLIERS[0])) & MASK64
    value = ((value ^ (value >> 27)) * int(_MULTIPLIERS[1])) & MASK64
    return value ^ (value >> 31)
