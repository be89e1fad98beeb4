"""The coordinator's decisions, without I/O: rounds, shares, losses, bad contributions, silence, snapshots."""

from cuadrilla.link.base import Progress
from cuadrilla.sync import events, work
from cuadrilla.sync.kinds import windows
from tests.driver import Crew, machine, rules


def begun(*members: str, **changes: object) -> Crew:
    """A crew that these members have joined."""
    crew = Crew(machine(rules(**changes)))
    for name in members:
        crew.join(name)
    return crew


def test_one_slow_first_answer_does_not_exclude_a_member() -> None:
    crew = begun("a", "b", num_steps=100)
    crew.round(a=0.1)  # b joined when a held the whole first round
    crew.round(a=0.1, b=10.0)
    for _ in range(4):
        crew.round(a=0.1, b=0.1)
    assert len(crew.of("b").units) >= 2


def test_a_member_without_a_share_is_measured_again_at_a_bounded_cost() -> None:
    crew = begun("a", "b", num_steps=1000)
    for _ in range(10):
        crew.round(a=0.125, b=8.0)
    took = sum(crew.round(a=0.125, b=8.0) for _ in range(700))
    assert 700 * 1.0 < took <= 700 * (1 + 1.2 * work.PROBE_COST)  # probed, for at most about 5 % of the time
    rounds = 0
    while len(crew.of("a").units) > 5:  # now b is as fast as a
        crew.round(a=0.125, b=0.125)
        rounds += 1
    assert rounds <= 8 / work.PROBE_COST / 0.125


def test_an_answer_to_the_lease_of_another_is_not_counted() -> None:
    crew = begun("a", "b")
    held = crew.of("a")
    crew.answer(held.lease_id, worker="b")
    assert (crew.discarded, crew.commits) == ([held.lease_id], [])
    crew.leases[held.lease_id] = held
    crew.answer(held.lease_id)
    assert len(crew.commits) == 1


def test_a_late_lease_is_told_once_and_not_again_when_another_is_late() -> None:
    crew = begun("a", "b", "c", "d", num_steps=100)
    for _ in range(8):
        crew.round(a=1.0, b=1.0, c=1.0, d=1.0)
    for worker in "cdb":  # c and d compute the units of b a second later
        crew.answer(crew.of(worker).lease_id, valid=worker != "b", seconds=2.0)
    crew.now += 1.1
    crew.send(events.Tick())
    assert crew.late == ["a"]
    assert crew.of("b").units == crew.of("a").units
    crew.now += 0.5
    crew.join("e")
    assert crew.late == ["a", "c", "d"]


def test_a_late_lane_does_not_go_back_to_a_worker_that_failed_it() -> None:
    crew = Crew(machine(rules(), strategy=windows(steps=1, lanes=(1.0, 1.0))))
    crew.join("a")
    crew.join("b")
    crew.answer(crew.of("b").lease_id, valid=False)
    crew.answer(crew.of("a").lease_id)
    crew.now += 100.0
    crew.send(events.Tick())
    assert [lease.worker for lease in crew.leases.values()] == ["a"]
    crew.join("c")
    assert crew.of("c").units == crew.of("a").units == (4, 5, 6, 7)


def test_of_two_members_lost_at_one_tick_none_gets_the_units_of_the_other() -> None:
    crew = begun("a", "b", "c", lost_after_seconds=5.0)  # a holds the whole first round
    crew.now = 6.0
    crew.say("c", Progress(micro_steps=0))
    crew.send(events.Tick())
    assert [stop.worker for stop in crew.evicted] == ["a", "b"]
    assert len(crew.of("c").units) == 8


def _fails(crew: Crew, worker: str, *, rounds: int) -> None:
    """Answer all leases for this number of rounds; the answers of `worker` are bad."""
    wanted = len(crew.commits) + rounds
    while len(crew.commits) < wanted:
        lease_id, grant = next(iter(crew.leases.items()))
        crew.answer(lease_id, valid=grant.worker != worker)


def test_who_is_left_out_stays_out_until_the_coordinator_restarts() -> None:
    crew = begun("good", num_steps=100)
    crew.answer(crew.of("good").lease_id)
    crew.join("broken")
    _fails(crew, "broken", rounds=1)
    assert not crew.evicted
    crew.lose("broken")  # after its first bad round it leaves, and comes back as if it were new
    crew.join("broken")
    while not crew.evicted:
        _fails(crew, "broken", rounds=1)
    crew.now += 3600.0
    crew.join("broken")
    for stop in crew.evicted:
        assert stop.message.reason.startswith("excluded: its contributions were unusable in 2 rounds")
        assert stop.message.refused
    assert len(crew.evicted) == 2
    assert all(not commit.merge.skipped for commit in crew.commits)
    restarted = Crew(machine(rules(num_steps=100), state=crew.machine.snapshot()))
    restarted.join("broken")
    assert not restarted.evicted


