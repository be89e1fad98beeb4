"""The figures of a load test, as pure functions of what happened to each request.

Definitions (all times in seconds, by one steady clock)
* **From when a request counts.** In an open loop a request has a scheduled arrival, and its times are counted from
  there, even if the client or a full queue sent it later: a server that stalls is charged for everybody who had to wait
  (no coordinated omission). `service_...` counts from the moment of sending. In a closed loop both are the same.
* **A percentile** is the smallest value that is not below that share of all values (nearest rank): one that occurred.
* **The window** is what is measured: after the warm-up, before the last requests are waited for. Latencies are those of
  requests that *arrived* in it; requests/s and tokens/s are what *came back* in it, whenever it was asked for.
* **Goodput**: of the requests that arrived in the window, those that were answered within all limits (`Slo`), per
  second. `attained` is their share. A failed request is not good, and is in no latency: read both together.
* **Between tokens**: the gaps between two pieces of text of one answer, of all answers together. The limit `itl` is for
  the mean gap of each answer, as other tools have it.
"""

import math
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTS = (50, 90, 95, 99)
CURVE = (0, *range(1, 100), 99.5, 99.9, 100)
MOST_KEPT = 1_000_000
MOST_BINS = 200
LATE_SECONDS, LATE_SHARE, BUSY_SHARE = 0.025, 0.1, 0.9
WATCHED_SECONDS = 1.0
"""The client is a limit itself when it is later than both of the first two (a share of the median time to the first
token), or when it needs this much of the one core that it can use. Late is, at the 99th percentile, its event loop, if
that was watched for long enough, or a request that had a connection."""
LAG_SECONDS = 0.01
"""How often the event loop is looked at."""
ENOUGH = 0.9
"""Part of the offered rate that a rate below the knee must attain."""
CHANCE = 3
"""Requests by which arrivals and answers of a window may differ without a queue that grows."""
RESOLUTION = 1.15
OPEN, CLOSED = "open", "closed"


@dataclass(slots=True, kw_only=True)
class LoadReply:
    """What became of one request; times from the start of its stage. `problem` "": it was answered."""

    scheduled: float
    sent: float
    ended: float = 0.0
    first: float | None = None
    """When the first text came."""
    last: float = 0.0
    chunks: int = 0
    chunks_inside: int = 0
    """Of them, those that came in the window."""
    tokens: int = 0
    by_usage: bool = False
    """The server has counted the tokens; else they are the chunks."""
    prompt_tokens: int | None = None
    finish: str = ""
    problem: str = ""
    detail: str = ""
    gaps: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Slo:
    """What a good answer keeps to; None: no limit."""

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    def is_met(self, reply: LoadReply) -> bool:
        if reply.problem:
            return False
        first = math.inf if reply.first is None else reply.first - reply.scheduled
        found = (first, mean_gap(reply) or 0.0, reply.ended - reply.scheduled)
        limits = (self.ttft, self.itl, self.e2e)
        return all(limit is None or value <= limit for value, limit in zip(found, limits, strict=True))


def mean_gap(reply: LoadReply) -> float | None:
    """Between two tokens of an answer; None where there are no two."""
    if reply.first is None or reply.tokens < 2:
        return None
    return (reply.last - reply.first) / (reply.tokens - 1)


class Reservoir:
    """All values up to `most`, then a random sample of that size, each value equally likely (Vitter's algorithm R)."""

    def __init__(self, most: int = MOST_KEPT, *, seed: int = 0) -> None:
        self.values = array("d")
        self.seen = 0
        self._most, self._dice = most, random.Random(seed)

    def add(self, values: Iterable[float]) -> None:
        for value in values:
            self.seen += 1
            if len(self.values) < self._most:
                self.values.append(value)
            elif (place := self._dice.randrange(self.seen)) < self._most:
                self.values[place] = value


@dataclass(kw_only=True)
class LoadStage:
    """What has been measured at one rate, or with one number of clients, so far."""

    mode: str
    rate: float | None = None
    clients: int | None = None
    begin: float = 0.0
    end: float = math.inf
    """The window; infinity: it is open, or ends with the last answer."""
    stopped: float = 0.0
    replies: list[LoadReply] = field(default_factory=list)
    gaps: Reservoir = field(default_factory=Reservoir)
    lags: Reservoir = field(default_factory=Reservoir)
    in_flight: int = 0
    held_back: int = 0
    """Requests that waited for a free connection of the client."""
    unsent: int = 0
    """Arrivals for which none became free before the end."""
    cpu_share: float = 0.0
    num_failed: int = 0
    examples: dict[str, str] = field(default_factory=dict)
    """What the first error of each kind said."""
    complete: bool = False

    def take(self, reply: LoadReply) -> None:
        if self.counts(reply.scheduled):
            self.gaps.add(reply.gaps)
        if reply.problem:
            self.num_failed += 1
            self.examples.setdefault(reply.problem, reply.detail)
        reply.gaps, reply.detail = (), ""  # kept once for all
        self.replies.append(reply)

    def counts(self, at: float) -> bool:
        return self.begin <= at < self.end


