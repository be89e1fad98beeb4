"""The asynchronous strategy's decisions, without I/O: the bound, lost and bad batches, the end, snapshots."""

import heapq
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.link.base import Contribution, Lease, Version
from cuadrilla.sync import events
from cuadrilla.sync.exact import Exact
from cuadrilla.sync.server import Server
from tests.driver import Crew, machine, rules

pytestmark = pytest.mark.unit


def server(*, staleness: int = 4, **changes: object) -> Crew:
    return Crew(machine(rules(**changes), strategy=Server(max_staleness=staleness)))


def batch(number: int) -> tuple[int, ...]:
    return tuple(range(8 * number, 8 * number + 8))


def play(crew: Crew, seconds: dict[str, float]) -> int:
    """Everyone needs so long for a batch, until the end; the most batches that were out at a time."""
    for worker in seconds:
        crew.join(worker)
    due: list[tuple[float, int]] = []
    seen: set[int] = set()
    most = 0
    while crew.finish is None:
        for lease_id in crew.leases.keys() - seen:
            heapq.heappush(due, (crew.now + seconds[crew.leases[lease_id].worker], lease_id))
        seen |= crew.leases.keys()
        most = max(most, len({lease.units for lease in crew.machine.work.ledger.leases.values()}))
        at, lease_id = heapq.heappop(due)
        if lease_id in crew.leases:
            crew.now = at
            crew.answer(lease_id)
    return most


@pytest.mark.parametrize("staleness", [0, 1, 2, 3, 4, 8, 20])
@pytest.mark.parametrize("seconds", [(1.0, 1.0), (1.0, 10.0), (1.0, 0.9, 1.1, 1.0), (0.1, 1.0, 3.0, 30.0, 31.0)])
def test_no_answer_is_older_than_the_bound(staleness: int, seconds: tuple[float, ...]) -> None:
    crew = server(staleness=staleness, num_versions=400)
    most = play(crew, dict(zip("abcde", seconds, strict=False)))
    found = [commit.merge.staleness for commit in crew.commits]
    assert max(age for age in found if age is not None) <= staleness
    assert most == min(len(seconds), staleness + 1)
    assert sorted(unit for commit in crew.commits for unit in commit.merge.units) == list(range(8 * 400))
    assert len(crew.discarded) <= len(crew.late) <= len(seconds)  # while nobody knows how long they need


def test_the_bound_is_used_and_the_fast_one_waits_only_then() -> None:
    """b needs as long as ten of a's: a makes four steps, waits for b's, and four more.

    b's first batch, of which nobody knows how long b needs, is late at the fourth, and a computes it as well.
    """
    crew = server(staleness=4, num_versions=15)
    play(crew, {"a": 1.0, "b": 10.0})
    workers = "".join(commit.merge.answers[0].grant.worker for commit in crew.commits)
    assert workers == "aaaaa" + "aaaab" + "aaaab"
    assert [late.worker for late in crew.late] == ["b"]
    assert [commit.merge.staleness for commit in crew.commits][5:11] == [0, 0, 0, 0, 4, 0]


def test_equal_workers_never_wait_from_twice_their_number_less_two_on() -> None:
    crew = server(staleness=4, num_versions=30)
    play(crew, {"a": 1.0, "b": 1.0, "c": 1.0})
    assert crew.now == 10.0


def test_bound_zero_is_one_lease_at_a_time_in_turn() -> None:
    crew = server(staleness=0, num_versions=6)
    assert play(crew, {"a": 1.0, "b": 5.0}) == 1
    assert [commit.merge.answers[0].grant.worker for commit in crew.commits] == list("ababab")
    assert [commit.merge.units for commit in crew.commits] == [batch(i) for i in range(6)]
    assert {commit.merge.staleness for commit in crew.commits} == {0}


def test_alone_it_decides_as_the_exact_coordinator() -> None:
    merges = []
    for strategy in (Exact(), Server(max_staleness=4)):
        crew = Crew(machine(rules(), strategy=strategy))
        crew.join("a")
        while crew.finish is None:
            crew.answer(crew.of("a").lease_id)
        merges.append([commit.merge for commit in crew.commits])
    assert merges[0] == [replace(merge, staleness=None) for merge in merges[1]]


def test_only_who_answered_is_given_the_new_version() -> None:
    crew = server(num_versions=10)
    crew.join("a")
    crew.join("b")
    grant = crew.leases.pop(crew.of("a").lease_id)
    said = Contribution(lease_id=grant.lease_id, tokens=80, loss_sum=1.0, tensors={})
    (merge,) = crew.machine.handle(events.Said(worker="a", message=said), 1.0)
    answer = events.Answer(grant=grant, said=said)
    assert merge == events.Merge(version=1, answers=(answer,), units=batch(0), skipped=(), tokens_before=0, staleness=0)
    commit, version, leased = crew.machine.handle(events.Merged(), 1.0)
    assert isinstance(commit, events.Commit)
    assert version == events.Send(worker="a", message=Version(version=1))
    lease = Lease(lease_id=grant.lease_id + 2, version=1, units=batch(2), planned_tokens=80)
    assert leased == events.Send(worker="a", message=lease)


def test_a_lost_workers_batch_is_the_next_to_be_leased() -> None:
    crew = server(num_versions=10)
    crew.join("a")
    crew.join("b")
    assert (crew.of("a").units, crew.of("b").units) == (batch(0), batch(1))
    crew.lose("a")
    crew.answer(crew.of("b").lease_id)
    assert crew.of("b").units == batch(0)
    crew.answer(crew.of("b").lease_id)
    assert crew.of("b").units == batch(2)


