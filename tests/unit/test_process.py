"""What a process asks of its system: what the user has set stays, and the limit of open files is never lowered."""

import sys

import pytest

from cuadrilla.host.process import SPINS, allow_descriptors, sleep_early

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"GOMP_SPINCOUNT": SPINS}),
        ({"GOMP_SPINCOUNT": "5"}, {"GOMP_SPINCOUNT": "5"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_threads_sleep_early_unless_the_user_wants_otherwise(before: dict[str, str], after: dict[str, str]) -> None:
    sleep_early(before)
    assert before == after


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_open_files_are_allowed_as_far_as_the_system_lets() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        for asked in (512, 10, before[1] + 1 if before[1] != resource.RLIM_INFINITY else 4096):
            most = max(asked, 512) if before[1] == resource.RLIM_INFINITY else min(max(asked, 512), before[1])
            allow_descriptors(asked)
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
