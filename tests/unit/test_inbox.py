"""Which of the arrived messages a worker reads: no outdated ones, and no lease before the version that it is for."""

from functools import partial

import pytest

from cuadrilla.errors import LinkError
from cuadrilla.link.base import Lease, Stop, Version
from cuadrilla.link.inproc import Inbox

OLD, NEW, NEWEST = (Version(version=number) for number in (1, 2, 3))
DONE = Stop(reason="done")


def lease(version: int) -> Lease:
    return Lease(lease_id=version, version=version, units=(version,), planned_tokens=1)


def read(*events) -> list[object]:
    inbox = Inbox()
    for event in events:
        inbox.put(event)
    return list(iter(partial(inbox.next_event, seconds=0.0), None))


@pytest.mark.parametrize(
    ("come", "counts"),
    [
        ((OLD, lease(1), NEW), [OLD, lease(1), NEW]),
        ((OLD, lease(1), NEW, NEWEST), [OLD, lease(1), NEWEST]),
        ((OLD, lease(1), NEW, lease(2), NEWEST), [NEW, lease(2), NEWEST]),
        ((lease(1), NEW), [lease(1), NEW]),
        ((OLD, NEW), [NEW]),
        ((OLD, lease(1), DONE), [DONE]),
        ((DONE, NEW, lease(2)), [DONE, NEW, lease(2)]),
    ],
)
def test_what_is_outdated_is_left_out(come, counts):
    assert read(*come) == counts


def test_the_end_of_a_session_stays():
    """A Stop before it is read first. Nothing else is left to read, whenever it arrived."""
    inbox = Inbox()
    for event in (OLD, DONE, LinkError("gone"), LinkError("again"), NEW, lease(2)):
        inbox.put(event)
    assert inbox.final_stop() == inbox.next_event() == DONE
    assert inbox.final_stop() is None
    for _ in range(2):
        assert inbox.interrupted()
        with pytest.raises(LinkError, match="gone"):
            inbox.next_event()
