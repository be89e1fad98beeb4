"""The files that a node needs for a run: the coordinator offers them, and the node fetches them by name.

They are in `code/` (a task's Python file and the files beside it that it imports), `data/` (a prepared folder, or what
`task.data` names), `teachers/` and `.initial/`. Other paths are refused, so a coordinator can write only into this
machine's cache. The cache holds each content once, for all runs; the folder of a run has hard links to it. Code runs
only after the machine's owner has approved its hash once (`cuadrilla join --trust`), and data are fetched after that.
Python imports only from `code/`.
"""

import hashlib
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from filelock import FileLock

from cuadrilla.config import Config, FileTaskSection
from cuadrilla.data.folder import TOKENIZER, data_files
from cuadrilla.errors import CheckpointError, DataError, TaskError
from cuadrilla.home import Home
from cuadrilla.link.base import Offer, OfferedFile, Refused, RunDescription
from cuadrilla.link.client import Connection
from cuadrilla.messages import Message
from cuadrilla.model import weights
from cuadrilla.rundir import RunDir, file_sha256, make_private, storage_errors, typed
from cuadrilla.runfile import dump, load_dumped
from cuadrilla.user_file import files_of
from cuadrilla.version import __version__

FILE = re.compile(
    r"code/[A-Za-z_][\w-]{0,60}\.py"
    r"|(data|teachers|\.initial)(/(?!\.)[^/\\:*?\"<>|\x00-\x1f\x7f]+)+",  # not hidden, and fit for any system
    re.ASCII,
)
CODE, DATA = "code", "data"
MAX_FILES = 10_000
"""Limit of files per run, since one message announces them all."""
REPORT_SECONDS = 10.0

Report = Callable[[str], None]


def offer(config: Config, folder: Path, *, initial: bool = False) -> Offer:
    """What a node needs for the run in `folder`: its configuration, and prepared data and teachers, or a task's code
    and data. `initial`: also the initial weights, for a machine that begins the run. Raises TaskError, DataError for
    files that no machine would take, CheckpointError."""
    config = config.for_others()
    if isinstance(config.task, FileTaskSection):
        code = (folder / config.task.file).resolve()
        found = {f"{CODE}/{file.name}": file for file in files_of(code)}
        task = config.task.model_copy(update={"path": f"{CODE}/{code.name}:{config.task.name}"})
        if task.data:
            data = folder / task.data
            found |= _files_of_data(data, run=folder)
            task = task.model_copy(update={"data": f"{DATA}/{data.name}" if data.is_file() else DATA})
        config = config.model_copy(update={"task": task})
        _require_usual(config, [*found])
        files = {name: (file, file_sha256(file)) for name, file in found.items()}
        return Offer(config=json.dumps(dump(config)), files=files)
    files = {f"{DATA}/{path.name}": (path, sha256) for path, sha256 in data_files(folder / config.data.folder)}
    teachers = [RunDir(folder).teachers.glob(f"*/{name}") for name in ("config.json", weights.WEIGHTS)]
    models = {path.relative_to(folder).as_posix(): path for path in sorted(itertools.chain(*teachers))}
    if initial and config.model.init:
        models |= _files_of_model(folder / config.model.init, name=RunDir(folder).initial.name)
    files |= {name: (path, file_sha256(path)) for name, path in models.items()}
    return Offer(config=json.dumps(dump(config)), files=files)


def _files_of_model(folder: Path, *, name: str) -> dict[str, Path]:
    """Files of initial weights, by their paths on a node. Raises CheckpointError."""
    if not (folder / weights.WEIGHTS).is_file():
        raise CheckpointError("{path} does not exist", path=folder / weights.WEIGHTS, hint=weights.NAME_FOLDER)
    files = [folder / "config.json", folder / TOKENIZER, folder / weights.WEIGHTS]
    return {f"{name}/{path.name}": path for path in files if path.is_file()}


def _files_of_data(path: Path, *, run: Path) -> dict[str, Path]:
    """Files of a task's data, by their paths on a node. Hidden files are left out. Raises DataError."""
    if path.is_file():
        return {f"{DATA}/{path.name}": path}
    if run.resolve().is_relative_to(path.resolve()):
        problem = "task.data {path} holds the run itself, which changes while it is trained"
        raise DataError(problem, path=path, hint="put the data into a folder of their own")
    inside = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
    found = [name for name in inside if not any(part.startswith(".") for part in name.parts)]
    if not found:
        raise DataError("there is nothing in task.data {path}", path=path, hint="name it as seen from the run file")
    return {f"{DATA}/{name.as_posix()}": path / name for name in found}


def fetch(connection: Connection, description: RunDescription, *, home: Home, report: Report) -> tuple[Config, Path]:
    """Fetch a run's files into the cache. Return its configuration, and the folder to which its paths are relative.

    Contents that the cache has are not fetched again. Raises LinkError, Refused (another version, code that is not
    approved), TaskError (files that this machine does not take), ConfigError, ResourceError.
    """
    require_work(description, jobs=False)  # before the settings are read: those of another version may not parse
    config, files = load_dumped(description.config), description.files
    _require_usual(config, [file.path for file in files])
    folder = home.cache / files_hash({file.path: file.sha256 for file in files})[:32]
    code = [file for file in files if file.path.startswith(f"{CODE}/")]
    if code:
        _bring(connection, code, folder, home=home, report=report)
        _require_trust(code, folder / CODE, home=home)
    _bring(connection, [file for file in files if file not in code], folder, home=home, report=report)
    return (config if code else config.moved(lambda _: DATA)), folder


