"""When a job has failed, and which machine rests: one broken machine uses up no search, one liar loses no job."""

import pytest

from cuadrilla.jobs.standing import (
    ALONE_FAILURES,
    FIRST_REST_SECONDS,
    LONGEST_REST_SECONDS,
    MAX_LOSSES,
    PATIENT_WITH,
    FailureMeans,
    Standing,
)

AGAIN, SET_ASIDE, FAILED = FailureMeans.AGAIN, FailureMeans.SET_ASIDE, FailureMeans.FAILED


def test_a_job_that_fails_twice_has_failed() -> None:
    standing = Standing()
    assert standing.failed("j", worker="ana", left_by=None, now=0.0) is AGAIN
    assert standing.failed("j", worker="luis", left_by="luis", now=0.0) is FAILED
    assert standing.failed("j", worker="ana", left_by=None, now=0.0) is AGAIN  # asked for again: from the beginning


def test_what_a_liar_has_left_is_set_aside_by_two_that_fail_with_it() -> None:
    standing = Standing()
    assert standing.failed("j", worker="ana", left_by="mala", now=0.0) is AGAIN
    assert standing.failed("j", worker="luis", left_by="mala", now=0.0) is SET_ASIDE
    assert standing.failed("j", worker="ana", left_by=None, now=0.0) is AGAIN


def test_who_has_failed_itself_has_left_nothing_to_doubt() -> None:
    standing = Standing()
    standing.failed("j", worker="ana", left_by="ana", now=0.0)
    assert standing.failed("j", worker="luis", left_by="ana", now=0.0) is FAILED


def test_a_broken_machine_does_not_throw_away_the_work_of_another() -> None:
    standing = Standing()
    for _ in range(ALONE_FAILURES - 1):
        assert standing.failed("j", worker="broken", left_by="ana", now=0.0) is AGAIN
    assert standing.failed("j", worker="broken", left_by="ana", now=0.0) is SET_ASIDE


def test_lost_machines_count_until_one_gets_further() -> None:
    standing = Standing()
    lost = [standing.lost("j", worker=f"node-{number}", now=0.0) for number in range(MAX_LOSSES - 1)]
    assert not any(lost)
    standing.got_further("j", worker="ana")
    lost = [standing.lost("j", worker=f"node-{number}", now=0.0) for number in range(MAX_LOSSES + 1)]
    assert lost == [False] * (MAX_LOSSES - 1) + [True, False]


def test_a_machine_on_which_one_job_after_the_other_ends_badly_rests() -> None:
    standing, rests = Standing(), []
    for number in range(20):
        standing.lost(f"j{number}", worker="broken", now=100.0)
        rests.append(standing.rest_seconds("broken", now=100.0))
    assert rests[:PATIENT_WITH] == [0.0] * PATIENT_WITH
    assert rests[PATIENT_WITH : PATIENT_WITH + 2] == [FIRST_REST_SECONDS, 2 * FIRST_REST_SECONDS]
    assert rests[-1] == LONGEST_REST_SECONDS
    assert standing.rest_seconds("broken", now=101.0) == pytest.approx(LONGEST_REST_SECONDS - 1)
    assert standing.rest_seconds("broken", now=100.0 + LONGEST_REST_SECONDS) == 0.0
    assert standing.rest_seconds("ana", now=100.0) == 0.0
    standing.got_further("j", worker="broken")
    assert standing.rest_seconds("broken", now=100.0) == 0.0
