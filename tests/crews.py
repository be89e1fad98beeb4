"""Nodes of crews, for the tests of keys, nodes and transports."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cuadrilla.errors import LinkError
from cuadrilla.link.identity import Identity, save_node
from cuadrilla.link.nodes import AllowList


def join(folder: Path, *, name: str, crew: Identity, nodes: AllowList) -> Identity:
    """Let a node join the crew, with its token in `folder`."""
    _, token = nodes.add(name)
    identity = Identity(token=token, certificate=crew.certificate)
    save_node(folder, identity)
    return identity


def refused(call: Callable[[], object]) -> LinkError:
    with pytest.raises(LinkError) as caught:
        call()
    assert caught.value.exit_code == 5
    assert caught.value.hint
    assert "PRIVATE KEY" not in caught.value.message + caught.value.hint
    return caught.value
