"""Who holds a folder's lock: a process that lives; one that has ended does not, whether or not it was waited for."""

import json
import os
from pathlib import Path

import psutil
import pytest

from cuadrilla.errors import ConfigError
from cuadrilla.rundir import FolderLock


def ended_child(lock: Path) -> int:
    """A child that took the lock and ended without giving it back; nobody has waited for it yet."""
    child = os.fork()
    if child == 0:
        FolderLock(lock, purpose="a test").__enter__()
        os._exit(0)
    while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        os.sched_yield()
    return child


def test_a_process_that_lives_keeps_others_out(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with FolderLock(lock, purpose="a test"), pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        FolderLock(lock, purpose="a test").__enter__()
    assert not lock.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_ended_does_not_even_before_it_is_waited_for(tmp_path: Path) -> None:
    """In a container whose first process is no init, an orphan stays in the list of processes for ever."""
    lock = tmp_path / "lock"
    child = ended_child(lock)
    try:
        assert json.loads(lock.read_text())["pid"] == child
        with FolderLock(lock, purpose="a test"):
            assert json.loads(lock.read_text())["pid"] == os.getpid()
    finally:
        os.waitpid(child, 0)
