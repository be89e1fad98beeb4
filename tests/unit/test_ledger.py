"""The ledger as a rule-based state machine: every unit free, leased once, or counted once (invariant I1)."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cuadrilla.sync.ledger import Grant, Ledger

pytestmark = pytest.mark.unit

WORKERS = st.sampled_from(["a", "b", "c"])


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.held: dict[int, Grant] = {}
        self.counted: list[int] = []
        self.dead: list[Grant] = []

    @rule(count=st.integers(1, 6))
    def open_units(self, count: int) -> None:
        self.ledger.open_units(count)

    @rule(worker=WORKERS, count=st.integers(1, 4))
    def grant(self, worker: str, count: int) -> None:
        grant = self.ledger.grant(worker, count)
        if grant is not None:
            assert 1 <= len(grant.units) <= count
            self.held[grant.lease_id] = grant

    @rule(pick=st.integers(0, 100), foreign=st.booleans())
    def count(self, pick: int, foreign: bool) -> None:
        if not self.held:
            return
        grant = self.held[sorted(self.held)[pick % len(self.held)]]
        if foreign:
            assert self.ledger.count(grant.lease_id, worker="somebody else") is None
            return
        assert self.ledger.count(grant.lease_id, worker=grant.worker) == grant
        assert self.ledger.count(grant.lease_id, worker=grant.worker) is None
        self.counted.extend(self.held.pop(grant.lease_id).units)

    @rule(worker=WORKERS)
    def release(self, worker: str) -> None:
        for grant in self.ledger.release(worker):
            self.dead.append(self.held.pop(grant.lease_id))

    @rule()
    def late_answers_are_refused(self) -> None:
        for grant in self.dead:
            assert self.ledger.count(grant.lease_id, worker=grant.worker) is None

    @rule()
    def restart(self) -> None:
        self.dead.extend(self.held.values())
        self.held.clear()
        self.ledger = Ledger.restore(self.ledger.snapshot())

    @invariant()
    def every_unit_is_in_one_place(self) -> None:
        leased = [unit for grant in self.held.values() for unit in grant.units]
        assert sorted([*self.ledger.free, *leased, *self.counted]) == list(range(self.ledger.opened))
        assert self.ledger.outstanding == len(self.ledger.free) + len(leased)


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
