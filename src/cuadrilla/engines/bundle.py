"""What a node needs for a run: offered by the coordinator by hash, fetched by the node, checked before use.

Files of a data folder have fixed names; the code of a task is its Python file and those beside it that it imports.
Nothing else is accepted, so that no coordinator can write anywhere but into this machine's cache. Code runs only after
the machine's owner has approved its hash once (`cuadrilla trust`).
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cuadrilla.config import Config, FileTaskSection
from cuadrilla.data.shards import TOKENIZER, data_files
from cuadrilla.errors import CheckpointError, LinkError
from cuadrilla.home import Home
from cuadrilla.link.base import Refused
from cuadrilla.link.offer import Offer, OfferedFile, RunConnection, RunDescription
from cuadrilla.messages import Message
from cuadrilla.model import weights
from cuadrilla.rundir import RunDir, file_sha256, make_private, storage_errors, typed
from cuadrilla.runfile import dump, load_dumped
from cuadrilla.user_file import files_of
from cuadrilla.version import __version__

DATA_FILE = re.compile(
    r"data/(manifest\.json|tokenizer\.json|(train|val)-\d{5}\.bin)|teachers/\d{1,2}/(config\.json|model\.safetensors)"
    r"|\.initial/(config\.json|tokenizer\.json|model\.safetensors\.index\.json|\w[\w.-]{0,199}\.safetensors)",
    re.ASCII,
)
CODE_FILE = re.compile(r"[A-Za-z_][\w-]{0,60}\.py", re.ASCII)
MAX_CODE_BYTES = 2**20

log = logging.getLogger(__name__)


class NotTrusted(Refused):
    """The run's code has not been approved on this machine."""


class OtherWork(Refused):
    """Not what this worker does: machines are given whole runs there, or take part in another one by now."""


class Unfit(OtherWork):
    """This machine cannot take part in the run that it is lent to; there will be others."""


def offer(config: Config, folder: Path) -> Offer:
    """What a node needs for this run in `folder`: the configuration, and the data folder or the task's file."""
    config = config.for_others()
    if isinstance(config.task, FileTaskSection):
        path = (folder / config.task.path.rpartition(":")[0]).resolve()
        named = config.task.model_copy(update={"path": f"{path.name}:{config.task.path.rpartition(':')[2]}"})
        config = config.model_copy(update={"task": named})
        return Offer(
            config=json.dumps(dump(config)), files={file.name: (file, _sha256(file)) for file in files_of(path)}
        )
    files = {f"data/{path.name}": (path, sha256) for path, sha256 in data_files(folder / config.data.folder)}
    teachers = RunDir(folder).teachers
    for path in sorted(path for name in ("config.json", weights.WEIGHTS) for path in teachers.glob(f"*/{name}")):
        files[path.relative_to(folder).as_posix()] = (path, _sha256(path))
    return Offer(config=json.dumps(dump(config)), files=files)


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
    connection: RunConnection,
    description: RunDescription,
    *,
    home: Home,
    report: Callable[[str], None],
    data: Path | None = None,
) -> tuple[Config, Path]:
    """Bring what the run needs into the cache; the configuration and the folder that its paths are relative to.

    What is there already, by hash, is not fetched again. `data`: a folder of this machine that holds the run's data;
    nothing of it is fetched. Raises LinkError, Refused (another version of cuadrilla, or `data` holds other data),
    OtherWork, NotTrusted, ConfigError, ResourceError.
    """
    if description.cuadrilla not in ("", __version__):  # before its settings are read: they may not be understood
        raise Refused(
            "the coordinator runs cuadrilla {theirs}, this machine {ours}",
            theirs=description.cuadrilla,
            ours=__version__,
            hint="install the same version on both machines",
        )
    if description.takes_jobs:
        raise OtherWork("the coordinator gives whole runs to machines", hint="cuadrilla join, without torchrun")
    config = load_dumped(description.config)
    _check_names(config, description.files)
    folder = _bring(connection, description.files, home=home, report=report, data=data)
    if isinstance(config.task, FileTaskSection):
        _require_trust(description.files, folder, home=home)
        return config, folder
    return config.model_copy(update={"data": config.data.model_copy(update={"folder": "data"})}), folder


