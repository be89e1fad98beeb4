"""Calls that join, wait, end and leave a batch in any order get the answers that each would get alone."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx2 as httpx
import pytest
import torch

from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import ResourceError
from cuadrilla.model.generate import generate
from cuadrilla.model.inference import InferenceModel
from cuadrilla.model.rows import Reason, Row, Rows
from cuadrilla.model.sampling import Sampling
from cuadrilla.serve import served
from cuadrilla.serve.app import make_app
from cuadrilla.serve.batching import Batcher, Steps
from cuadrilla.serve.completions import begin
from cuadrilla.serve.edge import Refusal
from cuadrilla.serve.openai import CompletionRequest
from cuadrilla.serve.served import ServedModel
from cuadrilla.train.precision import choose_precision
from cuadrilla.train.trained import LanguageModel
from tests.decided import decided_model

VOCABULARY, CONTEXT, CLIENTS = 97, 48, 64
GREEDY = Sampling(temperature=0, max_tokens=20)
WAYS = (GREEDY, Sampling(temperature=0.9), Sampling(temperature=0.8, top_k=9), Sampling(temperature=1.2, top_p=0.7))


@pytest.fixture(scope="module")
def model() -> InferenceModel:
    return decided_model(vocabulary=VOCABULARY, context=CONTEXT)


@asynccontextmanager
async def batcher(model: InferenceModel, *, slots: int = 4, waiting: int = 100) -> AsyncIterator[Batcher]:
    made = Batcher(Rows(model, slots=slots), max_waiting=waiting)
    async with made.running():
        yield made


async def steps_of(steps: Steps) -> AsyncIterator[tuple[int | None, Reason | None]]:
    """The tokens of a call with one row."""
    reason = None
    while reason is None:
        _, token, reason = await steps.get()
        yield token, reason


async def tokens_of(steps: Steps) -> list[int]:
    return [token async for token, _ in steps_of(steps) if token is not None]


def test_clients_that_come_and_go_at_random(model: InferenceModel) -> None:
    """Clients read at different speeds, and a third of them leave early. Tokens are greedy or drawn, with or without
    scores. Some prompts are longer than the context, and some rows outgrow it."""
    chance = random.Random(CLIENTS)
    shared = [chance.randrange(VOCABULARY) for _ in range(40)]

    async def client(service: Batcher, number: int) -> None:
        mine = random.Random(1000 * CLIENTS + number)
        for turn in range(2):
            own = [mine.randrange(VOCABULARY) for _ in range(mine.choice((1, 12, CONTEXT + 9)))]
            prompt = (shared if mine.random() < 0.4 else []) + own
            most = mine.randint(1, CONTEXT)
            sampling = replace(mine.choice(WAYS), max_tokens=most, seed=mine.randrange(2**40))
            alone = list(generate(model, prompt, sampling=sampling))
            row = Row(list(prompt), sampling, num_top=1 if turn == 1 else None)
            call = service.submit([row])
            leaves = mine.randint(0, most) if mine.random() < 0.3 else -1
            got: list[int] = []
            async for token, _ in steps_of(call):
                got += [] if token is None else [token]
                if len(got) == leaves:
                    service.leave(row)
                    break
                if mine.random() < 0.2:
                    await asyncio.sleep(0)
            assert got == (alone if leaves < 0 else alone[: len(got)])
            if turn == 1 and leaves < 0:
                assert [score.token for score in row.scores] == alone

    async def all_of_them() -> None:
        async with batcher(model, slots=7) as service:
            await asyncio.gather(*(client(service, number) for number in range(CLIENTS)))
            await until_idle(service)

    asyncio.run(all_of_them())


async def until_idle(service: Batcher) -> None:
    async with asyncio.timeout(30):
        while service.busy_slots or service.waiting:
            await asyncio.sleep(0.001)


def test_who_leaves_while_waiting_never_gets_a_slot(model: InferenceModel) -> None:
    async def scene() -> None:
        async with batcher(model, slots=1) as service:
            second = Row([2], GREEDY)
            first, left, third = (service.submit([row]) for row in (Row([1], GREEDY), second, Row([3], GREEDY)))
            service.leave(second)
            assert await tokens_of(third) == list(generate(model, [3], sampling=GREEDY))
            assert len(await tokens_of(first)) == 20
            assert left.empty()

    asyncio.run(scene())


def test_the_queue_is_bounded_and_nothing_is_taken_in_part(model: InferenceModel) -> None:
    async def scene() -> None:
        async with batcher(model, slots=2, waiting=1) as service:
            rows = [Row([1], replace(GREEDY, max_tokens=60)) for _ in range(3)]
            service.submit(rows)
            with pytest.raises(Refusal) as refused:
                service.submit([Row([1], GREEDY), Row([2], GREEDY), Row([3], GREEDY)])
            assert (refused.value.status_code, refused.value.code) == (429, "overloaded")
            assert int((refused.value.headers or {})["Retry-After"]) >= 1
            service.leave(*rows)
            await until_idle(service)
            assert len(await tokens_of(service.submit([Row([1], GREEDY)]))) == 20

    asyncio.run(scene())


def test_a_failed_step_ends_its_calls_and_not_the_service(
    model: InferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with batcher(model, slots=1) as service:
            with monkeypatch.context() as patch:
                patch.setattr(model, "read", _out_of_memory)
                first = service.submit([Row([1], GREEDY)])
                assert [step async for step in steps_of(first)] == [(None, "error")]
            assert len(await tokens_of(service.submit([Row([1], GREEDY)]))) == 20

    asyncio.run(scene())


def opened(model: InferenceModel) -> LanguageModel:
    return LanguageModel(
        model=model.model, tokenizer=Tokenizer.train(["Había una vez"] * 9, vocab_size=270), device=torch.device("cpu"),
        precision=choose_precision("fp32", device=torch.device("cpu")), tokenizer_path=Path("tokenizer.json"),
    )  # fmt: skip


@asynccontextmanager
async def service_of(model: InferenceModel) -> AsyncIterator[ServedModel]:
    made = ServedModel(name="m", opened=opened(model), batcher=Batcher(Rows(model, slots=1), max_waiting=5))
    async with made.running():
        yield made


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_a_step_is_seen_by_who_asks_for_the_health(
    model: InferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def health(served_model: ServedModel) -> int:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=make_app(served_model)), base_url="http://m"
        ) as client:
            return (await client.get("/health")).status_code

    async def scene() -> None:
        async with service_of(model) as served_model:
            assert await health(served_model) == 200
            monkeypatch.setattr(model, "read", _bug)
            call = served_model.batcher.submit([Row([1], GREEDY)])
            assert [step async for step in steps_of(call)] == [(None, "error")]
            assert await health(served_model) == 503

    asyncio.run(scene())


def test_who_stops_reading_a_stream_leaves_at_once(model: InferenceModel) -> None:
    async def scene() -> None:
        async with service_of(model) as served_model:
            asked = CompletionRequest.model_validate({"prompt": [1], "max_tokens": 40, "stream": True})
            events = (await begin(served_model, asked)).events()
            await anext(events)
            left: list[Row] = []
            served_model.batcher.leave = lambda *rows: left.extend(rows)  # type: ignore[method-assign]
            await events.aclose()
            assert left

    asyncio.run(scene())


def test_more_slots_than_memory_holds(model: InferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InferenceModel, "new_cache", _out_of_memory)
    monkeypatch.setattr(served, "open_model", lambda _path, **_given: opened(model))
    with pytest.raises(ResourceError, match="second: not enough memory to continue 2 texts at once") as raised:
        served.open_served(Path("x"), name="second", device="cpu", precision="fp32", slots=2, queue=0)
    assert "--slots 1" in raised.value.hint


def _bug(*_given: object, **_named: object) -> None:
    raise ValueError("a bug")


def _out_of_memory(*_given: object, **_named: object) -> None:
    raise RuntimeError("not enough memory: you tried to allocate 2 bytes")


def test_closing_ends_who_is_there_and_who_waits(model: InferenceModel) -> None:
    async def scene() -> None:
        async with batcher(model, slots=1, waiting=5) as service:
            calls = [service.submit([Row([1], replace(GREEDY, max_tokens=60))]) for _ in range(3)]
        for call in calls:
            assert [reason async for _, reason in steps_of(call)][-1] in ("error", "length")
        with pytest.raises(Refusal) as refused:
            service.submit([Row([1], GREEDY)])
        assert refused.value.status_code == 503

    asyncio.run(scene())
