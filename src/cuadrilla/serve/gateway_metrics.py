"""What a gateway counts and measures, as Prometheus reads it: for each replica, by its HOST:PORT."""

from collections.abc import Callable, Collection, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cuadrilla.serve.meters import CallMeters
from cuadrilla.serve.replicas import GatewayReplica, speeds

PREFIX = "cuadrilla_gateway"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

Value = Callable[[GatewayReplica], float]


class GatewayMetrics:
    """Of one gateway: nothing is kept in the library's global registry."""

    def __init__(self, replicas: Sequence[GatewayReplica], *, routes: Collection[str]) -> None:
        """`routes`: whose calls are counted by name."""
        registry = self._registry = CollectorRegistry()
        registry.register(_Now(replicas))
        self.calls = CallMeters(PREFIX, routes=routes, registry=registry)
        by_replica = ["replica"]
        self.requests = Counter(
            f"{PREFIX}_requests", "Requests that a replica was given, by how they ended.", ["replica", "outcome"],
            registry=registry,
        )  # fmt: skip
        self.retries = Counter(
            f"{PREFIX}_retries", "Requests that went to another replica, by why.", ["replica", "reason"],
            registry=registry,
        )  # fmt: skip
        self.tokens = Counter(f"{PREFIX}_tokens", "Tokens that came from a replica.", by_replica, registry=registry)
        self.seconds = Histogram(
            f"{PREFIX}_request_seconds", "Until the answer has come, or failed to.", by_replica,
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.first_seconds = Histogram(
            f"{PREFIX}_first_token_seconds", "Until the first part of the answer has come.", by_replica,
            buckets=SECONDS, registry=registry,
        )  # fmt: skip

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Now(Collector):
    """What holds at the moment, read from the replicas when somebody asks."""

    def __init__(self, replicas: Sequence[GatewayReplica]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        speed = speeds(self._replicas)
        yield self._family("up", "1: it takes requests.", lambda replica: replica.status == "ready")
        yield self._family("in_flight", "Requests at hand.", lambda replica: replica.requests)
        yield self._family("work_tokens", "Tokens that they may still get.", lambda replica: replica.work)
        yield self._family("tokens_per_second", "Of one request.", lambda replica: speed[replica.url])

    def _family(self, name: str, text: str, value: Value) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["replica"])
        for replica in self._replicas:
            family.add_metric([replica.name], value(replica))
        return family
