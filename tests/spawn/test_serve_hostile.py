"""A service among strangers, liars and the careless: others are answered, nothing is told, and it ends when told to."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
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
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.hf import save_hf
from tests.commands import wait_for
from tests.inside import cuadrilla
from tests.serving import Service, serving

pytestmark = pytest.mark.spawn

KEY = "correct-horse-battery-staple"
BEARER = {"Authorization": f"Bearer {KEY}"}
COMPLETIONS = "/v1/completions"
SLOTS, QUEUE = 4, 60
CONTEXT = 8192
LONG = {"model": "long", "prompt": "Hola", "max_tokens": CONTEXT, "ignore_eos": True}
"""Takes seconds: whoever does not wait for its end is seen to leave."""
MIB = 2**20
CEILING_SECONDS = 20.0
TASK = """
import sys
import torch
from torch import nn
from cuadrilla.model.task import TaskDefaults

class Data:
    def __len__(self): return 64
    def __getitem__(self, index): return {"x": torch.full((1,), float(index))}

class Liar:
    defaults = TaskDefaults(length=1)
    def model(self): return nn.Linear(1, 1)
    def loss(self, model, batch): return model(batch["x"]).square().sum(), len(batch["x"])
    def data(self, split): return Data()
    def data_hash(self): return "liar"
    def evaluate(self, model, batches): return {"loss": 0.0}
    def predict(self, model: nn.Module, inputs: list[str]) -> list[float]:
        found = []
        for one in inputs:
            if one.startswith("raise"): raise ValueError(one)
            if one == "few": continue
            if one == "exit": sys.exit(3)
            found.append(float("nan") if one == "nan" else float(len(one)))
        return found