def fetch_code(
    connection: RunConnection, files: Sequence[OfferedFile], *, home: Home, report: Callable[[str], None]
) -> Path:
    """Bring Python files into the cache, of which one has a function to call; the folder where they are then.

    Raises LinkError, NotTrusted, ResourceError.
    """
    _require_names([file.path for file in files], allowed=CODE_FILE)
    _require_small(files)
    folder = _bring(connection, files, home=home, report=report)
    _require_trust(files, folder, home=home)
    return folder


def _bring(
    connection: RunConnection,
    files: Sequence[OfferedFile],
    *,
    home: Home,
    report: Callable[[str], None],
    data: Path | None = None,
) -> Path:
    """Into a folder of the cache, which its names and contents name."""
    folder = home.cache / bundle_hash(files)[:32]
    make_private(home.cache)
    for file in files:
        target = folder / file.path
        if target.is_file() and target.stat().st_size == file.num_bytes and _sha256(target) == file.sha256:
            continue
        with storage_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        if data is not None and file.path.startswith("data/"):
            _link(data / target.name, target, file)
            continue
        told = "fetching {path} ({megabytes:.1f} MB)"
        report(Message(told, path=file.path, megabytes=file.num_bytes / 1e6))
        connection.fetch(file, to=target)
    return folder


def _require_trust(files: Sequence[OfferedFile], folder: Path, *, home: Home) -> None:
    """Raises NotTrusted."""
    key = bundle_hash(files)
    if key not in home.trusted():
        raise NotTrusted(
            "this run's code has not been approved on this machine: {folder}",
            folder=folder,
            hint="read it ({typed}), then: cuadrilla trust {key}",
            typed=typed(folder),
            key=key,
        )


def _link(here: Path, target: Path, file: OfferedFile) -> None:
    """Give a file of this machine a second name in the cache. Raises Refused when it is not the one of the run."""
    if not here.is_file():
        problem = "{path} does not exist"
    elif here.stat().st_size != file.num_bytes or _sha256(here) != file.sha256:
        problem = "{path} is not the data that the run uses"
    else:
        with storage_errors(target):
            target.unlink(missing_ok=True)
            try:
                os.link(here, target)
            except OSError:  # another file system
                target.symlink_to(here.resolve())
        return
    raise Refused(problem, path=here, hint="join without --data: what is missing is fetched from the coordinator")


def bundle_hash(files: Sequence[OfferedFile]) -> str:
    """SHA-256 (hexadecimal) of the names and contents of a run's files."""
    return _hash_of({file.path: file.sha256 for file in files})


def fetched_code(home: Home) -> list[str]:
    """The hashes of all code in the cache that is whole."""
    folders = sorted({path.parent for path in home.cache.glob("*/*.py")})
    found = {folder: _hash_of({file.name: _sha256(file) for file in folder.glob("*.py")}) for folder in folders}
    return [sha256 for folder, sha256 in found.items() if sha256.startswith(folder.name)]


def _hash_of(files: Mapping[str, bytes]) -> str:
    lines = sorted(f"{path} {sha256.hex()}\n" for path, sha256 in files.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _check_names(config: Config, files: Sequence[OfferedFile]) -> None:
    """Refuse a file that has no business in this run, before anything is written."""
    names = [file.path for file in files]
    if not isinstance(config.task, FileTaskSection):
        _require_names(names, allowed=DATA_FILE)
        return
    _require_names(names, allowed=CODE_FILE, needed=config.task.path.rpartition(":")[0])
    _require_small(files)


def _require_names(names: Sequence[str], *, allowed: re.Pattern[str], needed: str = "") -> None:
    """Raises LinkError."""
    wrong = [name for name in names if not allowed.fullmatch(name)]
    if needed and needed not in names:
        wrong.append(needed)
    if wrong or len(set(names)) != len(names):
        raise LinkError(
            "the coordinator offers files that no run has: {files}",
            files=", ".join(map(repr, (wrong or names)[:3])),
            hint="install the same version of cuadrilla on both machines",
        )


def _require_small(files: Sequence[OfferedFile]) -> None:
    """Raises LinkError."""
    if sum(file.num_bytes for file in files) > MAX_CODE_BYTES:
        raise LinkError("the run's code is larger than 1 MiB", hint="keep data out of the task's files")


def _sha256(path: Path) -> bytes:
    return bytes.fromhex(file_sha256(path))
