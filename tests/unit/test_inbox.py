"""Which of the arrived messages a worker reads: no outdated ones, and no lease before the version that it is for."""

import pytest

from cuadrilla.errors import LinkError
from cuadrilla.link.base import Lease, Stop, Version
from cuadrilla.link.inproc import Inbox

OLD, NEW, NEWEST = (Version(version=number) for number in (1, 2, 3))


def lease(version: int) -> Lease:
    return Lease(lease_id=version, version=version, units=(version,), planned_tokens=1)


def read(*events) -> list[object]:
    inbox = Inbox()
    for event in events:
        inbox.put(event)
    found: list[object] = []
    while not isinstance(found[-1] if found else None, Stop):
        found.append(inbox.next_event())
    return found[:-1]


@pytest.mark.parametrize(
    ("come", "counts"),
    [
        ((OLD, lease(1), NEW), [OLD, lease(1), NEW]),
        ((OLD, lease(1), NEW, NEWEST), [OLD, lease(1), NEWEST]),
        ((OLD, lease(1), NEW, lease(2), NEWEST), [NEW, lease(2), NEWEST]),
        ((lease(1), NEW), [lease(1), NEW]),
        ((OLD, NEW), [NEW]),
    ],
)
def test_what_is_outdated_is_left_out(come, counts):
    assert read(*come, Stop(reason="done")) == counts


def test_the_end_of_a_session_stays():
    inbox = Inbox()
    inbox.put(OLD)
    inbox.put(LinkError("gone"))
    assert inbox.next_event() == OLD
    for _ in range(2):
        assert inbox.interrupted()
        with pytest.raises(LinkError, match="gone"):
            inbox.next_event()
