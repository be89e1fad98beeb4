"""Calls that join, wait, end and leave in any order get what each would get alone."""

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import ResourceError
from cuadrilla.model.generate import generate
from cuadrilla.model.inference import InferenceModel
from cuadrilla.model.rows import Row
from cuadrilla.model.sampling import Sampling
from cuadrilla.serve.app import Service
from cuadrilla.serve.batching import Batcher, Call, Rate
from cuadrilla.serve.edge import Refusal
from cuadrilla.serve.predictions import Predictors
from cuadrilla.serve.served import LONG_TEXT, Models, Room, ServedModel
from cuadrilla.train.precision import choose_precision
from cuadrilla.train.trained import LanguageModel
from tests.decided import decided_model

pytestmark = pytest.mark.inproc

VOCABULARY, CONTEXT = 97, 64
GREEDY = Sampling(temperature=0, max_tokens=20)
WAYS = (GREEDY, Sampling(temperature=0.9), Sampling(temperature=0.8, top_k=9), Sampling(temperature=1.2, top_p=0.7))


@pytest.fixture(scope="module")
def model() -> InferenceModel:
    return decided_model(vocabulary=VOCABULARY, context=CONTEXT)


@asynccontextmanager
async def batcher(model: InferenceModel, *, slots: int = 4, waiting: int = 100) -> AsyncIterator[Batcher]:
    made = Batcher(model, slots=slots, most_waiting=waiting)
    try:
        yield made
    finally:
        await made.close()


async def tokens_of(call: Call) -> list[int]:
    return [step.token async for step in call if step.token is not None]


@pytest.mark.parametrize("clients", [4, 64])
def test_clients_that_come_and_go_at_random(model: InferenceModel, clients: int) -> None:
    """Each has its own pace; a third of them leave before the end. Greedy or drawn, scored or not."""
    chance = random.Random(clients)
    shared = [chance.randrange(VOCABULARY) for _ in range(40)]

    async def client(service: Batcher, number: int) -> None:
        mine = random.Random(1000 * clients + number)
        for turn in range(3):
            own = [mine.randrange(VOCABULARY) for _ in range(mine.randint(1, 12))]
            prompt = (shared if mine.random() < 0.4 else []) + own
            most = mine.randint(1, CONTEXT - len(prompt))
            sampling = replace(mine.choice(WAYS), max_tokens=most, seed=mine.randrange(2**40))
            alone = list(generate(model, prompt, sampling=sampling))
            (call,) = service.submit([Row(list(prompt), sampling, num_top=1 if turn == 1 else None)])
            leaves = mine.randint(0, most) if mine.random() < 0.3 else -1
            got: list[int] = []
            async for step in call:
                got += [] if step.token is None else [step.token]
                if len(got) == leaves:
                    call.cancel()
                    break
                if mine.random() < 0.2:
                    await asyncio.sleep(0)
            assert got == (alone if leaves < 0 else alone[: len(got)])
            if turn == 1 and leaves < 0:
                assert [score.token for score in call.row.scores] == alone

    async def all_of_them() -> None:
        async with batcher(model, slots=min(clients, 7)) as service:
            await asyncio.gather(*(client(service, number) for number in range(clients)))
            await until_idle(service)

    asyncio.run(all_of_them())


async def until_idle(service: Batcher) -> None:
    async with asyncio.timeout(30):
        while service.load.busy_slots or service.load.waiting:
            await asyncio.sleep(0.001)


def test_who_leaves_while_waiting_never_gets_a_slot(model: InferenceModel) -> None:
    async def scene() -> None:
        async with batcher(model, slots=1) as service:
            first, second, third = service.submit([Row([number], GREEDY) for number in (1, 2, 3)])
            second.cancel()
            assert await tokens_of(third) == list(generate(model, [3], sampling=GREEDY))
            assert len(await tokens_of(first)) == 20
            assert second.steps.empty()

    asyncio.run(scene())


def test_the_queue_is_bounded_and_nothing_is_taken_in_part(model: InferenceModel) -> None:
    async def scene() -> None:
        async with batcher(model, slots=2, waiting=1) as service:
            calls = service.submit([Row([1], replace(GREEDY, max_tokens=60)) for _ in range(3)])
            with pytest.raises(Refusal) as refused:
                service.submit([Row([1], GREEDY), Row([2], GREEDY), Row([3], GREEDY)])
            assert (refused.value.status, refused.value.code) == (429, "overloaded")
            assert refused.value.wait_seconds >= 1
            for call in calls:
                call.cancel()
            await until_idle(service)
            assert len(await tokens_of(service.submit([Row([1], GREEDY)])[0])) == 20

    asyncio.run(scene())


def test_a_row_without_anything_to_do_ends_at_once(model: InferenceModel) -> None:
    async def scene() -> None:
        async with batcher(model) as service:
            (call,) = service.submit([Row([1], replace(GREEDY, max_tokens=0))])
            assert [(step.token, step.reason) async for step in call] == [(None, "length")]

    asyncio.run(scene())


