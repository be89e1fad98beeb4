"""A gateway before real services of another make, all on the loopback and in one event loop."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic
from typing import Any

import aiohttp
import pytest
import uvicorn
from aiohttp import web

from cuadrilla.errors import ConfigError
from cuadrilla.link.address import Address
from cuadrilla.serve import gateway as module
from cuadrilla.serve.edge import Edge
from cuadrilla.serve.gateway import Gateway, refuse_itself
from cuadrilla.serve.listen import Port, open_port
from tests.ports import free_port
from tests.replica import State, application

KEY, REPLICA_KEY = "the-callers-key-0123", "the-replicas-key-0123"
CEILING_SECONDS = 30.0


class Crowd:
    """Services, and a gateway before them."""

    def __init__(self, states: Sequence[State]) -> None:
        self.states = states
        self.runners: list[web.AppRunner] = []
        self.ports: list[int] = []
        self.url = ""
        self.gateway: Gateway
        self.session: aiohttp.ClientSession

    async def start(self, index: int, port: int = 0) -> None:
        app = application(self.states[index])
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        self.runners[index : index + 1] = [runner]
        self.ports[index : index + 1] = [runner.addresses[0][1]]

    async def kill(self, index: int) -> None:
        """As far as its port shows: no listener, and every connection is reset."""
        for site in tuple(self.runners[index].sites):
            await site.stop()
        assert self.runners[index].server is not None
        for connection in self.runners[index].server.connections:
            if connection.transport is not None:
                connection.transport.abort()

    async def ask(self, **asked: Any) -> tuple[int, dict[str, str], str]:
        body = {"prompt": "hola", "max_tokens": 5, **asked}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            return response.status, dict(response.headers), await response.text()

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.text()

    async def status(self, index: int) -> str:
        said = json.loads((await self.get("/readyz"))[1])
        found: str = said["replicas"][index]["status"]
        return found

    def requests(self) -> list[int]:
        return [state.counts["requests"] for state in self.states]


@asynccontextmanager
async def crowd(
    *states: State, key: str = "", replica_key: str = "", more: Sequence[str] = (), most_seconds: float = 600
) -> AsyncIterator[Crowd]:
    made = Crowd(states)
    async with AsyncExitStack() as stack:
        for index in range(len(states)):
            await made.start(index)
            stack.push_async_callback(lambda index=index: made.runners[index].cleanup())
        urls = [f"http://127.0.0.1:{port}" for port in made.ports]
        made.gateway = Gateway([*urls, *more], replica_key=replica_key, most_seconds=most_seconds)
        made.url = await stack.enter_async_context(listening(made.gateway, key=key))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        made.session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers))
        yield made


@asynccontextmanager
async def listening(gateway: Gateway, *, key: str = "", port: int = 0) -> AsyncIterator[str]:
    """Its URL. Not through `listen`, which asks for the signals of a process."""
    with open_port(Port(address=Address("127.0.0.1", port))) as listener:
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        app: Any = gateway.counting(Edge(gateway.app(), key=key, hosts=[host]))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", timeout_graceful_shutdown=1))
        serving = asyncio.create_task(server._serve(sockets=[listener]))
        await until(lambda: server.started)
        yield f"http://{host}"
        server.should_exit = True
        await serving


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(CEILING_SECONDS):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.005)


def tokens(stream: str) -> int:
    return stream.count('"text"')


def error_in(stream: str) -> Any:
    """Of its last event."""
    return json.loads(stream.rstrip().rpartition("\n")[2].removeprefix("data: ")).get("error")


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), CEILING_SECONDS * 2))  # type: ignore[arg-type]


def test_answers_come_from_all_whole_and_as_streams() -> None:
    async def test() -> None:
        async with crowd(State(speed=1000), State(speed=1000)) as them:
            for _ in range(4):
                status, headers, body = await them.ask()
                assert (status, json.loads(body)["usage"]) == (200, {"completion_tokens": 5})
                assert headers["Content-Type"].startswith("application/json")
            status, headers, body = await them.ask(stream=True)
            assert (status, tokens(body), body.endswith("data: [DONE]\n\n")) == (200, 5, True)
            assert headers["Content-Type"].startswith("text/event-stream")
            assert min(them.requests()) >= 2
            assert json.loads((await them.get("/v1/models"))[1])["data"][0]["id"] == "uno"
            assert (await them.get("/healthz"))[0] == 200
            assert 'cuadrilla_gateway_requests_total{outcome="answered"' in (await them.get("/metrics"))[1]
            for path, expected in (("/otra", 404), ("/v1/completions", 405)):
                status, body = await them.get(path)
                assert (status, "message" in json.loads(body)["error"]) == (expected, True)

    run(test)


def test_a_stream_is_not_held_back() -> None:
    """The first token is there before the replica makes the second one, for which it waits."""

    async def test() -> None:
        state = State(speed=1000)
        async with crowd(state) as them:
            body = {"prompt": "a", "max_tokens": 2, "stream": True}
            async with them.session.post(f"{them.url}/v1/completions", json=body) as response:
                first = await response.content.readuntil(b"\n\n")
                state.speed = 1e-6 if tokens(first.decode()) == 1 else 0.0
                assert state.busy <= 1

    run(test)


def test_a_replica_that_dies_loses_no_request_before_its_first_token() -> None:
    async def test() -> None:
        states = [State(speed=100, slots=2) for _ in range(3)]
        async with crowd(*states) as them:
            asked = [asyncio.create_task(them.ask(stream=index % 2 == 0, max_tokens=20)) for index in range(24)]
            await until(lambda: states[0].busy == 2 and states[0].waiting > 0)
            await them.kill(0)
            answers = await asyncio.gather(*asked)
            assert [status for status, _, _ in answers] == [200] * 24
            broken = [body for index, (_, _, body) in enumerate(answers) if index % 2 == 0 and "[DONE]" not in body]
            assert len(broken) <= 2  # the streams that had begun
            assert all(tokens(body) > 0 and error_in(body)["code"] == "replica_lost" for body in broken)
            assert all(len(json.loads(body)["choices"][0]["text"].split()) == 20 for _, _, body in answers[1::2])
            assert await them.status(0) == "down"
            assert "cuadrilla_gateway_retries_total" in (await them.get("/metrics"))[1]
            await them.start(0, them.ports[0])
            await until(lambda: is_ready(them, 0))

    run(test)


async def is_ready(them: Crowd, index: int) -> bool:
    return await them.status(index) == "ready"


@pytest.mark.parametrize("settings", [{"cut_after": 3}, {"cut_after": 3, "half": True}, {"ends_early": True}])
def test_a_stream_that_breaks_ends_with_an_error(settings: dict[str, Any]) -> None:
    async def test() -> None:
        async with crowd(State(speed=500, **settings), State(speed=500, status="loading")) as them:
            status, _, body = await them.ask(stream=True)
            assert (status, tokens(body)) == (200, settings.get("cut_after", 5))
            assert (error_in(body)["type"], error_in(body)["code"]) == ("server_error", "replica_lost")
            assert all(json.loads(line.removeprefix("data: ")) for line in body.split("\n\n") if line)
            assert "[DONE]" not in body

    run(test)


def test_a_client_that_leaves_frees_its_place_within_a_second() -> None:
    async def test() -> None:
        state = State(speed=2, slots=1)
        async with crowd(state) as them:
            for stream in (True, False):
                asked = asyncio.create_task(them.ask(stream=stream, max_tokens=1000))
                waits = asyncio.create_task(them.ask(max_tokens=1000))
                await until(lambda: state.busy == 1 and state.waiting == 1)
                for task in (waits, asked):
                    task.cancel()
                left = monotonic()
                await until(lambda: state.busy == 0 and state.waiting == 0)
                print(f"freed after {monotonic() - left:.3f} s")
            described = json.loads((await them.get("/readyz"))[1])["replicas"][0]
            assert described["busy"] == 0

    run(test)


def test_a_full_one_is_passed_over_and_all_full_says_when_to_come_again() -> None:
    async def test() -> None:
        full, other = State(fails=503), State(queue=0, speed=500)
        async with crowd(full, other) as them:
            other.queue = 5
            assert [(await them.ask())[0] for _ in range(3)] == [200] * 3
            other.queue = 0
            status, headers, body = await them.ask(stream=True)
            assert (status, headers["Retry-After"], json.loads(body)["error"]["code"]) == (503, "3", "overloaded")

    run(test)


@pytest.mark.parametrize(("fails", "passed"), [(422, 422), (404, 404), (500, 502), (401, 503)])
def test_what_a_replica_refuses(fails: int, passed: int) -> None:
    """What is wrong with a request is the caller's to know; what is wrong with a replica is not."""

    async def test() -> None:
        async with crowd(State(fails=fails), State(fails=fails)) as them:
            status, _, body = await them.ask()
            assert (status, json.loads(body)["error"]["message"] == "no") == (passed, fails == passed)
            assert sum(them.requests()) == (1 if fails == passed else 2)

    run(test)


