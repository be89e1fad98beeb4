"""Ranks miss one that has gone although nothing else tells them, and none that has left."""

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


def test_a_rank_that_is_silent_is_missed_and_one_that_has_left_is_not(store: HashStore) -> None:
    lost: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
    ranks = [
        Pulse(store, rank=rank, num_ranks=3, lost=lambda reason, rank=rank: lost.put((rank, reason)))
        for rank in range(3)
    ]
    ranks[0].watch()
    ranks[1].watch()
    ranks[1].end()  # and rank 2 has never begun to count: its process is gone
    rank, reason = lost.get(timeout=10)
    assert (rank, "rank 2 has been silent" in str(reason)) == (0, True)
    ranks[0].end()
    ranks[2].end()
    assert lost.empty()


def test_all_that_count_are_left_alone(store: HashStore) -> None:
    lost: queue.SimpleQueue[Message] = queue.SimpleQueue()
    ranks = [Pulse(store, rank=rank, num_ranks=2, lost=lost.put) for rank in range(2)]
    for each in ranks:
        each.watch()
    with pytest.raises(queue.Empty):
        lost.get(timeout=2)
    for each in ranks:
        each.end()
        each.end()


def test_a_store_that_is_gone_is_missed(store: HashStore) -> None:
    class Gone:
        """As a store whose process has died."""

        beats = 0

        def set_timeout(self, _timeout: object) -> None: ...

        def set(self, key: str, value: str) -> None:
            self.beats += 1
            if self.beats > 3:
                raise RuntimeError("Broken pipe")
            store.set(key, value)

    lost: queue.SimpleQueue[Message] = queue.SimpleQueue()
    one = Pulse(Gone(), rank=0, num_ranks=1, lost=lost.put)
    one.watch()
    assert "does not answer" in str(lost.get(timeout=10))
    one.end()
