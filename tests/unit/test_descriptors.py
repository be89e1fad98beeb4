"""The limit of open files is raised as far as it may be, and never lowered."""

import sys

import pytest

from cuadrilla.host.descriptors import allow_descriptors

pytestmark = [pytest.mark.unit, pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")]


def test_it_is_raised_up_to_what_the_system_allows_and_never_lowered() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 4096 if before[1] == resource.RLIM_INFINITY else min(4096, before[1])
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        assert allow_descriptors(512) == 512
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (512, before[1])
        assert allow_descriptors(10) == 512
        assert allow_descriptors(most) == most
        if before[1] != resource.RLIM_INFINITY:
            assert allow_descriptors(before[1] + 1) == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
