"""An honest load test of a service: requests at a rate, or from a number of clients, and a rate that rises to the knee.

`run_load` first makes sure that the server answers as it should, then measures stage after stage; `load_stats` has the
definitions. Read `load_asks` (what is asked), `load_client` (one request), this, `load_stats`, `load_report`.

Invariants
* Open loop: when a request is due depends on the seed alone, never on the server. One that the client cannot send in
  time is sent late and charged from when it was due; one that it cannot send at all is an error.
* The warm-up is played like the rest, and counted nowhere.
* What has been measured is in `LoadRun` at any moment: whoever is interrupted still has it.
* Memory is bounded: by `MOST_REQUESTS` of a stage, by `most_open` requests at a time, and by what an answer may hold.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from cuadrilla.errors import ConfigError, LinkError
from cuadrilla.messages import Message
from cuadrilla.rundir import finite_json
from cuadrilla.serve import load_client
from cuadrilla.serve.load_asks import Asking, LoadAsk, StoryText, arrivals, asks
from cuadrilla.serve.load_client import BadAnswerError, LoadClient, LoadTarget, said_in
from cuadrilla.serve.load_stats import (
    CLOSED,
    LAG_SECONDS,
    OPEN,
    LoadReply,
    LoadStage,
    Slo,
    broken_by,
    next_rate,
    summarise,
)

MOST_REQUESTS = 200_000
MOST_STAGES = 24
TRIAL_CHARACTERS, TRIAL_TOKENS = 200, 2
MOST_CHARACTERS_PER_TOKEN = 12.0
REFUSALS = ("status 400", "status 422")
TELL_SECONDS = 5.0
PAUSE_SECONDS = 0.1
"""Of a client in a closed loop after an error, which may have come at once: not a thousand more in each second."""
KEY_HINT = "--key-file FILE, or --key-file - to type the key"

Tell = Callable[[LoadStage, float], None]
"""Hears how a stage is getting on, after how many seconds; last when it is complete."""


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """What to measure. `levels`: rates (a second) or numbers of clients, a stage each; or the first of a sweep.

    `seconds` and `requests`: whichever is reached first ends a stage; both count from the end of the warm-up.
    """

    target: LoadTarget
    asking: Asking
    mode: str = CLOSED
    levels: tuple[float, ...] = ()
    is_sweep: bool = False
    factor: float = 1.6
    seconds: float | None = 30.0
    requests: int | None = None
    warm_up_seconds: float = 0.0
    most_open: int = 1000
    slo: Slo = field(default_factory=Slo)
    seed: int = 0


@dataclass(kw_only=True)
class LoadRun:
    """What has been found out so far. `asking`: as it was after the server had been asked for its model."""

    asking: Asking
    stages: list[LoadStage] = field(default_factory=list)
    is_complete: bool = False


def check_plan(plan: LoadPlan) -> None:
    """Raises ConfigError for a test that would need too much memory, or that would never end."""
    span = None if plan.seconds is None else plan.warm_up_seconds + plan.seconds
    for rate in plan.levels if plan.mode == OPEN else ():
        counts = [rate * span] if span is not None else []
        if plan.requests is not None:
            counts.append(plan.requests + rate * plan.warm_up_seconds)
        if min(counts) > MOST_REQUESTS:
            raise ConfigError(
                "{rate:g} requests/s for that long are more than {most:,} requests",
                rate=rate,
                most=MOST_REQUESTS,
                hint="--seconds {seconds:.0f}, or a lower --rate",
                seconds=max(MOST_REQUESTS / rate - plan.warm_up_seconds, 1.0),
            )


def run_load(plan: LoadPlan, run: LoadRun, *, tell: Tell = lambda _stage, _seconds: None) -> None:
    """Measure all stages. Raises LinkError before the first; KeyboardInterrupt at any time."""
    asyncio.run(_run(plan, run, tell))


async def _run(plan: LoadPlan, run: LoadRun, tell: Tell) -> None:
    text = StoryText()
    async with LoadClient(plan.target) as client:
        run.asking = await meet(client, plan.asking, text)
        tried: dict[float, bool] = {}
        first = await _first_rate(client, plan, run.asking, text) if plan.is_sweep else 0.0
        levels = iter(plan.levels)
        while len(run.stages) < MOST_STAGES:
            level = next_rate(tried, first=first, factor=plan.factor) if plan.is_sweep else next(levels, None)
            if level is None:
                break
            stage = _stage(plan, level)
            run.stages.append(stage)
            await _measure(client, plan, stage, asks(run.asking, stage=len(run.stages), text=text), tell)
            tried[level] = not broken_by(summarise(stage, slo=plan.slo), slo=plan.slo)
    run.is_complete = True


def _stage(plan: LoadPlan, level: float) -> LoadStage:
    end = math.inf if plan.seconds is None else plan.warm_up_seconds + plan.seconds
    rate, clients = (level, None) if plan.mode == OPEN else (None, int(level))
    return LoadStage(mode=plan.mode, rate=rate, clients=clients, begin=plan.warm_up_seconds, end=end)


async def _first_rate(client: LoadClient, plan: LoadPlan, asking: Asking, text: StoryText) -> float:
    """Of a sweep: half of what a single client would reach, unless it is given."""
    if plan.levels:
        return plan.levels[0]
    reply = await _send_alone(client, next(asks(asking, stage=0, text=text)))
    return min(0.5 / max(reply.ended - reply.sent, 1e-3), 100.0)


# -- before the first stage --------------------------------------------------------------------------------------------


async def meet(client: LoadClient, asking: Asking, text: StoryText) -> Asking:
    """Ask for the model's name and send one request: a test of nothing but errors is of no use. Raises LinkError."""
    if client.target.api == load_client.PREDICT:
        _require(await _send_alone(client, LoadAsk(number=0, body=asking.bodies[0], most_tokens=0)), client.target)
        return asking
    if not asking.model:
        asking = replace(asking, model=await find_model(client))
    prompt = text.piece(TRIAL_CHARACTERS, random.Random(asking.seed))
    reply = await _send_alone(client, asking.one(prompt, number=0, most_tokens=TRIAL_TOKENS))
    if reply.problem in REFUSALS:  # perhaps an old server, which does not know the wish
        asking = replace(asking, asks_usage=False)
        reply = await _send_alone(client, asking.one(prompt, number=0, most_tokens=TRIAL_TOKENS))
    _require(reply, client.target)
    if reply.prompt_tokens:
        characters = min(max(len(prompt) / reply.prompt_tokens, 1.0), MOST_CHARACTERS_PER_TOKEN)
        asking = replace(asking, characters_per_token=characters)
    return asking


