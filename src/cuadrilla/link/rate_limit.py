"""How often somebody may do something that costs us more than them: a number at once, then a number per second."""

MAX_KNOWN = 4096
"""Who was quiet longest is forgotten then, and begins anew."""


class RateLimit:
    """A pace for each name: an address, a node. Reads no clock; not thread-safe."""

    def __init__(self, *, per_second: float, at_once: float) -> None:
        self._per_second = per_second
        self._at_once = at_once
        self._left: dict[str, tuple[float, float]] = {}

    def admits(self, name: str, now: float) -> bool:
        """Whether `name` may do it at `now`, in seconds of any clock; it counts if so."""
        left, since = self._left.pop(name, (self._at_once, now))
        left = min(self._at_once, left + (now - since) * self._per_second)
        if len(self._left) >= MAX_KNOWN:
            del self._left[next(iter(self._left))]
        self._left[name] = (max(left - 1, 0.0), now)
        return left >= 1
