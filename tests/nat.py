"""Machines behind a router that hides them, as WSL2 and Docker do: they can dial out, but cannot be dialled.

One member of `lan` becomes the router. Each machine behind it has a cable and a private network, 172.30.N.0/24. Its
packets leave the router with the router's address (masquerade). Needs root and iptables.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.lan import CARD, Member, ip, plug_in

INSIDE = "172.30."


@contextmanager
def hidden(router: Member, num_members: int, *, rate: str) -> Iterator[list[Member]]:
    """Make machines behind a router for which `masquerade` was called."""
    names = [f"{router.namespace}-in{index}" for index in range(1, num_members + 1)]
    made: list[str] = []
    try:
        for index, name in enumerate(names, start=1):
            ip("netns", "add", name)
            made.append(name)
            plug_in(name, address=f"{INSIDE}{index}.2", into=router.namespace, port=f"inside{index}", rate=rate)
            ip("-n", router.namespace, "addr", "add", f"{INSIDE}{index}.1/24", "dev", f"inside{index}")
            ip("-n", name, "route", "add", "default", "via", f"{INSIDE}{index}.1")
        yield [Member(f"{INSIDE}{i}.2", ("ip", "netns", "exec", name)) for i, name in enumerate(names, start=1)]
    finally:
        for name in made:
            ip("netns", "del", name)


def masquerade(router: Member) -> None:
    """Make the router forward packets; those that leave by its card get its address. Raises RuntimeError."""
    _run(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
    _run(router, "iptables", "-t", "nat", "-A", "POSTROUTING", "-o", CARD, "-j", "MASQUERADE")


def publish(router: Member, port: int, address: str) -> None:
    """Forward a port of the router to the same port of `address`, like a published port or a portproxy."""
    here = ["-d", router.address, "-p", "tcp", "--dport", str(port)]
    _run(router, "iptables", "-t", "nat", "-A", "PREROUTING", *here, "-j", "DNAT", "--to-destination", address)


def forget(router: Member) -> None:
    """Make the router lose all translations, like one that is switched off and on: it knows no old connection."""
    _run(router, "sysctl", "-qw", "net.netfilter.nf_conntrack_tcp_loose=0")
    flush = "from pyroute2 import NFCTSocket\nwith NFCTSocket() as connections: connections.flush()"
    _run(router, sys.executable, "-c", flush)


def _run(router: Member, *command: str) -> None:
    done = subprocess.run([*router.prefix, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or "no reason given").splitlines()[-1])
