"""What whoever looks into a problem needs, as one text in Markdown without anything secret: `cuadrilla bug-report`.

Invariants
* Every text from outside goes through one `Redactor` and `printable`, and is bounded: no line, section or report is
  longer than the constants below say, whatever a run folder holds.
* Of a run folder only regular files that lie in it are read, and only their ends: a link out of it may lead to a key.
* What a model has written, and what it was asked, is left out unless it is asked for.
* Reads files and asks nobody; starts without torch. The report is in English, as logs are.
"""

import getpass
import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cuadrilla.errors import ConfigError
from cuadrilla.home import Home
from cuadrilla.host.devices import Device
from cuadrilla.host.environment import compare_environments, read_environment
from cuadrilla.host.facts import read_facts
from cuadrilla.host.usage import usage_data
from cuadrilla.monitor.follow import FileFollower
from cuadrilla.monitor.nodes import NodeNow, node_files, read_nodes
from cuadrilla.monitor.redact import Redactor
from cuadrilla.printable import one_line, printable
from cuadrilla.rundir import RunDir, finite_json, read_regular, require_regular, worker_of_node_file
from cuadrilla.version import __version__

NAME_OF_FILE = "cuadrilla-bug-report.md"
MOST_BYTES = 2**20
MOST_SECTION_BYTES = 96 * 2**10
MOST_LINE = 1000
MOST_JSON_BYTES = 2**20
TAIL_BYTES = 2**16
NUM_EVENTS, NUM_ROWS, NUM_LOG_LINES, NUM_NODES, NUM_LOGS, NUM_FILES = 60, 20, 120, 40, 40, 200
NUM_SAMPLES = 3
SAMPLE, PROMPT = ("sample", "text"), ("prompt",)
"""Keys of a run's rows, and of its settings, under which texts are."""
ALARM_COMMAND = ("command",)
"""Of the settings: who is told of a run is nobody else's."""
PACKAGE, VERSION = re.compile(r"[\w.-]{1,80}", re.ASCII), re.compile(r"[\w.+!-]{1,60}", re.ASCII)
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "MKL_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ENABLE_MPS_FALLBACK", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "LANG", "LC_ALL", "LANGUAGE",
    "VIRTUAL_ENV",
)  # fmt: skip
CUT = "... (cut here)"


@dataclass(frozen=True, kw_only=True)
class ReportPart:
    """A section: its title, and lines that are redacted already."""

    title: str
    lines: Sequence[str]


def write_report(
    run: RunDir | None,
    *,
    devices: Sequence[Device],
    findings: Mapping[str, Any] | None,
    with_samples: bool = False,
    redactor: Redactor | None = None,
    now: datetime | None = None,
) -> str:
    """The whole report. `findings`: what `cuadrilla doctor --json` prints, if it could be asked.

    Never raises because of what a run folder holds.
    """
    redactor = redactor or redactor_for(run)
    made = (now or datetime.now(tz=UTC)).strftime("%Y-%m-%d %H:%M UTC")
    head = [
        "# cuadrilla bug report",
        "",
        f"Made {made} by cuadrilla {__version__}. People, machines and addresses have other names; secrets are out.",
        "",
        "## What happened",
        "",
        "(Say here what you typed, what you expected, and what came instead.)",
    ]
    parts = [*machine_parts(redactor, devices=devices, findings=findings)]
    if run is not None:
        parts += run_parts(run, redactor, with_samples=with_samples)
    text = "\n".join([*head, *(line for part in parts for line in in_markdown(part))]) + "\n"
    return bounded_text(text, most_bytes=MOST_BYTES)


def redactor_for(run: RunDir | None) -> Redactor:
    """Knows who is logged in, what this machine is called, and the machines of the run."""
    hosts = [socket.gethostname(), *_own_names()]
    if run is not None:
        workers = [worker_of_node_file(path.name) for path in node_files(run.nodes)]
        workers += [str(row.get("worker", "")) for row in _rows(run, run.events)]
        hosts += [worker.partition("/")[0] for worker in workers]
        hosts.append(str(_object(run, run.lock).get("host", "")))
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a number without a name, in a container
        user = ""
    return Redactor(home=str(Path.home()), user=user, hosts=hosts)


def _own_names() -> Iterator[str]:
    """What crews call this machine, and their coordinators' hosts."""
    for crew in Home.of_user().joined():
        yield crew.name
        yield crew.address.rpartition(":")[0].strip("[]")


# -- the machine -------------------------------------------------------------------------------------------------------


