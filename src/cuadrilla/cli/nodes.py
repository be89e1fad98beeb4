"""`cuadrilla nodes`: the machines of this machine's crew, of a run that uses Ray, or of a Ray cluster."""

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cuadrilla.cli.output import emit_json, emit_table, options, say
from cuadrilla.errors import ConfigError
from cuadrilla.home import Home, read_object
from cuadrilla.link.names import node_of
from cuadrilla.monitor.crew import RUNNING, CrewMember, CrewNow, CrewReader, state_of
from cuadrilla.monitor.jobs import HandedOut
from cuadrilla.monitor.nodes import NodeNow
from cuadrilla.monitor.screen import PHASE_WORDS
from cuadrilla.rundir import RunDir, is_abandoned, private_folder

GIB = 2**30
FOLDED, LEAST_FOLDED = ("device", "said", "ray"), 20
"""In a narrower column nobody reads a sentence."""
NOBODY = CrewMember(name="", here=False, node=NodeNow(name=""))


def nodes(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="A run that trains through Ray now: the machines of its cluster."),
    ] = None,
    ray_address: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="The machines of this Ray cluster, with the token of this user."),
    ] = "",
    ray_without_token: Annotated[
        bool, typer.Option("--ray-without-token", help="Ask that cluster even if it asks nobody for a token.")
    ] = False,
) -> None:
    """List the machines of this machine's crew, or of a Ray cluster with their resources."""
    if run is not None and ray_address:
        raise ConfigError("a run and --ray-address name two clusters", hint="give one of them")
    if ray_without_token and not ray_address:
        raise ConfigError("--ray-without-token needs --ray-address", hint="name the head: --ray-address HOST:6379")
    if ray_address:
        _show_cluster(_ask_cluster(ray_address, without_token=ray_without_token))
    elif run is not None:
        _show_cluster(_cluster_of(run))
    else:
        _show_crew(Home.of_user())


def _show_crew(home: Home) -> None:
    """While the crew trains: what each machine does of it, and what Ray has there, if the crew's run uses Ray. While it
    takes runs of a queue or a search: which one each machine has."""
    from cuadrilla.link.nodes import AllowList

    listed = AllowList(home.nodes).nodes()
    if not listed and not options.json:
        say("no machine has joined this machine's crew yet: cuadrilla up RUN")
        return
    rows: list[dict[str, Any]] = [{"node": name, "key": key.hex()[:16]} for name, key in sorted(listed.items())]
    run = RunDir(Path(str(home.open_crew()["run"]))) if home.open_file.exists() else None
    if run is not None and state_of(run) == RUNNING:
        work = HandedOut(home).read(now=time.time())
        crew = CrewReader(run).read(now=time.time()) if work is None else work.machines
        rows = _at_work(rows, crew, paused=home.paused_nodes, has_share=work is None)
    cluster = _read(run) if run is not None else None
    if cluster is not None:
        there = {machine["node"]: machine["resources"] for machine in cluster["nodes"]}
        for row in rows:
            found = there.get(row["node"])
            row["ray"] = found if options.json or found is None else _in_words(found)
    known = {key for row in rows for key, value in row.items() if value is not None}
    emit_table(
        [{key: value for key, value in row.items() if key in known or options.json} for row in rows],
        folded=FOLDED,
        least_folded=LEAST_FOLDED,
    )


def _at_work(
    listed: Sequence[Mapping[str, Any]], crew: CrewNow, *, paused: Collection[str], has_share: bool
) -> list[dict[str, Any]]:
    """A row for each worker of a machine that is there now, and for each machine that is not. `has_share`: all train
    one run."""
    by_node: dict[str, list[CrewMember]] = {}
    for member in crew.members:
        by_node.setdefault(node_of(member.name), []).append(member)
    rows = []
    for row in listed:
        members = by_node.get(row["node"], [])
        for member in [each for each in members if each.here] or members[:1] or [NOBODY]:
            rows.append({**row, **_work_of(member, now=crew.time, paused=row["node"] in paused)})
    if options.json:
        return rows
    if has_share and not all(row["share"] for row in rows):
        say("without a share: not working now")
    return [{key: value for key, value in row.items() if key != "key"} for row in rows]


