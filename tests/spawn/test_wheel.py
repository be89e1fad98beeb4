"""A machine without the repository has the wheel of `make wheel`, and joins a coordinator that runs from sources."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from cuadrilla import __version__
from tests.commands import ended, goes_on, is_what_one_worker_gives, run_program, wait_for
from tests.machines import Machines, down, invite, language_run, present, up

ROOT = Path(__file__).parents[2]


def install(tmp_path: Path) -> Path:
    """A folder with cuadrilla from its wheel; other libraries come from this installation."""
    built = tmp_path / "built"
    made = run_program("make", "--no-print-directory", "wheel", f"DIST={built}", cwd=ROOT, seconds=280)
    (wheel,) = built.glob("*.whl")
    assert made.stdout.split() == [str(wheel), "SHA-256", hashlib.sha256(wheel.read_bytes()).hexdigest()]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    run_program(*pip, tmp_path / "installed", wheel)
    return tmp_path / "installed"


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_machine_with_the_wheel_joins(machine: Machines, stories: Path, tmp_path: Path, port: int) -> None:
    installed, run = install(tmp_path), language_run(tmp_path / "run", stories)
    coordinator, ana = machine("coordinator"), machine("ana")
    ana.prefix = ("env", f"PYTHONPATH={installed}")
    where = [*ana.prefix, sys.executable, "-c", "import cuadrilla; print(cuadrilla.__file__)"]
    assert subprocess.check_output(where, text=True, cwd=tmp_path).startswith(str(installed))
    crew = up(coordinator, run, port)
    worker = ana.start("join", "--name", "ana", says=invite(coordinator))
    wait_for(lambda: "ana" in present(run), worker)
    wait_for(goes_on(run), crew)
    down(coordinator, crew)
    ended(worker)
    assert is_what_one_worker_gives(run)


def test_the_pages_name_the_wheel_that_is_built() -> None:
    for page in ("crew.md", "es/crew.md"):
        assert f"cuadrilla-{__version__}-py3-none-any.whl" in (ROOT / "docs" / page).read_text(encoding="utf-8")
