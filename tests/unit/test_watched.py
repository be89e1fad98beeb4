"""What a worker's owner reads while it works."""

from collections.abc import Mapping

from cuadrilla.link.base import Contribution, Lease, TensorRef, Tensors, ToCoordinator, ToWorker
from cuadrilla.link.watched import LINE_SECONDS, WatchedLink


class Leases:
    """A link on which leases wait, and a clock that the answers move on."""

    def __init__(self, *leases: Lease) -> None:
        self._leases = list(leases)
        self.now = 100.0
        self.said: list[ToCoordinator] = []

    def call(self, message: ToCoordinator) -> None:
        self.said.append(message)

    def upload(self, piece: Tensors, *, lease_id: int) -> None:
        raise AssertionError("answers come whole")

    def next_event(self) -> ToWorker:
        return self._leases.pop(0)

    def interrupted(self) -> bool:
        return False

    def download(self, ref: TensorRef) -> Tensors:
        assert isinstance(ref, Mapping)
        return ref

    def close(self) -> None: ...


def test_step_share_and_speed_are_said_at_once_and_then_now_and_then() -> None:
    """Three of eight units; then none of a step, four and all of the two after it: 12 of 24."""
    shares = {7: 3, 9: 4, 10: 8}
    link = Leases(*(Lease(lease_id=v, version=v, units=tuple(range(n)), planned_tokens=0) for v, n in shares.items()))
    lines: list[str] = []
    watched = WatchedLink(link, report=lines.append, units_per_round=8, clock=lambda: link.now)
    for seconds in (2.0, 4.0, LINE_SECONDS - 4.0):
        lease = watched.next_event()
        assert isinstance(lease, Lease)
        link.now += seconds
        watched.call(Contribution(lease_id=lease.lease_id, tokens=1000 * len(lease.units), loss_sum=0.0, tensors={}))
    assert lines == ["step 8  share 38 %  1,500 tokens/s", "step 11  share 50 %  1,200 tokens/s"]
    assert len(link.said) == 3