def fetch_run(
    connection: Connection, description: RunDescription, run: RunDir, *, home: Home, report: Report
) -> Config:
    """Fetch a run that this machine is to train by itself. Return its settings for a run file in the folder of `run`,
    where the models that it begins from are put; data and code stay in the cache. Raises as `fetch`."""
    config, folder = fetch(connection, description, home=home, report=report)
    for models in (run.teachers, run.initial):
        make_private(models)  # else this machine's own model at the path in the settings would be used
        if (sent := folder / models.name).is_dir():
            with storage_errors(models):
                shutil.copytree(sent, models, dirs_exist_ok=True)
    return config.for_others().moved(lambda path: str(folder / path))


def _bring(connection: Connection, files: Sequence[OfferedFile], folder: Path, *, home: Home, report: Report) -> None:
    """Fetch the contents that the cache lacks, and link them into `folder`. Raises as `_download`."""
    contents = home.cache / "contents"  # named by their hash
    for private in (home.path, home.cache, contents):
        make_private(private)
    with FileLock(home.cache / "lock"):  # one process of this machine at a time
        missing = {contents / file.sha256: file for file in files if not _is_held(file, contents / file.sha256)}
        _download(connection, missing, report=report)
        for file in files:
            content, path = contents / file.sha256, folder / file.path
            if not path.exists() or not path.samefile(content):
                _link(content, path)


def _is_held(file: OfferedFile, content: Path) -> bool:
    """Whether the cache has the content of a file. Contents are hashed when they arrive; code, which people read there
    and may have changed, is hashed again."""
    is_whole = content.is_file() and content.stat().st_size == file.num_bytes
    return is_whole and (not file.path.startswith(f"{CODE}/") or file_sha256(content) == file.sha256)


def _download(connection: Connection, missing: Mapping[Path, OfferedFile], *, report: Report) -> None:
    """Fetch these files, reporting every REPORT_SECONDS. Raises LinkError, Refused, ResourceError."""
    if not missing:
        return
    total, received, reported_at = sum(file.num_bytes for file in missing.values()), 0, time.monotonic()
    template = "fetching {megabytes:.1f} MB (files: {number})"
    report(Message(template, number=len(missing), megabytes=total / 1e6))

    def arrived(num_bytes: int) -> None:
        nonlocal received, reported_at
        received += num_bytes
        if time.monotonic() - reported_at > REPORT_SECONDS:
            reported_at = time.monotonic()
            report(Message("fetched {come:.1f} of {megabytes:.1f} MB", come=received / 1e6, megabytes=total / 1e6))

    for content, file in missing.items():
        connection.fetch(file, to=content, arrived=arrived)


def _link(path: Path, name: Path) -> None:
    """Give a file a second name, in the cache. Raises ResourceError."""
    with storage_errors(name):
        name.parent.mkdir(parents=True, exist_ok=True)
        name.unlink(missing_ok=True)
        try:
            os.link(path, name)
        except OSError:  # a file system without hard links
            name.symlink_to(path.resolve())


def require_work(description: RunDescription, *, jobs: bool) -> None:
    """Raises Refused for a coordinator of another version or another kind of work: `jobs`, or one run for all."""
    if description.cuadrilla not in ("", __version__):
        raise Refused(
            "the coordinator runs cuadrilla {theirs}, this machine {ours}",
            theirs=description.cuadrilla,
            ours=__version__,
            hint="install the same version on both machines",
        )
    if description.takes_jobs != jobs:
        raise Refused("the coordinator has other work for this machine", hint="cuadrilla join, without torchrun")


def _require_trust(code: Sequence[OfferedFile], folder: Path, *, home: Home) -> None:
    """Raises Refused for code that this machine's owner has not approved."""
    key = files_hash({Path(file.path).name: file.sha256 for file in code})
    if key not in home.trusted():
        raise Refused(
            "this run's code has not been approved on this machine: {folder}",
            folder=folder,
            hint="read it ({typed}), then: cuadrilla join --trust {key}",
            typed=typed(folder),
            key=key,
        )


def files_hash(files: Mapping[str, str]) -> str:
    """SHA-256 (hexadecimal) of these files. `files`: the SHA-256 of each one's content, by its name."""
    lines = sorted(f"{path} {sha256}\n" for path, sha256 in files.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _require_usual(config: Config, names: Sequence[str]) -> None:
    """Raises TaskError for files that no node takes. Called before they are announced, and before they are written."""
    task = config.task
    wrong = [name for name in names if not FILE.fullmatch(name)]
    if isinstance(task, FileTaskSection):
        wrong += [name for name in (task.file, task.data or DATA) if name not in (DATA, *names)]
    if wrong or len(names) > MAX_FILES:
        raise TaskError(
            "no machine takes these {number:,} files of a run: {files}",
            number=len(names),
            files=", ".join(map(repr, (wrong or names)[:3])),
            hint="{most:,} files at most (pack data into .zip, .npz, .parquet); code is NAME.py, of letters, digits, - "
            'and _; data have names without \\ : * ? " < > |',
            most=MAX_FILES,
        )
