"""`cuadrilla trust`: the owner of a machine approves the code of a run, once, by its hash."""

import re
from typing import Annotated

import typer

from cuadrilla.cli.output import say
from cuadrilla.errors import ConfigError
from cuadrilla.home import Home


def trust(
    sha256: Annotated[
        str, typer.Argument(metavar="HASH", help="SHA-256 of the code, as `join` printed it, or its beginning.")
    ],
) -> None:
    """Approve the code of a run by its hash, once it has been read: it may run on this machine."""
    home = Home.of_user()
    whole = whole_hash(sha256, home=home)
    home.trust(whole)
    say("{hash} may run on this machine", hash=whole)


def whole_hash(text: str, *, home: Home) -> str:
    """The hash that `text` is, or begins: then of code that `join` has fetched. Raises ConfigError."""
    from cuadrilla.engines.bundle import fetched_code

    if not re.fullmatch(r"[0-9a-f]{8,64}", text):
        raise ConfigError(
            "{text!r} is not a hash",
            text=text[:80],
            hint="copy at least 8 of the 64 characters that `cuadrilla join` printed",
        )
    if len(text) == 64:
        return text
    found = [sha256 for sha256 in fetched_code(home) if sha256.startswith(text)]
    if not found:
        raise ConfigError(
            "no fetched code has a hash that begins with {text}", text=text, hint="type all 64 characters of it"
        )
    if len(found) > 1:
        hashes = ", ".join(found)
        raise ConfigError(
            "{text} begins {number} hashes: {hashes}",
            text=text,
            number=len(found),
            hashes=hashes,
            hint="type one of them",
        )
    return found[0]
