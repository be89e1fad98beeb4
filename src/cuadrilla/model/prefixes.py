"""Keys and values of prompts that were read, for prompts that begin alike: a chat's history, one long instruction.

Letters in tensor names: see `gpt2.py`; N positions of a prefix.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

LEAST_TOKENS = 32
"""A shorter prefix is read as fast as it is looked up and copied."""
MOST_PREFIXES = 64


@dataclass(frozen=True)
class Prefix:
    tokens_N: NDArray[np.int32]
    k_LHND: Tensor
    v_LHND: Tensor

    @property
    def num_bytes(self) -> int:
        return self.k_LHND.nbytes + self.v_LHND.nbytes


class Prefixes:
    """At most so many bytes of them; the one that was not used for longest goes first. Used by one thread."""

    def __init__(self, *, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, Prefix] = OrderedDict()
        self.num_bytes = 0

    def find(self, tokens: Sequence[int]) -> tuple[int, Prefix | None]:
        """How many of the first tokens are known, and where; 0 where it is not worth while."""
        wanted = np.asarray(tokens, np.int32)
        best, found = LEAST_TOKENS - 1, b""
        for key, prefix in self._kept.items():
            if (length := _alike(wanted, prefix.tokens_N)) > best:
                best, found = length, key
        if not found:
            return 0, None
        self._kept.move_to_end(found)
        return best, self._kept[found]

    def keep(self, tokens: Sequence[int], k_LHSD: Tensor, v_LHSD: Tensor) -> None:
        """What a row has read: a copy, unless it is in another one already. A prefix that it continues goes."""
        length = len(tokens)
        num_bytes = 2 * length * k_LHSD[:, :, :1].nbytes
        if length < LEAST_TOKENS or num_bytes > self._most_bytes:
            return
        new = np.asarray(tokens, np.int32)
        for key, prefix in list(self._kept.items()):
            alike = _alike(new, prefix.tokens_N)
            if alike == length:
                return
            if alike == len(prefix.tokens_N):
                self._drop(key)
        while self._kept and (self.num_bytes + num_bytes > self._most_bytes or len(self._kept) >= MOST_PREFIXES):
            self._drop(next(iter(self._kept)))
        self._kept[new.tobytes()] = Prefix(new, k_LHSD[:, :, :length].clone(), v_LHSD[:, :, :length].clone())
        self.num_bytes += num_bytes

    def _drop(self, key: bytes) -> None:
        self.num_bytes -= self._kept.pop(key).num_bytes


def _alike(one_N: NDArray[np.int32], other_N: NDArray[np.int32]) -> int:
    """How many tokens both begin with."""
    length = min(len(one_N), len(other_N))
    different = np.flatnonzero(one_N[:length] != other_N[:length])
    return int(different[0]) if len(different) else length
