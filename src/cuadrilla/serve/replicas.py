"""The services behind a gateway: which one takes a request, and which ones are left out. No I/O, no clock of its own.

A replica's load is the work that it has at hand, in tokens that are still to come, divided by its speed. The least
loaded one is chosen; among equal ones, such as idle ones, each gets requests in proportion to its speed (stride
scheduling, Waldspurger 1995, with a short memory; with equal speeds that is round robin).

Its speed is what one request gets, in tokens per second from when it was sent until it was answered, averaged over the
last ones. Not what all its requests get together: that grows with the work that a replica is given, so that the one
which happens to have more would get more still. Until it has answered some, it is what the replica says of itself,
in the proportion in which the others' word and deed stand to each other.

Invariants
* Only a replica that has just said it is ready, with the model of the others, is chosen.
* One that refuses or resets a connection is out at once. It is asked again at once, then less and less often.
* One that is slow to say how it is, but has said anything else meanwhile, is alive.
* The work of a replica without requests is exactly zero.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from cuadrilla.errors import ConfigError
from cuadrilla.messages import Message

CHECK_SECONDS = 1.0
FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 1.0, 15.0
MOST_MISSED = 2
"""Checks in a row without an answer, after which a replica is out."""
MOST_FAILED = 3
"""Requests in a row that a replica answers with 5xx, after which it is out: one such request may be to blame itself."""
REMEMBERED = 0.9
"""Of what was measured, with each request after it."""
UNKNOWN_SPEED = 1.0
MOST_REPLICAS, MOST_MODELS = 256, 256
PATHS = ("", "/", "/v1", "/v1/")

Status = Literal["unknown", "ready", "loading", "draining", "down", "refused"]


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """What a service has said of itself. `model`: the first one, "": it did not say; `models`: those that
    continue texts. `gateway`: a gateway's number, if it is one."""

    status: Literal["ready", "loading", "draining"]
    model: str = ""
    models: tuple[str, ...] = ()
    tokens_per_second: float = 0.0
    gateway: str = ""


@dataclass(kw_only=True)
class Measured:
    """Tokens per second of a request, over the last ones."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        if tokens > 0 and seconds > 0:
            self.tokens = self.tokens * REMEMBERED + tokens
            self.seconds = self.seconds * REMEMBERED + seconds

    @property
    def tokens_per_second(self) -> float:
        """0: not known."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(kw_only=True, eq=False)
class GatewayReplica:
    """One service, as the gateway sees it."""

    url: str
    status: Status = "unknown"
    reason: str = ""
    """Why it is not ready."""
    model: str = ""
    models: tuple[str, ...] = ()
    claimed: float = 0.0
    """Tokens per second, by its own word."""
    measured: Measured = field(default_factory=Measured)
    requests: int = 0
    """At hand."""
    work: int = 0
    """Tokens that these requests may still get."""
    turn: float = 0.0
    """What it was given lately, divided by its speed."""
    quiet_until: float = 0.0
    """It has asked to be left alone until then; only if all have, it is asked."""
    failures: int = 0
    """Times in a row that it was found dead."""
    missed: int = 0
    failed: int = 0
    check_at: float = 0.0
    heard_at: float = 0.0

    @property
    def name(self) -> str:
        """HOST:PORT."""
        return urlsplit(self.url).netloc


@dataclass(kw_only=True, eq=False)
class Errand:
    """A request at a replica. `work`: tokens that it may still get. `began`: when it was sent."""

    replica: GatewayReplica
    work: int
    began: float
    tokens: int = 0


def choose(
    replicas: Sequence[GatewayReplica], *, now: float, tried: Collection[GatewayReplica] = ()
) -> GatewayReplica | None:
    """The replica for the next request, of those that have not been `tried` for it; None if there is none."""
    able = [replica for replica in replicas if replica.status == "ready" and replica not in tried]
    speed = speeds(replicas)
    return min(
        able,
        key=lambda replica: (now < replica.quiet_until, replica.work / speed[replica.url], replica.turn),
        default=None,
    )


