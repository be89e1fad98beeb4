"""Which service behind a gateway takes a request, and which ones are left out."""

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.errors import ConfigError
from cuadrilla.serve.relay import whole_events
from cuadrilla.serve.replicas import (
    CHECK_SECONDS,
    LONGEST_BACKOFF_SECONDS,
    Errand,
    GatewayReplica,
    Readiness,
    answered,
    begin,
    choose,
    end,
    hear,
    lose,
    miss,
    parse_readiness,
    parse_replicas,
    parse_url,
    progress,
    shared_models,
    speeds,
    work_of,
)

pytestmark = pytest.mark.unit

READY = Readiness(status="ready", model="uno", tokens_per_second=100.0)


def replicas(*speed: float) -> list[GatewayReplica]:
    """That are ready, and say so fast they are."""
    return [
        GatewayReplica(url=f"http://10.0.0.{index}:8000", status="ready", model="uno", claimed=each)
        for index, each in enumerate(speed)
    ]


def picked(them: Sequence[GatewayReplica], *, work: int = 16) -> Errand:
    replica = choose(them, now=0.0)
    assert replica is not None
    return begin(replica, among=them, work=work, now=0.0)


def heard(replica: GatewayReplica, said: Readiness, among: Sequence[GatewayReplica], *, now: float = 1.0) -> None:
    hear(replica, said, among=among, gateway="me", model="uno", now=now)


def shares(them: Sequence[GatewayReplica], *, requests: int, clients: int) -> list[int]:
    """How many requests each gets of clients that ask again at once; a replica answers one after the other."""
    counted: Counter[str] = Counter()
    ends: list[tuple[float, int, Errand]] = []
    free = dict.fromkeys((replica.url for replica in them), 0.0)
    now = 0.0
    for number in range(requests):
        if len(ends) >= clients:
            now, _, errand = heapq.heappop(ends)
            end(errand, now=now)
        errand = picked(them)
        counted[errand.replica.url] += 1
        url = errand.replica.url
        free[url] = max(now, free[url]) + 16 / errand.replica.claimed
        heapq.heappush(ends, (free[url], number, errand))
    return [counted[replica.url] for replica in them]


@pytest.mark.parametrize("clients", [1, 2, 6, 41])
def test_equal_ones_take_turns_and_a_faster_one_gets_more(clients: int) -> None:
    equal = shares(replicas(50.0, 50.0, 50.0), requests=300, clients=clients)
    assert max(equal) - min(equal) <= 2
    fast, *slow = shares(replicas(100.0, 50.0, 50.0), requests=400, clients=clients)
    assert all(1.7 <= fast / each <= 2.3 for each in slow)


def test_the_least_loaded_one_is_chosen_by_its_work_and_its_speed() -> None:
    slow, fast = them = replicas(50.0, 200.0)
    slow_one = begin(slow, among=them, work=100, now=0.0)
    begin(fast, among=them, work=300, now=0.0)
    assert choose(them, now=0.0) is fast  # 1.5 seconds of work, and 2
    progress(slow_one, tokens=60, now=0.0)
    assert choose(them, now=0.0) is slow  # 0.8


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 600)), max_size=30))
def test_who_has_no_requests_has_no_work(requests: list[tuple[int, int]]) -> None:
    (replica,) = them = replicas(100.0)
    errands = [begin(replica, among=them, work=work, now=0.0) for work, _ in requests]
    for errand, (_, tokens) in zip(errands, requests, strict=True):
        progress(errand, tokens=tokens, now=0.5)
        assert errand.work >= 1
    assert replica.work >= replica.requests == len(errands)
    for errand in errands:
        end(errand, now=1.0)
    assert (replica.work, replica.requests) == (0, 0)


