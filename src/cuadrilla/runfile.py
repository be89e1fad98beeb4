"""Run files. Reading turns TOML text and `--set` values into a checked `Config` with the origin of each value. Writing
makes a run file in which the meaning of each key, from `config.py`, stands beside it.
"""

import difflib
import json
import os
import re
import textwrap
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
import tomli_w
from pydantic_core import ErrorDetails

from cuadrilla.config import SCHEMA, Config, DimensionSection, Section
from cuadrilla.errors import ConfigError
from cuadrilla.messages import Message, language
from cuadrilla.rundir import RunDir, make_private, typed, write_atomic

WANTED = {
    "missing": Message("Field required"),
    "int_type": Message("should be a valid integer"),
    "int_parsing": Message("should be a valid integer"),
    "float_type": Message("should be a valid number"),
    "float_parsing": Message("should be a valid number"),
    "string_type": Message("should be a valid string"),
    "bool_type": Message("should be a valid boolean"),
    "list_type": Message("should be a valid list"),
    "finite_number": Message("should be a finite number"),
    "dict_type": Message("should be a table"),
    "model_type": Message("should be a table"),
}
"""Messages that replace pydantic's own, by the type of its error."""
SIGNS = {"greater_than": ">", "greater_than_equal": "≥", "less_than": "<", "less_than_equal": "≤"}
LENGTHS = ("tokens", "epochs", "steps")
"""Keys of the section `train` that say how long to train. Only the one set last holds."""
SIZES = {  # for a first run of this size: tokens, and sequences in a batch (None: chosen by a rule)
    "micro": (3_000_000, None),
    "mini": (20_000_000, None),
    "small": (2_500_000_000, 480),
}
OFTEN_CHANGED = (
    "run.seed", "train.batch_sequences", "train.precision", "train.device", "optim.kind", "optim.lr",
    "schedule.warmup", "schedule.cooldown", "checkpoint.every_seconds", "sample.prompt",
)  # fmt: skip
"""Keys that a new run file shows with their defaults, as comments."""
HEAD = """\
# A run of cuadrilla. A key that is not here, or behind a #, has its default.
# `cuadrilla train --show-config` shows and explains every key."""
MEANING_AT, MEANING_WIDTH = 28, 90
"""In a new run file: the column where meanings begin, and their width."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A checked configuration. `origins` maps `section.key` to "default", "file" or "--set"."""

    config: Config
    origins: dict[str, str]