def speeds(replicas: Iterable[GatewayReplica]) -> dict[str, float]:
    """Tokens per second by URL, of those that may be chosen and of the others; never 0."""
    replicas = list(replicas)
    both = [replica for replica in replicas if replica.claimed and replica.measured.tokens_per_second]
    scale = _sum_of_measured(both) / sum(replica.claimed for replica in both) if both else 1.0
    found = {replica.url: replica.measured.tokens_per_second or replica.claimed * scale for replica in replicas}
    known = [speed for speed in found.values() if speed]
    usual = sum(known) / len(known) if known else UNKNOWN_SPEED
    return {url: speed or usual for url, speed in found.items()}


def _sum_of_measured(replicas: Sequence[GatewayReplica]) -> float:
    return sum(replica.measured.tokens_per_second for replica in replicas)


# -- requests ----------------------------------------------------------------------------------------------------------


def begin(replica: GatewayReplica, *, among: Iterable[GatewayReplica], work: int, now: float) -> Errand:
    """Give it a request that may get `work` tokens. `among`: all replicas."""
    among = list(among)
    for each in among:  # what is long past is no debt: load alone may have decided then
        each.turn *= REMEMBERED
    replica.requests += 1
    replica.work += work
    replica.turn += work / speeds(among)[replica.url]
    return Errand(replica=replica, work=work, began=now)


def progress(errand: Errand, *, tokens: int, now: float) -> None:
    """Something came, with so many tokens. A request that is at hand counts as one token at least."""
    done = max(0, min(tokens, errand.work - 1))
    errand.work -= done
    errand.replica.work -= done
    errand.tokens += tokens
    errand.replica.heard_at = now


def end(errand: Errand, *, now: float) -> None:
    """Answered, given up or broken: what it got by then was measured."""
    errand.replica.requests -= 1
    errand.replica.work -= errand.work
    errand.replica.measured.add(errand.tokens, now - errand.began)
    errand.work = 0


def answered(replica: GatewayReplica, *, status: int, wait_seconds: float, now: float) -> None:
    """It has answered a request, with this status of HTTP; `wait_seconds`: its Retry-After."""
    replica.heard_at = now
    if status in (429, 503):
        replica.quiet_until = now + wait_seconds
    replica.failed = replica.failed + 1 if status >= 500 and status != 503 else 0
    if replica.failed >= MOST_FAILED:
        replica.failed = 0
        lose(replica, Message("it has answered {times} requests in a row with errors", times=MOST_FAILED), now=now)


# -- health ------------------------------------------------------------------------------------------------------------


def hear(
    replica: GatewayReplica, report: Readiness, *, among: Iterable[GatewayReplica], gateway: str, model: str, now: float
) -> None:
    """What it says of itself. `gateway`: our own number. `model`: what this gateway serves; "": not known yet."""
    replica.check_at = now + CHECK_SECONDS
    replica.heard_at = now
    replica.failures = replica.missed = 0
    replica.model = report.model or replica.model
    replica.models = report.models or replica.models
    if replica.status != "ready":  # without requests: what it says of itself at work is something else
        replica.claimed = report.tokens_per_second or replica.claimed
    if report.gateway and report.gateway == gateway:
        _leave_out(replica, "refused", Message("it is this gateway itself"))
    elif report.status != "ready":
        _leave_out(replica, report.status, Message("it says that it is {status}", status=report.status))
    elif model and report.model and report.model != model:
        reason = Message("it serves {other}, and this gateway {model}", other=report.model, model=model)
        _leave_out(replica, "refused", reason)
    elif replica.status != "ready":
        others = [other.turn for other in among if other.status == "ready"]
        replica.turn = max(replica.turn, min(others, default=0.0))  # what it missed it does not make up for
        replica.status, replica.reason, replica.quiet_until = "ready", "", 0.0


def miss(replica: GatewayReplica, *, asked_at: float, now: float) -> None:
    """It was asked how it is, and did not answer in time."""
    replica.check_at = now + CHECK_SECONDS
    if replica.status == "ready" and replica.heard_at > asked_at:
        return
    replica.missed += 1
    if replica.status != "ready" or replica.missed >= MOST_MISSED:
        lose(replica, Message("it does not answer"), now=now, checked=True)


def lose(replica: GatewayReplica, reason: str, *, now: float, checked: bool = False) -> None:
    """It was found dead: by a check, or by a request; of many requests that break at once only the first one counts."""
    if replica.status == "down" and not checked:
        return
    replica.failures += 1
    wait = FIRST_BACKOFF_SECONDS * 2.0 ** (replica.failures - 2) if replica.failures > 1 else 0.0
    replica.check_at = now + min(LONGEST_BACKOFF_SECONDS, wait)
    _leave_out(replica, "down", reason)


