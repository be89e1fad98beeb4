"""The way to a coordinator (`--head`): the walk of `cuadrilla check link`, and what to type where it ends.

A machine that has not joined the crew walks as far as it can without keys: name, route, tcp, and whether a coordinator
answers.
"""

import json
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cuadrilla.doctor.child import child_argv
from cuadrilla.doctor.diagnosis import Diagnosis, Shell, fail, warn, well
from cuadrilla.doctor.programs import ProgramAnswer, answer_of
from cuadrilla.home import Joined
from cuadrilla.link.address import Address
from cuadrilla.link.check import CheckedStep, Target, check_unjoined
from cuadrilla.messages import Message

WALK_SECONDS = 90.0
NC_SECONDS = 6.0
LOCAL_NETWORK_SETTINGS = "'x-apple.systempreferences:com.apple.preference.security?Privacy_LocalNetwork'"
MEASURE_SECONDS = 2.0
SLOW_MEGABITS = 200.0
LOPSIDED = 4.0
RATES = ("download", "upload")
EXAMPLE_PARAMETERS, PARAMETER_BITS = 10_000_000, 32
WORK_PER_EXCHANGE = 9
"""So many times as long as it exchanges a step has to compute for nine tenths of the time to be work."""


def walk(address: Address, *, crew: Joined | None) -> Iterator[CheckedStep]:
    """The steps, until the first that is broken."""
    if crew is None:
        yield from check_unjoined(Target(address=address, folder=Path(), seconds=MEASURE_SECONDS))
        return
    argv = child_argv("link", str(address), str(crew.folder), str(MEASURE_SECONDS))
    answer = answer_of(argv, seconds=WALK_SECONDS) or ProgramAnswer()
    steps = parse_steps(answer.text)
    yield from steps
    if answer.code is None:
        reason = Message("the walk did not end within {seconds:g} s", seconds=WALK_SECONDS)
        yield CheckedStep(step="link", ok=False, reason=reason, seconds=WALK_SECONDS)
    elif not steps:
        said = answer.text.splitlines()[-1][:200] if answer.text else ""
        yield CheckedStep(step="link", ok=False, reason=Message("no step was done: {said}", said=said), seconds=0.0)


def mac_forbids(steps: list[CheckedStep], address: Address) -> bool:
    """Whether macOS keeps this terminal from the local network: its own `nc` needs no permission, and gets there."""
    if platform.system() != "Darwin" or not steps or steps[-1].step != "tcp" or steps[-1].ok:
        return False
    answer = answer_of(["/usr/bin/nc", "-z", "-G", "3", address.host, str(address.port)], seconds=NC_SECONDS)
    return answer is not None and answer.ok


def parse_steps(text: str) -> list[CheckedStep]:
    """What the child says, put together again."""
    found = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            found.append(
                CheckedStep(
                    step=row["step"],
                    ok=row["ok"],
                    reason=_message(row["reason"]),
                    hint=_message(row["hint"]),
                    seconds=row["seconds"],
                )
            )
    return found


def _message(parts: Mapping[str, Any]) -> str:
    """Of our own child's, taken apart by `child.py`."""
    fields = {name: _message(value) if isinstance(value, dict) else value for name, value in parts["fields"].items()}
    return Message(parts["template"], **fields) if parts["template"] else ""


def judge(
    steps: list[CheckedStep],
    *,
    address: Address,
    system: str = sys.platform,
    joined: bool = True,
    forbidden: bool = False,
) -> Iterator[tuple[str, Diagnosis]]:
    """By step; pure. `joined`: whether this machine is one of the crew. `forbidden`: what `mac_forbids` says."""
    rates = {step.step: rate for step in steps if step.ok and (rate := _megabits(step)) is not None}
    slow = [name for name, rate in rates.items() if rate < SLOW_MEGABITS]
    for step in steps:
        reason = Message("{step}: {reason}", step=step.step, reason=step.reason)
        if not step.ok and forbidden:
            yield (
                step.step,
                fail(
                    Message(
                        "macOS keeps this terminal from the local network; {address} answers others", address=address
                    ),
                    remedy=Message("allow this terminal there, then try again"),
                    command=f"open {LOCAL_NETWORK_SETTINGS}",
                ),
            )
        elif not step.ok:
            command, shell = _command(step, address, system, joined=joined)
            yield step.step, fail(reason, remedy=step.hint, command=command, shell=shell)
        elif step.step in slow:  # what there is to say of both directions stands under the last
            remedy = _slow(rates) if step.step == slow[-1] else Message("a cable is faster than Wi-Fi")
            yield step.step, warn(reason, remedy=remedy)
        elif step.step == "tcp" and step.hint:
            yield step.step, warn(reason, remedy=step.hint, command="cuadrilla doctor", shell="coordinator")
        elif step.step == "clock" and step.hint:
            yield step.step, warn(reason, remedy=step.hint, command=_set_clock(system))
        else:
            yield step.step, well(reason)


def _megabits(step: CheckedStep) -> float | None:
    value = getattr(step.reason, "fields", {}).get("bits") if step.step in RATES else None
    return float(value) if isinstance(value, int | float) else None


def _slow(rates: Mapping[str, float]) -> Message:
    if len(rates) == len(RATES) and max(rates.values()) > LOPSIDED * min(rates.values()):
        return Message(
            "one direction is much slower: under WSL, switch off Large Send Offload of vEthernet (WSL) in Windows; "
            "else look at the cable"
        )
    if len(rates) < len(RATES):
        return Message("a cable is faster than Wi-Fi")
    megabits = EXAMPLE_PARAMETERS * PARAMETER_BITS / 1e6
    seconds = sum(megabits / max(rate, 1e-3) for rate in rates.values())
    return Message(
        "a cable is faster than Wi-Fi. In each step all weights come here and all gradients go back: {seconds:,.0f} s "
        "at these rates for {millions} million parameters. Exchange less often: choose train.batch_sequences so large "
        "that a step computes for {work:,.0f} s; or leave this machine out",
        seconds=seconds,
        millions=EXAMPLE_PARAMETERS // 10**6,
        work=WORK_PER_EXCHANGE * seconds,
    )


def _command(step: CheckedStep, address: Address, system: str, *, joined: bool) -> tuple[str, Shell]:
    """What to type where a step is broken: mostly there, since a firewall and a program are there."""
    port = address.port
    match step.step:
        case "name":
            return f"cuadrilla doctor --head ADDRESS:{port}", "here"
        case "route":
            return ("ip route" if system == "linux" else "netstat -rn"), "here"
        case "tcp":
            return f"cuadrilla doctor --port {port}", "coordinator"
        case "tls" if joined:
            return "cuadrilla join --new", "here"
        case "credentials" | "tls":
            return "cuadrilla invite", "coordinator"
    return f"cuadrilla check link {address}", "here"


def _set_clock(system: str) -> str:
    if system == "darwin":
        return "sudo sntp -sS time.apple.com"
    return "w32tm /resync" if system == "win32" else "sudo timedatectl set-ntp true"
