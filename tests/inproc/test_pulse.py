"""Ranks miss one that has gone although nothing else tells them."""

import queue

import pytest
from torch.distributed import HashStore

from cuadrilla.crew import pulse
from cuadrilla.crew.pulse import Pulse
from cuadrilla.messages import Message


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    monkeypatch.setattr(pulse, "PULSE_SECONDS", 0.02)
    monkeypatch.setattr(pulse, "LOST_SECONDS", 0.5)
    return HashStore()


def test_a_rank_that_is_silent_is_missed_by_the_others(store: HashStore) -> None:
    lost: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
    store.set("pulse/2", "1")  # once; then its process is gone
    ranks = [
        Pulse(store, rank=rank, num_ranks=3, lost=lambda reason, rank=rank: lost.put((rank, reason)))
        for rank in range(2)
    ]
    told = [lost.get(timeout=10) for _ in ranks]
    assert {rank for rank, _ in told} == {0, 1}
    assert all("rank 2 has been silent" in str(reason) for _, reason in told)
    for each in ranks:
        each.end()


def test_all_that_count_are_left_alone(store: HashStore) -> None:
    lost: queue.SimpleQueue[Message] = queue.SimpleQueue()
    ranks = [Pulse(store, rank=rank, num_ranks=2, lost=lost.put) for rank in range(2)]
    with pytest.raises(queue.Empty):
        lost.get(timeout=2)
    for each in ranks:
        each.end()


def test_a_store_that_is_gone_is_missed(store: HashStore) -> None:
    class Gone:
        """As a store whose process has died."""

        def set_timeout(self, _timeout: object) -> None: ...

        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Broken pipe")

    lost: queue.SimpleQueue[Message] = queue.SimpleQueue()
    one = Pulse(Gone(), rank=1, num_ranks=3, lost=lost.put)
    assert "rank 0 has been silent" in str(lost.get(timeout=10))
    one.end()