def test_a_speed_is_measured_and_a_claim_is_taken_as_others_claims_turned_out() -> None:
    one, other, newcomer, silent = them = replicas(100.0, 50.0, 100.0, 0.0)
    for replica, tokens in ((one, 40), (other, 20)):  # under load: 0.4 of what they claim
        errand = begin(replica, among=them, work=tokens, now=0.0)
        progress(errand, tokens=tokens, now=1.0)
        end(errand, now=1.0)
    found = speeds(them)
    assert [round(found[replica.url], 6) for replica in (one, other, newcomer)] == [40.0, 20.0, 40.0]
    assert found[silent.url] == pytest.approx(100 / 3)
    assert speeds(replicas(0.0, 0.0)) == {"http://10.0.0.0:8000": 1.0, "http://10.0.0.1:8000": 1.0}


def test_each_is_tried_once_and_who_asked_for_quiet_comes_last() -> None:
    one, other = them = replicas(100.0, 100.0)
    answered(one, status=429, wait_seconds=3.0, now=10.0)
    assert choose(them, now=12.0) is other
    assert choose(them, now=12.0, tried=[other]) is one
    assert choose(them, now=12.0, tried=them) is None
    assert choose(them, now=13.5) is one


def test_a_dead_one_is_out_at_once_and_asked_again_less_and_less_often() -> None:
    one, other = them = replicas(100.0, 100.0)
    lose(one, "gone", now=5.0)
    assert (one.status, one.check_at, choose(them, now=5.0)) == ("down", 5.0, other)
    lose(one, "gone", now=5.0)  # the other requests that it had
    waits = []
    for _ in range(7):
        now = one.check_at
        lose(one, "gone", now=now, checked=True)
        waits.append(one.check_at - now)
    assert waits == [1.0, 2.0, 4.0, 8.0, *[LONGEST_BACKOFF_SECONDS] * 3]
    heard(one, READY, them, now=99.0)
    assert (one.status, one.failures, one.check_at) == ("ready", 0, 99.0 + CHECK_SECONDS)


def test_who_comes_back_does_not_make_up_for_what_it_missed() -> None:
    one, other = them = replicas(100.0, 100.0)
    lose(one, "gone", now=0.0)
    for _ in range(50):
        end(picked(them), now=0.0)
    heard(one, READY, them)
    assert [picked(them).replica for _ in range(4)] == [one, other, one, other]


def test_slow_to_say_how_it_is_is_not_dead_while_it_says_other_things() -> None:
    (one,) = them = replicas(100.0)
    errand = begin(one, among=them, work=50, now=0.0)
    for asked_at in range(10):
        progress(errand, tokens=1, now=asked_at + 0.5)
        miss(one, asked_at=asked_at, now=asked_at + 2.0)
    assert one.status == "ready"
    miss(one, asked_at=20.0, now=22.0)
    assert one.status == "ready"
    miss(one, asked_at=23.0, now=25.0)
    assert one.status == "down"


def test_errors_in_a_row_leave_a_replica_out() -> None:
    (one,) = replicas(100.0)
    for status in (500, 500, 200, 500, 503, 502, 500, 200):
        answered(one, status=status, wait_seconds=1.0, now=0.0)
    assert one.status == "ready"
    for _ in range(3):
        answered(one, status=500, wait_seconds=1.0, now=0.0)
    assert (one.status, "3" in one.reason) == ("down", True)


@pytest.mark.parametrize(
    ("said", "status", "reason"),
    [
        (Readiness(status="ready", model="dos"), "refused", "it serves dos, and this gateway uno"),
        (Readiness(status="ready", model="uno", gateway="me"), "refused", "it is this gateway itself"),
        (Readiness(status="ready", model="uno", gateway="another"), "ready", ""),
        (Readiness(status="draining"), "draining", "it says that it is draining"),
        (Readiness(status="loading"), "loading", "it says that it is loading"),
        (Readiness(status="ready"), "ready", ""),
    ],
)
def test_what_a_replica_says_decides(said: Readiness, status: str, reason: str) -> None:
    one, _ = them = replicas(100.0, 100.0)
    heard(one, said, them)
    assert (one.status, one.reason) == (status, reason)
    assert (one in [choose(them, now=0.0, tried=them[1:])]) is (status == "ready")


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://192.168.1.50:8000", "http://192.168.1.50:8000"),
        ("http://PC:8000/v1/", "http://pc:8000"),
        ("https://modelo.example", "https://modelo.example:443"),
        ("http://[fd00::5]:8000/", "http://[fd00::5]:8000"),
    ],
)
def test_urls(text: str, url: str) -> None:
    assert parse_url(text) == url