# -- values ------------------------------------------------------------------------------------------------------------


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order, by nearest rank."""
    rank = math.ceil(round(percent * len(ordered) / 100, 9))
    return ordered[max(rank, 1) - 1]


def distribution(values: Iterable[float]) -> dict[str, float] | None:
    """None where there is no value."""
    ordered = sorted(values)
    if not ordered:
        return None
    percents = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTS}
    return {"count": len(ordered), "mean": math.fsum(ordered) / len(ordered), **percents, "max": ordered[-1]}


def curve(values: Iterable[float]) -> list[float]:
    """Percentiles for a plot, at the percents of `CURVE`."""
    ordered = sorted(values)
    return [percentile(ordered, percent) for percent in CURVE] if ordered else []


# -- a stage -----------------------------------------------------------------------------------------------------------


def summarise(stage: LoadStage, *, slo: Slo) -> dict[str, Any]:
    """Everything that is reported of a stage, as JSON."""
    end = window_end(stage)
    seconds = max(end - stage.begin, 1e-9)
    arrived = [reply for reply in stage.replies if stage.counts(reply.scheduled)]
    answered = [reply for reply in arrived if not reply.problem]
    inside = [reply for reply in stage.replies if not reply.problem and stage.begin <= reply.ended <= end]
    good = sum(map(slo.is_met, answered))
    offered = len(arrived) + stage.unsent
    return {
        "mode": stage.mode,
        "rate": stage.rate,
        "clients": stage.clients,
        "seconds": seconds,
        "complete": stage.complete,
        "counts": {
            "offered": offered,
            "answered": len(answered),
            "failed": offered - len(answered),
            "good": good,
            "answered_in_window": len(inside),
            "in_flight_at_end": stage.in_flight,
            "held_back": stage.held_back,
            "unsent": stage.unsent,
        },
        "errors": errors_by_kind(arrived, stage.examples, unsent=stage.unsent),
        "finish_reasons": dict(Counter(reply.finish for reply in answered if reply.finish)),
        "offered_per_second": offered / seconds,
        "requests_per_second": len(inside) / seconds,
        "tokens_per_second": math.fsum(map(tokens_inside, stage.replies)) / seconds,
        "goodput_per_second": good / seconds,
        "attained": _part(good, offered),
        **_latencies(answered, stage),
        "client": _client(stage, answered),
        "timeline": timeline(arrived, begin=stage.begin, seconds=seconds),
    }


def window_end(stage: LoadStage) -> float:
    """Of a window without end: when the last answer came. Of one that was interrupted: when."""
    if not stage.complete:
        return min(stage.end, stage.stopped)
    last = max((reply.ended for reply in stage.replies), default=stage.begin)
    return stage.end if stage.end < math.inf else last


def tokens_inside(reply: LoadReply) -> float:
    """The tokens of an answer that came within the window: a chunk may hold several."""
    return reply.tokens * reply.chunks_inside / reply.chunks if reply.chunks else 0.0


def errors_by_kind(
    replies: Iterable[LoadReply], examples: Mapping[str, str], *, unsent: int = 0
) -> dict[str, dict[str, Any]]:
    """How many of each kind, most first, and what one of them said."""
    counts = Counter(reply.problem for reply in replies if reply.problem)
    if unsent:
        counts["not sent"] = unsent
    return {kind: {"count": count, "example": examples.get(kind, "")} for kind, count in counts.most_common()}


def _latencies(answered: Sequence[LoadReply], stage: LoadStage) -> dict[str, Any]:
    streamed = [(reply.first, reply) for reply in answered if reply.first is not None]
    ttft = [first - reply.scheduled for first, reply in streamed]
    e2e = [reply.ended - reply.scheduled for reply in answered]
    return {
        "ttft_seconds": distribution(ttft),
        "itl_seconds": distribution(stage.gaps.values),
        "pieces_together": _part(sum(gap == 0 for gap in stage.gaps.values), len(stage.gaps.values)),
        "itl_sampled": stage.gaps.seen > len(stage.gaps.values),
        "tpot_seconds": distribution(gap for reply in answered if (gap := mean_gap(reply)) is not None),
        "e2e_seconds": distribution(e2e),
        "service_ttft_seconds": distribution(first - reply.sent for first, reply in streamed),
        "service_e2e_seconds": distribution(reply.ended - reply.sent for reply in answered),
        "send_delay_seconds": distribution(reply.sent - reply.scheduled for reply in answered),
        "prompt_tokens": distribution(reply.prompt_tokens for reply in answered if reply.prompt_tokens is not None),
        "output_tokens": distribution(reply.tokens for reply in answered if reply.chunks),
        "tokens_per_piece": _part(sum(r.tokens for r in answered), sum(r.chunks for r in answered)),
        "tokens_counted_by": "usage" if all(r.by_usage for r in answered if r.chunks) else "chunks",
        "curves": {"percent": list(CURVE), "ttft": curve(ttft), "itl": curve(stage.gaps.values), "e2e": curve(e2e)},
    }


def _part(some: float, of: float) -> float | None:
    return some / of if of else None


def _client(stage: LoadStage, answered: Sequence[LoadReply]) -> dict[str, Any]:
    lag = distribution(stage.lags.values)
    waits = distribution((reply.first or reply.ended) - reply.sent for reply in answered)
    delays = distribution(reply.sent - reply.scheduled for reply in answered)
    late = lag["p99"] if lag and lag["count"] * (LAG_SECONDS + lag["mean"]) >= WATCHED_SECONDS else 0.0
    if delays and not stage.held_back:
        late = max(late, delays["p99"])
    return {
        "lag_seconds": lag,
        "late_seconds": late,
        "cpu_share": stage.cpu_share,
        "saturated": is_client_the_limit(late, stage.cpu_share, typical=waits["p50"] if waits else 0.0),
    }


def is_client_the_limit(late: float, cpu_share: float, *, typical: float) -> bool:
    """`late`: by how much its event loop was, at the 99th percentile; `typical`: the median time to a first token."""
    return cpu_share >= BUSY_SHARE or late > max(LATE_SECONDS, LATE_SHARE * typical)


def timeline(replies: Sequence[LoadReply], *, begin: float, seconds: float) -> list[dict[str, Any]]:
    """Requests by their arrival, in at most `MOST_BINS` steps of at least a second."""
    width = max(1.0, seconds / MOST_BINS)
    bins: dict[int, list[LoadReply]] = {}
    for reply in replies:
        bins.setdefault(int((reply.scheduled - begin) / width), []).append(reply)
    rows = []
    for place in sorted(bins):
        there = bins[place]
        waits = distribution(reply.first - reply.scheduled for reply in there if reply.first is not None)
        ends = distribution(reply.ended - reply.scheduled for reply in there if not reply.problem)
        rows.append(
            {
                "second": place * width,
                "arrived": len(there),
                "failed": sum(bool(reply.problem) for reply in there),
                "ttft_p50": waits and waits["p50"],
                "ttft_max": waits and waits["max"],
                "e2e_max": ends and ends["max"],
            }
        )
    return rows


# -- the knee ----------------------------------------------------------------------------------------------------------


def broken_by(stage: Mapping[str, Any], *, slo: Slo) -> str:
    """What does not hold at this rate: "goodput", "backlog", "ttft" or "client"; nothing: it is below the knee."""
    counts, waits = stage["counts"], stage["ttft_seconds"]
    if stage["client"]["saturated"]:
        return "client"
    if not counts["offered"]:
        return ""
    if stage["attained"] < ENOUGH:
        return "goodput"
    if counts["answered_in_window"] + CHANCE < ENOUGH * counts["offered"]:
        return "backlog"
    return "ttft" if waits and slo.ttft is not None and waits["p99"] > slo.ttft else ""


def next_rate(tried: Mapping[float, bool], *, first: float, factor: float, least: float = 0.01) -> float | None:
    """Of a sweep: rates rise by `factor` while they hold, then the knee is enclosed. None: it is known well enough."""
    if not tried:
        return rounded(first)
    high = min((rate for rate, holds in tried.items() if not holds), default=None)
    low = max((rate for rate, holds in tried.items() if holds and (high is None or rate < high)), default=None)
    if high is None and low is not None:
        return rounded(low * factor)
    assert high is not None
    if low is None:
        return rounded(high / factor) if high / factor >= least else None
    middle = rounded(math.sqrt(low * high))
    return None if high / low <= RESOLUTION or middle in tried else middle


def rounded(rate: float) -> float:
    """To three digits."""
    return float(f"{rate:.3g}")


def knee(stages: Sequence[Mapping[str, Any]], *, slo: Slo) -> dict[str, Any]:
    """The highest rate that holds below the lowest that does not, and what broke there."""
    broke = {stage["rate"]: broken_by(stage, slo=slo) for stage in stages if stage["complete"]}
    high = min((rate for rate, reason in broke.items() if reason), default=None)
    low = max((rate for rate, reason in broke.items() if not reason and (high is None or rate < high)), default=None)
    return {"rate": low, "broken_rate": high, "broken_by": broke.get(high, "") if high is not None else ""}