def read_run_file(path: Path, *, sets: Sequence[str] = ()) -> Resolved:
    """Read and check a run file. Raises ConfigError naming the file, the line or key, and the remedy."""
    path = path / "run.toml" if path.is_dir() else path
    if path.is_file() and path.suffix != ".toml":
        raise ConfigError("{path} is no run file", path=path, hint="of a text: cuadrilla train {path}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        hint = "write one with `cuadrilla new NAME`"
        raise ConfigError("cannot read {path}: {reason}", path=path, reason=error.strerror, hint=hint) from error
    except UnicodeDecodeError as error:
        template = "{path} is not UTF-8 text (byte {byte})"
        raise ConfigError(template, path=path, byte=error.start, hint="save it as UTF-8") from error
    return resolve(text, sets=sets, name=str(path))


def has_begun(run: RunDir) -> bool:
    """Whether the run has a checkpoint."""
    return run.checkpoints.is_dir() and any(run.checkpoints.iterdir())


def literal(value: Any) -> str:
    """A value in one line, as `--set` reads it. Raises ConfigError for a type that TOML lacks."""
    try:
        text = tomli_w.dumps({"value": value}, indent=0)
    except TypeError as error:
        hint = "texts, numbers, booleans and lists"
        raise ConfigError("the settings: {reason}", reason=error, hint=hint) from None
    return text.removeprefix("value = ").strip().replace("[\n", "[").replace(",\n]", "]").replace("\n", " ")


def as_sets(values: Mapping[str, Any]) -> list[str]:
    """Values by `section.key`, as arguments for `--set`. Raises ConfigError."""
    return [f"{key}={literal(value)}" for key, value in values.items()]


def read_run_config(run: RunDir) -> Config:
    """The configuration of the last training (config.json); before the first, the run file. Raises ConfigError."""
    if not run.config.exists() or (run.run_file.exists() and not has_begun(run)):
        return read_run_file(run.run_file).config
    try:
        return Config.model_validate(json.loads(run.config.read_bytes())["values"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "{path} cannot be read: {reason}",
            path=run.config,
            reason=str(error).partition("\n")[0],
            hint="cuadrilla train {run}",
            run=typed(run.path),
        ) from error


def resolve(text: str, *, sets: Sequence[str] = (), name: str = "run.toml") -> Resolved:
    """Check TOML text with `--set` values; see `read_run_file`."""
    values = parse_toml(text, name=name)
    origins = {key: "file" for key in leaves(values)}
    parsed = [parse_set(item) for item in sets]
    _drop_other_lengths(values, [".".join(key) for key, value in parsed if value])
    for key, value in parsed:
        _assign(values, key, value)
        origins[".".join(key)] = "--set"
    for section in VARIANTS:
        if isinstance(values.get(section), dict):
            values[section].setdefault("kind", Config.model_fields[section].default.kind)
    try:
        config = Config.model_validate(values)
    except pydantic.ValidationError as error:
        raise _explain(error, name) from None
    dumped = dump(config)
    origins = {key: origins.get(key, "default") for key in leaves(dumped)}
    return Resolved(config=config, origins=origins)


def parse_toml(text: str, *, name: str) -> dict[str, Any]:
    """TOML text as nested dicts. Raises ConfigError that names the line."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        hint = 'texts stand in quotes, decimals have a point: name = "casa", lr = 0.02; see https://toml.io'
        if not (found := re.search(r"line (\d+), column \d+", str(error))):
            raise ConfigError("{name}: {reason}", name=name, reason=error, hint=hint) from error
        line = text.splitlines()[int(found[1]) - 1].strip()
        template = "{name}, line {number}: this is not TOML: {line}"
        raise ConfigError(template, name=name, number=found[1], line=line[:80], hint=hint) from error


def parse_set(item: str) -> tuple[list[str], Any]:
    """`section.key=value`, the value in TOML or a bare word. Raises ConfigError."""
    key, separator, raw = item.partition("=")
    if not separator or not re.fullmatch(r"\w+(\.\w+)*", key.strip()):
        hint = "e.g. --set optim.lr=0.01"
        raise ConfigError("--set {item}: not of the form section.key=value", item=item, hint=hint)
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    return key.strip().split("."), value


def dump(config: Config) -> dict[str, Any]:
    """Nested plain values, as a run file would hold them."""
    return config.model_dump(by_alias=True, mode="json")


def load_dumped(text: str) -> Config:
    """A configuration that another machine dumped as JSON. Raises ConfigError."""
    try:
        return Config.model_validate(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "the coordinator's configuration cannot be read: {reason}",
            reason=str(error).splitlines()[0],
            hint="install the same version of cuadrilla on both machines",
        ) from None


def to_toml(config: Config) -> str:
    """The configuration as TOML text, without keys that are None: TOML has no null."""
    return tomli_w.dumps(config.model_dump(by_alias=True, mode="json", exclude_none=True))


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """`section.key` → (old, new) for every value that differs between two dumped configurations."""
    a, b = leaves(old), leaves(new)
    return {key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values, flattened to `section.key`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _drop_other_lengths(values: dict[str, Any], keys: Sequence[str]) -> None:
    """Drop the file's length (see `LENGTHS`) if `--set` gives one."""
    train = values.get("train")
    if isinstance(train, dict) and any(f"train.{length}" in keys for length in LENGTHS):
        for length in LENGTHS:
            train.pop(length, None)


def _assign(values: dict[str, Any], key: list[str], value: Any) -> None:
    for part in key[:-1]:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError("--set {key}: {part} is a value, not a section", key=".".join(key), part=part)
        values = inner
    values[key[-1]] = value


def _explain(error: pydantic.ValidationError, name: str) -> ConfigError:
    """The first problem in one line, with "did you mean" for an unknown key and the legal range for a value."""
    problem = error.errors()[0]
    first, *rest = [*map(str, problem["loc"])] or [""]
    *section, last = [first, *(rest[1:] if first in VARIANTS else rest)]
    key = ".".join([*section, last]) or Message("the run file")
    if problem["type"] == "extra_forbidden":
        known = _known_keys(section)
        elsewhere = [f"{section}.{last}" for section in Config.model_fields if last in _known_keys([section])]
        near = elsewhere[:1] or difflib.get_close_matches(last, known, n=1, cutoff=0.5)
        hint = "did you mean {meant}?" if near else "known here: {known}"
        return ConfigError(
            "{name}: unknown key {key}",
            name=name,
            key=key,
            hint="it belongs to another kind" if last in known else hint,
            meant=next(iter(near), ""),
            known=", ".join(known),
        )
    given = problem.get("input")
    return ConfigError(
        "{name}: {key}: {problem}"
        if isinstance(given, dict | Section)
        else "{name}: {key}: {problem} (given: {given!r})",
        name=name,
        key=key,
        problem=in_our_words(problem),
        given=str(given)[:80],
        hint="outside of a run's folder, `cuadrilla train --show-config` explains each key",
    )


def in_our_words(problem: ErrorDetails) -> str:
    """The text of a problem: our own message, a template for a frequent one of pydantic, or else pydantic's text."""
    match problem.get("ctx", {}):
        case {"error": ValueError(args=(Message() as message,))}:
            return message
        case {"gt": limit} | {"ge": limit} | {"lt": limit} | {"le": limit}:
            return Message("should be {sign} {limit}", sign=SIGNS[problem["type"]], limit=limit)
        case {"expected_tags": str(expected)}:
            return Message("kind should be one of {choices}", choices=expected)
        case {"pattern": str(pattern)} if "auto|" in pattern and "," in pattern:
            return Message("should be auto, or devices such as cuda:0,cuda:1,cpu")
        case {"pattern": str(pattern)} if "auto|" in pattern:
            return Message("should be auto, or a device such as cpu, mps, cuda, cuda:1")
        case {"expected": str(expected)}:
            return Message("should be one of {choices}", choices=expected.replace(" or ", ", "))
    return WANTED.get(problem["type"]) or problem["msg"].replace("Input should", "should")


VARIANTS = {
    name: typing.get_args(field.annotation) for name, field in Config.model_fields.items() if field.discriminator
}
"""The variants of the sections that have several. Pydantic inserts the kind into the location of an error in these
(`optim.muon.lr`)."""


def _known_keys(section: list[str]) -> list[str]:
    if not section:
        return [field.alias or name for name, field in Config.model_fields.items()]
    if section[:2] == ["tune", "space"] and len(section) > 2:  # a user chooses its keys
        return list(DimensionSection.model_fields)
    field = Config.model_fields[section[0]]
    variants = VARIANTS.get(section[0], (field.annotation,))
    return sorted({key for variant in variants for key in getattr(variant, "model_fields", {})})


def make_run(folder: Path, text: str) -> RunDir:
    """Make a run folder with this run file. Raises ConfigError if the folder already has one."""
    run = RunDir(folder)
    if run.run_file.exists():
        raise ConfigError("{path} exists", path=run.run_file, hint="choose another name, or edit that file")
    make_private(folder)
    write_atomic(run.run_file, text)
    return run


def settings_text(settings: Mapping[str, Any] | str, *, folder: Path) -> str:
    """The text of the run file in `folder`, from a mapping of sections, or from such a text, which is only checked.

    In a mapping, the data folder may be relative to the working directory or to `folder`. Raises ConfigError.
    """
    if isinstance(settings, str):
        resolve(settings)
        return settings
    values = {key: value for key, value in leaves(settings).items() if value != {}}
    if isinstance(data := values.get("data.folder"), str | os.PathLike):
        values["data.folder"] = seen_from(folder, os.fspath(data))
    return run_file_text(values)


def seen_from(run: Path, data: str) -> str:
    """The data folder relative to the run. `data` may be relative to the run or to the working directory."""
    return os.path.relpath(data, run) if not (run / data).exists() and Path(data).exists() else data


def gpt2_settings(size: str, *, data: str, tokens: int) -> dict[str, Any]:
    """The settings of a first run of this size, by `section.key`."""
    _, batch = SIZES[size]
    settings = {"data.folder": data.replace("\\", "/"), "model.preset": size, "train.tokens": tokens}
    return settings | ({"train.batch_sequences": batch} if batch else {})


def run_file_text(settings: Mapping[str, Any]) -> str:
    """A run file with these settings (by `section.key`). Beside each stands its meaning, in the reader's language.

    Raises ConfigError.
    """
    config, section = resolve("", sets=as_sets(settings), name=Message("the settings")).config, ""
    lines = [Message(HEAD).in_language(language()), f"schema = {SCHEMA}"]
    for key, value in leaves(dump(config)).items():
        within, _, name = key.partition(".")
        if not name or (key not in settings and key not in OFTEN_CHANGED):
            continue
        if within != section:
            section = within
            lines += ["", f"[{section}]"]
        written = f"{value:_}" if type(value) is int and value >= 10_000 else literal(value)
        left = f"{'' if key in settings else '# '}{name} = {written}"
        for line in textwrap.wrap(meaning(config, key).in_language(language()), MEANING_WIDTH) or [""]:
            lines.append(f"{left:{MEANING_AT}}# {line}" if line else left)
            left = ""
    return "\n".join(lines) + "\n"


def meaning(config: Config, key: str) -> Message:
    """The help text of a key; the schema and the values of a search have none."""
    section, _, name = key.partition(".")
    fields = type(getattr(config, section)).model_fields if name else {}
    return Message(fields[name].description or "" if name in fields else "")
