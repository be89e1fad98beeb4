"""Crews that are described instead of measured: by a file, or by one of the presets below."""

from pathlib import Path
from typing import Annotated, Self

import pydantic
from pydantic import Field, model_validator

from cuadrilla.config import LINK_SHAPE, CrewEngine, LocalEngine, Section
from cuadrilla.errors import ConfigError
from cuadrilla.link.practice import parse_shape
from cuadrilla.messages import Message
from cuadrilla.plan.predict import Crew, MachineSpec
from cuadrilla.runfile import in_our_words, parse_toml

Positive = Annotated[float, Field(gt=0, le=1e18)]
LinkShape = Annotated[str, Field(pattern=LINK_SHAPE)]


class MachineSection(Section):
    """A machine, or `count` equal ones. Its speed is given by one of three keys. `tflops`: what a training achieves,
    which is a third to a half of the figure on the box.
    """

    name: Annotated[str, Field(min_length=1, max_length=64)]
    count: Annotated[int, Field(ge=1, le=1000)] = 1
    speed: Positive | None = None
    """Relative to this machine."""
    tokens_per_second: Positive | None = None
    tflops: Positive | None = None
    link: LinkShape = ""
    """Its link to the coordinator, such as "940mbit+1ms". The machine without a link coordinates."""

    @model_validator(mode="after")
    def _one_speed(self) -> Self:
        if [self.speed, self.tokens_per_second, self.tflops].count(None) != 2:
            keys = Message("speed, tokens_per_second or tflops")
            raise ValueError(
                Message("machine {name}: give its speed by exactly one of {keys}", name=self.name, keys=keys)
            )
        return self

    @property
    def names(self) -> list[str]:
        """A name for each of the `count` machines."""
        return [f"{self.name} {number}" for number in range(1, self.count + 1)] if self.count > 1 else [self.name]


class CrewFile(Section):
    link: LinkShape = ""
    """The coordinator's own link, which all others share. By default it is as fast as the fastest of theirs."""
    machine: Annotated[list[MachineSection], Field(min_length=1, max_length=1000)]

    @model_validator(mode="after")
    def _own_names(self) -> Self:
        names = [name for section in self.machine for name in section.names]
        if len({*names}) < len(names):
            raise ValueError(Message("two machines have one name"))
        return self


# What a training achieves on a card is assumed: a third to a half of the figure on its box.
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
    """The crew of a preset's name, or of a file. Raises ConfigError."""
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
            key=".".join(str(part) for part in problem["loc"]) or "machine",
            problem=in_our_words(problem),
            hint="a [[machine]] has its own name, one of speed, tokens_per_second, tflops, and perhaps link and count",
        ) from error


def practised(engine: LocalEngine | CrewEngine, *, here: float) -> Crew:
    """The practice crew of a run file. `here`: tokens per second of a worker that is not slowed down."""
    link, speeds = engine.link if isinstance(engine, CrewEngine) else "", engine.workers or [1.0]
    return Crew(machines=[_spec(f"worker-{number}", speed * here, link) for number, speed in enumerate(speeds, 1)])


def described(file: CrewFile, *, here: float, operations: float) -> Crew:
    """The crew of a file. `here`: tokens per second of this machine, which coordinates and works if every machine of
    the file has a link. `operations`: floating-point operations for one token."""
    machines = [] if any(not section.link for section in file.machine) else [_spec("here", here, "")]
    for section in file.machine:
        rate = section.tokens_per_second or (section.speed or 0.0) * here + (section.tflops or 0.0) * 1e12 / operations
        machines += [_spec(name, rate, section.link) for name in section.names]
    links = [machine.bytes_per_second for machine in machines if machine.bytes_per_second < float("inf")]
    own = parse_shape(file.link).bits_per_second / 8
    return Crew(machines=machines, bytes_per_second=own or max(links, default=float("inf")))


def _spec(name: str, tokens_per_second: float, link: str) -> MachineSpec:
    shape = parse_shape(link)
    return MachineSpec(
        name=name,
        tokens_per_second=tokens_per_second,
        bytes_per_second=shape.bits_per_second / 8 or float("inf"),
        delay_seconds=shape.delay_seconds,
    )
