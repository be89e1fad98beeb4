"""Who gets past the edge of a service, called as a server would call it, and what is told to the others."""

import asyncio
import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.serve.edge import MOST_KEYS, Edge, Event, Limits, Receive, Refusal, Scope, Send, check_json

HOST, KEY = "127.0.0.1:8000", "correct-horse-battery-staple"
BEARER = ("Authorization", f"Bearer {KEY}")
JSON = ("Content-Type", "application/json")
LIMITS = Limits(head_bytes=2000, body_bytes=1000, body_seconds=0.05)
Head = Sequence[tuple[str, str]]


@dataclass
class Inside:
    """An application that keeps what reaches it, and says `ok`."""

    bodies: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.bodies.append((await receive())["body"])
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
    """Parts of the request that nobody has received."""

    @property
    def code(self) -> Any:
        return json.loads(self.body)["error"]["code"]


def ask(
    method: str = "GET",
    path: str = "/v1/models",
    head: Head = (),
    *,
    host: str | None = HOST,
    parts: Iterable[bytes] = (b"",),
    ends: bool = True,
    key: str = "",
    limits: Limits = LIMITS,
) -> Answer:
    """`ends`: the body does; else nothing follows its parts."""
    inside, sent = Inside(), list[Event]()
    left = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if ends:
        left[-1]["more_body"] = False
    given = [*([("Host", host)] if host is not None else []), *head]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in given]

    async def receive() -> Event:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    async def send(event: Event) -> None:
        sent.append(event)

    edge = Edge(inside, key=key, hosts=[HOST], limits=limits)
    asyncio.run(edge({**scope, "headers": raw}, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], headers, b"".join(e["body"] for e in sent[1:]), inside.bodies, len(left))


def post(body: bytes, *head: tuple[str, str]) -> Answer:
    return ask("POST", "/v1/completions", [JSON, *head], parts=[body])


def refused(answer: Answer, status: int) -> None:
    """In OpenAI's form, on a connection that ends, and the application has seen nothing."""
    assert answer.status == status
    assert not answer.reached
    assert set(json.loads(answer.body)["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["connection"] == "close"
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "head",
    [
        [],
        [("Authorization", "")],
        [("Authorization", "Bearer")],
        [("Authorization", f"Bearer {KEY[:-1]}")],
        [("Authorization", f"Bearer {KEY}x")],
        [("Authorization", f"Bearer {KEY.upper()}")],
        [("Authorization", KEY)],
        [("Authorization", f"Token {KEY}")],
        [("Authorization", "Bearer ñ\xff")],
        [("Authorization", "Bearer " + "a" * 1000)],
        [("Authorization", "Basic ====")],
        [("Authorization", "Basic " + base64.b64encode(b"\xff:\xff").decode())],
        [("Authorization", "Basic " + base64.b64encode(KEY.encode()).decode())],
        [("X-Api-Key", KEY)],
        [("Cookie", f"key={KEY}")],
    ],
)
def test_no_key_or_a_wrong_one(head: Head) -> None:
    for path in ("/v1/models", "/metrics", "/", "/healthz/", "//healthz", "/nowhere", "/HEALTHZ"):
        answer = ask("GET", path, head, key=KEY)
        refused(answer, 401)
        assert KEY not in answer.body.decode()
    assert ask("GET", "/healthz", head, key=KEY).status == 200


def test_the_key() -> None:
    assert ask("GET", head=[BEARER], key=KEY).status == 200
    assert ask("GET", head=[("Authorization", f"bearer  {KEY} ")], key=KEY).status == 200
    basic = base64.b64encode(f"any:{KEY}".encode()).decode()
    assert ask("GET", head=[("Authorization", f"Basic {basic}")], key=KEY).status == 200
    refused(ask("GET", head=[BEARER, ("Authorization", "Bearer wrong")], key=KEY), 400)


def test_who_has_no_key_is_not_read() -> None:
    """Not even thrown away: a stranger's body costs nothing."""
    answer = ask("POST", "/v1/completions", [JSON], parts=[b"x" * 900] * 50, key=KEY)
    refused(answer, 401)
    assert answer.left == 50


@pytest.mark.parametrize("host", [None, "", "evil.example", "127.0.0.1", "127.0.0.1:8001", f"{HOST}.evil", f"x@{HOST}"])
@pytest.mark.parametrize("path", ["/healthz", "/v1/models"])
def test_a_service_goes_by_its_names_only(host: str | None, path: str) -> None:
    refused(ask("GET", path, host=host), 421)


def test_two_hosts() -> None:
    refused(ask("GET", head=[("Host", "evil.example")]), 400)
    assert ask("GET", host=HOST.upper()).status == 200


@pytest.mark.parametrize(
    "origin", ["null", "", "https://evil.example", f"http://{HOST}.evil", "http://127.0.0.1:8001", "http://x:1@y"]
)
def test_pages_of_other_origins(origin: str) -> None:
    refused(ask("GET", head=[("Origin", origin)]), 403)
    refused(ask("POST", "/v1/completions", [JSON, ("Origin", origin)], parts=[b"{}"]), 403)


def test_its_own_page() -> None:
    assert ask("GET", head=[("Origin", f"http://{HOST}")]).status == 200
    refused(ask("GET", head=[("Origin", f"http://{HOST}"), ("Origin", "https://evil.example")]), 400)


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "DELETE", "PATCH", "PUT", "CONNECT", "get", "ANY"])
def test_methods_that_nothing_has(method: str) -> None:
    preflight = [("Access-Control-Request-Method", "POST"), ("Access-Control-Request-Headers", "content-type")]
    answer = ask(method, "/v1/completions", preflight)
    refused(answer, 405)
    assert answer.headers["allow"] == "GET, HEAD, POST"


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonx", "json"])
def test_bodies_that_are_no_json(kind: str) -> None:
    refused(ask("POST", head=[("Content-Type", kind)], parts=[b"{}"]), 415)
    refused(ask("POST", parts=[b"{}"]), 415)


