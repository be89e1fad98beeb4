"""When a job has failed, and which machine rests: one broken machine uses up no search."""

import pytest

from cuadrilla.jobs.retries import FIRST_REST_SECONDS, MAX_LOSSES, MAX_REST_SECONDS, PATIENT_WITH, Retries


def test_a_job_that_fails_twice_has_failed() -> None:
    retries = Retries()
    failed = [retries.failed("j", worker=worker, now=0.0) for worker in ("ana", "luis", "ana")]
    assert failed == [False, True, False], "asked for again: from the beginning"


def test_lost_machines_count_until_one_gets_further() -> None:
    retries = Retries()
    lost = [retries.lost("j", worker=f"node-{number}", now=0.0) for number in range(MAX_LOSSES - 1)]
    assert not any(lost)
    retries.got_further("j", worker="ana")
    lost = [retries.lost("j", worker=f"node-{number}", now=0.0) for number in range(MAX_LOSSES + 1)]
    assert lost == [False] * (MAX_LOSSES - 1) + [True, False]


def test_a_machine_on_which_one_job_after_the_other_ends_badly_rests() -> None:
    retries, rests = Retries(), []
    for number in range(20):
        retries.lost(f"j{number}", worker="broken", now=100.0)
        rests.append(retries.rest_seconds("broken", now=100.0))
    assert rests[:PATIENT_WITH] == [0.0] * PATIENT_WITH
    assert rests[PATIENT_WITH : PATIENT_WITH + 2] == [FIRST_REST_SECONDS, 2 * FIRST_REST_SECONDS]
    assert rests[-1] == MAX_REST_SECONDS
    assert retries.rest_seconds("broken", now=101.0) == pytest.approx(MAX_REST_SECONDS - 1)
    assert retries.rest_seconds("broken", now=100.0 + MAX_REST_SECONDS) == 0.0
    assert retries.rest_seconds("ana", now=100.0) == 0.0
    retries.got_further("j", worker="broken")
    assert retries.rest_seconds("broken", now=100.0) == 0.0
