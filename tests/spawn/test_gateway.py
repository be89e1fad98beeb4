"""`cuadrilla gateway` before services, all of them processes: one is killed, a caller leaves, the gateway stops."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.commands import COMMAND
from tests.inside import cuadrilla
from tests.ports import free_port

pytestmark = [pytest.mark.spawn, pytest.mark.skipif(os.name == "nt", reason="needs signals of POSIX")]

KEY, REPLICA_KEY = "the-callers-key-0123", "the-replicas-key-0123"
CEILING_SECONDS = 60.0


class Processes:
    """Three services, and a gateway before them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        for name, key in (("key", KEY), ("replica-key", REPLICA_KEY)):
            (folder / name).write_text(f"{key}\n")
            (folder / name).chmod(0o600)
        self.ports = [free_port() for _ in range(3)]
        self.replicas = [
            self._start(
                stack, [sys.executable, "-m", "tests.replica", str(port), "--key-file", str(folder / "replica-key")]
            )
            for port in self.ports
        ]
        (folder / "replicas").write_text("".join(f"http://127.0.0.1:{port}\n" for port in self.ports[1:]))
        self.log = folder / "log.txt"
        self.url = f"http://127.0.0.1:{(own := free_port())}"
        self.gateway = self._start(
            stack,
            [*COMMAND, "gateway", f"http://127.0.0.1:{self.ports[0]}", "--replicas-file", str(folder / "replicas"),
             "--listen", f"127.0.0.1:{own}", "--key-file", str(folder / "key"),
             "--replica-key-file", str(folder / "replica-key"), "--most-body", "5000", "--log", str(self.log)],
        )  # fmt: skip

    def _start(self, stack: ExitStack, command: Sequence[str]) -> "subprocess.Popen[str]":
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        stack.callback(lambda: (process.kill(), process.communicate()))
        return process


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with ExitStack() as stack:
        yield Processes(tmp_path, stack)


@asynccontextmanager
async def callers(them: Processes) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with asyncio.timeout(CEILING_SECONDS), aiohttp.ClientSession(headers=headers) as session:
        while not await all_ready(session, them.url):
            await asyncio.sleep(0.05)
        yield session


async def all_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/readyz") as response:
            return all(replica["status"] == "ready" for replica in (await response.json())["replicas"])
    except aiohttp.ClientConnectionError:
        return False


async def ask(session: aiohttp.ClientSession, url: str, **asked: Any) -> tuple[int, str]:
    body = {"prompt": "hola", "max_tokens": 20, **asked}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        return response.status, await response.text()


async def counts(session: aiohttp.ClientSession, port: int) -> dict[str, int]:
    async with session.get(f"http://127.0.0.1:{port}/counts") as response:
        found: dict[str, int] = await response.json()
        return found


async def busy(session: aiohttp.ClientSession, port: int, number: int) -> None:
    while (await counts(session, port))["busy"] != number:
        await asyncio.sleep(0.01)


def test_a_killed_replica_a_caller_that_leaves_and_an_end_in_peace(processes: Processes) -> None:
    async def test() -> None:
        async with callers(processes) as session:
            asked = [asyncio.create_task(ask(session, processes.url, stream=number % 2 == 0)) for number in range(36)]
            await busy(session, processes.ports[0], 4)
            processes.replicas[0].kill()
            answers = await asyncio.gather(*asked)
            assert [status for status, _ in answers] == [200] * 36
            broken = [body for _, body in answers[::2] if not body.endswith("data: [DONE]\n\n")]
            assert all('"text"' in body and '"replica_lost"' in body for body in broken)  # after their first token
            assert len(broken) <= 4
            assert all(json.loads(body)["usage"]["completion_tokens"] == 20 for _, body in answers[1::2])

            status, body = await ask(session, processes.url, prompt="a" * 5000)
            assert (status, json.loads(body)["error"]["code"]) == (413, "too_large")

            leaves = [asyncio.create_task(ask(session, processes.url, max_tokens=10_000)) for _ in range(8)]
            for port in processes.ports[1:]:
                await busy(session, port, 4)
            for each in leaves:
                each.cancel()
            for port in processes.ports[1:]:
                await busy(session, port, 0)

            last = asyncio.create_task(ask(session, processes.url, stream=True, max_tokens=60))
            while not any([(await counts(session, port))["busy"] for port in processes.ports[1:]]):
                await asyncio.sleep(0.01)
            processes.gateway.send_signal(signal.SIGTERM)
            assert (await last)[1].endswith("data: [DONE]\n\n")
        said = await asyncio.to_thread(processes.gateway.communicate, timeout=CEILING_SECONDS)
        assert (processes.gateway.returncode, "Traceback" in said[1]) == (0, False), said[1]
        assert not any(key in said[1] for key in (KEY, REPLICA_KEY))
        assert f"127.0.0.1:{processes.ports[0]} gets no requests" in said[1]
        log = processes.log.read_text()
        assert ("/v1/completions 413 in" in log, KEY in log) == (True, False)

    asyncio.run(test())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "no service is named"),
        (["http://127.0.0.1:8001"], 2, "is this gateway itself"),
        (["http://localhost:8001"], 2, "is this gateway itself"),
        (["http://127.0.0.1:8000", "--listen", "192.0.2.1:8001"], 5, "no key"),
        (["http://127.0.0.1:8000", "--replicas-file", "none"], 2, "none"),
        (["http://127.0.0.1:8000", "--replica-key-file", "none"], 2, "none"),
        (["http://ana:secreto@127.0.0.1:8000"], 2, "no user, key or question"),
        (["127.0.0.1:8000"], 2, "is not the URL of a service"),
    ],
)
def test_what_is_refused(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    done = cuadrilla("gateway", *arguments, cwd=tmp_path)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert "hint:" in done.stderr
    assert "secreto" not in done.stderr
