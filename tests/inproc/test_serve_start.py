"""Reasons for which a service or a dashboard does not start: a public address, no key, a port in use."""

import socket
from pathlib import Path

import pytest

from tests.inside import cuadrilla

KEY_FILE = {"serve": "--api-key-file", "dashboard": "--token-file"}
VERBS = pytest.mark.parametrize("verb", KEY_FILE)


@VERBS
@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.1.50"])
def test_nobody_may_call_from_elsewhere_without_a_key(tmp_path: Path, verb: str, address: str) -> None:
    done = cuadrilla(verb, tmp_path, "--host", address, code=5)
    assert KEY_FILE[verb] in done.stderr or address != "192.168.1.50"
    assert "hint" in done.stderr


@VERBS
@pytest.mark.parametrize("key", [None, "short", "a line\nand another one", "ñ" * 20])
def test_keys_that_are_none(tmp_path: Path, verb: str, key: str | None) -> None:
    """`key` is the content of the key file; None means that there is no such file."""
    if key is not None:
        (tmp_path / "key").write_text(key)
    done = cuadrilla(verb, tmp_path, "--port", 0, KEY_FILE[verb], tmp_path / "key", code=2)
    assert "key" in done.stderr.partition("hint")[0]
    assert key is None or key not in done.stderr.partition("a key is")[2]
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        done = cuadrilla("serve", tmp_path, "--port", other.getsockname()[1])
    assert done.returncode == 5
    assert "cannot listen" in done.stderr
    assert "--port" in done.stderr
