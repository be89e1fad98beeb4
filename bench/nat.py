"""Machines behind a router that hides them, as WSL2 and Docker hide theirs: they dial out, nobody dials in.

A member of `lan` becomes the router. Each machine behind it has a cable and a private network, 172.30.N.0/24, and
leaves with the router's address (masquerade). The rules are set over netlink by pyroute2, inside the namespace of the
router: neither iptables nor nft needs to be installed. Needs root.
"""

import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.lan import CARD, Member, ip, limit_rate

INSIDE = "172.30."
TCP_PORT_OFFSET, TRANSPORT_HEADER = 2, 2  # the destination port in a TCP header; which header (NFT_PAYLOAD_*)
DESTINATION_NAT, IPV4 = 1, 2  # NFT_NAT_DNAT, NFPROTO_IPV4
SOURCE_PRIORITY, DESTINATION_PRIORITY = 100, -100  # as nft names them: srcnat, dstnat
LOOSE = Path("/proc/sys/net/netfilter/nf_conntrack_tcp_loose")


@contextmanager
def hidden(router: Member, num_members: int, *, rate: str) -> Iterator[list[Member]]:
    """Members behind `router`, which forwards already: `call(router, "masquerade")`."""
    names = [f"{router.namespace}-in{index}" for index in range(1, num_members + 1)]
    made: list[str] = []
    try:
        for index, name in enumerate(names, start=1):
            ip("netns", "add", name)
            made.append(name)
            _plug_in(name, router=router.namespace, index=index, rate=rate)
        yield [Member(f"{INSIDE}{i}.2", ("ip", "netns", "exec", name)) for i, name in enumerate(names, start=1)]
    finally:
        for name in made:
            ip("netns", "del", name)


def _plug_in(name: str, *, router: str, index: int, rate: str) -> None:
    port = f"inside{index}"
    ip("-n", name, "link", "add", CARD, "type", "veth", "peer", "name", port, "netns", router)
    ip("-n", router, "addr", "add", f"{INSIDE}{index}.1/24", "dev", port)
    ip("-n", router, "link", "set", port, "up")
    ip("-n", name, "addr", "add", f"{INSIDE}{index}.2/24", "dev", CARD)
    ip("-n", name, "link", "set", CARD, "up")
    ip("-n", name, "link", "set", "lo", "up")
    ip("-n", name, "route", "add", "default", "via", f"{INSIDE}{index}.1")
    for place, device in ((name, CARD), (router, port)):
        limit_rate(place, device, rate)


def plug(router: Member, index: int, state: str) -> None:
    """`down` pulls the cable of the hidden member number `index` at the router, `up` puts it back."""
    ip("-n", router.namespace, "link", "set", f"inside{index}", state)


def call(router: Member, function: str, *arguments: str) -> None:
    """Run one of the functions below in the router's namespace. Raises RuntimeError with the kernel's words."""
    script = f"import sys; from bench import nat; nat.{function}(*sys.argv[1:])"
    command = [*router.prefix, sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or "no reason given").splitlines()[-1])


def masquerade() -> None:
    """Forward packets, and give those that leave by the card its address."""
    from pyroute2.nftables.expressions import masq
    from pyroute2.nftables.main import NFTables

    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    with NFTables(nfgen_family=IPV4) as nft:
        nft.table("add", name="nat")
        nft.chain("add", table="nat", name="out", hook="postrouting", type="nat", priority=SOURCE_PRIORITY)
        nft.rule("add", table="nat", chain="out", expressions=[masq()])


def publish(here: str, port: str, address: str) -> None:
    """Lead what is sent to HERE:PORT, the router's, to the same port of `address`: a published port, a portproxy."""
    from pyroute2.nftables.expressions import genex, ipv4addr
    from pyroute2.nftables.main import NFTables

    lead = [
        genex("payload", {"dreg": 1, "base": TRANSPORT_HEADER, "offset": TCP_PORT_OFFSET, "len": 2}),
        genex("cmp", {"sreg": 1, "op": 0, "data": _data(struct.pack(">H", int(port)))}),
        genex("immediate", {"dreg": 1, "data": _data(socket.inet_aton(address))}),
        genex("nat", {"type": DESTINATION_NAT, "family": IPV4, "reg_addr_min": 1}),
    ]
    with NFTables(nfgen_family=IPV4) as nft:
        nft.chain("add", table="nat", name="in", hook="prerouting", type="nat", priority=DESTINATION_PRIORITY)
        nft.rule("add", table="nat", chain="in", expressions=[ipv4addr(dst=here), lead])


def forget() -> None:
    """Lose all translations, like a router that is switched off and on: old connections mean nothing to it."""
    from pyroute2 import NFCTSocket

    LOOSE.write_text("0")
    with NFCTSocket() as connections:
        connections.flush()


def _data(value: bytes) -> dict[str, list[tuple[str, bytes]]]:
    return {"attrs": [("NFTA_DATA_VALUE", value)]}
