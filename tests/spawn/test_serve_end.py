"""A service that has more to do than it can: all its seats taken, and its end while everybody wants something."""

import http.client
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cuadrilla.data.options import PrepareOptions
from cuadrilla.data.prepare import prepare
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.hf import save_hf
from cuadrilla.serve.listen import DRAIN_SECONDS, MOST_CONNECTIONS
from tests.commands import wait_for
from tests.inside import cuadrilla
from tests.serving import Service, serving
from tests.spawn.test_serve_hostile import (
    COMPLETIONS,
    CONTEXT,
    JSON,
    LONG,
    RUN,
    TASK,
    crowd,
    head,
    many_descriptors,
    port_of,
    post,
)

pytestmark = [pytest.mark.spawn, pytest.mark.thorough, pytest.mark.timeout(200)]

HANG = {"inputs": ["hang"]}


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model `long`, whose texts take seconds, and a task `liar` that may never return."""
    made = tmp_path_factory.mktemp("busy")
    prepare(["cuentos:40"], out=made / "data", options=PrepareOptions(vocab=300), progress=lambda *_: None)
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=300, context=CONTEXT, layers=1, heads=1, width=8))
    save_hf(model, made / "long", tokenizer_path=made / "data" / "tokenizer.json")
    (made / "liar").mkdir()
    (made / "liar" / "task.py").write_text(TASK)
    (made / "liar" / "run.toml").write_text(RUN)
    done = cuadrilla("train", made / "liar" / "run.toml")
    assert done.returncode == 0, done.stderr
    return made


def test_it_is_gone_in_time_however_much_there_is_to_do(busy: Path) -> None:
    """Beside texts that take longer: a task that never returns, slow bodies, half of heads, callers who do not read."""
    with serving(busy / "long", busy / "liar", "--slots", 4, "--queue", 100) as service, ExitStack() as stack:
        body = head(service, f"POST {COMPLETIONS}", JSON, "Content-Length: 1000")
        for number, start in ((20, body), (20, b"GET /"), (2, post(service, {**LONG, "n": 4, "stream": True}))):
            stack.enter_context(crowd(service, number, start))
        pool = stack.enter_context(ThreadPoolExecutor(24))
        texts = [pool.submit(service.ask, COMPLETIONS, {**LONG, "n": 2}) for _ in range(20)]
        guesses = [pool.submit(service.ask, "/v1/predict", HANG) for _ in range(4)]
        wait_for(lambda: service.ask("/readyz")[1]["waiting"] >= 40, seconds=60)
        began = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(timeout=60) == 0
        took = time.monotonic() - began
        for status, answer in (each.result() for each in texts):
            assert status == 200
            assert {choice["finish_reason"] for choice in answer["choices"]} <= {"length", "error"}
        for status, answer in (each.result() for each in guesses):
            assert (status, answer["error"]["code"]) == (503, "draining")
        assert "Traceback" not in service.said.read_text()
        assert took < DRAIN_SECONDS  # the promise itself, and no measurement


@contextmanager
def asked(service: Service, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(service), timeout=60)
    with closing(connection):
        data = None if body is None else json.dumps(body)
        connection.request("GET" if data is None else "POST", path, data, {"Content-Type": "application/json"})
        yield connection.getresponse()


def is_full(service: Service) -> bool:
    with asked(service, "/v1/models") as answer:
        return answer.status == 503


def test_who_comes_when_all_seats_are_taken_is_told_so(busy: Path) -> None:
    """By callers who wait for their answers; those who only connect do not change it, nor stop anybody."""
    with serving(busy / "liar", "--most-seconds", 100) as service, many_descriptors(4096):
        asking = post(service, HANG, path="/v1/predict")
        with crowd(service, MOST_CONNECTIONS, asking), ExitStack() as stack:

            def fills_up() -> bool:
                """One that has not been read yet has given way to whoever looked: another comes in its place."""
                if not is_full(service):
                    stack.enter_context(crowd(service, 1, asking))
                    return False
                return True

            wait_for(fills_up, seconds=60)
            with crowd(service, 1000, b"", b"G"):
                for body in (None, HANG, {"inputs": ["a" * 900_000]}):
                    with asked(service, "/v1/predict", body) as answer:
                        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
                        assert json.loads(answer.read())["error"]["code"] == "overloaded"
                with asked(service, "/healthz") as answer:
                    assert answer.status == 200
        wait_for(lambda: not is_full(service), seconds=60)
        assert service.stop() == 0
