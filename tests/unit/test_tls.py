"""Keys, certificates and tokens in real files: made once, private, checked at every start."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509

from cuadrilla.link.identity import Identity, load_node, open_coordinator, save_node
from cuadrilla.link.nodes import AllowList
from tests.crews import join, refused

posix = pytest.mark.skipif(os.name == "nt", reason="needs POSIX file modes")
PRIVATE = ("crew/coordinator.json", "node/node.json")


@pytest.fixture
def crew(tmp_path: Path) -> Identity:
    """A coordinator in `crew`, and a node of it in `node`."""
    keys = open_coordinator(tmp_path / "crew")
    join(tmp_path / "node", name="ana", crew=keys, nodes=AllowList(tmp_path / "nodes.json"))
    return keys


def start(folder: Path) -> Callable[[], object]:
    return (lambda: open_coordinator(folder)) if folder.name == "crew" else (lambda: load_node(folder))


def test_no_clock_can_be_wrong(crew: Identity) -> None:
    certificate = x509.load_pem_x509_certificate(crew.certificate)
    assert (certificate.not_valid_before_utc.year, certificate.not_valid_after_utc.year) == (2000, 9999)


@posix
def test_secrets_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        save_node(tmp_path / "node", Identity(token="x", certificate=open_coordinator(tmp_path / "crew").certificate))
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / file).stat().st_mode) for file in PRIVATE] == [0o600, 0o600]
    assert [stat.S_IMODE((tmp_path / folder).stat().st_mode) for folder in ("crew", "node")] == [0o700, 0o700]
    assert {file.name for file in (tmp_path / "crew").iterdir()} == {"coordinator.json"}


def test_nothing_secret_is_shown(tmp_path: Path, crew: Identity) -> None:
    node = load_node(tmp_path / "node")
    assert "PRIVATE KEY" not in repr(crew)
    assert node.token not in repr(node)


@posix
@pytest.mark.parametrize("file", PRIVATE)
def test_a_secret_that_others_can_read(tmp_path: Path, crew: Identity, file: str) -> None:
    (tmp_path / file).chmod(0o640)
    error = refused(start((tmp_path / file).parent))
    assert "open to other users" in error.message
    assert "chmod 600" in error.hint


@pytest.mark.parametrize("file", PRIVATE)
@pytest.mark.parametrize("content", ["hola", "[]", "{}"])
def test_damaged(tmp_path: Path, crew: Identity, file: str, content: str) -> None:
    path = tmp_path / file
    path.write_text(content)
    error = refused(start(path.parent))
    assert f"{path} cannot be read: it is damaged" in error.message


def test_one_folder_may_hold_both_roles(tmp_path: Path, crew: Identity) -> None:
    """A coordinator's machine that works in another crew keeps its own key."""
    other = open_coordinator(tmp_path / "other")
    node = Identity(token="x", certificate=other.certificate)
    save_node(tmp_path / "crew", node)
    assert open_coordinator(tmp_path / "crew") == crew
    assert load_node(tmp_path / "crew") == node
