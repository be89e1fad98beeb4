"""A call of a user's function: a process of its own, `cuadrilla call-function FOLDER`, that ends with the one that
started it. On a worker of a Dask cluster, which has none of its files, these come by name with their bytes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

REQUEST = "trial.json"
"""In the folder of a call: what is called, with which arguments."""
LOOK_SECONDS = 0.2
MAX_TALK_BYTES = 2**18
"""Of what a call printed, the last part is kept."""


def call_limits(threads: int) -> Mapping[str, str]:
    """Variables by which numerical libraries take that many threads, unless the function says otherwise."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "LOKY_MAX_CPU_COUNT")
    return dict.fromkeys(names, str(threads))


def packages_here(names: Collection[str]) -> dict[str, str]:
    """Versions of these modules' packages, of those that are installed: they may decide what a function gives."""
    known = _packages_of_modules() if names else {}
    return {name: metadata.version(known[name][0]) for name in sorted(names) if name in known}


@cache
def _packages_of_modules() -> Mapping[str, list[str]]:
    """Half a second where much is installed."""
    return metadata.packages_distributions()


def call_command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "cuadrilla", "--json", "call-function", str(folder)]


def call_apart(
    request: Mapping[str, Any], code: Mapping[str, bytes], *, threads: int, where: str, is_wanted: Callable[[], bool]
) -> dict[str, Any]:
    """{"code", "said", "talk"}: the exit code, what it answered and what it printed. `where`: for the folder.

    When it `is_wanted` no more, it is killed.
    """
    with TemporaryDirectory(prefix="cuadrilla-", dir=where) as name:
        folder = Path(name)
        for file, raw in code.items():
            (folder / file).write_bytes(raw)
        (folder / REQUEST).write_text(json.dumps(request))
        with open(folder / ".talk", "w+b") as talk:
            process = subprocess.Popen(
                call_command(folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=talk,
                text=True,
                env={**os.environ, **call_limits(threads)},
            )
            with process:
                while process.poll() is None:
                    if not is_wanted():
                        process.kill()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(LOOK_SECONDS)
                assert process.stdout is not None
                said = process.stdout.read()
            talk.seek(max(0, talk.seek(0, 2) - MAX_TALK_BYTES))
            return {"code": process.returncode, "said": said, "talk": talk.read()}
