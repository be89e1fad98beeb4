"""What `doctor --head` makes of the steps of `check link`: the remedy where it ends, and of what is slow."""

import json

import pytest

from cuadrilla.doctor.diagnosis import Diagnosis
from cuadrilla.doctor.link import judge, parse_steps
from cuadrilla.link.address import Address
from cuadrilla.link.check import CheckedStep
from cuadrilla.messages import Message

pytestmark = pytest.mark.unit

HEAD = Address("192.168.1.50", 47470)


def step(name: str, reason: str = "well", *, ok: bool = True, hint: str = "") -> CheckedStep:
    return CheckedStep(step=name, ok=ok, reason=reason, hint=hint, seconds=0.1)


def rate(name: str, bits: float) -> CheckedStep:
    return step(name, Message("{rate:.1f} MB/s ({bits:.0f} Mbit/s)", rate=bits / 8, bits=bits))


def judged(*steps: CheckedStep, system: str = "linux", joined: bool = True) -> dict[str, Diagnosis]:
    return dict(judge(list(steps), address=HEAD, system=system, joined=joined))


def test_a_way_that_is_free() -> None:
    found = judged(step("name"), step("tcp"), rate("download", 941), rate("upload", 938), step("clock"))
    assert {each.level for each in found.values()} == {"ok"}


@pytest.mark.parametrize(
    ("name", "command", "shell"),
    [
        ("name", "cuadrilla doctor --head ADDRESS:47470", "here"),
        ("route", "ip route", "here"),
        ("tcp", "cuadrilla doctor --port 47470", "coordinator"),
        ("tls", "cuadrilla join --new", "here"),
        ("credentials", "cuadrilla invite", "coordinator"),
        ("download", "cuadrilla check link 192.168.1.50:47470", "here"),
    ],
)
def test_each_step_has_its_remedy(name: str, command: str, shell: str) -> None:
    found = judged(step(name, "broken", ok=False, hint="what check link says"))[name]
    assert (found.level, found.command, found.shell) == ("failure", command, shell)
    assert found.remedy == "what check link says"


def test_who_has_not_joined_is_not_told_to_join_anew() -> None:
    found = judged(step("tls", "broken", ok=False), joined=False)["tls"]
    assert (found.command, found.shell) == ("cuadrilla invite", "coordinator")


def test_the_permission_of_a_mac_is_said_as_check_link_says_it() -> None:
    hint = "System Settings, Privacy & Security, Local Network: allow this terminal; then try again"
    found = judged(step("tcp", "cannot reach: No route to host", ok=False, hint=hint), system="darwin")["tcp"]
    assert found.remedy == hint
    (found,) = dict(judge([step("tcp", "x", ok=False)], address=HEAD, system="darwin", forbidden=True)).values()
    assert "192.168.1.50:47470 answers others" in found.cause
    assert found.command.endswith("Privacy_LocalNetwork'")


def test_a_slow_line_and_a_lopsided_one() -> None:
    slow = judged(rate("download", 90), rate("upload", 80))
    assert [each.level for each in slow.values()] == ["warning", "warning"]
    assert slow["download"].remedy == "a cable is faster than Wi-Fi"
    lopsided = judged(rate("download", 500), rate("upload", 3.5))  # WSL#4901
    assert lopsided["download"].level == "ok"
    assert "Large Send Offload" in lopsided["upload"].remedy
    assert judged(rate("download", 1.0))["download"].level == "warning"


def test_how_often_to_exchange_over_a_slow_line() -> None:
    """10 million numbers of 32 bits at 1 Mbit/s take 320 s, each way."""
    said = judged(rate("download", 1.0), rate("upload", 1.0))["upload"].remedy
    assert "640 s at these rates for 10 million parameters" in said
    assert "so large that a step computes for 5,760 s" in said
    assert "5.760 s" in said.in_language("es")  # type: ignore[attr-defined]
    assert "7 s at these rates" in judged(rate("download", 100), rate("upload", 80))["upload"].remedy
    only_down = judged(rate("download", 100), rate("upload", 300))
    assert "4 s at these rates" in only_down["download"].remedy
    assert only_down["upload"].level == "ok"


def test_tiny_packets_on_the_way() -> None:
    found = judged(step("tcp", "answers", hint="its packets bring 524 bytes at most"))["tcp"]
    assert (found.level, found.command, found.shell) == ("warning", "cuadrilla doctor", "coordinator")
    assert found.remedy.startswith("its packets")


@pytest.mark.parametrize(("system", "command"), [("linux", "sudo timedatectl set-ntp true"),
                                                 ("darwin", "sudo sntp -sS time.apple.com"),
                                                 ("win32", "w32tm /resync")])  # fmt: skip
def test_a_clock_that_is_far_off(system: str, command: str) -> None:
    found = judged(step("clock", "a day ahead", hint="set the clocks"), system=system)["clock"]
    assert (found.level, found.command) == ("warning", command)


def test_what_the_child_says_is_put_together_again() -> None:
    inner = {"template": "{number:.1f} hours", "fields": {"number": 26.0}}
    reason = {"template": "the coordinator's is {duration} ahead", "fields": {"duration": inner}}
    row = {"step": "clock", "ok": True, "seconds": 0.1, "reason": reason, "hint": {"template": "", "fields": {}}}
    noise = "not JSON\n[1]\n" + json.dumps(row) + "\n"
    (found,) = parse_steps(noise)
    assert found.reason == "the coordinator's is 26.0 hours ahead"
    assert isinstance(found.reason, Message)
    assert found.reason.in_language("es") != found.reason
    assert found.hint == ""
    assert parse_steps("") == []