def test_a_lost_workers_batch_goes_to_who_waits() -> None:
    crew = server(staleness=0)
    crew.join("a")
    crew.join("b")
    assert [lease.worker for lease in crew.leases.values()] == ["a"]
    crew.lose("a")
    assert crew.of("b").units == batch(0)


def test_a_late_answer_is_not_used() -> None:
    crew = server(num_versions=10)
    crew.join("a")
    crew.join("b")
    late = crew.of("a")
    crew.lose("a")
    crew.leases[late.lease_id] = late
    crew.answer(late.lease_id)
    assert crew.discarded == [late.lease_id]
    assert not crew.commits


def test_a_bad_batch_is_computed_by_another_and_its_first_worker_gets_a_strike() -> None:
    crew = server(num_versions=10)
    crew.join("good")
    crew.join("broken")
    while not crew.evicted:
        for lease_id, lease in list(crew.leases.items()):
            crew.answer(lease_id, valid=lease.worker != "broken")
    assert [evicted.worker for evicted in crew.evicted] == ["broken"]
    while crew.finish is None:
        crew.answer(crew.of("good").lease_id)
    assert not any(commit.merge.skipped for commit in crew.commits)
    assert sorted(unit for commit in crew.commits for unit in commit.merge.units) == list(range(80))


@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_batch_that_fails_twice_is_skipped_and_makes_a_version(names: str) -> None:
    crew = server(num_versions=5)
    crew.bad_units = {11}
    for name in names:
        crew.join(name)
    while crew.finish is None:
        crew.answer(min(crew.leases))
    skipped = [commit.merge for commit in crew.commits if commit.merge.skipped]
    assert [(merge.skipped, merge.answers) for merge in skipped] == [(batch(1), ())]
    assert [commit.merge.version for commit in crew.commits] == [1, 2, 3, 4, 5]
    assert not crew.evicted
    assert crew.commits[-1].tokens == 4 * 80


def test_after_a_rollback_leases_of_the_old_weights_are_void() -> None:
    crew = server(num_versions=10)
    crew.join("a")
    crew.join("b")
    old = crew.of("b")
    said = Contribution(lease_id=crew.of("a").lease_id, tokens=80, loss_sum=1.0, tensors={})
    crew.machine.handle(events.Said(worker="a", message=said), 0.0)
    crew.leases.clear()
    crew.do(crew.machine.handle(events.Merged(rolled_back=True), 0.0))
    assert {lease.version for lease in crew.leases.values()} == {1}
    assert {lease.units for lease in crew.leases.values()} == {batch(1), batch(2)}
    crew.leases[old.lease_id] = old
    crew.answer(old.lease_id)
    assert crew.discarded == [old.lease_id]


def test_at_the_end_the_idle_wait_and_no_batch_is_opened_beyond_it() -> None:
    crew = server(num_versions=3)
    for name in "abc":
        crew.join(name)
    crew.answer(crew.of("a").lease_id)
    crew.answer(crew.of("b").lease_id)
    assert [lease.worker for lease in crew.leases.values()] == ["c"]
    assert crew.machine.work.ledger.opened == 24
    crew.answer(crew.of("c").lease_id)
    assert crew.finish == events.Finish(reason="the run is complete", complete=True)


def test_a_snapshot_holds_unfinished_leases_as_free() -> None:
    crew = server(num_versions=6)
    for name in "abc":
        crew.join(name)
    crew.answer(crew.of("c").lease_id)
    state = crew.machine.snapshot()
    assert state["ledger"]["free"] == [*batch(0), *batch(1), *batch(3)]
    again = Crew(machine(rules(num_versions=6), strategy=Server(max_staleness=4), state=state))
    again.join("d")
    order = []
    while again.finish is None:
        order.append(again.of("d").units)
        again.answer(again.of("d").lease_id)
    assert order == [batch(number) for number in (0, 1, 3, 4, 5)]


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abcd"), st.integers(0, 10**6)), max_size=150),
)
def test_every_batch_is_a_version_once_whatever_happens(staleness: int, happenings: list[tuple[int, str, int]]) -> None:
    """Random joins, deaths, answers, bad answers and restarts."""
    limits, strategy = rules(units_per_round=5, num_versions=6), Server(max_staleness=staleness)
    crew = Crew(machine(limits, strategy=strategy))
    commits: list[events.Commit] = []
    for choice, worker, number in happenings:
        if crew.finish is not None:
            break
        if not crew.machine.crew.members or choice == 0:
            crew.leases = {k: v for k, v in crew.leases.items() if v.worker != worker}
            crew.join(worker)
        elif choice == 1:
            crew.lose(worker)
        elif choice == 2:
            commits += crew.commits
            crew = Crew(machine(limits, strategy=strategy, state=crew.machine.snapshot()))
        elif crew.leases:
            crew.answer(sorted(crew.leases)[number % len(crew.leases)], valid=choice != 3)
        assert crew.finish or not crew.machine.crew.members or crew.leases
    commits += crew.commits
    assert [commit.merge.version for commit in commits] == list(range(1, len(commits) + 1))
    batches = [commit.merge.units for commit in commits]
    assert len(set(batches)) == len(batches)
    assert all(units == tuple(range(units[0], units[0] + 5)) and units[0] % 5 == 0 for units in batches)
    assert all(commit.merge.staleness in range(staleness + 1) for commit in commits)
    assert crew.machine.work.ledger.opened <= 30
    if crew.finish is not None:
        assert sorted(unit for units in batches for unit in units) == list(range(30))
