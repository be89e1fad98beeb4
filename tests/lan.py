"""A small network inside this machine: network namespaces joined by a bridge, each with a card limited to a rate.

Each member of the network has an address (10.77.0.1, .2, ...) and a virtual card. `tc tbf` at both ends of its cable
limits what the card sends and receives. Needs root. At the end all namespaces are removed by name.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

CARD, LAN = "card", "10.77.0."
PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9}
FRAME_BYTES, SEGMENT_BYTES = 1514, 1448  # a full Ethernet frame as tbf counts it, and the TCP payload in it
BURST_BYTES, QUEUE_BYTES = 131072, 1_000_000  # a burst must exceed the 64 KiB that the kernel gives to a card at once
SLOW, SLOW_BURST_BYTES, SLOW_QUEUE_BYTES = 30e6, 16384, 200_000  # at lower rates the larger ones last up to a second


@dataclass(frozen=True)
class Member:
    """Where processes are started: `prefix` goes before their command. Without a prefix it is this machine itself."""

    address: str
    prefix: tuple[str, ...] = ()

    @property
    def namespace(self) -> str:
        return self.prefix[-1]


def bits_per_second(rate: str) -> float:
    """Convert a rate in tc's notation (`1gbit`); 0 means no limit."""
    return float(rate[:-4]) * PREFIXES[rate[-4]] if rate.endswith("bit") else float(rate)


def ceiling_bytes_per_second(rate: str) -> float | None:
    """Bytes of TCP payload per second that fit through the limit, before TLS and HTTP/2; None without a limit."""
    return bits_per_second(rate) / 8 * SEGMENT_BYTES / FRAME_BYTES or None


def can_shape(rate: str) -> bool:
    """Whether `lan` makes a limited network, which needs root and a rate other than 0."""
    return os.geteuid() == 0 and bits_per_second(rate) > 0


@contextmanager
def lan(num_members: int, *, rate: str) -> Iterator[list[Member]]:
    """Make a network of limited cards. Where `can_shape` is false all members are this machine's loopback."""
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
            plug_in(name, address=f"{LAN}{index}", into=switch, port=f"port{index}", rate=rate)
            ip("-n", switch, "link", "set", f"port{index}", "master", "bridge")
        yield [Member(f"{LAN}{i}", ("ip", "netns", "exec", name)) for i, name in enumerate(names, start=1)]
    finally:
        for name in made:
            ip("netns", "del", name)


def plug_in(name: str, *, address: str, into: str, port: str, rate: str) -> None:
    """Give a namespace a card with this address, and a cable to a `port` of the namespace `into`."""
    ip("-n", name, "link", "add", CARD, "type", "veth", "peer", "name", port, "netns", into)
    ip("-n", name, "addr", "add", f"{address}/24", "dev", CARD)
    ip("-n", name, "link", "set", "lo", "up")
    for place, device in ((name, CARD), (into, port)):
        ip("-n", place, "link", "set", device, "up")
        limit_rate(place, device, rate)


def limit_rate(place: str, device: str, rate: str) -> None:
    """Limit what a card sends from now on. To limit both directions of a cable, call it for both of its ends."""
    is_slow = bits_per_second(rate) < SLOW
    burst, queue = (SLOW_BURST_BYTES, SLOW_QUEUE_BYTES) if is_slow else (BURST_BYTES, QUEUE_BYTES)
    limits = ["rate", rate, "burst", str(burst), "limit", str(queue)]
    subprocess.run(["tc", "-n", place, "qdisc", "replace", "dev", device, "root", "tbf", *limits], check=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