def test_types_with_parameters() -> None:
    assert ask("POST", head=[("Content-Type", "Application/JSON ; charset=utf-8")], parts=[b"{}"]).status == 200


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate", "identity, gzip", "x"])
def test_packed_bodies(coding: str) -> None:
    refused(post(b"{}", ("Content-Encoding", coding)), 415)


def test_headers_that_two_readers_understand_differently() -> None:
    refused(post(b"{}", ("Transfer-Encoding", "chunked"), ("Content-Length", "2")), 400)
    refused(post(b"{}", ("Content-Length", "2"), ("Content-Length", "20")), 400)
    refused(post(b"{}", JSON), 400)
    refused(post(b"{}", ("Content-Encoding", "gzip"), ("Content-Encoding", "identity")), 400)


def test_a_long_head() -> None:
    refused(ask("GET", head=[("X", "a" * 2000)]), 431)
    refused(ask("GET", head=[(f"X{number}", "") for number in range(500)]), 431)
    refused(ask("GET", "/" + "a" * 2000), 431)


@pytest.mark.parametrize("length", ["1001", "9" * 18, "9" * 19, "9" * 5000])
def test_a_length_that_is_too_much(length: str) -> None:
    answer = ask("POST", head=[JSON, ("Content-Length", length)], limits=Limits(body_bytes=1000))
    refused(answer, 413)
    assert answer.code == "too_large"


def test_a_body_that_is_too_long_is_received_and_thrown_away() -> None:
    """A client that sends everything before it reads would else see a broken connection instead of the reason."""
    answer = ask("POST", head=[JSON], parts=[b"[" * 900] * 20)
    refused(answer, 413)
    assert answer.left == 0


def test_a_body_that_is_much_too_long_is_not() -> None:
    answer = ask("POST", head=[JSON], parts=[b"[" * 900] * 500, ends=False)
    refused(answer, 413)
    assert answer.left > 400