def machine_parts(
    redactor: Redactor, *, devices: Sequence[Device], findings: Mapping[str, Any] | None
) -> Iterator[ReportPart]:
    facts = read_facts()
    yield ReportPart(title="Machine", lines=_named(redactor, asdict(facts), addresses=False))
    environment = read_environment()
    shown = [redactor.redact_value(asdict(device)) for device in devices]
    yield ReportPart(title="Devices", lines=[_json(device) for device in shown])
    known = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    yield ReportPart(title="Variables", lines=_named(redactor, known))
    if findings is not None:
        yield ReportPart(title="cuadrilla doctor", lines=_findings(redactor, findings))
    packages = environment.pop("packages")
    yield ReportPart(
        title="Versions", lines=[*_named(redactor, environment, addresses=False), *_packages(redactor, packages)]
    )


def _findings(redactor: Redactor, findings: Mapping[str, Any]) -> list[str]:
    rows = [redactor.redact_value(row) for row in findings.get("findings", [])]
    shown = ("level", "check", "cause", "remedy", "command")
    return [_json({key: row[key] for key in shown if row.get(key)}) for row in rows]


def _packages(redactor: Redactor, packages: Mapping[str, str]) -> list[str]:
    """Versions look like addresses, and some names like those of secrets: what looks otherwise is left out."""
    told = [(name, str(version)) for name, version in packages.items()]
    good = [(name, version) for name, version in told if PACKAGE.fullmatch(name) and VERSION.fullmatch(version)]
    return [redactor.redact_names(f"{name}=={version}") for name, version in good]


# -- the run -----------------------------------------------------------------------------------------------------------


def run_parts(run: RunDir, redactor: Redactor, *, with_samples: bool) -> Iterator[ReportPart]:
    left_out, unasked = ((), ()) if with_samples else (SAMPLE, PROMPT)

    def rows(path: Path, number: int) -> list[str]:
        return [_json(redactor.redact_value(row, left_out=left_out)) for row in _rows(run, path)[-number:]]

    yield ReportPart(title="Run: settings", lines=_settings(run, redactor, left_out=(*unasked, *ALARM_COMMAND)))
    yield ReportPart(
        title="Run: status", lines=[_json(redactor.redact_value(_object(run, run.status), left_out=left_out))]
    )
    yield ReportPart(title="Run: other versions when it was trained", lines=_differences(run, redactor))
    yield ReportPart(title="Run: files", lines=[redactor.redact(line) for line in _files(run)])
    yield ReportPart(title=f"Run: newest events (at most {NUM_EVENTS})", lines=rows(run.events, NUM_EVENTS))
    yield ReportPart(title=f"Run: newest rows (at most {NUM_ROWS})", lines=rows(run.metrics, NUM_ROWS))
    for node in _nodes(run):
        yield ReportPart(title=f"Run: machine {redactor.redact(node.name)}", lines=_node(redactor, node))
    for path in _logs(run):
        title = f"Run: end of logs/{redactor.redact(one_line(path.name, most=80))}"
        yield ReportPart(title=title, lines=redactor.redact(tail_text(path)).split("\n")[-NUM_LOG_LINES:])
    if with_samples:
        yield ReportPart(title="Run: samples", lines=[redactor.redact(text) for text in _samples(run)])


def _settings(run: RunDir, redactor: Redactor, *, left_out: Iterable[str]) -> list[str]:
    """Each section on a line; of the keys that were set by somebody, by whom."""
    found = _object(run, run.config)
    values = redactor.redact_value(found.get("values"), left_out=left_out)
    if not isinstance(values, Mapping):
        return ["none: it has not been trained"]
    origins = found.get("origins")
    told = {key: origin for key, origin in origins.items() if origin != "default"} if isinstance(origins, dict) else {}
    return [*_named(redactor, values, clean=True), "", "set: " + redactor.redact(_json(told))]


def _differences(run: RunDir, redactor: Redactor) -> list[str]:
    then = _object(run, run.env)
    if not then or not isinstance(then.get("packages", {}), dict):
        return ["not known"]
    rows = compare_environments(then, read_environment())
    told = (_json(row) for row in rows if all(VERSION.fullmatch(str(value)) for value in row.values()))
    return [redactor.redact_names(line) for line in told] or ["none"]