async def find_model(client: LoadClient) -> str:
    """The first that `/v1/models` lists. Raises LinkError."""
    url = client.target.url
    try:
        status, body = await client.get("/v1/models")
    except BadAnswerError as error:
        raise _unreachable(url, error) from None
    if status in (401, 403):
        raise LinkError("{url} wants another key" if client.target.key else "{url} wants a key", url=url, hint=KEY_HINT)
    if status != 200:
        said = Message("GET /v1/models says {status}: {said}", status=status, said=said_in(body))
        raise _stranger(url, said)
    try:
        listed = [str(model["id"]) for model in finite_json(body.decode("utf-8"))["data"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _stranger(url, Message("what GET /v1/models says is not a list of models")) from None
    if not listed:
        raise LinkError("{url} has no model", url=url, hint="load one there, or name it: --model NAME")
    return listed[0]


def _unreachable(url: str, error: BadAnswerError) -> LinkError:
    match error.kind:
        case load_client.TIME_OUT:
            return LinkError("{url} does not answer", url=url, hint="see whether the service still works")
        case load_client.CERTIFICATE:
            hint = "use a certificate that this machine trusts; http:// if the service has none"
            return LinkError("{url}: no trusted connection: {reason}", url=url, reason=error.detail, hint=hint)
        case load_client.MALFORMED:
            return _stranger(url, Message("it does not speak HTTP ({error})", error=error.detail))
    hint = "start the service, or correct the address: `cuadrilla serve RUN` says where it listens"
    return LinkError("nothing answers at {url}: {reason}", url=url, reason=error.detail, hint=hint)


def _stranger(url: str, reason: Message) -> LinkError:
    hint = (
        "give the address without a path, as http://127.0.0.1:8000; --predict FILE.json for a service of another kind"
    )
    return LinkError("{url} is not an OpenAI-compatible server: {reason}", url=url, reason=reason, hint=hint)


def _require(reply: LoadReply, target: LoadTarget) -> None:
    """Raises LinkError unless it is an answer."""
    if not reply.problem:
        return
    url, path = target.url, load_client.PATHS[target.api]
    if reply.problem == load_client.CONNECTION:
        raise _unreachable(url, BadAnswerError(reply.problem, reply.detail))
    hints = {
        "status 401": KEY_HINT,
        "status 403": KEY_HINT,
        "status 404": "look at its model's name (--model NAME) and at what it offers (--chat, --predict FILE.json)",
        "status 429": "it is busy: try again when it is not",
        "status 503": "it is not ready: try again when it is",
        load_client.NOT_STREAMED: "only services that stream their answers can be measured",
    }
    raise LinkError(
        "{url}{path} does not answer a first request: {problem} {detail}",
        url=url,
        path=path,
        problem=Message(reply.problem),
        detail=reply.detail,
        hint=hints.get(reply.problem, "see what its log says; --model, --fields and --chat change what is asked"),
    )


async def _send_alone(client: LoadClient, ask: LoadAsk) -> LoadReply:
    return await client.send(ask, clock=time.perf_counter, scheduled=time.perf_counter(), inside=lambda _now: False)


# -- a stage -----------------------------------------------------------------------------------------------------------


async def _measure(client: LoadClient, plan: LoadPlan, stage: LoadStage, asked: Iterator[LoadAsk], tell: Tell) -> None:
    began = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - began

    async def send(scheduled: float) -> LoadReply:
        stage.in_flight += 1
        reply = await client.send(next(asked), clock=clock, scheduled=scheduled, inside=stage.counts)
        stage.in_flight -= 1
        stage.take(reply)
        return reply

    watch = asyncio.create_task(_watch(stage, clock, tell))
    try:
        if plan.mode == OPEN:
            await _open_loop(plan, stage, send, clock)
        else:
            await _closed_loop(plan, stage, send, clock)
        stage.complete = True
    finally:
        stage.stopped = clock()
        watch.cancel()
    tell(stage, stage.stopped)


Send = Callable[[float], Coroutine[Any, Any, LoadReply]]
Clock = Callable[[], float]


async def _open_loop(plan: LoadPlan, stage: LoadStage, send: Send, clock: Clock) -> None:
    """Send each request when it is due. The block ends when all are answered."""
    assert stage.rate is not None
    free = asyncio.Semaphore(plan.most_open)
    counted = 0

    async def one(due: float) -> None:
        try:
            await send(due)
        finally:
            free.release()

    async with asyncio.TaskGroup() as group:
        for due in arrivals(stage.rate, seed=plan.seed):
            if due >= stage.end or counted == plan.requests:
                break
            await asyncio.sleep(max(due - clock(), 0))
            counted += stage.counts(due)
            if free.locked() and stage.counts(due):
                stage.held_back += 1
            if await _taken(free, seconds=stage.end - clock() if stage.end < math.inf else plan.target.timeout_seconds):
                group.create_task(one(due))
            else:
                stage.unsent += stage.counts(due)


async def _taken(free: asyncio.Semaphore, *, seconds: float) -> bool:
    """Whether a seat became free in time."""
    if not free.locked():
        return await free.acquire()
    try:
        async with asyncio.timeout(max(seconds, 0)):
            return await free.acquire()
    except TimeoutError:
        return False


async def _closed_loop(plan: LoadPlan, stage: LoadStage, send: Send, clock: Clock) -> None:
    """Each client asks again as soon as it has its answer."""
    assert stage.clients is not None
    num_sent = counted = 0

    async def one() -> None:
        nonlocal num_sent, counted
        while (now := clock()) < stage.end and counted != plan.requests and num_sent < MOST_REQUESTS:
            num_sent += 1
            counted += stage.counts(now)
            if (await send(now)).problem:
                await asyncio.sleep(PAUSE_SECONDS)

    async with asyncio.TaskGroup() as group:
        for _ in range(stage.clients):
            group.create_task(one())


async def _watch(stage: LoadStage, clock: Clock, tell: Tell) -> None:
    """How late this program itself is, and how much of its core it needs, within the window."""
    told, used, since = 0.0, time.process_time(), clock()
    while True:
        due = clock() + LAG_SECONDS
        await asyncio.sleep(LAG_SECONDS)
        now = clock()
        if stage.counts(now):
            stage.lags.add((max(now - due, 0.0),))
            stage.cpu_share = (time.process_time() - used) / max(now - since, 1e-9)
        elif now < stage.begin:
            used, since = time.process_time(), now
        if now - told >= TELL_SECONDS:
            told = now
            tell(stage, now)
