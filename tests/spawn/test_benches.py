"""Each benchmark runs to its end and reports figures, with the smallest settings."""

import importlib
import json
import shutil
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.data import cuentos
from tests.chromium import CHROMIUM

pytestmark = pytest.mark.thorough

BENCHES = Path(__file__).parents[2] / "bench"
NEEDS = {"train": "transformers", "serve": "transformers"}
SMALLEST = {  # DATA: a prepared folder, TEXTS: a folder of text files
    "dashboard": "--workers 2 --rounds 40 --opens 1",
    "exact": "--steps 1 --stories 200 --settings adamw~fp32",
    "faults": "--faults 1 --minutes 0.02",
    "kernels": "--preset micro --rounds 1 --threads 1",
    "scale": "--rounds 1 --nodes 2",
    "link": "--parameters 50000 --rate 0 --rounds 1",
    "prepare": "TEXTS --rounds 1 --processes 1",
    "serve": "--shape 10m --clients 2 --requests 1 --new-tokens 3 --slots 2",
    "throughput": "--unit-ms 5 10 --units 8 --steps 1 --repeats 1 --rate 0",
    "time_to_loss": "DATA --steps 4 --seeds 1 --cores 1.6 0.8 --batch 6 --length 16 --layers 1 --width 32 "
    "--link 100mbit --pace 1 --only windows~of~2 ddp",
    "train": "--size micro --steps 3 --threads 1",
}


def programs() -> list[str]:
    """The benchmarks that a user starts. The other files are parts of them."""
    return sorted(
        path.stem for path in BENCHES.glob("*.py") if f"python -m bench.{path.stem} " in path.read_text() + " "
    )


def test_each_benchmark_is_started_here() -> None:
    assert programs() == sorted(SMALLEST)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        text = "\n\n".join(cuentos.stories(120, start=1000 * number))
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def signals() -> Iterator[None]:
    """Restore the handler of SIGTERM, which benchmarks on a network replace in this process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def figures(value: Any) -> Iterator[float]:
    """Every number in a report."""
    match value:
        case dict():
            for part in value.values():
                yield from figures(part)
        case list():
            for part in value:
                yield from figures(part)
        case bool():
            pass
        case int() | float():
            yield float(value)


@pytest.mark.parametrize("name", SMALLEST)
def test_it_measures(
    name: str, texts: Path, stories: Path, signals: None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    if (needed := NEEDS.get(name)) and find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: pip install {needed}")
    if name == "dashboard" and CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt install chromium")
    if name == "scale":
        monkeypatch.setattr("bench.scale.WARM_UP", 2)
        monkeypatch.setattr("bench.scale.CREWS", {"apart": ("3050", "M2")})
    if name == "faults":
        monkeypatch.setattr("bench.faults.CORES", 1.0)
    if name == "time_to_loss":
        shutil.copytree(stories, tmp_path / "data")
    places = {"TEXTS": str(texts), "DATA": str(tmp_path / "data")}
    words = [places.get(word, word).replace("~", " ") for word in SMALLEST[name].split()]
    monkeypatch.setattr(sys, "argv", [name, *words])
    importlib.import_module(f"bench.{name}").main()
    report = json.loads(capsys.readouterr().out)
    assert report["benchmark"] == name
    measured = list(figures({key: value for key, value in report.items() if key not in ("machine", "benchmark")}))
    assert measured
    assert all(number == number and abs(number) != float("inf") for number in measured)