def move(replica: GatewayReplica, url: str, *, now: float) -> None:
    """It has begun anew at another address: nothing is known of it."""
    replica.url, replica.measured, replica.claimed = url, Measured(), 0.0
    replica.failures = replica.missed = replica.failed = 0
    replica.check_at = now
    _leave_out(replica, "unknown", "")


def _leave_out(replica: GatewayReplica, status: Status, reason: str) -> None:
    replica.status, replica.reason = status, reason


# -- what others write -------------------------------------------------------------------------------------------------


def parse_replicas(urls: Iterable[str], text: str = "") -> list[str]:
    """From the command line, and a file with a URL on each line and `#` before what is none. Raises ConfigError."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    found = [parse_url(url) for url in (*urls, *filter(None, lines))]
    twice = next((url for index, url in enumerate(found) if url in found[:index]), None)
    if twice:
        raise ConfigError("{url} is named twice", url=twice, hint="name each service once")
    if not found:
        raise ConfigError(
            "no service is named",
            hint="cuadrilla gateway http://192.168.1.50:8000 http://192.168.1.51:8000, or --replicas-file FILE",
        )
    if len(found) > MOST_REPLICAS:
        raise ConfigError("{count} services are more than {most}", count=len(found), most=MOST_REPLICAS)
    return found


def parse_url(text: str) -> str:
    """SCHEME://HOST:PORT of a service, in one spelling. Raises ConfigError, without showing what may be a secret."""
    hint = "write it as http://192.168.1.50:8000"
    try:
        parts = urlsplit(text)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        raise ConfigError("{url!r} is not the URL of a service", url=text[:80], hint=hint) from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        hint = "a key comes from a file: --replica-key-file FILE"
        raise ConfigError("the URL of a service has no user, key or question in it", hint=hint)
    if not port or not parts.hostname or parts.path not in PATHS:
        raise ConfigError("{url!r} is not the URL of a service", url=text[:80], hint=hint)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def parse_readiness(status: int, said: Any) -> Readiness:
    """The answer of `/readyz`, whoever gave it. Raises ValueError with the reason for one that is none."""
    word = said.get("status") if isinstance(said, dict) else None
    if word not in ("ready", "loading", "draining"):
        raise ValueError(Message("what answers there is no such service (HTTP {status})", status=status))
    speed, model, gateway = said.get("tokens_per_second"), said.get("model"), said.get("gateway")
    listed = said.get("models")  # empty: it has tasks only
    return Readiness(
        status="loading" if status == 503 and word == "ready" else word,
        model=model if isinstance(model, str) else "",
        models=parse_models(listed, key="model") or ((model,) if isinstance(model, str) and listed != [] else ()),
        tokens_per_second=float(speed) if isinstance(speed, int | float) and 0 < speed < 1e12 else 0.0,
        gateway=gateway if isinstance(gateway, str) else "",
    )


def parse_models(listed: Any, *, key: str) -> tuple[str, ...]:
    """Their names in a list of objects."""
    rows = listed[:MOST_MODELS] if isinstance(listed, list) else []
    names = [row.get(key) for row in rows if isinstance(row, dict)]
    return tuple(dict.fromkeys(name for name in names if isinstance(name, str)))


def shared_models(replicas: Iterable[GatewayReplica]) -> list[str]:
    """Models that every replica has which takes requests, whichever is asked; in the order of the first one."""
    ready = [replica for replica in replicas if replica.status == "ready"]
    return [name for name in ready[0].models if all(name in other.models for other in ready)] if ready else []


def work_of(body: Any) -> int:
    """Tokens that a request may get, by its JSON; 1 for one that gets none."""
    if not isinstance(body, dict) or not ("prompt" in body or "messages" in body):
        return 1
    usual = 16 if "prompt" in body else 256
    prompt = body.get("prompt")
    each = max(1, len(prompt)) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
    wanted = _count(body.get("max_completion_tokens"), _count(body.get("max_tokens"), usual))
    return max(1, min(2**20, wanted * each * _count(body.get("n"), 1)))


def _count(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and 0 < value <= 2**20 else otherwise