def test_what_no_other_try_would_better_is_asked_of_one_only() -> None:
    """A request that takes longer than any may would cost every replica as much."""

    async def test() -> None:
        async with crowd(State(fails=503, hopeless=True), State(fails=503, hopeless=True)) as them:
            status, headers, body = await them.ask()
            assert (status, json.loads(body)["error"]["message"]) == (503, "no")
            assert (headers["x-should-retry"], headers.get("Retry-After")) == ("false", None)
            assert sum(them.requests()) == 1
            assert [await them.status(index) for index in range(2)] == ["ready", "ready"]

    run(test)


def test_a_header_that_no_gateway_writes_is_not_handed_on() -> None:
    async def test() -> None:
        state = State(speed=500)
        async with crowd(state) as them:
            for strange in ("ü", "no gateway", "a," * 100):
                headers = {"X-Cuadrilla-Gateway": strange}
                async with them.session.get(f"{them.url}/v1/models", headers=headers) as response:
                    assert response.status == 200

    run(test)


def test_a_frozen_one_is_left_and_its_requests_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_LIMIT_SECONDS", 0.1)

    async def test() -> None:
        frozen = State(speed=500)
        async with crowd(frozen, State(speed=500)) as them:
            frozen.frozen = True
            answers = await asyncio.gather(*(them.ask() for _ in range(4)))
            assert [status for status, _, _ in answers] == [200] * 4
            assert frozen.counts["requests"] > 0
            assert await them.status(0) == "down"

    run(test)


