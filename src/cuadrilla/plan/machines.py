"""Machines that are described instead of measured: a file, or one of the crews below."""

from pathlib import Path
from typing import Annotated

import pydantic
from pydantic import Field

from cuadrilla.config import CrewEngine, LocalEngine, Section
from cuadrilla.errors import ConfigError
from cuadrilla.link.practice import parse_shape
from cuadrilla.messages import Message
from cuadrilla.plan.predict import Crew, MachineSpec
from cuadrilla.runfile import parse_toml

Positive = Annotated[float, Field(gt=0, le=1e18)]


class MachineSection(Section):
    """How fast a machine trains: one of the three. `tflops`: what a training gets out of it, not what is printed on
    the box; a third to a half of that.
    """

    name: Annotated[str, Field(min_length=1, max_length=64)]
    count: Annotated[int, Field(ge=1, le=1000)] = 1
    speed: Positive | None = None
    """In times of this machine."""
    tokens_per_second: Positive | None = None
    tflops: Positive | None = None
    link: str = ""
    """To the coordinator, such as "940mbit+1ms"; none: it coordinates."""


class CrewFile(Section):
    link: str = ""
    """The coordinator's own, which all others share."""
    machine: Annotated[list[MachineSection], Field(min_length=1, max_length=1000)]


# What a training gets out of a card is assumed, a third to a half of what is printed on its box.
PRESETS = {
    "4070ti+m2-wifi": CrewFile(
        machine=[
            MachineSection(name="RTX 4070 Ti", tflops=40.0),
            MachineSection(name="MacBook Air M2", tflops=1.25, link="300mbit+4ms"),
        ]
    ),
    "5x3050-1gbe": CrewFile(
        link="940mbit",
        machine=[
            MachineSection(name="RTX 3050 laptop", tflops=4.8),
            MachineSection(name="RTX 3050 laptop, by cable", tflops=4.8, count=4, link="940mbit+0.3ms"),
        ],
    ),
    "classroom-30": CrewFile(
        link="940mbit",
        machine=[
            MachineSection(name="teacher's PC", tflops=0.2),
            MachineSection(name="PC", tflops=0.2, count=29, link="940mbit+0.5ms"),
        ],
    ),
}


def read_crew(text: str) -> CrewFile:
    """A preset's name, or the path of a file. Raises ConfigError."""
    if text in PRESETS:
        return PRESETS[text]
    try:
        content = Path(text).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "cannot read {path}: {reason}",
            path=text,
            reason=getattr(error, "strerror", None) or error,
            hint="a file that describes the machines, or one of: {presets}",
            presets=", ".join(PRESETS),
        ) from error
    try:
        return CrewFile.model_validate(parse_toml(content, name=text))
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(
            "{name}: {key}: {problem}",
            name=text,
            key=".".join(str(part) for part in problem["loc"]),
            problem=problem["msg"],
            hint="a [[machine]] has a name, one of speed, tokens_per_second, tflops, and may have a link and a count",
        ) from error


def practised(engine: LocalEngine | CrewEngine, *, here: float) -> Crew:
    """The workers of a run file; `here`: tokens per second of one that is not slowed down."""
    link = engine.link if isinstance(engine, CrewEngine) else ""
    shape = parse_shape(link, speed=1.0)
    limits = {"bytes_per_second": shape.bits_per_second / 8, "delay_seconds": shape.delay_seconds} if link else {}
    return Crew(
        machines=[
            MachineSpec(name=f"worker-{number}", tokens_per_second=speed * here, **limits)
            for number, speed in enumerate(engine.workers or [1.0], 1)
        ]
    )


def described(file: CrewFile, *, here: float, operations: float) -> Crew:
    """`here`: tokens per second of this machine; `operations`: of one token. Raises ConfigError."""
    machines = []
    for section in file.machine:
        rates = {
            "tokens_per_second": section.tokens_per_second,
            "speed": section.speed and section.speed * here,
            "tflops": section.tflops and section.tflops * 1e12 / operations,
        }
        given = [rate for rate in rates.values() if rate]
        if len(given) != 1:
            problem = "machine {name}: its speed is needed, once: {keys}"
            raise ConfigError(problem, name=section.name, keys=Message("speed, tokens_per_second or tflops"))
        shape = parse_shape(section.link, speed=1.0)
        for number in range(1, section.count + 1):
            name = f"{section.name} {number}" if section.count > 1 else section.name
            link = {"bytes_per_second": shape.bits_per_second / 8, "delay_seconds": shape.delay_seconds}
            machines.append(MachineSpec(name=name, tokens_per_second=given[0], **(link if section.link else {})))
    if len({machine.name for machine in machines}) < len(machines):
        raise ConfigError("two machines have one name", hint="each [[machine]] needs its own")
    own = parse_shape(file.link, speed=1.0).bits_per_second / 8
    return Crew(machines=machines, bytes_per_second=own or float("inf"))