def _files(run: RunDir) -> Iterator[str]:
    try:
        names = sorted(os.listdir(run.path))[:NUM_FILES]
        kept = sorted(os.listdir(run.checkpoints))[-10:] if _is_inside(run, run.checkpoints) else []
    except OSError as error:
        yield f"cannot be listed: {error.strerror}"
        return
    for name in names:
        try:
            status = (run.path / name).lstat()
        except OSError:
            continue
        kind = "folder" if (run.path / name).is_dir() else f"{status.st_size:,} bytes"
        yield f"{one_line(name, most=100)}  {'a link' if (run.path / name).is_symlink() else kind}"
    for name in kept:
        yield f"checkpoints/{one_line(name, most=100)}"


def _nodes(run: RunDir) -> Iterator[NodeNow]:
    files = [path for path in node_files(run.nodes) if _is_inside(run, path)]
    names = {one_line(worker_of_node_file(path.name)) for path in files[:NUM_NODES]}
    yield from (node for node in read_nodes(run) if node.name in names)


def _node(redactor: Redactor, node: NodeNow) -> list[str]:
    facts = redactor.redact_value(dict(node.facts))
    known = {"phase": node.phase, "waiting_part": node.waiting_part, "round_trip_seconds": node.round_trip_seconds}
    now = {name: value for name, value in known.items() if value is not None}
    lines = [f"{_time(line.time)} {line.level} {redactor.redact(line.text)}" for line in node.log]
    usage = redactor.redact_value(usage_data(node.usage))
    return [f"facts: {_json(facts)}", f"newest: {_json({**now, **usage})}", *lines]


def _logs(run: RunDir) -> list[Path]:
    try:
        found = sorted(path for path in run.logs.iterdir() if path.suffix == ".txt")
    except OSError:
        return []
    return [path for path in found if _is_inside(run, path)][:NUM_LOGS]


def _samples(run: RunDir) -> list[str]:
    texts = [str(row["sample"]) for row in _rows(run, run.metrics) if isinstance(row.get("sample"), str)]
    return texts[-NUM_SAMPLES:]


# -- wary reading ------------------------------------------------------------------------------------------------------


def _is_inside(run: RunDir, path: Path) -> bool:
    """Not by a link to somewhere else."""
    try:
        return path.resolve().is_relative_to(run.path.resolve())
    except (OSError, RuntimeError):  # links in a circle
        return False


def _object(run: RunDir, path: Path) -> dict[str, Any]:
    if not _is_inside(run, path):
        return {}
    try:
        value = finite_json(read_regular(path, most_bytes=MOST_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _rows(run: RunDir, path: Path) -> list[dict[str, Any]]:
    """The newest of an append-only file."""
    return FileFollower(path, tail_bytes=TAIL_BYTES).read().rows if _is_inside(run, path) else []


def tail_text(path: Path) -> str:
    """The last lines of a file, whole ones only: what is cut may be a secret that nothing recognises any more."""
    try:
        require_regular(path)
        with open(path, "rb") as file:
            first = max(0, file.seek(0, 2) - TAIL_BYTES)
            file.seek(first)
            raw = file.read(TAIL_BYTES)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return (raw.partition(b"\n")[2] if first else raw).decode("utf-8", "replace").rstrip("\n")


def run_folder(path: Path) -> RunDir:
    """A run's folder, or that of its run file. Raises ConfigError."""
    run = RunDir(path if path.is_dir() else path.parent)
    if not path.exists():
        raise ConfigError("{path} does not exist", path=path, hint="name a run folder, or none")
    return run


# -- as text -----------------------------------------------------------------------------------------------------------


def in_markdown(part: ReportPart) -> Iterator[str]:
    """A section whose lines can end neither it nor themselves."""
    text = "\n".join(_line(line) for given in part.lines for line in printable(given).split("\n"))
    text = bounded_text(text, most_bytes=MOST_SECTION_BYTES)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    yield from ("", f"## {one_line(part.title)}", "", fence, text or "none", fence)


def _line(text: str) -> str:
    return text if len(text) <= MOST_LINE else f"{text[:MOST_LINE]}{CUT}"


def bounded_text(text: str, *, most_bytes: int) -> str:
    raw = text.encode("utf-8", "replace")
    if len(raw) <= most_bytes:
        return text
    return raw[: most_bytes - len(CUT) - 2].decode("utf-8", "ignore") + f"\n{CUT}\n"


def _named(redactor: Redactor, values: Mapping[str, Any], *, addresses: bool = True, clean: bool = False) -> list[str]:
    """A line for each value that is known. `clean`: they were redacted as values."""
    shown: Callable[[str], str] = (
        (lambda text: text) if clean else lambda text: redactor.redact(text, addresses=addresses)
    )
    return [shown(f"{name}: {_plain(value)}") for name, value in values.items() if value is not None]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