def _work_of(member: CrewMember, *, now: float, paused: bool) -> dict[str, Any]:
    """What a worker does; a machine that is not there now has neither share nor speed."""
    node, usage = member.node, member.node.usage
    phase = "paused" if paused else node.phase if member.here else None
    degrees = max(
        (each for each in (usage.temperature_celsius, *(gpu.temperature_celsius for gpu in usage.gpus)) if each),
        default=None,
    )
    found: dict[str, Any] = {
        "device": node.facts.get("device"),
        "job": member.job or None,
        "phase": phase,
        "share": member.share if member.here else None,
        "tokens/s": member.tokens_per_second if member.here else None,
        "waiting": node.waiting_part if member.here else None,
        "link MB/s": [node.sent_bytes_per_second, node.received_bytes_per_second],
        "round trip": node.round_trip_seconds if member.here else None,
        "°C": degrees,
        "heard": None if member.seen is None else max(0.0, now - member.seen),
        "said": member.word.text if member.word is not None else None,
    }
    if options.json:
        return found
    words = {
        "phase": PHASE_WORDS.get(phase or "", phase),
        "share": _of(found["share"], "{value:.0%}"),
        "tokens/s": _of(found["tokens/s"], "{value:,.0f}"),
        "waiting": _of(found["waiting"], "{value:.0%}"),
        "link MB/s": _speeds(node),
        "round trip": _of(found["round trip"], "{value:.3f} s"),
        "°C": _of(degrees, "{value:.0f}"),
        "heard": _of(found["heard"], "{value:.0f} s"),
    }
    return {**found, **words}


def _of(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value=value)


def _speeds(node: NodeNow) -> str | None:
    """Up and down, while something travelled."""
    up, down = (_of(None if rate is None else rate / 1e6, "{value:.1f}") or "-" for rate in (
        node.sent_bytes_per_second, node.received_bytes_per_second
    ))  # fmt: skip
    return None if up == down == "-" else f"{up}↑ {down}↓"


def _show_cluster(cluster: dict[str, Any]) -> None:
    """`cluster`: a `Resources` as plain data."""
    if options.json:
        emit_json(cluster)
        return
    emit_table([_row(machine) for machine in cluster["nodes"]])
    say(
        "Ray        {address}: {resources}; free: {available}",
        address=cluster["address"],
        resources=_in_words(cluster["resources"]),
        available=_in_words(cluster["available"]),
    )
    if not any(machine["workers"] for machine in cluster["nodes"]):
        say("no machine offers itself for training; on each that should: {start}", start=_start())


def _start() -> str:
    from cuadrilla.engines.ray.cluster import OFFER

    return f"ray start … {OFFER}"


def _row(machine: dict[str, Any]) -> dict[str, Any]:
    has = machine["resources"]
    return {
        "node": machine["node"],
        "address": machine["address"],
        "workers": machine["workers"],
        "CPU": f"{has.get('CPU', 0):g}",
        "GPU": f"{has.get('GPU', 0):g}",
        "memory": f"{has.get('memory', 0) / GIB:.1f} GiB",
    }


def _in_words(resources: dict[str, float]) -> str:
    memory = resources.get("memory", 0) / GIB
    return f"{resources.get('CPU', 0):g} CPU, {resources.get('GPU', 0):g} GPU, {memory:.1f} GiB"


def _ask_cluster(address: str, *, without_token: bool) -> dict[str, Any]:
    from dataclasses import asdict

    from cuadrilla.engines.ray.cluster import joined
    from cuadrilla.engines.ray.resources import read_resources
    from cuadrilla.log import libraries_apart

    with (
        private_folder() as private,
        libraries_apart(private / "ray.txt"),
        joined(address, without_token=without_token) as cluster,
    ):
        return asdict(read_resources(cluster.address))


def _cluster_of(path: Path) -> dict[str, Any]:
    """Of the run in a folder, or of its run file. Raises ConfigError."""
    run = RunDir(path if path.is_dir() else path.parent)
    cluster = _read(run)
    if cluster is None:
        raise ConfigError(
            "{run} does not train through Ray now",
            run=run.path,
            hint="the machines of this machine's crew: cuadrilla nodes; of a Ray cluster: --ray-address HOST:PORT",
        )
    return cluster


def _read(run: RunDir) -> dict[str, Any] | None:
    """What the coordinator of a run has written about its cluster, if it is still there."""
    cluster = read_object(run.ray)
    try:
        is_of_now = not is_abandoned(run.lock) and read_object(run.lock).get("pid") == cluster.pop("pid", None)
    except OSError:
        return None
    cluster.pop("schema", None)
    return cluster if is_of_now else None
