"""The list of nodes: one token for each name; a damaged list admits no node; no change is lost."""

import hashlib
import json
from pathlib import Path

import pytest

from cuadrilla.errors import ConfigError
from cuadrilla.link.nodes import AllowList
from cuadrilla.rundir import FolderLock
from tests.crews import refused


@pytest.fixture
def nodes(tmp_path: Path) -> AllowList:
    return AllowList(tmp_path / "crew" / "nodes.json")


def test_who_has_a_token_is_known_until_it_is_removed(tmp_path: Path, nodes: AllowList) -> None:
    path = tmp_path / "crew" / "nodes.json"
    of_another_process = AllowList(path)
    assert nodes.nodes() == {}
    (_, ana), (_, luis) = nodes.add("ana"), nodes.add("luis")
    assert of_another_process.name_of(luis) == "luis"
    assert "ana, luis" in refused(lambda: nodes.remove("eva")).hint
    of_another_process.remove("luis")
    assert [nodes.name_of(token) for token in (ana, luis, "", ana[:-1])] == ["ana", None, None, None]
    assert json.loads(path.read_text()) == {"nodes": {"ana": hashlib.sha256(ana.encode()).hexdigest()}}
    assert {file.name for file in path.parent.glob("*nodes*")} == {"nodes.json"}


def test_machines_of_one_name_are_numbered(nodes: AllowList) -> None:
    long = 63 * "a"
    given = [nodes.add("aula")[0] for _ in range(11)]
    assert given == ["aula", *(f"aula-{number}" for number in range(2, 12))]
    nodes.remove("aula-5")
    assert nodes.add("aula")[0] == "aula-5"
    assert nodes.add("coordinator")[0] == "coordinator-2"
    assert [nodes.add(long)[0] for _ in range(2)] == [long, 61 * "a" + "-2"]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"nodes": []}', '{"nodes": {"ana": 3}}', '{"nodes": {"ana": "zz"}}'],
)
def test_a_damaged_list_lets_nobody_in(tmp_path: Path, content: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(content)
    nodes = AllowList(path)
    refused(lambda: nodes.name_of("x"))
    refused(lambda: nodes.add("ana"))
    refused(lambda: nodes.remove("ana"))
    assert path.read_text() == content


def test_two_processes_never_change_it_at_once(tmp_path: Path, nodes: AllowList) -> None:
    _, ana = nodes.add("ana")
    lock = FolderLock(tmp_path / "crew" / "nodes.json.lock")
    with lock, pytest.raises(ConfigError, match="is in use"):
        nodes.remove("ana")
    assert nodes.name_of(ana) == "ana"
