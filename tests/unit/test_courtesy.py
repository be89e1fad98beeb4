"""When work waits: a battery, an owner at the machine, a pause."""

import queue
import subprocess
import sys
from pathlib import Path

import pytest

from cuadrilla.cli.pause import parse_size
from cuadrilla.engines.courtesy import QUIET_SECONDS, Courtesy, Manners, Surroundings, why_wait
from cuadrilla.errors import ConfigError
from cuadrilla.home import Home

pytestmark = pytest.mark.unit

ALL = Manners(while_idle=True, on_power=True)


def seen(
    *, paused: bool = False, battery: bool | None = False, others: float | None = 0.0, quiet: float = 1e9
) -> Surroundings:
    return Surroundings(paused=paused, on_battery=battery, others=others, quiet_seconds=quiet)


def test_work_is_welcome_unless_something_is_in_its_way() -> None:
    assert why_wait(ALL, seen(), waits=False) is None
    assert why_wait(ALL, seen(battery=None, others=None), waits=True) is None
    assert "paused" in str(why_wait(Manners(), seen(paused=True), waits=False))
    assert why_wait(ALL, seen(battery=True), waits=False) == "on battery"
    assert why_wait(ALL, seen(others=0.5), waits=False) == "the machine is being used"
    assert why_wait(Manners(), seen(battery=True, others=1.0), waits=False) is None


def test_a_machine_must_be_quiet_for_a_while_before_work_goes_on() -> None:
    little = seen(others=0.2, quiet=0)
    assert why_wait(ALL, little, waits=False) is None
    assert why_wait(ALL, little, waits=True) == "the machine is being used"
    assert why_wait(ALL, seen(quiet=QUIET_SECONDS - 1), waits=True)
    assert why_wait(ALL, seen(quiet=QUIET_SECONDS), waits=True) is None


def test_a_pause_of_this_machine_and_of_nodes_are_two_things(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    assert (home.is_paused, home.paused_nodes) == (False, frozenset())
    home.pause(nodes=frozenset({"ana"}), here=False)
    assert (home.is_paused, home.paused_nodes) == (False, {"ana"})
    home.pause(nodes=frozenset(), here=True)
    assert (home.is_paused, home.paused_nodes) == (True, frozenset())
    (home.path / "paused.json").write_text('{"nodes": 7, "here": "yes"}')
    assert (home.is_paused, home.paused_nodes) == (False, frozenset())


def test_a_watcher_says_once_that_work_is_not_welcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuadrilla.engines.courtesy.LOOK_SECONDS", 0.01)
    home = Home(tmp_path / "home")
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    courtesy = Courtesy(Manners(), home=home)
    with courtesy.watching(heard.put):
        home.pause(nodes=frozenset(), here=True)
        assert "paused" in heard.get(timeout=10)
    assert heard.empty()
    home.pause(nodes=frozenset(), here=False)
    assert courtesy.wait_until_welcome() < 10


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 2**32), ("500 MB", 500 * 2**20), ("1.5g", 3 * 2**29), ("1024", 1024), ("1t", 2**40)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "4 apples", "1e9", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: limits of memory")
def test_priority_and_memory_of_a_process() -> None:
    """In a process of its own: a limit cannot be taken back."""
    script = """
import os, torch
from cuadrilla.engines.courtesy import Manners, behave
behave(Manners(low_priority=True, max_memory_bytes=2**30))
torch.zeros(2**20)
try:
    torch.zeros(2**30)
except RuntimeError as error:
    from cuadrilla.train.loop import is_out_of_memory
    assert is_out_of_memory(error), error
else:
    raise SystemExit("four gigabytes in one")
print(os.nice(0))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 10


def test_a_limit_in_which_nothing_fits_is_refused() -> None:
    from cuadrilla.engines.courtesy import behave

    with pytest.raises(ConfigError, match="not enough"):
        behave(Manners(max_memory_bytes=2**20))