def test_a_step_that_fails_ends_its_calls_and_not_the_service(
    model: InferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with batcher(model, slots=1) as service:
            with monkeypatch.context() as patch:
                patch.setattr(service._model, "read", _out_of_memory)
                (first,) = service.submit([Row([1], GREEDY)])
                assert [(step.token, step.reason) async for step in first] == [(None, "error")]
            assert len(await tokens_of(service.submit([Row([1], GREEDY)])[0])) == 20

    asyncio.run(scene())


def test_a_thread_that_cannot_begin_leaves_nobody_waiting(
    model: InferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[type[BaseException] | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: failed.append(told.exc_type))

    async def scene() -> None:
        monkeypatch.setattr(InferenceModel, "new_cache", _out_of_memory)
        async with batcher(model) as service:
            async with asyncio.timeout(30):
                with contextlib.suppress(Refusal):  # it may be gone already
                    (call,) = service.submit([Row([1], GREEDY)])
                    assert [(step.token, step.reason) async for step in call] == [(None, "error")]
            assert not service.works

    asyncio.run(scene())
    assert failed == [RuntimeError]


class Counting(Tokenizer):
    """Notes what it encodes, and how many threads do so at once."""

    encoded: list[str]
    at_once, most_at_once = 0, 0

    def encode(self, text: str) -> list[int]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.encoded.append(text)
        try:
            return super().encode(text)
        finally:
            self.at_once -= 1


def test_a_text_that_cannot_fit_is_refused_unread_and_long_ones_are_read_one_by_one() -> None:
    Counting.encoded = []
    tokenizer = Counting.train(["Había una vez un niño"] * 9, vocab_size=300)
    long = "¿Qué? " * (LONG_TEXT // 6 + 1)
    context = len(tokenizer.encode(long))
    model = decided_model(vocabulary=tokenizer.vocab_size, context=context)
    opened = LanguageModel(
        model=model.model, tokenizer=tokenizer, device=torch.device("cpu"),
        precision=choose_precision("fp32", device=torch.device("cpu")),
        tokenizer_path=Path("tokenizer.json"),
    )  # fmt: skip
    served = ServedModel(name="x", opened=opened, ready=model, room=Room(slots=1))
    tokenizer.encoded.clear()

    async def scene() -> None:
        with pytest.raises(Refusal, match=f"at least .* tokens, the model reads {context:,}"):
            await served.prompt_ids("a" * 2**20)
        assert not tokenizer.encoded
        found = await asyncio.gather(*(served.prompt_ids(long) for _ in range(8)))
        assert {len(ids) for ids in found} == {context}
        assert (len(tokenizer.encoded), tokenizer.most_at_once) == (8, 1)
        with pytest.raises(Refusal, match=f"has {context + 1:,} tokens"):
            await served.prompt_ids(long + "x")
        await served.close()

    asyncio.run(scene())


def test_a_model_without_room_for_its_slots_does_not_start(
    model: InferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that started before it ends with it."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    tokenizer = Tokenizer.train(["Había una vez"] * 9, vocab_size=270)
    opened = LanguageModel(
        model=model.model, tokenizer=tokenizer, device=torch.device("cpu"),
        precision=choose_precision("fp32", device=torch.device("cpu")),
        tokenizer_path=Path("tokenizer.json"),
    )  # fmt: skip
    models = {
        name: ServedModel(name=name, opened=opened, ready=ready, room=Room(slots=2))
        for name, ready in (("first", model), ("second", decided_model(vocabulary=VOCABULARY, context=CONTEXT)))
    }
    monkeypatch.setattr(models["second"].ready, "new_cache", _out_of_memory)
    starting = Service(models=Models(models), predictors=Predictors({}), most_seconds=5)

    async def scene() -> None:
        async with starting.running():
            raise AssertionError("it has started")

    with pytest.raises(ResourceError, match="second: there is no room for 2 texts together") as raised:
        asyncio.run(scene())
    assert "--slots 1" in raised.value.hint


def _out_of_memory(*_given: object, **_named: object) -> None:
    raise RuntimeError("not enough memory: you tried to allocate 2 bytes")


def test_closing_ends_who_is_there_and_who_waits(model: InferenceModel) -> None:
    async def scene() -> None:
        service = Batcher(model, slots=1, most_waiting=5)
        calls = service.submit([Row([1], replace(GREEDY, max_tokens=60)) for _ in range(3)])
        await service.close()
        for call in calls:
            assert [step.reason async for step in call][-1] in ("error", "length")
        with pytest.raises(Refusal) as refused:
            service.submit([Row([1], GREEDY)])
        assert refused.value.status == 503

    asyncio.run(scene())


def test_a_rate_forgets_what_is_long_ago() -> None:
    rate = Rate()
    assert rate.value == 0
    rate.add(100, 1.0)
    assert rate.value == pytest.approx(100)
    for _ in range(20):
        rate.add(10, 1.0)
    assert rate.value == pytest.approx(10, rel=1e-3)
