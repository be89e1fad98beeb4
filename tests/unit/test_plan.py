"""The plan for described machines, computed by hand: the gain of a crew, by which strategy and with which machines."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from cuadrilla.errors import ConfigError
from cuadrilla.plan.machines import PRESETS, described, read_crew
from cuadrilla.plan.predict import TEACHES, Crew, MachineSpec, Workload, predict, smaller_steps_teach

WORK = Workload(
    num_steps=999, units_per_step=16, unit_tokens=100, step_cost_tokens=0.0, exact_bytes=1000, window_bytes=2000
)
PC = MachineSpec(name="pc", tokens_per_second=800.0)
MAC = MachineSpec(name="mac", tokens_per_second=800.0, bytes_per_second=1000.0, delay_seconds=0.5)


def test_without_a_network_exact_reaches_the_ceiling() -> None:
    crew = Crew(machines=[PC, replace(PC, name="second", tokens_per_second=400.0)])
    best = predict(crew, replace(WORK, units_per_step=12))[0]
    assert (best.steps, best.shares) == (1, {"pc": 8, "second": 4})
    assert best.tokens_per_second == pytest.approx(1200)
    assert best.gain == pytest.approx(crew.ceiling) == pytest.approx(1.5)
    assert best.waiting == pytest.approx(0, abs=1e-9)


def test_a_round_is_the_slowest_transfer_and_its_units() -> None:
    """The mac needs 2 s for 1,000 bytes and two delays. Each machine needs an eighth of a second for a unit."""
    long = replace(WORK, units_per_step=160)
    found = {each.steps: each for each in predict(Crew(machines=[PC, MAC]), long)}
    assert found[1].shares == {"pc": 88, "mac": 72}  # 11 s, and 2 + 9 s
    assert found[1].tokens_per_second == pytest.approx(16_000 / 11)
    assert found[1].bytes_per_second == pytest.approx(1000 / 11)
    assert found[8].shares == {"pc": 8 * 81, "mac": 8 * 79}  # in eight steps 81 s, and 3 + 79 s
    assert found[8].tokens_per_second == pytest.approx(8 * 16_000 / 82)
    assert found[8].gain == pytest.approx(8 * 16_000 / 82 / 800 * TEACHES[8] / long.alone_teaches())
    assert long.alone_teaches() == smaller_steps_teach(16_000, parts=2, num_steps=999)


def test_a_hopeless_link_leaves_the_best_machine_alone() -> None:
    found = predict(Crew(machines=[PC, replace(MAC, bytes_per_second=1.0)]), WORK)
    assert [each.steps for each in found] == [0]
    assert (found[0].gain, found[0].shares) == (1.0, {"pc": 16})


def test_a_coordinators_link_is_shared() -> None:
    fast = [replace(MAC, name=f"mac {number}", bytes_per_second=1e9, delay_seconds=0.0) for number in range(4)]
    free, narrow = (Crew(machines=[PC, *fast], bytes_per_second=each) for each in (math.inf, 4000.0))
    work = replace(WORK, units_per_step=100)
    rates = [next(each for each in predict(crew, work) if each.steps == 1).tokens_per_second for crew in (free, narrow)]
    assert rates[0] == pytest.approx(4000, rel=1e-3)
    assert rates[1] < rates[0]


def test_optimizer_steps_cost_the_coordinator_and_in_windows_every_worker() -> None:
    crew, work = Crew(machines=[PC, replace(PC, name="second")]), replace(WORK, step_cost_tokens=160.0)
    found = {each.steps: each.tokens_per_second for each in predict(crew, work)}
    assert found[0] == pytest.approx(1600 / 2.2)
    assert found[1] == pytest.approx(1600 / 1.2)
    assert found[4] == pytest.approx(4 * 1600 / (4 * 1.2 + 0.2))


def test_a_token_teaches_more_in_smaller_steps() -> None:
    """Measured in runs of 1 M tokens (docs/experiments.md): a token is worth 0.87 and 0.47 of one in steps of 1,024."""
    assert 1 / smaller_steps_teach(4_096, parts=4, num_steps=244) == pytest.approx(0.87, abs=0.04)
    assert 1 / smaller_steps_teach(16_384, parts=16, num_steps=61) == pytest.approx(0.47, abs=0.07)
    assert smaller_steps_teach(16_384, parts=4, num_steps=10**6) == pytest.approx(1.0, abs=0.02)


def test_presets_have_numbers() -> None:
    for file in PRESETS.values():
        crew = described(file, here=1.0, operations=1e9)
        assert crew.ceiling > 1
        assert math.isinf(crew.coordinator.bytes_per_second)


def test_a_file_describes_machines(tmp_path: Path) -> None:
    path = tmp_path / "crew.toml"
    path.write_text(
        'link = "80kbit"\n[[machine]]\nname = "a"\nspeed = 2.0\n'
        '[[machine]]\nname = "b"\ncount = 2\ntflops = 1.0\nlink = "8kbit+10ms"\n'
    )
    crew = described(read_crew(str(path)), here=50.0, operations=1e10)
    assert crew.bytes_per_second == 10_000
    assert list(crew.machines) == [
        MachineSpec(name="a", tokens_per_second=100.0),
        MachineSpec(name="b 1", tokens_per_second=100.0, bytes_per_second=1000.0, delay_seconds=0.01),
        MachineSpec(name="b 2", tokens_per_second=100.0, bytes_per_second=1000.0, delay_seconds=0.01),
    ]


def test_where_all_have_a_link_this_machine_coordinates(tmp_path: Path) -> None:
    path = tmp_path / "crew.toml"
    path.write_text('[[machine]]\nname = "a"\nspeed = 2.0\nlink = "8kbit"\n')
    crew = described(read_crew(str(path)), here=50.0, operations=1.0)
    assert (crew.coordinator, crew.bytes_per_second) == (MachineSpec(name="here", tokens_per_second=50.0), 1000.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "machine"),
        ('[[machine]]\nname = "a"\nspede = 1.0', "spede"),
        ('[[machine]]\nname = "a"', "give its speed by exactly one of"),
        ('[[machine]]\nname = "a"\nspeed = 1.0\ntflops = 1.0', "give its speed by exactly one of"),
        ('[[machine]]\nname = "a"\nspeed = 1.0\nlink = "fast"', "link"),
        ('[[machine]]\nname = "a"\nspeed = 1.0\nlink = "0.0mbit+1ms"', "link"),
        ('[[machine]]\nname = "a"\nspeed = 1.0\n[[machine]]\nname = "a"\nspeed = 1.0', "one name"),
        ("[[machine", "crew.toml"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "crew.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        described(read_crew(str(path)), here=1.0, operations=1.0)