@pytest.mark.parametrize(
    "text",
    [
        "pc:8000",
        "ftp://pc",
        "http://",
        "http://pc:99999",
        "http://pc:8000/otra",
        "http://u:secreto@pc",
        "http://pc/?key=secreto",
    ],
)
def test_what_is_no_url_of_a_service(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_url(text)
    assert "secreto" not in raised.value.message


def test_a_list_of_replicas() -> None:
    text = "# PCs\nhttp://a:8000  # the tower\n\nhttp://b:8000\n"
    assert parse_replicas(["http://c:1"], text) == ["http://c:1", "http://a:8000", "http://b:8000"]
    for urls, wrong in (([], "no service"), (["http://a:1", "http://A:1/"], "twice")):
        with pytest.raises(ConfigError, match=wrong):
            parse_replicas(urls)


@pytest.mark.parametrize("said", [None, [], {}, {"status": "no"}, {"status": 3}])
def test_what_is_no_service(said: Any) -> None:
    with pytest.raises(ValueError, match="no such service"):
        parse_readiness(200, said)


def test_what_a_service_says_is_not_trusted() -> None:
    said = {"status": "ready", "model": 3, "tokens_per_second": "inf", "gateway": None}
    assert parse_readiness(200, said) == Readiness(status="ready")
    assert parse_readiness(200, {**said, "tokens_per_second": float("inf")}).tokens_per_second == 0.0
    assert parse_readiness(503, said).status == "loading"


def test_models_that_all_have_who_take_requests() -> None:
    one, other, gone = them = replicas(100.0, 100.0, 100.0)
    assert shared_models(them) == []
    for replica, names in ((one, ["uno", "b", "c"]), (other, ["uno", "c", "d"]), (gone, ["uno"])):
        said = {"status": "ready", "model": "uno", "models": [{"model": name} for name in names]}
        heard(replica, parse_readiness(200, said), them)
    assert shared_models(them) == ["uno"]
    lose(gone, "gone", now=2.0)
    assert shared_models(them) == ["uno", "c"]
    lose(one, "gone", now=2.0)
    lose(other, "gone", now=2.0)
    assert shared_models(them) == []


@pytest.mark.parametrize("listed", [None, {}, "uno", [None, 3, {}, {"model": None}, {"id": "uno"}]])
def test_lists_of_models_that_are_none(listed: Any) -> None:
    assert parse_readiness(200, {"status": "ready", "model": "uno", "models": listed}).models == ("uno",)
    assert parse_readiness(200, {"status": "ready", "models": listed}).models == ()


@pytest.mark.parametrize(
    ("body", "work"),
    [
        ({"prompt": "a"}, 16),
        ({"prompt": "a", "max_tokens": 7, "n": 3}, 21),
        ({"prompt": ["a", "b"], "max_tokens": 7}, 14),
        ({"prompt": [1, 2, 3], "max_tokens": 7}, 7),
        ({"prompt": [], "max_tokens": -5}, 16),
        ({"messages": []}, 256),
        ({"messages": [], "max_tokens": 9, "max_completion_tokens": 5}, 5),
        ({"prompt": "a", "max_tokens": 10**30}, 16),
        ({"inputs": [[1]]}, 1),
        ("text", 1),
    ],
)
def test_work(body: Any, work: int) -> None:
    assert work_of(body) == work


def test_events_are_handed_on_whole() -> None:
    assert whole_events(b"data: 1\n\ndata: 2\n\ndata") == b"data: 1\n\ndata: 2\n\n"
    assert whole_events(b"data: 1\r\n\r\ndata") == b"data: 1\r\n\r\n"
    assert whole_events(b"data: 1\n") == b""
    assert whole_events(b"\n\nda") == b"\n\n"
    assert whole_events(b"x" * 2**21) == b"x" * 2**21
