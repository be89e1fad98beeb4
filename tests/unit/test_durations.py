"""What a test run took: added up by test, fixture and folder, and compared with budgets; and who runs beside whom."""

import json
from pathlib import Path

import pytest

import durations
from tests.schedule import group_of

ROWS = [
    {"test": "tests/unit/test_a.py::test_x[1]", "phase": "setup", "wall_seconds": 1.0, "cpu_seconds": 0.5,
     "fixtures": [{"fixture": "folder", "scope": "module", "wall_seconds": 0.75, "cpu_seconds": 0.25}]},
    {"test": "tests/unit/test_a.py::test_x[1]", "phase": "call", "wall_seconds": 2.0, "cpu_seconds": 1.0},
    {"test": "tests/unit/test_a.py::test_y", "phase": "call", "wall_seconds": 4.0, "cpu_seconds": 4.0,
     "fixtures": [{"fixture": "folder", "scope": "module", "wall_seconds": 1.25, "cpu_seconds": 0.75}]},
    {"test": "tests/spawn/test_b.py::test_z", "phase": "call", "wall_seconds": 8.0, "cpu_seconds": 2.0},
]  # fmt: skip


def costs(found: list[durations.Cost]) -> list[tuple[str, int, float, float]]:
    return [(cost.name, cost.count, cost.wall_seconds, cost.cpu_seconds) for cost in found]


def test_phases_of_a_test_are_one_cost_and_the_slowest_comes_first() -> None:
    assert costs(durations.tests(ROWS)) == [
        ("tests/spawn/test_b.py::test_z", 1, 8.0, 2.0),
        ("tests/unit/test_a.py::test_y", 1, 4.0, 4.0),
        ("tests/unit/test_a.py::test_x[1]", 1, 3.0, 1.5),
    ]


def test_folders_and_fixtures() -> None:
    assert costs(durations.folders(ROWS)) == [("spawn", 1, 8.0, 2.0), ("unit", 2, 7.0, 5.5)]
    assert costs(durations.fixtures(ROWS)) == [("folder (module)", 2, 2.0, 1.0)]


def test_a_folder_over_its_budget_or_without_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "BUDGETS_CPU_SECONDS", {"unit": 5.0})
    assert durations.over_budget(durations.folders(ROWS)) == [
        "spawn has no budget: add one to tools/durations.py",
        "unit took 6 processor seconds, its budget is 5",
    ]


def test_a_file_that_holds_something_else_is_named(tmp_path: Path) -> None:
    file = tmp_path / "durations.json"
    file.write_text(json.dumps({"rows": []}))
    with pytest.raises(SystemExit, match="holds no durations of a test run"):
        durations.read_run(file)


@pytest.mark.parametrize(
    ("test", "group"),
    [
        ("tests/unit/test_ledger.py::test_x", "tests/unit/test_ledger.py"),
        ("tests/inproc/test_exact.py::test_x[grpc-one]", "tests/inproc/test_exact.py"),
        ("tests/inproc/test_exact.py::test_x[ray-one]", "ray"),
        ("tests/spawn/test_faults.py::test_x[ray-5]", "ray"),
        ("tests/spawn/test_ray.py::test_x", "ray"),
        ("tests/spawn/test_faults.py::test_x[crew-5]", "tests/spawn/test_faults.py::test_x[crew-5]"),
        ("tests/spawn/test_crew.py::test_an_array", "tests/spawn/test_crew.py::test_an_array"),
        ("tests/rig/test_lan.py::test_x", "rig"),
        ("tests/docker/test_compose.py::test_ray", "docker"),
    ],
)
def test_what_follows_one_another_in_one_process(test: str, group: str) -> None:
    assert group_of(test) == group
