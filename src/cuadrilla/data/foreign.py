"""Tokenizers that others have made: tried out in a child process before one is loaded in this one.

A tokenizer.json of a kilobyte can make the library that reads it take all memory: steps that write several letters for
one, each behind the other. So a child (`tryout.py`) without network and with limited memory and time does what
`Tokenizer` would do here, and leaves the content behind if nothing happens.
"""

import json
from functools import lru_cache
from pathlib import Path

from cuadrilla.errors import DataError
from cuadrilla.host.sandbox import run_in_sandbox
from cuadrilla.rundir import private_folder, read_regular

MAX_FILE_BYTES = 2**26  # twice that of Gemma's 262,144 tokens, the largest that is published
MAX_BYTES = 4 * MAX_FILE_BYTES  # of one that is made from its parts
TIMEOUT_SECONDS = 600.0


def tried(source: Path, *, timeout_seconds: float = TIMEOUT_SECONDS) -> bytes:
    """The content of a tokenizer.json, or of a model's folder, once it is known to do no harm. Raises DataError."""
    with private_folder() as private:
        target = private / "tokenizer.json"
        arguments = (str(source), str(source.absolute()), str(target))
        ended = run_in_sandbox("cuadrilla.data.tryout", *arguments, folder=private, timeout_seconds=timeout_seconds)
        if ended.code == 0:
            return read_regular(target, most_bytes=MAX_BYTES)
    if ended.code == DataError.exit_code:
        refused = json.loads(ended.said)
        raise DataError(refused["error"], hint=refused["hint"])
    raise DataError(
        "{source} cannot be used as a tokenizer: {reason}",
        source=source,
        reason=ended.reason,
        hint="it needs more memory or time than any published tokenizer: use the original file, or train one",
    )


@lru_cache(maxsize=4)
def tried_once(source: Path, *, sha256: str) -> bytes:
    """`tried`, once for each content that this process finds there. `sha256`: of the content."""
    del sha256
    return tried(source)
