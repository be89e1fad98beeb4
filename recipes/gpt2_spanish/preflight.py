"""Try whether the machines reach each other in both directions, as torch's ranks must; prints the network card to use.

python preflight.py ADDRESS PORT MACHINES NUMBER SECONDS [again]: all meet at torch's store of number 0, which calls
each at the address that Gloo would name. The first time, number 0 must answer within 10 s, if only with a refusal.
"""

import ipaddress
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore

from cuadrilla.cli.output import emit, report_error
from cuadrilla.errors import LinkError
from cuadrilla.host.card import addresses
from cuadrilla.messages import Message

CREW = "a crew needs one open port: `cuadrilla up RUN --listen {host}` there, `cuadrilla join` on the other machines"
CALL_SECONDS, REACHED = 10, "reached"


def call_back(store: TCPStore, machines: int) -> str:
    number, address = 0, ""
    try:
        for number in range(1, machines):
            store.get(f"machine {number}")
        for number in range(1, machines):
            address, port = store.get(f"machine {number}").decode().split()
            socket.create_connection((address, int(port)), timeout=CALL_SECONDS).close()
    except RuntimeError:
        return Message("machine {number} did not come in time", number=number)
    except OSError as error:
        text = "machine {number} reaches this one, but not the other way round: {address}: {reason}"
        return Message(text, number=number, address=address, reason=error.strerror or error)
    return REACHED


def meet(host: str, port: int, machines: int, number: int, own: str, seconds: float) -> str:
    """What number 0 has found. Raises RuntimeError without its store, or with one that a training has left."""
    with socket.create_server((own, 0)) as listener:
        store = TCPStore(host, port, None, number == 0, timedelta(seconds=seconds), wait_for_workers=False)
        if number > 0:
            store.set_timeout(timedelta(seconds=seconds + 2 * CALL_SECONDS))  # what number 0 finds at the very end
            store.set(f"machine {number}", f"{own} {listener.getsockname()[1]}")
            found = store.get("found").decode()
            store.set(f"told {number}", "")
        else:
            store.set("found", found := call_back(store, machines))
            with suppress(RuntimeError):
                store.wait([f"told {other}" for other in range(1, machines)], timedelta(seconds=CALL_SECONDS))
        return found


def main(name: str, port: int, machines: int, number: int, seconds: float, *, again: bool) -> str:
    """The card that leads to number 0. Raises OSError."""
    host, deadline = socket.gethostbyname(name), time.monotonic() + seconds
    with socket.socket(type=socket.SOCK_DGRAM) as way:
        way.connect((host, port))  # sends nothing
        own = way.getsockname()[0]
    if ipaddress.ip_address(host).is_global or (number == 0 and own != host):
        raise OSError(Message("{host} must be the private address of machine 0", host=host))
    if number > 0 and not again:
        with suppress(ConnectionRefusedError):  # it is there, and starts later
            socket.create_connection((host, port), timeout=CALL_SECONDS).close()
    while True:
        try:
            found = meet(host, port, machines, number, own, max(deadline - time.monotonic(), 1))
        except RuntimeError as error:
            if number == 0 or time.monotonic() > deadline:
                raise OSError(str(error).splitlines()[0]) from None
            time.sleep(0.5)
        else:
            break
    if found != REACHED:
        raise OSError(found)
    return next(card for card, found in addresses().items() if own in found)


if __name__ == "__main__":
    try:
        emit("{card}", card=main(sys.argv[1], *map(int, sys.argv[2:6]), again="again" in sys.argv[6:]))
    except OSError as error:
        reason = error.args[0] if len(error.args) == 1 else error
        report_error(LinkError("the machines cannot meet: {reason}", reason=reason, hint=CREW, host=sys.argv[1]))
        sys.exit(LinkError.exit_code)
