"""What a node needs for a run: files, offered by the coordinator and fetched by their hash.

They are in `code/` (the Python file of a task and those beside it that it imports), `data/` (a prepared folder, or what
`task.data` names), `teachers/` and `.initial/`. Nothing else is accepted, so that no coordinator can write anywhere but
into this machine's cache. Code runs only after the machine's owner has approved
its hash once (`cuadrilla join --trust`); data are fetched after that. Nothing but code lies where Python imports from.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cuadrilla.config import Config, FileTaskSection
from cuadrilla.crew.contents import bring
from cuadrilla.data.shards import TOKENIZER, data_files
from cuadrilla.errors import CheckpointError, DataError, TaskError
from cuadrilla.home import Home
from cuadrilla.link.base import Offer, OfferedFile, Refused, RunDescription, offered
from cuadrilla.link.client import Connection
from cuadrilla.model import weights
from cuadrilla.rundir import RunDir, file_sha256, typed
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
"""They are announced in one message."""


class NotTrusted(Refused):
    """The run's code has not been approved on this machine."""


def offer(config: Config, folder: Path) -> Offer:
    """What a node needs for this run in `folder`: the configuration; prepared data and teachers, or a task's code and
    data. Raises TaskError, DataError for what no machine would take."""
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
        files = {name: (file, _sha256(file)) for name, file in found.items()}
        _require_usual(config, offered(files))
        return Offer(config=json.dumps(dump(config)), files=files)
    files = {f"{DATA}/{path.name}": (path, sha256) for path, sha256 in data_files(folder / config.data.folder)}
    teachers = RunDir(folder).teachers
    for path in sorted(path for name in ("config.json", weights.WEIGHTS) for path in teachers.glob(f"*/{name}")):
        files[path.relative_to(folder).as_posix()] = (path, _sha256(path))
    return Offer(config=json.dumps(dump(config)), files=files)


def _files_of_data(path: Path, *, run: Path) -> dict[str, Path]:
    """The files of a task's data by their names at a node. Hidden ones stay here. Raises DataError."""
    if path.is_file():
        return {f"{DATA}/{path.name}": path}
    if not path.exists():
        raise DataError("task.data {path} does not exist", path=path, hint="name it as seen from the run file")
    if run.resolve().is_relative_to(path.resolve()):
        problem = "task.data {path} holds the run itself, which changes while it is trained"
        raise DataError(problem, path=path, hint="put the data into a folder of their own")
    found: dict[str, Path] = {}
    for file in path.rglob("*"):
        inside = file.relative_to(path)
        if any(part.startswith(".") for part in inside.parts):
            continue
        if file.is_symlink() and not (file.is_file() and file.resolve().is_relative_to(path.resolve())):
            raise DataError("{file} leads out of task.data", file=file, hint="put there what it leads to")
        if file.is_file():
            found[f"{DATA}/{inside.as_posix()}"] = file
        if len(found) > MAX_FILES:
            break  # that is too many
    if not found:
        raise DataError("task.data {path} is empty", path=path, hint="put the task's data there")
    return found


def offer_whole(config: Config, folder: Path, *, goes_on: bool) -> Offer:
    """`offer` for a machine that trains the run alone, with the weights that the run begins with. `goes_on`: from a
    checkpoint, so that they may have gone.

    Raises CheckpointError.
    """
    if not config.model.init:
        return offer(config, folder)
    begins_from = folder / config.model.init
    held = weights.weights_of(begins_from)
    if not held.is_file() and not goes_on:
        raise CheckpointError(
            "{path} does not exist", path=held, hint="name a folder with config.json and model.safetensors"
        )
    parts = weights.files_of(held) if held.is_file() else []
    files = [begins_from / "config.json", begins_from / TOKENIZER, held, *parts]
    where, offered = RunDir(folder).initial.name, offer(config, folder)
    found = {f"{where}/{path.name}": (path, _sha256(path)) for path in files if path.is_file()}
    return replace(offered, files={**offered.files, **found})


def fetch(
    connection: Connection,
    description: RunDescription,
    *,
    home: Home,
    report: Callable[[str], None],
    data: Path | None = None,
    approved: bool = False,
) -> tuple[Config, Path]:
    """Bring what the run needs into the cache; the configuration and the folder that its paths are relative to.

    What is there already, by hash, is not fetched again. `data`: a folder of this machine that holds the run's data;
    nothing of it is fetched. `approved`: whoever started this process may run any code here. Raises LinkError, Refused
    (another version of cuadrilla, or `data` holds other data), NotTrusted, ConfigError, ResourceError.
    """
    require_work(description, jobs=False)  # before its settings are read: they may not be understood
    config, files = load_dumped(description.config), description.files
    try:
        _require_usual(config, files)
    except TaskError as error:
        raise Refused(error.message, hint=error.hint) from None
    folder = home.cache / _hash_of({file.path: file.sha256 for file in files})[:32]
    code = [file for file in files if _is_in(CODE, file)]
    here = {file.path: data / Path(file.path).relative_to(DATA) for file in files if data and _is_in(DATA, file)}
    get = partial(bring, connection, folder=folder, home=home, report=report, here=here)
    if code:
        get(code)
        if not approved:
            _require_trust(code, folder / CODE, home=home)
    get([file for file in files if file not in code])
    return (config if code else config.moved(lambda _: DATA)), folder


def require_work(description: RunDescription, *, jobs: bool) -> None:
    """Raises Refused for a coordinator of another version, or with other work: one run for all machines, or `jobs`."""
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
    """Raises NotTrusted."""
    key = _hash_of({Path(file.path).name: file.sha256 for file in code})
    if key not in home.trusted():
        raise NotTrusted(
            "this run's code has not been approved on this machine: {folder}",
            folder=folder,
            hint="read it ({typed}), then: cuadrilla join --trust {key}",
            typed=typed(folder),
            key=key,
        )


def _is_in(folder: str, file: OfferedFile) -> bool:
    return file.path.startswith(f"{folder}/")


def code_hash(files: Sequence[Path]) -> str:
    """SHA-256 (hexadecimal) of the names and contents of these files."""
    return _hash_of({file.name: _sha256(file) for file in files})


def fetched_code(home: Home) -> list[str]:
    """The hashes of all code in the cache."""
    return [code_hash(list(folder.glob("*.py"))) for folder in sorted(home.cache.glob(f"*/{CODE}"))]


def _hash_of(files: Mapping[str, bytes]) -> str:
    lines = sorted(f"{path} {sha256.hex()}\n" for path, sha256 in files.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _require_usual(config: Config, files: Sequence[OfferedFile]) -> None:
    """Before anything is announced, and before anything is written. Raises TaskError for files that no node takes."""
    names, task = [file.path for file in files], config.task
    wrong = [name for name in names if not FILE.fullmatch(name)]
    if isinstance(task, FileTaskSection):
        wrong += [name for name in (task.file, task.data or DATA) if name not in (DATA, *names)]
    if wrong:
        raise TaskError(
            "no machine takes these files of a run: {files}",
            files=", ".join(map(repr, wrong[:3])),
            hint='code is NAME.py, of letters, digits, - and _; data have names without \\ : * ? " < > |',
        )
    if len(files) > MAX_FILES:
        hint = "pack the data into fewer files (.zip, .npz, .parquet)"
        raise TaskError("the run has more than {most:,} files", most=MAX_FILES, hint=hint)


def _sha256(path: Path) -> bytes:
    return bytes.fromhex(file_sha256(path))
