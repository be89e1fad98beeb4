"""A small network inside this machine: namespaces joined by a bridge, every network card limited to a rate.

Each member has an address of its own (10.77.0.1, .2, ...) and a virtual card that sends and receives at no more than
the rate: `tc tbf` at both ends of its cable. Needs root. All namespaces are removed by name at the end.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

CARD, LAN = "card", "10.77.0."
PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9}
FRAME_BYTES, SEGMENT_BYTES = 1514, 1448  # what tbf counts of a full Ethernet frame, and the TCP payload in it
BURST_BYTES, QUEUE_BYTES = 131072, 1_000_000  # the first above a segment of 64 KiB as the kernel hands it to the card
SLOW, SLOW_BURST_BYTES, SLOW_QUEUE_BYTES = 30e6, 16384, 200_000  # where the others are a good part of a second


@dataclass(frozen=True)
class Member:
    """A place to start processes: `prefix` goes before the command. Without a namespace, this machine itself."""

    address: str
    prefix: tuple[str, ...] = ()

    @property
    def namespace(self) -> str:
        return self.prefix[-1]


def bits_per_second(rate: str) -> float:
    """Of tc's notation (`1gbit`); 0 for no limit."""
    return float(rate[:-4]) * PREFIXES[rate[-4]] if rate.endswith("bit") else float(rate)


def ceiling_bytes_per_second(rate: str) -> float | None:
    """TCP payload that fits through the limit, before TLS and HTTP/2; None without a limit."""
    return bits_per_second(rate) / 8 * SEGMENT_BYTES / FRAME_BYTES or None


def can_shape(rate: str) -> bool:
    """Whether there will be a network at all: needs root, and a rate."""
    return os.geteuid() == 0 and bits_per_second(rate) > 0


@contextmanager
def lan(num_members: int, *, rate: str) -> Iterator[list[Member]]:
    """Members of a shaped network; without root or rate all are this machine's loopback."""
    if not can_shape(rate):
        yield [Member("127.0.0.1")] * num_members
        return
    switch = f"cua-{os.getpid()}-switch"
    names = [f"cua-{os.getpid()}-{index}" for index in range(1, num_members + 1)]
    made: list[str] = []
    try:
        for name in (switch, *names):
            ip("netns", "add", name)
            made.append(name)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for index, name in enumerate(names, start=1):
            _plug_in(name, switch=switch, index=index, rate=rate)
        yield [Member(f"{LAN}{i}", ("ip", "netns", "exec", name)) for i, name in enumerate(names, start=1)]
    finally:
        for name in made:
            ip("netns", "del", name)


def _plug_in(name: str, *, switch: str, index: int, rate: str) -> None:
    port = f"port{index}"
    ip("-n", name, "link", "add", CARD, "type", "veth", "peer", "name", port, "netns", switch)
    ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    ip("-n", name, "addr", "add", f"{LAN}{index}/24", "dev", CARD)
    ip("-n", name, "link", "set", CARD, "up")
    ip("-n", name, "link", "set", "lo", "up")
    for place, device in ((name, CARD), (switch, port)):
        limit_rate(place, device, rate)


def limit_rate(place: str, device: str, rate: str) -> None:
    """What a card may send from now on; for both directions of a cable, both its ends."""
    is_slow = bits_per_second(rate) < SLOW
    burst, queue = (SLOW_BURST_BYTES, SLOW_QUEUE_BYTES) if is_slow else (BURST_BYTES, QUEUE_BYTES)
    limits = ["rate", rate, "burst", str(burst), "limit", str(queue)]
    subprocess.run(["tc", "-n", place, "qdisc", "replace", "dev", device, "root", "tbf", *limits], check=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
