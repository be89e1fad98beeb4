"""Who uses the GPUs: what the driver's child and programs say, what of it is others', and drivers that hang."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cuadrilla.host import nvml
from cuadrilla.host.gpu_users import CardUse, GpuWatch, others_on, parse_uses

pytestmark = pytest.mark.unit

OURS, GAME = 100, 200


@pytest.mark.parametrize(
    ("cards", "works", "told_apart", "part"),
    [
        ([], False, True, None),
        ([CardUse(busy=0.9, users={OURS: 0.9})], True, True, 0.0),
        ([CardUse(busy=0.9, users={OURS: 0.5, GAME: 0.4})], True, True, 0.4),
        ([CardUse(busy=1.0, users={GAME: 0.8, 201: 0.7})], True, True, 1.0),
        ([CardUse(busy=0.9, users={OURS: 0.5, GAME: 0.4})], True, False, None),  # numbers of another system
        ([CardUse(busy=0.9, users={GAME: 0.4})], False, False, 0.9),
        ([CardUse(busy=0.9)], True, True, None),  # Apple, WSL: it may be all ours
        ([CardUse(busy=0.9)], False, True, 0.9),
        ([CardUse()], False, True, None),
        ([CardUse(busy=0.1), CardUse(users={GAME: 0.6})], False, True, 0.6),
    ],
)
def test_what_of_a_card_others_use(cards: list[CardUse], works: bool, told_apart: bool, part: float | None) -> None:
    assert others_on(cards, ours={OURS}, told_apart=told_apart, all_are_others=not works) == part


def test_what_the_child_says_is_not_believed() -> None:
    rows = [
        {"index": 0, "busy_percent": 98, "users": [[7, 90], [8, 8]]},
        {"busy_percent": 1e9, "users": [[1], 5, ["x", 3], [9, "many"], [-1, 5], [10, 400]]},
        {"busy_percent": "much", "users": None},
        "no card",
    ]
    assert parse_uses(rows) == (CardUse(busy=0.98, users={7: 0.9, 8: 0.08}), CardUse(users={}), CardUse())
    assert parse_uses(None) == parse_uses({"a": 1}) == ()


CHILD = """
import json, sys
for line in sys.stdin:
    told = {answer}
    print(json.dumps({{"gpus": told if line.strip() == "users" else []}}), flush=True)
"""


def child(answer: object) -> list[str]:
    return [sys.executable, "-c", CHILD.format(answer=repr(answer))]


def smi(folder: Path, busy: int) -> list[str]:
    """A program that prints what `nvidia-smi` does, and counts how often it was asked."""
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho >> {folder}/asked\necho "0, Card, {busy}, 1, 2, 3, 4"\n')
    program.chmod(0o755)
    return [str(program)]


@pytest.mark.skipif(sys.platform == "win32", reason="needs programs in the shell's language")
def test_the_library_is_asked_first_and_the_program_while_nothing_of_ours_computes(tmp_path: Path) -> None:
    watch = GpuWatch(argv=smi(tmp_path, 70), nvml_argv=child([{"busy_percent": 40, "users": [[GAME, 40]]}]))
    assert watch.look(works=True) == watch.look(works=False) == (CardUse(busy=0.4, users={GAME: 0.4}),)
    watch.close()
    assert not (tmp_path / "asked").exists()
    watch = GpuWatch(argv=smi(tmp_path, 70), nvml_argv=[])
    assert watch.look(works=False) == watch.look(works=False) == (CardUse(busy=0.7),)
    assert watch.look(works=True) == (CardUse(),)
    assert (tmp_path / "asked").read_text() == "\n"  # once: it takes a while
    watch.close()


def test_a_driver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuadrilla.host.gpus.START_SECONDS", 0.2)
    watch = GpuWatch(argv=[], nvml_argv=[sys.executable, "-c", "import time; time.sleep(1000)"])
    assert watch.look(works=True) == ()
    began = time.monotonic()
    for _ in range(100):
        assert watch.look(works=False) == ()  # it is left alone for a while
    assert time.monotonic() - began < 10
    watch.close()


class Fault(Exception):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.value = value


class Library:
    """NVML with one card."""

    NVMLError, NVML_ERROR_NOT_FOUND = Fault, 6

    def __init__(self, told: list[tuple[int, int, int]] | int) -> None:
        self.told = told

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"card {index}"

    def nvmlDeviceGetUtilizationRates(self, card: str) -> Any:
        assert card == "card 0"
        return SimpleNamespace(gpu=55)

    def nvmlDeviceGetProcessUtilization(self, card: str, since: int) -> list[Any]:
        assert 0 < time.time() * 1e6 - since < 60e6
        if isinstance(self.told, int):
            raise Fault(self.told)
        return [SimpleNamespace(pid=pid, timeStamp=at, smUtil=percent) for pid, at, percent in self.told]


@pytest.mark.parametrize(
    ("told", "users"),
    [
        ([(7, 1, 90), (7, 2, 30), (8, 1, 5), (0, 1, 5), (9, 3, 4000)], [[7, 30], [8, 5]]),
        (6, []),  # nobody computes
        (0, []),
        (3, None),  # not supported: WSL, a part of a card
    ],
)
def test_what_the_library_says_of_processes(
    told: list[tuple[int, int, int]] | int, users: list[list[int]] | None
) -> None:
    found = nvml.uses(Library(told))
    assert found == [{"index": 0, "busy_percent": 55, "users": users}]
    json.dumps(found)