def test_a_body_that_does_not_come() -> None:
    refused(ask("POST", head=[JSON], parts=[b'{"prompt"'], ends=False), 408)
    refused(ask("POST", head=[JSON, ("Content-Length", "9")], parts=[], ends=False), 408)


def test_a_caller_that_leaves_in_its_body() -> None:
    async def receive() -> Event:
        return {"type": "http.disconnect"}

    inside, sent = Inside(), list[Event]()

    async def send(event: Event) -> None:
        sent.append(event)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"host", HOST.encode()),
             (b"content-type", b"application/json")]}  # fmt: skip
    asyncio.run(Edge(inside, key="", hosts=[HOST])(scope, receive, send))
    assert not inside.bodies


def test_a_body_in_parts_is_given_whole() -> None:
    answer = ask("POST", head=[JSON], parts=[b'{"a"', b"", b": 1", b"}"])
    assert answer.status == 200
    assert answer.reached == [b'{"a": 1}']


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"}", b"{}{}", b"{'a': 1}", b'{"a": 1,}', b"nul", b'"', b"\xff\xfe", b'{"a": "\xff"}',
        b"\xef\xbb\xbf{}",
        '{"a": 1}'.encode("utf-16"), b"NaN", b'{"t": NaN}', b"[Infinity]", b"[-Infinity]", b'{"a": 1, "a": 2}',
        b'{"x": [{"a": 1, "\\u0061": 2}]}', b'"\\ud800"', b'{"\\udc00": 1}', b'"\\udc00\\ud800"', b'["\\uD83D"]',
        b'"a\x00"', b"1" + b"0" * 5000, b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000,
        b'"' + "\ud800".encode("utf-8", "surrogatepass") + b'"',
    ],
)  # fmt: skip
def test_bodies_that_readers_might_understand_differently(body: bytes) -> None:
    answer = ask("POST", head=[JSON], parts=[body], limits=Limits())
    refused(answer, 400)
    assert "sys." not in answer.body.decode()


def test_an_object_of_too_many_keys() -> None:
    body = json.dumps({str(number): 0 for number in range(MOST_KEYS + 1)}).encode()
    refused(ask("POST", head=[JSON], parts=[body], limits=Limits()), 400)


@pytest.mark.parametrize("text", ["", "\0" * 50, "ñ€𝄞", "\x1b[31m\r\n<script>", "\ufffe\u202e", "\\ud800"])
def test_texts_that_are_strange_and_right(text: str) -> None:
    for escaped in (True, False):
        assert check_json(json.dumps({"prompt": text}, ensure_ascii=escaped).encode()) == {"prompt": text}


@given(st.binary(max_size=200))
def test_any_bytes_are_json_or_refused(body: bytes) -> None:
    try:
        value = check_json(body)
    except Refusal as refusal:
        assert refusal.status == 400
        json.dumps(refusal.body).encode()
    else:
        json.dumps(value, ensure_ascii=False, allow_nan=True).encode()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(json_values, st.booleans())
def test_any_json_is_read_as_it_is(value: Any, escaped: bool) -> None:
    assert check_json(json.dumps(value, ensure_ascii=escaped).encode()) == value


def test_refusals() -> None:
    refusal = Refusal(429, "too many", code="overloaded", wait_seconds=7)
    assert refusal.headers == {"Retry-After": "7"}
    assert refusal.body["error"]["type"] == "rate_limit_error"
    assert Refusal(503, "ending").body["error"]["type"] == "server_error"
    assert "Bearer" in Refusal(401, "no").headers["WWW-Authenticate"]


def test_what_is_no_request_passes() -> None:
    seen: list[str] = []

    async def inside(scope: Scope, _receive: Receive, _send: Send) -> None:
        seen.append(scope["type"])

    async def nothing(*_: Any) -> Any:
        return {}

    asyncio.run(Edge(inside, key=KEY, hosts=[])({"type": "lifespan"}, nothing, nothing))
    assert seen == ["lifespan"]
