"""When work waits: a battery, an owner at the machine, a pause."""

import json
import os
import queue
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from cuadrilla.cli.pause import parse_size
from cuadrilla.engines.courtesy import QUIET_SECONDS, Courtesy, Manners, Surroundings, family_here, memory_of, why_wait
from cuadrilla.errors import ConfigError, EnvironmentProblem, ResourceError
from cuadrilla.home import Home
from cuadrilla.host.gpu_users import CardUse

pytestmark = pytest.mark.unit

ALL = Manners(while_idle=True, on_power=True)
GAME = 2**22 + 7


def seen(
    *,
    paused: bool = False,
    battery: bool | None = False,
    others: float | None = 0.0,
    gpu: float | None = None,
    quiet: float = 1e9,
) -> Surroundings:
    return Surroundings(paused=paused, on_battery=battery, others=others, gpu_others=gpu, quiet_seconds=quiet)


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


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "4 apples", "1e9", "nan", "0", "0.4", "999999999T", "9" * 400])
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


def test_a_gpu_that_others_use_counts_as_the_processor_does() -> None:
    assert why_wait(ALL, seen(gpu=0.5), waits=False) == "the machine is being used"
    assert why_wait(ALL, seen(others=None, gpu=0.5), waits=False) == "the machine is being used"
    assert why_wait(ALL, seen(gpu=0.2), waits=False) is None
    assert why_wait(Manners(), seen(gpu=1.0), waits=False) is None


class Cards:
    """What the driver is to say at each look; the last answer stays."""

    def __init__(self, *uses: CardUse) -> None:
        self.uses, self.closed = list(uses), 0

    def look(self, *, works: bool) -> tuple[CardUse, ...]:
        return (self.uses.pop(0) if len(self.uses) > 1 else self.uses[0],)

    def close(self) -> None:
        self.closed += 1


def courtesy_with(cards: Cards, home: Home, **options: Any) -> Courtesy:
    made = Courtesy(Manners(while_idle=True), home=home, gpus=cards, **options)  # type: ignore[arg-type]
    made._others = lambda: 0.0  # type: ignore[method-assign]  # the processors of whoever runs the tests
    return made


def test_work_stops_for_a_game_and_goes_on_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuadrilla.engines.courtesy.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("cuadrilla.engines.courtesy.QUIET_SECONDS", 0.05)
    monkeypatch.setattr("cuadrilla.engines.courtesy.sees_all_programs", lambda: True)
    ours = {os.getpid(): 0.9}
    cards = Cards(*[CardUse(busy=0.9, users=ours)] * 5, CardUse(busy=1.0, users=ours | {GAME: 0.6}))
    courtesy = courtesy_with(cards, Home(tmp_path / "home"))
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    with courtesy.watching(heard.put):
        assert heard.get(timeout=10) == "the machine is being used"
    assert cards.closed
    cards.uses = [CardUse(busy=0.6, users={GAME: 0.6})] * 3 + [CardUse(busy=0.0, users={})]
    assert courtesy.wait_until_welcome() < 10
    assert cards.uses == [CardUse(busy=0.0, users={})]


def test_a_gpu_that_tells_no_programs_apart_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be all our own work: that must not keep us from it. Before work begins it is others'."""
    monkeypatch.setattr("cuadrilla.engines.courtesy.LOOK_SECONDS", 0.01)
    cards = Cards(CardUse(busy=1.0))
    courtesy = courtesy_with(cards, Home(tmp_path / "home"))
    with caplog.at_level("INFO"):
        for _ in range(3):
            assert why_wait(courtesy.manners, courtesy._look(works=True), waits=False) is None
    assert [record.getMessage() for record in caplog.records if "GPU" in record.getMessage()] == [
        "--while-idle: which programs use the GPU is not told here, so that it does not count while this one works"
    ]
    assert why_wait(courtesy.manners, courtesy._look(works=False), waits=True) == "the machine is being used"
    several = courtesy_with(cards, Home(tmp_path / "home"), root=os.getppid())
    assert why_wait(several.manners, several._look(works=False), waits=True) is None  # another worker's, perhaps


def test_what_cannot_be_measured_keeps_nobody_from_work(tmp_path: Path) -> None:
    nothing = courtesy_with(Cards(CardUse()), Home(tmp_path / "home"))
    nothing._others = lambda: None  # type: ignore[method-assign]
    assert why_wait(nothing.manners, nothing._look(works=False), waits=True) is None


def test_nice_work_of_ours_is_counted_once() -> None:
    """The system counts it as nice, beside the work of others: taken away twice, others would seem to do nothing."""
    script = "import os, sys\nos.nice(15)\nwhile True: sum(range(10**5)); print(flush=True)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as nice:
        process, courtesy = psutil.Process(nice.pid), Courtesy(Manners(), home=Home(Path("unused")), root=nice.pid)
        try:
            deadline = time.monotonic() + 30
            while process.cpu_times().user < 0.3 and time.monotonic() < deadline:
                assert nice.stdout is not None
                nice.stdout.readline()
            assert courtesy._own_seconds() <= process.cpu_times().system + 0.05
        finally:
            nice.kill()


def test_what_an_owner_asks_reaches_other_processes(tmp_path: Path) -> None:
    asked = Courtesy(Manners(while_idle=True, max_memory_bytes=2**31), home=Home(tmp_path), root=7).data()
    again = Courtesy.from_data(json.loads(json.dumps(asked)), home=Home(tmp_path))
    assert (again.manners, again.data()) == (Manners(while_idle=True, max_memory_bytes=2**31), asked)
    assert Courtesy.from_data({}, home=Home(tmp_path)).manners == Manners()


def test_without_a_limit_of_the_kernel_who_has_too_much_memory_leaves_for_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on macOS and Windows; its children count."""
    home = Home(tmp_path / "home")
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    much = Courtesy(Manners(max_memory_bytes=2**40), home=home, kernel_limits_memory=False)
    with caplog.at_level("INFO"), much.watching(heard.put):
        assert much._why_leave_for_good() is None
    assert [record.getMessage()[:13] for record in caplog.records] == ["--max-memory:"]
    assert much.wait_until_welcome() < 10
    little = Courtesy(Manners(max_memory_bytes=2**20), home=home, kernel_limits_memory=False)
    with little.watching(heard.put):
        assert "GiB of memory, more than its owner allows" in heard.get(timeout=10)
    with pytest.raises(ResourceError, match="more than --max-memory"):
        little.wait_until_welcome()
    by_kernel = Courtesy(Manners(max_memory_bytes=2**20), home=home, kernel_limits_memory=True)
    assert by_kernel._why_leave_for_good() is None


def test_memory_of_a_family() -> None:
    script = "import sys\nkept = b'x' * 2**27\nprint(flush=True)\nsys.stdin.read()"
    before = memory_of(family_here())
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert memory_of(family_here()) - before > 2**26
        child.kill()


def test_ranks_of_torchrun_have_no_limit_without_a_kernel_that_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuadrilla.engines.courtesy import behave

    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("cuadrilla.engines.courtesy.KERNEL_LIMITS_MEMORY", False)
    with pytest.raises(EnvironmentProblem, match="on Linux only"):
        behave(Manners(max_memory_bytes=2**40))
