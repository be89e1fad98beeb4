"""recipes/serving/nginx.conf before two services: tokens arrive one by one, and one service is killed under load."""

import http.client
import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common import tokenizer_of
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.hf import save_hf
from tests.commands import wait_for
from tests.ports import free_port, listens
from tests.serving import Service, serving

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed: apt install nginx-light"),
]

CONF = Path(__file__).parents[2] / "recipes" / "serving" / "nginx.conf"
CONTEXT, SLOTS = 4096, 2
SHORT, LONG = 1000, CONTEXT - 8
"""Lengths of the texts in tokens; the long one takes seconds."""


@contextmanager
def in_front_of(addresses: Sequence[str], *, port: int, folder: Path) -> Iterator[None]:
    """nginx with the recipe's file, in which the port and the services are replaced."""
    conf = CONF.read_text().replace("listen 127.0.0.1:8001;", f"listen 127.0.0.1:{port};")
    for number, address in enumerate(addresses):
        conf = conf.replace(f"server 127.0.0.1:{8010 + number} ", f"server {address} ")
    (folder / "nginx.conf").write_text(conf)
    command = ["nginx", "-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf")]
    with subprocess.Popen(command) as nginx:
        try:
            wait_for(lambda: listens(f"127.0.0.1:{port}"))
            yield
        finally:
            nginx.terminate()


@contextmanager
def asked(port: int, *, max_tokens: int, stream: bool) -> Iterator[http.client.HTTPResponse]:
    body = {"prompt": "Hola", "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        yield connection.getresponse()


@dataclass
class Front:
    """nginx, and the services behind it."""

    port: int
    services: list[Service]

    def answer(self, *, stream: bool) -> tuple[int, str]:
        """Send a request, and return its status and the part of the body that arrives."""
        with asked(self.port, max_tokens=SHORT, stream=stream) as response:
            try:
                return response.status, response.read().decode()
            except http.client.IncompleteRead as error:
                return response.status, error.partial.decode()

    def busy(self) -> list[int]:
        """How many texts each running service is generating."""
        return [one.figure("busy_slots", "modelo") for one in self.services if one.process.poll() is None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modelo")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, context=CONTEXT, layers=1, heads=1, width=8)
    save_hf(GPT2(config), folder, tokenizer=tokenizer_of(300))
    return folder


@pytest.fixture
def front(model: Path, tmp_path: Path) -> Iterator[Front]:
    port = free_port()
    options = ["--slots", SLOTS, "--queue", 100]
    with ExitStack() as stack:
        services = [stack.enter_context(serving(model, "--name", "modelo", *options)) for _ in range(2)]
        addresses = [service.url.removeprefix("http://") for service in services]
        stack.enter_context(in_front_of(addresses, port=port, folder=tmp_path))
        yield Front(port, services)


def test_tokens_are_handed_on_as_they_come_and_a_service_hears_that_a_caller_has_left(front: Front) -> None:
    with asked(front.port, max_tokens=LONG, stream=True) as response:
        assert text_of(response.readline().decode()) is not None
        assert sum(front.busy()) == 1  # seconds of it are still to come
    wait_for(lambda: front.busy() == [0, 0])


@pytest.mark.thorough
def test_who_had_received_nothing_from_a_killed_service_is_answered_by_the_other(front: Front) -> None:
    """Twelve whole answers and twelve streams. Each service generates two of them at a time, and more wait."""
    with ThreadPoolExecutor(24) as pool:
        answers = {stream: [pool.submit(front.answer, stream=stream) for _ in range(12)] for stream in (False, True)}
        wait_for(lambda: front.busy() == [SLOTS, SLOTS])
        front.services[0].process.kill()
        whole = [answer.result() for answer in answers[False]]
        streams = [answer.result() for answer in answers[True]]
    assert [status for status, _ in whole + streams] == [200] * 24
    assert [json.loads(body)["usage"]["completion_tokens"] for _, body in whole] == [SHORT] * 12
    broken = [body for _, body in streams if not body.endswith("data: [DONE]\n\n")]
    assert len(broken) <= SLOTS
    assert all(text_of(body) is not None for body in broken)
    assert front.answer(stream=False)[0] == 200


def text_of(events: str) -> Any:
    """The text of the first event; None without one."""
    first = events.partition("\n")[0].removeprefix("data: ")
    return json.loads(first)["choices"][0]["text"] if first else None
