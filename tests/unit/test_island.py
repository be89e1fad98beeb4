"""The decisions of ranks from the messages of all ranks: pure functions of the island."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from cuadrilla.crew.island import backend_for, require_alike
from cuadrilla.crew.run import all_ranks
from cuadrilla.errors import ConfigError, EnvironmentProblem, LinkError
from cuadrilla.host.torchrun import Place, find_place
from cuadrilla.link.base import Hello, Stop
from cuadrilla.link.inproc import InProcLink
from cuadrilla.link.island import IslandLink, part_of
from cuadrilla.link.wire import Layout, decode
from cuadrilla.runfile import resolve
from tests.runs import RUN_FILE
from tests.sessions import SOME_LEASE

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
PLACE = Place(rank=0, num_ranks=2)


def test_a_place_needs_all_that_torchrun_sets():
    found = find_place({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2", "LOCAL_WORLD_SIZE": "2"})
    assert found == Place(rank=1, num_ranks=3, local_rank=1, ranks_here=2, attempt=2)
    assert not found.leads
    assert find_place({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}) is None
    for name in ("RANK", "WORLD_SIZE"):
        assert find_place({key: value for key, value in TORCHRUN.items() if key != name}) is None
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        with pytest.raises(ConfigError, match=name):  # and not one training of each rank
            find_place({key: value for key, value in TORCHRUN.items() if key != name})


@pytest.mark.parametrize("wrong", [{"RANK": "3"}, {"RANK": "-1"}, {"WORLD_SIZE": "two"}, {"LOCAL_RANK": "1e3"}])
def test_a_place_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match="not as torchrun sets them"):
        find_place({**TORCHRUN, **wrong})


@pytest.mark.parametrize(
    ("num_units", "num_ranks", "sizes"), [(7, 3, [2, 2, 3]), (8, 2, [4, 4]), (2, 3, [0, 1, 1]), (1, 4, [0, 0, 0, 1])]
)
def test_units_are_dealt_as_evenly_as_they_can_be(num_units, num_ranks, sizes):
    units = tuple(range(100, 100 + num_units))
    dealt = [part_of(units, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert [len(part) for part in dealt] == sizes
    assert sum(dealt, ()) == units


@pytest.mark.parametrize(
    ("cards", "name", "reason"),
    [
        (["a", "b"], "nccl", "of its own"),
        (["a", "b", "a"], "gloo", "not every rank has a CUDA device of its own"),
        (["a", ""], "gloo", "not every rank"),
        (["", ""], "gloo", "not every rank"),
    ],
)
def test_nccl_needs_a_card_for_each_rank(cards, name, reason):
    chosen, why = backend_for(cards)
    assert chosen == name
    assert reason in why
    assert backend_for(cards, asked="gloo")[0] == "gloo"
    if name == "gloo":
        with pytest.raises(EnvironmentProblem, match=reason):
            backend_for(cards, asked="nccl")


def test_ranks_that_differ_are_named_with_both_values():
    require_alike([{"data": "1"}, {"data": "1"}])
    with pytest.raises(ConfigError, match="system differs: Darwin at rank 2, Linux at rank 0") as caught:
        require_alike([{"system": "Linux", "torch": "2.9"}] * 2 + [{"system": "Darwin", "torch": "2.8"}])
    assert "cuadrilla join" in caught.value.hint


def test_an_island_is_one_worker():
    with pytest.raises(ConfigError, match="torchrun has started 2 ranks"):
        all_ranks(PLACE, engine=resolve(RUN_FILE, sets=['engine.kind="crew"']).config.engine)


@pytest.fixture
def group() -> Iterator[None]:
    """An island of one rank, this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("stop", [Stop(reason="done"), None])
def test_a_break_is_the_farewell_that_came_before_it_or_is_raised(stop, monkeypatch):
    """The coordinator hangs up while an answer is on its way: all ranks leave with its Stop, none joins again."""
    told = []
    monkeypatch.setattr("cuadrilla.link.island.broadcast_bytes", lambda text: told.append(text) or text)

    broken = LinkError("the session has ended")

    def hung_up(_message):
        raise broken

    inner, cpu = InProcLink(hung_up), torch.device("cpu")
    link = IslandLink(inner=inner, parameters=Layout(()), device=cpu)
    for event in filter(None, (SOME_LEASE, stop, broken)):
        inner.inbox.put(event)
    link.call(Hello(speed_hint=1.0))
    if stop is not None:
        assert link.next_event() == stop
    else:
        with pytest.raises(LinkError, match="ended"):
            link.next_event()
    handed_on = decode(told.pop(), Stop)
    assert handed_on.again == (stop is None)
    assert not told
