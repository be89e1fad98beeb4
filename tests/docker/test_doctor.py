"""`cuadrilla doctor` inside a container: no finding in a healthy one, one finding with a tiny /dev/shm."""

import json
from typing import Any

import pytest

from tests.docker.conftest import Containers

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]


def findings(containers: Containers, *options: str) -> list[dict[str, Any]]:
    answer = json.loads(containers.run("cuadrilla", "doctor", "--json", options=options))
    return [row for row in answer["findings"] if row["level"] != "ok"]


def test_no_false_alarm_in_a_container(containers: Containers) -> None:
    """A full disk may be found, since the disk is this machine's."""
    assert {row["check"] for row in findings(containers)} <= {"machine.disk"}


def test_a_tiny_shared_memory_and_the_option_that_is_printed(containers: Containers) -> None:
    (row,) = [row for row in findings(containers, "--shm-size", "1m") if row["check"] == "machine.shm"]
    assert row["level"] == "warning"
    option = row["command"].split()[2:4]  # docker run --shm-size 2g ...
    assert not [row for row in findings(containers, *option) if row["check"] == "machine.shm"]
