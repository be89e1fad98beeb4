"""A service with hostile and careless clients: others get their answers, nothing leaks, and it can be stopped."""

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from cuadrilla.data.prepare import PrepareOptions, prepare
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.host.process import allow_descriptors
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.hf import save_hf
from tests.commands import run_program, wait_for
from tests.serving import Service, serving

KEY = "correct-horse-battery-staple"
COMPLETIONS = "/v1/completions"
CONTEXT = 8192
LONG = {"model": "long", "prompt": "Hola", "max_tokens": CONTEXT, "ignore_eos": True}
"""A request that takes seconds, so that the service notices a client that leaves before its end."""
MIB = 2**20
CEILING_SECONDS = 20.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models: `long` and `short`, by the time to fill their contexts, and `nan`, whose outputs are NaN."""
    made = tmp_path_factory.mktemp("hostile")
    prepare(["cuentos:40"], out=made / "data", options=PrepareOptions(vocab=300), progress=lambda *_: None)
    torch.manual_seed(0)
    for name, context in (("long", CONTEXT), ("short", 64), ("nan", 64)):
        model = GPT2(GPT2Config(vocab_size=300, context=context, layers=1, heads=1, width=8))
        if name == "nan":
            with torch.no_grad():
                model.transformer.wte.weight.fill_(3e38)  # finite, as loaded weights must be; their squares are not
        save_hf(model, made / name, tokenizer=Tokenizer.load(made / "data" / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    with serving(folder / "long", "--slots", 4, "--queue", 60, key=KEY) as found:
        yield found


@pytest.fixture(scope="module")
def broken(folder: Path) -> Iterator[Service]:
    with serving(folder / "nan", "--name", "broken", key=KEY) as found:
        yield found


def port_of(service: Service) -> int:
    return int(service.url.rpartition(":")[2])


def is_well(service: Service) -> None:
    """The service answers as usual."""
    status, answer = service.ask(COMPLETIONS, {"model": "long", "prompt": "Hola", "max_tokens": 2, "ignore_eos": True})
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")


def busyness(service: Service) -> tuple[int, int]:
    return service.figure("busy_slots", "long"), service.figure("waiting", "long")


def until_idle(service: Service) -> None:
    wait_for(lambda: busyness(service) == (0, 0), seconds=CEILING_SECONDS)


def resident(service: Service) -> int:
    found: int = psutil.Process(service.process.pid).memory_info().rss
    return found


def head(service: Service, first: str, *lines: str) -> bytes:
    told = [f"{first} HTTP/1.1", f"Host: 127.0.0.1:{port_of(service)}", f"Authorization: Bearer {KEY}", *lines]
    return "\r\n".join([*told, "", ""]).encode()


def post(service: Service, asked: Any, *, path: str = COMPLETIONS, more: Sequence[str] = ()) -> bytes:
    body = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    return head(service, f"POST {path}", "Content-Type: application/json", f"Content-Length: {len(body)}", *more) + body


@contextlib.contextmanager
def connected(service: Service) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port_of(service)), timeout=CEILING_SECONDS) as connection:
        yield connection


def said(service: Service, sent: bytes) -> tuple[int, bytes]:
    """Send bytes; the status of the first answer, and all bytes until the service closes or sends no more."""
    with connected(service) as connection:
        with contextlib.suppress(OSError):  # the service may close before it has read everything
            connection.sendall(sent)
        answer = b""
        with contextlib.suppress(OSError):
            while part := connection.recv(65_536):
                answer += part
    assert answer.startswith(b"HTTP/1.1 "), answer[:200]
    return int(answer.split()[1]), answer


CLOSE = "Connection: close"
JSON = "Content-Type: application/json"


@pytest.mark.parametrize(
    ("make", "statuses"),
    [
        (lambda s: head(s, "GET /healthz", "Host: evil.example"), {400}),
        (lambda s: head(s, "GET /healthz", "X: " + "a" * MIB), {400, 431}),
        (lambda s: head(s, "GET /" + "a" * MIB), {400, 431}),
        (lambda s: post(s, b"\x1f\x8b", more=["Content-Encoding: gzip", CLOSE]), {400}),
        (lambda _: bytes(range(256)) * 20, {400}),
        (lambda s: head(s, "GET /../../etc/passwd", CLOSE), {404}),
    ],
    ids=["two hosts", "a header of a megabyte", "an address of a megabyte", "gzip", "rubbish", "a path upwards"],
)
def test_requests_of_strange_shapes(service: Service, make: Callable[[Service], bytes], statuses: set[int]) -> None:
    status, answer = said(service, make(service))
    assert status in statuses
    assert b"Traceback" not in answer
    assert b"access-control" not in answer.lower()
    assert KEY.encode() not in answer
    assert service.ask("/healthz") == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (COMPLETIONS, b'{"prompt": "\\ud800"}', 400),
        (COMPLETIONS, b'"\xff"', 400),
        (COMPLETIONS, b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", 400),
        (COMPLETIONS, b'{"prompt": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", 400),
        (COMPLETIONS, b'{"prompt": "' + b"a" * 10**6 + b'"}', 400),
        (COMPLETIONS, b'{"prompt": [300]}', 400),
        (COMPLETIONS, b'{"prompt": "a", "model": "../../etc/passwd"}', 404),
        ("/v1/predict", b'{"inputs": ["a"], "model": "long"}', 404),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bodies_that_nobody_should_send(service: Service, path: str, body: bytes, expected: int) -> None:
    status, answer = said(service, post(service, body, path=path, more=[CLOSE]))
    assert status == expected
    assert json.loads(answer.partition(b"\r\n\r\n")[2])
    is_well(service)


def test_a_call_without_the_header_is_told_so(service: Service) -> None:
    body = b'{"prompt": "a", "logit_bias": {"1": 1}}'
    form = ("Content-Type: application/x-www-form-urlencoded", f"Content-Length: {len(body)}", CLOSE)  # as of `curl -d`
    status, answer = said(service, head(service, f"POST {COMPLETIONS}", *form) + body)
    assert (status, b"Content-Type: application/json" in answer) == (400, True)
    assert b"logit_bias: cannot be served here" in said(service, post(service, body, more=[CLOSE]))[1]


@pytest.mark.parametrize("chat", [False, True])
def test_a_model_whose_numbers_are_none(broken: Service, chat: bool) -> None:
    """This ends the text, not the service: the answer has the finish reason `error`."""
    if chat:
        path, asked = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hola"}], "logprobs": True}
    else:
        path, asked = COMPLETIONS, {"prompt": ["Hola", "Adiós"], "logprobs": 3, "echo": True}
    asked |= {"model": "broken", "max_tokens": 5}
    status, answer = broken.ask(path, asked)
    assert status == 200
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"error"}
    _, stream = said(broken, post(broken, {**asked, "stream": True}, path=path, more=[CLOSE]))
    assert b'"finish_reason": "error"' in stream
    assert b"data: [DONE]" in stream
    assert b"NaN" not in stream


@pytest.mark.parametrize(
    ("asked", "callers"),
    [
        ({"stream": True}, 1),
        ({"prompt": "Hola " * 300, "echo": True, "logprobs": 1, "n": 4}, 1),
        ({}, 20),
    ],
    ids=["a stream", "a prompt that is scored", "some that wait for an answer in one piece"],
)
def test_who_leaves_frees_its_slot(service: Service, asked: dict[str, Any], callers: int) -> None:
    until_idle(service)
    before = service.figure("generated_tokens_total", "long")
    with ExitStack() as stack:
        made = [stack.enter_context(connected(service)) for _ in range(callers)]
        for connection in made:
            connection.sendall(post(service, {**LONG, **asked}))
        wait_for(lambda: busyness(service)[0] > 0, seconds=CEILING_SECONDS)
    until_idle(service)
    rows = callers * int(asked.get("n", 1))
    assert service.figure("generated_tokens_total", "long") - before < rows * (CONTEXT - 2000)


@contextlib.contextmanager
def crowd(service: Service, number: int, *starts: bytes) -> Iterator[list[socket.socket]]:
    """Open this number of connections; each sends one of these beginnings of a request."""
    with ExitStack() as stack:
        made = []
        for index in range(number):
            connection = stack.enter_context(socket.socket())
            connection.settimeout(CEILING_SECONDS)
            with contextlib.suppress(OSError):  # the service may have closed it already
                connection.connect(("127.0.0.1", port_of(service)))
                connection.sendall(starts[index % len(starts)])
            made.append(connection)
        yield made


def test_a_thousand_who_only_connect_two_hundred_who_are_slow_and_an_end_in_order(folder: Path) -> None:
    """The service has no key, so that strangers may also begin a body. It ends after the present answers."""
    with serving(folder / "long", "--slots", 4, "--queue", 8) as service:
        allow_descriptors(4096)
        is_well(service)
        before = resident(service)
        body = head(service, f"POST {COMPLETIONS}", JSON, "Content-Length: 1000") + b'{"prompt": "'
        with crowd(service, 1000, b"", b"G", b"GET /healthz HTTP/1.1\r\nHost: ", body[:40]):
            is_well(service)
            with crowd(service, 200, body):
                is_well(service)
                with crowd(service, 600, body):  # more than the service admits
                    is_well(service)
        is_well(service)
        assert resident(service) - before < 64 * MIB
        asked = {**LONG, "max_tokens": 600, "temperature": 0}
        expected = service.ask(COMPLETIONS, asked)[1]["choices"][0]["text"]
        with ThreadPoolExecutor(8) as pool, connected(service) as silent, connected(service) as half:
            half.sendall(b"GET /healthz HTTP/1.1\r\n")
            work = [pool.submit(service.ask, COMPLETIONS, asked) for _ in range(8)]
            wait_for(lambda: sum(busyness(service)) == 8, seconds=CEILING_SECONDS)
            service.process.send_signal(signal.SIGINT)
            for each in work:
                status, answer = each.result()
                assert status == 200
                assert answer["choices"][0]["text"] == expected
            assert service.process.wait(timeout=60) == 0
            assert silent.recv(1) == b""
        with pytest.raises(OSError, match=r"refused|reset"):
            service.ask("/healthz")
        assert "Traceback" not in service.said.read_text()


@pytest.mark.thorough
@pytest.mark.timeout(250)
def test_schemathesis_finds_nothing(folder: Path, tmp_path: Path) -> None:
    """Requests that the service's OpenAPI document allows, and many that it does not, never cause a server error."""
    with serving(folder / "short", "--queue", 200) as service:
        run_program(
            sys.executable, "-m", "schemathesis.cli", "run", f"{service.url}/openapi.json",
            "--checks", "not_a_server_error", "--phases", "coverage,fuzzing", "--max-examples", "10",
            "--generation-deterministic", "--request-timeout", "60", "--suppress-health-check", "all",
            cwd=tmp_path, env={**os.environ, "NO_COLOR": "1"}, seconds=240,
        )  # fmt: skip
        assert service.ask("/healthz") == (200, {"status": "ok"})