def task(): return Liar()
"""
RUN = """
schema = 1
[task]
kind = "file"
path = "task.py:task"
[train]
steps = 1
batch_sequences = 8
unit_sequences = 8
precision = "fp32"
threads = 1
device = "cpu"
[checkpoint]
every_seconds = 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models `long` and `short`, by how long it takes to fill their contexts; `nan`, whose numbers are none; a task."""
    made = tmp_path_factory.mktemp("hostile")
    prepare(["cuentos:40"], out=made / "data", options=PrepareOptions(vocab=300), progress=lambda *_: None)
    torch.manual_seed(0)
    for name, context in (("long", CONTEXT), ("short", 64), ("nan", 64)):
        model = GPT2(GPT2Config(vocab_size=300, context=context, layers=1, heads=1, width=8))
        if name == "nan":
            with torch.no_grad():
                model.transformer.wte.weight.fill_(3e38)  # finite, as what is loaded must be; their squares are not
        save_hf(model, made / name, tokenizer_path=made / "data" / "tokenizer.json")
    (made / "liar").mkdir()
    (made / "liar" / "task.py").write_text(TASK)
    (made / "liar" / "run.toml").write_text(RUN)
    done = cuadrilla("train", made / "liar" / "run.toml")
    assert done.returncode == 0, done.stderr
    (made / "key.txt").write_text(KEY + "\n")
    return made


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    room = ("--slots", SLOTS, "--queue", QUEUE, "--api-key-file", folder / "key.txt")
    with serving(folder / "long", folder / "nan", folder / "liar", *room) as found:
        yield found


def port_of(service: Service) -> int:
    return int(service.url.rpartition(":")[2])


def ask(service: Service, path: str, body: Any = None) -> tuple[int, Any]:
    return service.ask(path, body, headers=BEARER)


def is_well(service: Service) -> None:
    """It answers, as ever."""
    status, answer = ask(service, COMPLETIONS, {"model": "long", "prompt": "Hola", "max_tokens": 2, "ignore_eos": True})
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")


def busyness(service: Service, name: str = "long") -> tuple[int, int]:
    return figure(service, "busy_slots", name), figure(service, "waiting", name)


def figure(service: Service, name: str, model: str = "long") -> int:
    return service.figure(name, model, headers=BEARER)


def until_idle(service: Service) -> None:
    wait_for(lambda: busyness(service) == (0, 0), seconds=CEILING_SECONDS)


def resident(service: Service) -> int:
    found: int = psutil.Process(service.process.pid).memory_info().rss
    return found


def head(service: Service, first: str = "GET /v1/models", *lines: str, key: str = KEY) -> bytes:
    told = [f"{first} HTTP/1.1", f"Host: 127.0.0.1:{port_of(service)}", f"Authorization: Bearer {key}", *lines]
    return "\r\n".join([*told, "", ""]).encode()


def post(service: Service, asked: Any, *, path: str = COMPLETIONS, more: Sequence[str] = ()) -> bytes:
    body = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    return head(service, f"POST {path}", "Content-Type: application/json", f"Content-Length: {len(body)}", *more) + body


@contextlib.contextmanager
def connected(service: Service, *, receive_bytes: int = 0) -> Iterator[socket.socket]:
    with socket.socket() as connection:
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(CEILING_SECONDS)
        connection.connect(("127.0.0.1", port_of(service)))
        yield connection


def said(service: Service, sent: bytes) -> tuple[int, bytes]:
    """The status of the (first) answer and all that came until the service closed, or had nothing more to say."""
    with connected(service) as connection:
        with contextlib.suppress(OSError):  # it may close before it has everything
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
    ("name", "make", "statuses"),
    [
        ("two hosts", lambda s: head(s, "GET /healthz", "Host: evil.example"), {400}),
        ("a header of a megabyte", lambda s: head(s, "GET /healthz", "X: " + "a" * MIB), {400, 431}),
        ("an address of a megabyte", lambda s: head(s, "GET /" + "a" * MIB), {400, 431}),
        ("gzip", lambda s: post(s, b"\x1f\x8b", more=["Content-Encoding: gzip", CLOSE]), {400}),
        ("rubbish", lambda _: bytes(range(256)) * 20, {400}),
        ("a path upwards", lambda s: head(s, "GET /../../etc/passwd", CLOSE), {404}),
    ],
)
def test_requests_of_strange_shapes(
    service: Service, name: str, make: Callable[[Service], bytes], statuses: set[int]
) -> None:
    status, answer = said(service, make(service))
    assert status in statuses, name
    assert b"Traceback" not in answer
    assert b"access-control" not in answer.lower()
    assert KEY.encode() not in answer
    assert service.ask("/healthz") == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("path", "body", "statuses"),
    [
        (COMPLETIONS, b'{"prompt": "\\ud800"}', {422}),
        ("/v1/predict", b'{"inputs": [{"\\ud800": 1}]}', {422}),
        (COMPLETIONS, b'"\xff"', {400}),
        (COMPLETIONS, b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", {400}),
        (COMPLETIONS, b'{"prompt": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", {400}),
        (COMPLETIONS, b'{"prompt": [' + b"null," * 10**5 + b"null]}", {422}),
        (COMPLETIONS, b'{"prompt": "' + b"a" * 10**6 + b'"}', {422}),
        (COMPLETIONS, b'{"prompt": "a", "model": "../../etc/passwd"}', {404}),
        ("/v1/predict", b'{"inputs": ["a"], "model": "long"}', {404}),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, bytes) else "",
)
def test_bodies_that_nobody_should_send(service: Service, path: str, body: bytes, statuses: set[int]) -> None:
    status, answer = said(service, post(service, body, path=path, more=[CLOSE]))
    assert status in statuses
    assert json.loads(answer.partition(b"\r\n\r\n")[2])
    is_well(service)


@pytest.mark.parametrize("chat", [False, True])
def test_a_model_whose_numbers_are_none(service: Service, chat: bool) -> None:
    """It is an ending of the text, not of the service: the call is answered and says `error`."""
    asked: dict[str, Any] = {"model": "nan", "max_tokens": 5}
    path = "/v1/chat/completions" if chat else COMPLETIONS
    asked |= {"messages": [{"role": "user", "content": "Hola"}]} if chat else {"prompt": ["Hola", "Adiós"]}
    status, answer = ask(service, path, asked)
    assert status == 200
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"error"}
    scored = {"logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 3}
    status, answer = ask(service, path, {**asked, **scored})
    assert status == 200
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"error"}
    scored |= {} if chat else {"echo": True}
    _, stream = said(service, post(service, {**asked, **scored, "stream": True}, path=path, more=[CLOSE]))
    assert b'"finish_reason": "error"' in stream
    assert b"data: [DONE]" in stream
    assert b"NaN" not in stream


@pytest.mark.parametrize("lie", ["raise", "few", "nan", "exit"])
def test_a_task_that_lies_or_fails(service: Service, lie: str) -> None:
    """Only who asked for it hears of it."""
    with ThreadPoolExecutor(4) as pool:
        asked = ["abc", lie, "de", lie, "f"] * 3
        found = list(pool.map(lambda one: ask(service, "/v1/predict", {"inputs": [one]}), asked))
    for one, (status, answer) in zip(asked, found, strict=True):
        if one == lie:
            assert (status, answer["error"]["param"]) == (422, "inputs")
        else:
            assert (status, answer["outputs"]) == (200, [len(one)])


@pytest.mark.parametrize(
    ("name", "asked", "callers"),
    [
        ("a stream", {"stream": True}, 1),
        ("an answer in one piece", {}, 1),
        ("a prompt that is scored", {"prompt": "Hola " * 300, "echo": True, "logprobs": 1, "n": 4}, 1),
        ("some that wait", {}, 20),
    ],
)
@pytest.mark.parametrize("way", ["closes", "resets"])
def test_who_leaves_frees_its_slot(service: Service, name: str, asked: dict[str, Any], callers: int, way: str) -> None:
    until_idle(service)
    before = figure(service, "generated_tokens_total")
    with ExitStack() as stack:
        made = [stack.enter_context(connected(service)) for _ in range(callers)]
        for connection in made:
            connection.sendall(post(service, {**LONG, **asked}))
        wait_for(lambda: busyness(service)[0] > 0, seconds=CEILING_SECONDS)
        for connection in made:
            if way == "resets":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    until_idle(service)
    rows = callers * int(asked.get("n", 1))
    assert figure(service, "generated_tokens_total") - before < rows * (CONTEXT - 2000)


@contextlib.contextmanager
def many_descriptors(number: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < number:
        pytest.skip(f"needs {number} open files; this machine allows {before[1]}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(number, before[0]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def crowd(service: Service, number: int, *starts: bytes) -> Iterator[list[socket.socket]]:
    """So many connections, each with one of these beginnings."""
    with ExitStack() as stack:
        made = []
        for index in range(number):
            connection = stack.enter_context(socket.socket())
            connection.settimeout(CEILING_SECONDS)
            with contextlib.suppress(OSError):  # the service may already have had enough of it
                connection.connect(("127.0.0.1", port_of(service)))
                connection.sendall(starts[index % len(starts)])
            made.append(connection)
        yield made


def test_a_thousand_who_only_connect_and_two_hundred_who_are_slow(folder: Path) -> None:
    """Without a key, so that strangers may also begin a body."""
    with serving(folder / "long", "--slots", 2) as service, many_descriptors(4096):
        is_well(service)
        before = resident(service)
        body = head(service, f"POST {COMPLETIONS}", JSON, "Content-Length: 1000") + b'{"prompt": "'
        with crowd(service, 1000, b"", b"G", b"GET /healthz HTTP/1.1\r\nHost: ", body[:40]):
            is_well(service)
            with crowd(service, 200, body):
                is_well(service)
                with crowd(service, 600, body):  # more than there are seats
                    is_well(service)
        is_well(service)
        assert resident(service) - before < 64 * MIB


def test_it_ends_when_those_at_hand_have_their_answer(folder: Path) -> None:
    asked = {**LONG, "max_tokens": 600, "temperature": 0}
    with serving(folder / "long", "--slots", 4, "--queue", 8) as service:
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
    """Whatever its description of itself allows, and much that it does not: never an error of its own."""
    with serving(folder / "short", folder / "liar", "--queue", 200) as service:
        done = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", "run", f"{service.url}/openapi.json",
             "--checks", "not_a_server_error", "--phases", "coverage,fuzzing", "--max-examples", "10",
             "--generation-deterministic", "--request-timeout", "60", "--suppress-health-check", "all"],
            cwd=tmp_path, env={**os.environ, "NO_COLOR": "1"}, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
        assert service.ask("/healthz") == (200, {"status": "ok"})
