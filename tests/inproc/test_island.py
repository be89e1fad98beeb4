"""Where the ranks of an island meet."""

import socket

import pytest

from cuadrilla.crew.island import joined
from cuadrilla.errors import LinkError
from cuadrilla.host.torchrun import Place


def test_rank_0_says_that_its_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        with (
            pytest.raises(LinkError, match=f"MASTER_PORT={port} is in use") as raised,
            joined(Place(rank=0, num_ranks=2)),
        ):
            pass
    assert "another MASTER_PORT" in raised.value.hint