def test_all_devices_of_a_node_answer_for_each_of_them() -> None:
    """Else a node that lies could come back under another device, since it names its devices itself."""
    crew = begun("good", num_steps=100)
    crew.answer(crew.of("good").lease_id)
    for device in ("cpu", "cpu.2"):
        crew.join(f"mala/{device}")
    while not crew.evicted:
        _fails(crew, "mala/cpu", rounds=1)
    assert {evicted.worker for evicted in crew.evicted} == {"mala/cpu", "mala/cpu.2"}
    crew.evicted.clear()
    for name in ("mala/xpu:7", "mala"):
        crew.join(name)
    assert all("excluded" in refused.message.reason for refused in crew.evicted)
    assert [refused.worker for refused in crew.evicted] == ["mala/xpu:7", "mala"]
    crew.join("malacara")
    assert "malacara" in crew.machine.crew.members


def test_who_leaves_before_the_update_is_left_out_all_the_same() -> None:
    crew = begun("good", num_steps=100)
    crew.answer(crew.of("good").lease_id)
    for _ in range(2):
        crew.join("broken")
        crew.answer(crew.of("good").lease_id)
        crew.answer(crew.of("broken").lease_id, valid=False)
        crew.lose("broken")
        _fails(crew, "broken", rounds=1)
    crew.join("broken")
    assert [evicted.worker for evicted in crew.evicted] == ["broken"]


def test_leases_that_go_out_late_are_not_overdue() -> None:
    """A commit may take a minute. A delay by it makes no worker hung, lost or slower."""
    crew = begun("a", lost_after_seconds=10.0)
    crew.say("a", Progress(micro_steps=1))
    crew.answer(crew.of("a").lease_id)
    crew.machine.postpone(60.0)
    crew.now += 60.0
    crew.say("a", Progress(micro_steps=1))
    crew.send(events.Tick())
    assert not crew.evicted
    (lease,) = crew.machine.work.leases.values()
    assert lease.at == crew.now


def test_the_first_round_waits_for_the_workers_that_are_expected_but_not_for_ever() -> None:
    crew = Crew(machine(rules(quorum=3)))
    crew.now = 100.0
    crew.join("slow", 0.1)
    crew.join("fast", 1.0)
    crew.now = 114.0
    crew.send(events.Tick())
    assert not crew.leases
    crew.now = 115.0
    crew.send(events.Tick())
    assert len(crew.of("fast").units) == 7
    assert len(crew.of("slow").units) == 1

    whole = Crew(machine(rules(quorum=2)))
    whole.join("slow", 0.1)
    assert not whole.leases
    whole.join("fast", 1.0)
    assert len(whole.of("fast").units) == 7


def test_the_first_pass_may_take_long() -> None:
    crew = begun("a", lost_after_seconds=5.0)
    crew.now = 100.0
    crew.say("a", Progress(micro_steps=0))
    crew.send(events.Tick())
    assert not crew.evicted


def test_a_new_member_that_may_be_downloading_is_waited_for_and_not_taken_for_slow() -> None:
    crew = begun("a", "b", quorum=2, num_steps=100)
    crew.answer(crew.of("a").lease_id)
    crew.now = 29.0
    crew.send(events.Tick())
    assert not crew.late
    crew.now = 31.0
    crew.send(events.Tick())
    assert crew.late == ["b"]
    crew.answer(crew.of("a").lease_id)  # now the units of b, too
    member = crew.machine.crew.members["b"]
    assert (member.measurements, member.transfer_seconds, crew.now) == (0, 32.0, 32.0)
    for _ in range(9):  # it is tried again, but not in each round, nor does it count as measured by passes of before
        crew.say("b", Progress(micro_steps=1))
        crew.answer(crew.of("a").lease_id)
    assert (len(crew.commits), crew.now) == (10, 41.0)


def test_another_program_is_refused_and_not_waited_for() -> None:
    crew = Crew(machine(rules(quorum=2, fingerprint={"cuadrilla": "1.0"})))
    crew.join("a", cuadrilla="1.0")
    assert not crew.leases
    crew.join("b", cuadrilla="1.1")
    assert [(refused.worker, refused.message.refused) for refused in crew.evicted] == [("b", True)]
    assert len(crew.of("a").units) == 8


def test_who_dies_before_the_first_round_is_not_waited_for_until_it_comes_back() -> None:
    crew = Crew(machine(rules(quorum=3)))
    crew.lose("a")  # before its Hello
    crew.join("b")
    crew.join("c")
    assert len(crew.of("b").units) == len(crew.of("c").units) == 4

    crew = Crew(machine(rules(quorum=3)))
    for name in ("a", "b"):
        crew.join(name)
        crew.lose(name)
    crew.join("a")
    assert not crew.leases  # c is still expected
    crew.join("c")
    assert len(crew.of("a").units) == len(crew.of("c").units) == 4