def test_another_model_is_refused_and_named(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with crowd(State(), State(model="dos"), State(has_ready_page=False)) as them:
            said = json.loads((await them.get("/readyz"))[1])
            assert [replica["status"] for replica in said["replicas"]] == ["ready", "refused", "ready"]
            assert said["replicas"][1]["reason"] == "it serves dos, and this gateway uno"
            for _ in range(4):
                assert (await them.ask())[0] == 200
            assert them.requests() == [2, 0, 2]
            assert f"127.0.0.1:{them.ports[1]} gets no requests: it serves dos" in caplog.text

    run(test)


def test_keys_and_headers_stay_on_their_side(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        state = State(key=REPLICA_KEY)
        async with crowd(state, State(key="another-key-01234567"), key=KEY, replica_key=REPLICA_KEY) as them:
            them.session.headers.update({"Cookie": "a=b", "X-Forwarded-For": "10.0.0.1"})
            assert [(await them.ask())[0] for _ in range(2)] == [200] * 2
            assert await them.status(1) == "down"
            assert all(seen["Authorization"] == f"Bearer {REPLICA_KEY}" for seen in state.seen)
            assert not {"Cookie", "X-Forwarded-For"} & {name for seen in state.seen for name in seen}
            metrics, ready = (await them.get("/metrics"))[1], (await them.get("/readyz"))[1]
            for path in ("/readyz", "/metrics", "/v1/models"):
                async with aiohttp.ClientSession() as stranger, stranger.get(them.url + path) as response:
                    assert response.status == 401
            assert not any(key in text for key in (KEY, REPLICA_KEY) for text in (metrics, ready, caplog.text))

    run(test)


def test_a_call_that_takes_too_long_is_ended() -> None:
    async def test() -> None:
        state = State(speed=5)
        async with crowd(state, most_seconds=0.5) as them:
            status, headers, body = await them.ask(max_tokens=1000)
            assert (status, headers["x-should-retry"], "Retry-After" in headers) == (503, "false", False)
            assert "not done within 0.5 seconds" in json.loads(body)["error"]["message"]
            status, _, body = await them.ask(max_tokens=1000, stream=True)
            assert (status, "not done within" in error_in(body)["message"]) == (200, True)
            await until(lambda: state.busy == 0)
            assert await them.status(0) == "ready"  # the caller has asked for much; that is no fault of its

    run(test)


def test_one_whose_connections_are_all_taken_is_alive() -> None:
    """What it then has at hand must not be given up, and it is asked again when it has said."""

    async def test() -> None:
        state = State(speed=20)
        async with crowd(state, State(status="loading")) as them:
            asked = asyncio.create_task(them.ask(max_tokens=30))
            await until(lambda: state.busy == 1)
            for each in them.states:
                each.turns_away = True
            before = state.counts["turned away"]
            await until(lambda: state.counts["turned away"] > before + 1)
            assert [await them.status(index) for index in (0, 1)] == ["ready", "loading"]
            status, headers, _ = await them.ask()
            assert (status, headers["Retry-After"]) == (503, "1")
            assert (await asked)[0] == 200

    run(test)


def test_its_own_page_and_the_routes_that_are_counted() -> None:
    async def test() -> None:
        async with crowd(State(model="uno")) as them:
            status, page = await them.get("/")
            assert (status, 'MODELS = ["uno"]' in page) == (200, True)
            assert json.loads((await them.get("/readyz"))[1])["models"] == [{"model": "uno"}]
            await them.get("/nowhere")
            await them.ask()
            counted = (await them.get("/metrics"))[1]
            for labels in ('route="/v1/completions",status="200"', 'route="other",status="404"'):
                assert f"cuadrilla_gateway_calls_total{{{labels}}} 1.0" in counted

    run(test)


def test_none_ready_and_a_gateway_that_stops() -> None:
    async def test() -> None:
        state = State(speed=20)
        async with crowd(state, more=[f"http://127.0.0.1:{free_port()}"]) as them:
            asked = asyncio.create_task(them.ask(stream=True, max_tokens=10))
            await until(lambda: state.busy == 1)
            them.gateway.drain()
            status, headers, body = await them.ask()
            assert (status, headers["Retry-After"], json.loads(body)["error"]["code"]) == (503, "1", "draining")
            assert (await them.get("/readyz"))[0] == 503
            assert "[DONE]" in (await asked)[2]
        async with crowd(State(status="loading")) as them:
            status, headers, body = await them.ask()
            assert (status, headers["Retry-After"], json.loads(body)["error"]["code"]) == (503, "1", "no_replica")
            assert [(await them.get(path))[0] for path in ("/readyz", "/healthz")] == [503, 200]

    run(test)


def test_a_stream_that_outlasts_the_gateway_ends_with_an_error() -> None:
    async def test() -> None:
        async with aiohttp.ClientSession() as session:
            async with crowd(State(speed=20)) as them:
                body = {"prompt": "a", "max_tokens": 1000, "stream": True}
                response = await session.post(f"{them.url}/v1/completions", json=body)
                first = await response.content.readuntil(b"\n\n")
                rest = asyncio.create_task(response.text())
            assert tokens(first.decode()) == 1
            assert error_in(await rest)["message"] == "the gateway is stopping"

    run(test)


def test_no_answer_waits_for_an_acknowledgement() -> None:
    """asyncio sets TCP_NODELAY for sockets that name their protocol: without it each small answer takes 40 ms."""
    with open_port(Port(address=Address("127.0.0.1", 0))) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_no_gateway_calls_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_LIMIT_SECONDS", 0.2)  # it asks itself before it is there

    async def test() -> None:
        port = free_port()
        itself = Gateway([f"http://localhost:{port}"])
        async with listening(itself, port=port) as url, aiohttp.ClientSession() as session:

            async def reason() -> str:
                async with session.get(f"{url}/readyz") as response:
                    found: str = (await response.json())["replicas"][0]["reason"]
                    return found

            async def is_found() -> bool:
                return bool(await reason())

            await until(is_found)

    run(test)
    for url in ("http://127.0.0.1:8001", "http://localhost:8001"):
        with pytest.raises(ConfigError, match="itself"):
            refuse_itself([url], address=Address("127.0.0.1", 8001))
    refuse_itself(["http://127.0.0.1:8002"], address=Address("127.0.0.1", 8001))
