"""Which requests pass the edge of a service, called as a server would call it, and how the others are refused."""

import asyncio
import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from starlette.types import Message, Receive, Scope, Send

from cuadrilla.serve import edge as module
from cuadrilla.serve.edge import Edge, Refusal

HOST, KEY = "127.0.0.1:8000", "correct-horse-battery-staple"
BEARER = ("Authorization", f"Bearer {KEY}")
JSON = ("Content-Type", "application/json")
Head = Sequence[tuple[str, str]]


@dataclass
class Inside:
    """An application that keeps the requests that reach it, and answers `ok`."""

    bodies: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        event = await receive()
        self.bodies.append(event["body"])
        while event["more_body"]:
            event = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    reached: list[bytes]
    """The bodies that the application has seen."""
    left: int
    """Number of parts of the request that were not read."""


def ask(
    method: str = "GET",
    path: str = "/v1/models",
    head: Head = (),
    *,
    host: str | None = HOST,
    parts: Iterable[bytes] = (b"",),
    key: str = "",
    pages: bool = True,
) -> Answer:
    inside, sent = Inside(), list[Message]()
    left = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    left[-1]["more_body"] = False
    given = [*([("Host", host)] if host is not None else []), *head]
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in given]

    async def receive() -> Message:
        return left.pop(0)

    async def send(event: Message) -> None:
        sent.append(event)

    scope = {"type": "http", "method": method, "path": path, "headers": raw}
    asyncio.run(Edge(inside, key=key, pages=pages)(scope, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], headers, b"".join(e["body"] for e in sent[1:]), inside.bodies, len(left))


def refused(answer: Answer, status: int) -> None:
    """The answer is an error in OpenAI's form, and the request has not reached the application."""
    assert answer.status == status
    assert not answer.reached
    assert set(json.loads(answer.body)["error"]) == {"message", "type", "param", "code"}
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "authorization",
    [
        None, "", "Bearer", f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", KEY, f"Token {KEY}", "Bearer ñ\xff", "Basic ====",
        "Basic " + base64.b64encode(b"\xff:\xff").decode(), "Basic " + base64.b64encode(KEY.encode()).decode(),
    ],
)  # fmt: skip
def test_no_key_or_a_wrong_one(authorization: str | None) -> None:
    """The body of a stranger's request is not read, either."""
    head = [] if authorization is None else [("Authorization", authorization)]
    for path in ("/v1/models", "/metrics", "/", "/healthz/", "//healthz", "/nowhere", "/HEALTH"):
        answer = ask("POST", path, [*head, JSON], parts=[b"x" * 900] * 50, key=KEY)
        refused(answer, 401)
        assert KEY not in answer.body.decode()
        assert answer.left == 50
    assert [ask("GET", path, head, key=KEY).status for path in ("/health", "/healthz")] == [200, 200]


def test_the_key() -> None:
    basic = base64.b64encode(f"any:{KEY}".encode()).decode()
    for value in (f"Bearer {KEY}", f"bearer  {KEY} ", f"Basic {basic}"):
        assert ask(head=[("Authorization", value)], key=KEY).status == 200
    assert ask(path="/", key=KEY).headers["www-authenticate"].startswith("Basic")
    assert ask(path="/metrics", key=KEY).headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("host", [None, "", "evil.example", "127.0.0.1.evil:80", f"x@{HOST}", "localhost:x"])
def test_without_a_key_it_goes_by_the_names_of_this_machine(host: str | None) -> None:
    """A page whose host name was bound to this address (DNS rebinding) has another name, and no key."""
    refused(ask("GET", "/healthz", host=host), 421)
    assert ask(host=host, head=[BEARER], key=KEY).status == 200
    for own in ("localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]:8000"):
        assert ask(host=own).status == 200


@pytest.mark.parametrize(
    "origin", ["null", "", "https://evil.example", f"http://{HOST}.evil", "http://127.0.0.1:8001", "http://x:1@y"]
)
def test_pages_of_other_origins(origin: str) -> None:
    refused(ask("GET", head=[("Origin", origin)]), 403)
    basic = ("Authorization", "Basic " + base64.b64encode(f"any:{KEY}".encode()).decode())  # a browser may add it
    refused(ask("POST", "/v1/completions", [JSON, ("Origin", origin), basic], parts=[b"{}"], key=KEY), 403)
    refused(ask("POST", "/v1/completions", [JSON, ("Origin", origin), ("Authorization", "Bearer x")], key=KEY), 401)
    mine = [JSON, ("Origin", origin), BEARER]
    assert ask("POST", "/v1/completions", mine, parts=[b"{}"], key=KEY).status == 200
    refused(ask("POST", "/api/stop", mine, parts=[b"{}"], key=KEY, pages=False), 403)
    assert ask("GET", head=[("Origin", f"http://{HOST}")]).status == 200


def test_a_body_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BODY_BYTES", 1000)
    with pytest.raises(Refusal) as refused:
        ask("POST", head=[JSON], parts=[b"[" * 900] * 2)
    assert (refused.value.status_code, refused.value.code) == (413, "too_large")
    assert ask("POST", head=[JSON], parts=[b'{"a"', b"", b": 1", b"}"]).status == 200
