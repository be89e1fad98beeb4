"""`cuadrilla load`: how a service answers under load."""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from getpass import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from cuadrilla.cli.output import emit, emit_json, emit_table, error_data, options, report_error, say
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, ConfigError, CuadrillaError, LinkError
from cuadrilla.host.descriptors import allow_descriptors
from cuadrilla.messages import Message, language, shown
from cuadrilla.rundir import read_regular, write_atomic

if TYPE_CHECKING:
    from cuadrilla.serve.load import LoadPlan, Tell
    from cuadrilla.serve.load_asks import Asking
    from cuadrilla.serve.load_stats import LoadStage

EXAMPLE_URL = "http://127.0.0.1:8000"
MOST_KEY_BYTES = 4096
SPARE_DESCRIPTORS = 100
SWEEP_TTFT = 1.0
DEFAULT_SECONDS = 30.0
WORTH_A_NOTE = 1.05
"""Tokens in a piece of text."""
MANY_TOGETHER = 0.2
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Many = Annotated[
    str, typer.Option(metavar="R[,R...]", help="Requests a second that arrive at random, whatever the server does.")
]
Clients = Annotated[
    str, typer.Option(metavar="N[,N...]", help="So many clients, each of which waits for its answer (default: 1).")
]
Limit = Annotated[float | None, typer.Option(metavar="SECONDS", min=0, help="Limit of a good answer: the first token.")]
GapLimit = Annotated[
    float | None, typer.Option(metavar="SECONDS", min=0, help="Limit of a good answer: between two tokens, its mean.")
]
WholeLimit = Annotated[
    float | None, typer.Option(metavar="SECONDS", min=0, help="Limit of a good answer: until its end.")
]
Compared = Annotated[
    tuple[Path, Path] | None,
    typer.Option(metavar="A.json B.json", help="Compare two results that --out has written; nothing is measured."),
]


def load(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of any service with OpenAI's API.")] = "",
    rate: Many = "",
    clients: Clients = "",
    sweep: Annotated[bool, typer.Option("--sweep", help="Raise the rate until the service cannot keep up.")] = False,
    seconds: Annotated[
        float | None, typer.Option(min=1, max=86_400, help="To measure at each rate (30, unless --requests is given).")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, max=200_000, help="To count at each rate, at most.")] = None,
    warm_up: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, max=3600, help="Before that, the same load, not counted.")
    ] = 5.0,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="N|A:B|lognormal:MEDIAN:SIGMA", help="Length of the prompts, of built-in stories.")
    ] = "32:128",
    max_tokens: Annotated[
        str, typer.Option(metavar="N|A:B|lognormal:MEDIAN:SIGMA", help="How many tokens an answer may have.")
    ] = "64",
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts, one a line, or JSON lines with `prompt`.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 always takes the most likely token.")] = 1.0,
    fields: Annotated[str, typer.Option(metavar="JSON", help="More fields of each request: '{\"top_p\": 0.9}'.")] = "",
    model: Annotated[str, typer.Option(help="Default: the first that the service lists.")] = "",
    chat: Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions.")] = False,
    predict: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Send this to /v1/predict; of JSON lines, one after another."),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Holds the key of the service; `-`: type it, or from stdin.")
    ] = None,
    slo_ttft: Limit = None,
    slo_itl: GapLimit = None,
    slo_e2e: WholeLimit = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, max=3600, help="Of one request.")] = 120.0,
    most_open: Annotated[int, typer.Option(min=1, max=20_000, help="Requests at a time, at most.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, lengths and prompts.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write all figures.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write one page with plots.")] = None,
    compare: Compared = None,
    as_json: Annotated[bool, typer.Option("--json", help="All figures as JSON on standard output.")] = False,
) -> None:
    """Measure how a service answers under load: time to the first token, between tokens, whole answers, goodput.

    With --rate, times count from when a request was due, even if it could not be sent: a server that stalls is charged
    for all who had to wait. Ctrl-C ends at once, with the figures until then.
    """
    given = dict(locals())
    options.json |= as_json
    if compare is not None:
        if out or html:
            raise ConfigError("--compare writes no file", hint="--json > FILE.json keeps what it shows")
        _compare(*compare)
    else:
        _measure(given)


# -- what was typed ----------------------------------------------------------------------------------------------------


def read_address(url: str) -> str:
    """Without a slash or `/v1` at the end. Raises ConfigError."""
    parts = urlsplit(url)
    try:
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole or parts.query or parts.fragment or not url.isprintable():
        hint = "as {example}"
        raise ConfigError("{url!r} is not the address of a service", url=url, hint=hint, example=EXAMPLE_URL)
    if parts.username is not None or parts.password is not None:
        raise ConfigError("an address must not hold a secret: arguments can be seen", hint="--key-file FILE")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _numbers(text: str, *, option: str, whole: bool = False) -> tuple[float, ...]:
    """Of `4` or `1,4,16`. Raises ConfigError."""
    try:
        found = tuple(int(part) if whole else float(part) for part in text.split(",")) if text else ()
    except ValueError:
        found = (0,)
    if not all(0 < number <= 100_000 for number in found):
        hint = "a number above 0, or several: {option} 1,4,16"
        raise ConfigError("{option} {text!r} cannot be used", option=option, text=text, hint=hint)
    return found


def _check_numbers(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError("{option} must be a number", option=option, hint="such as {option} 30")


def _check_mode(
    rates: Sequence[float],
    numbers: Sequence[float],
    *,
    sweep: bool,
    chat: bool,
    predict: Path | None,
    limits_tokens: bool,
) -> None:
    if numbers and (rates or sweep):
        hint = "--rate: requests arrive whatever the server does; --clients: each client waits for its answer"
        raise ConfigError("--clients excludes --rate and --sweep", hint=hint)
    if sweep and len(rates) > 1:
        raise ConfigError("--sweep begins with one rate", hint="--sweep --rate {rate}", rate=f"{min(rates):g}")
    if predict and limits_tokens:
        hint = "--slo-e2e limits the whole answer"
        raise ConfigError("a prediction has no first token: --slo-ttft and --slo-itl are for texts", hint=hint)
    if chat and predict:
        raise ConfigError("--chat and --predict exclude each other", hint="leave one out")


def _read_fields(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError("--fields is not a JSON object", hint="--fields '{\"top_p\": 0.9}'")
    return value


def _read_key(path: Path | None, url: str) -> str:
    """Raises ConfigError."""
    if path is None:
        return ""
    if str(path) == "-":
        is_typed = sys.stdin.isatty()
        prompt = shown(Message("key (not shown): "), language())
        text = getpass(prompt, stream=sys.stderr) if is_typed else sys.stdin.readline(MOST_KEY_BYTES)
    else:
        try:
            text = read_regular(path, most_bytes=MOST_KEY_BYTES).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else Message("it is not text")
            hint = "name a file that holds the key"
            raise ConfigError("{path}: {reason}", path=path, reason=reason, hint=hint) from None
    key = next(iter(text.splitlines()), "").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError("there is no usable key in {path}", path=path, hint="one line of letters, digits and signs")
    if url.startswith("http://") and urlsplit(url).hostname not in LOOPBACK:
        say("warning: the key travels unencrypted to {url}", url=url)
    return key


def _check_place(path: Path | None) -> None:
    """Before minutes are spent: it can be written. Raises ConfigError."""
    if path is not None and (not path.resolve().parent.is_dir() or (path.exists() and not path.is_file())):
        raise ConfigError("{path} cannot be written", path=path, hint="name a file in a folder that exists")


# -- measuring ---------------------------------------------------------------------------------------------------------


def _plan(typed: Mapping[str, Any]) -> "LoadPlan":
    """Of the options by name, as they were typed. Raises ConfigError."""
    from cuadrilla.serve.load import LoadPlan
    from cuadrilla.serve.load_client import CHAT, COMPLETIONS, PREDICT, LoadTarget
    from cuadrilla.serve.load_stats import CLOSED, OPEN, Slo

    rates = _numbers(typed["rate"], option="--rate")
    numbers = _numbers(typed["clients"], option="--clients", whole=True)
    sweep, chat, predict = typed["sweep"], typed["chat"], typed["predict"]
    limits_tokens = typed["slo_ttft"] is not None or typed["slo_itl"] is not None
    _check_mode(rates, numbers, sweep=sweep, chat=chat, predict=predict, limits_tokens=limits_tokens)
    url, seconds = read_address(typed["url"]), typed["seconds"]
    ttft = SWEEP_TTFT if sweep and typed["slo_ttft"] is None and not predict else typed["slo_ttft"]
    asking = _asking(typed)
    return LoadPlan(
        target=LoadTarget(
            url=url,
            api=PREDICT if predict else CHAT if chat else COMPLETIONS,
            key=_read_key(typed["key_file"], url),
            timeout_seconds=typed["timeout"],
        ),
        asking=asking,
        mode=OPEN if rates or sweep else CLOSED,
        levels=rates or numbers or (() if sweep else (1,)),
        is_sweep=sweep,
        seconds=DEFAULT_SECONDS if seconds is None and typed["requests"] is None else seconds,
        requests=typed["requests"],
        warm_up_seconds=typed["warm_up"],
        most_open=typed["most_open"],
        slo=Slo(ttft=ttft, itl=typed["slo_itl"], e2e=typed["slo_e2e"]),
        seed=typed["seed"],
    )


def _asking(typed: Mapping[str, Any]) -> "Asking":
    from cuadrilla.serve.load_asks import Asking, parse_lengths, read_bodies, read_prompts

    return Asking(
        model=typed["model"],
        is_chat=typed["chat"],
        prompts=read_prompts(typed["prompts"]) if typed["prompts"] else (),
        prompt_tokens=parse_lengths(typed["prompt_tokens"], option="--prompt-tokens"),
        max_tokens=parse_lengths(typed["max_tokens"], option="--max-tokens"),
        temperature=typed["temperature"],
        fields=_read_fields(typed["fields"]),
        bodies=read_bodies(typed["predict"]) if typed["predict"] else (),
        seed=typed["seed"],
    )


def _allow_connections(most: int) -> None:
    """Raises ConfigError."""
    if allow_descriptors(most + SPARE_DESCRIPTORS) < most + SPARE_DESCRIPTORS // 2:
        hint = "fewer, or raise the limit: ulimit -n {count}"
        count = most + SPARE_DESCRIPTORS
        raise ConfigError(
            "this system allows too few connections for {most} requests at a time", most=most, hint=hint, count=count
        )


def _measure(typed: Mapping[str, Any]) -> None:
    out, html = typed["out"], typed["html"]
    _check_numbers(typed)
    for path in (out, html):
        _check_place(path)
    from cuadrilla.serve.load import LoadRun, check_plan, run_load
    from cuadrilla.serve.load_report import render_load, result
    from cuadrilla.serve.load_stats import OPEN

    plan = _plan(typed)
    check_plan(plan)
    _allow_connections(plan.most_open if plan.mode == OPEN else int(max(plan.levels)))
    run = LoadRun(asking=plan.asking)
    interrupted = False
    say("asking {url}", url=plan.target.url)
    try:
        run_load(plan, run, tell=_teller(plan))
    except KeyboardInterrupt:
        if not run.stages:
            raise
        interrupted = True
    found = result(plan, run, options=_noted(typed))
    try:
        _show(found, failure=None if interrupted else _failure(found))
    finally:
        if out:
            write_atomic(out, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        if html:
            write_atomic(html, render_load(found))
    if html:
        say("open it in a browser: {address}", address=html.resolve().as_uri())
    if interrupted:
        say("interrupted: these are the figures until then")
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _noted(typed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, without what is no setting or nobody else's business."""
    left_out = ("url", "out", "html", "compare", "as_json", "key_file")
    plain = (str, int, float, bool, type(None), Path)
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in typed.items()
        if name not in left_out and isinstance(value, plain)
    }


def _teller(plan: "LoadPlan") -> "Tell":
    from cuadrilla.serve.load_report import BROKE, stage_name
    from cuadrilla.serve.load_stats import broken_by, summarise

    def tell(stage: "LoadStage", seconds: float) -> None:
        name = stage_name({"mode": stage.mode, "rate": stage.rate, "clients": stage.clients})
        say(
            "{stage}: {seconds:.0f} s{warming}, {answered:,} answered, {failed:,} errors, {open:,} in flight",
            stage=name,
            seconds=seconds,
            warming=Message(" (warming up)") if seconds < stage.begin else "",
            answered=len(stage.replies) - stage.num_failed,
            failed=stage.num_failed,
            open=stage.in_flight,
        )
        if plan.is_sweep and stage.complete:
            broke = broken_by(summarise(stage, slo=plan.slo), slo=plan.slo)
            say("{stage}: {verdict}", stage=name, verdict=BROKE.get(broke, Message("it keeps up")))

    return tell


def _failure(found: Mapping[str, Any]) -> CuadrillaError | None:
    """When not one request was answered, the figures are none."""
    if any(stage["counts"]["answered"] for stage in found["stages"]):
        return None
    kinds = [(kind, error["example"]) for stage in found["stages"] for kind, error in stage["errors"].items()]
    if not kinds:
        hint = "measure for longer (--seconds), or ask more often (--rate)"
        return LinkError("no request arrived while it was measured", hint=hint)
    kind, example = kinds[0]
    hint = "see what the service's log says; --timeout, --max-tokens and --prompt-tokens change what is asked"
    return LinkError("no request was answered: {kind} {example}", kind=Message(kind), example=example, hint=hint)


# -- what is shown -----------------------------------------------------------------------------------------------------


def _show(found: Mapping[str, Any], *, failure: CuadrillaError | None) -> None:
    """Raises typer.Exit for a failure, which has then been reported."""
    if options.json:
        emit_json({**found, **(error_data(failure) if failure else {})})
        options.json = False  # what follows has been said as data
    else:
        stages = sorted(found["stages"], key=lambda stage: stage["rate"] or stage["clients"])
        emit_table(list(_rows_of_one(stages[0])) if len(stages) == 1 else list(map(_row, stages)))
        if len(stages) == 1:
            _emit_rates(stages[0])
        if found["knee"]:
            _emit_knee(found["knee"])
        _emit_errors(stages)
    for note in notes(found):
        say("note: {note}", note=note)
    if failure:
        report_error(failure)
        raise typer.Exit(failure.exit_code)


def _rows_of_one(stage: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    rows = (
        (Message("first token"), "ttft_seconds"),
        (Message("between tokens"), "itl_seconds"),
        (Message("whole answer"), "e2e_seconds"),
    )
    late = (
        (Message("first token, from sending"), "service_ttft_seconds"),
        (Message("whole answer, from sending"), "service_e2e_seconds"),
        (Message("sent late by"), "send_delay_seconds"),
    )
    for name, key in (*rows, *(late if stage["mode"] == "open" else ())):
        if values := stage[key]:
            columns = ("mean", "p50", "p90", "p95", "p99", "max")
            yield {Message("milliseconds"): name, **{column: _number(1000 * values[column]) for column in columns}}


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return Message("{value:,.0f}" if value >= 1000 else "{value:,.1f}" if value >= 10 else "{value:,.2f}", value=value)


def _emit_rates(stage: Mapping[str, Any]) -> None:
    emit(
        "\n{requests:,.2f} requests/s, {tokens:,.1f} tokens/s; goodput {good:,.2f}/s: "
        "{attained:.1%} of {offered:,} requests within the limits; {failed:,} errors",
        requests=stage["requests_per_second"],
        tokens=stage["tokens_per_second"],
        good=stage["goodput_per_second"],
        attained=stage["attained"] or 0.0,
        offered=stage["counts"]["offered"],
        failed=stage["counts"]["failed"],
    )


def _row(stage: Mapping[str, Any]) -> dict[str, Any]:
    """Short enough for nine columns on a terminal of eighty letters."""
    from cuadrilla.serve.load_report import stage_name

    def ms(key: str) -> str:
        return "/".join(_short(1000 * stage[key][name]) for name in ("p50", "p99")) if stage[key] else "–"

    attained = stage["attained"]
    return {
        Message("stage"): stage_name(stage),
        Message("errors"): Message("{count:,}", count=stage["counts"]["failed"]),
        "req/s": _short(stage["requests_per_second"]),
        "tok/s": _short(stage["tokens_per_second"]),
        Message("good"): "–" if attained is None else Message("{attained:.0%}", attained=attained),
        Message("first token, ms: p50/p99"): ms("ttft_seconds"),
        Message("between tokens, ms: p50/p99"): ms("itl_seconds"),
        Message("whole answer, ms: p50/p99"): ms("e2e_seconds"),
    }


def _short(value: float) -> str:
    """Three digits."""
    text = "{value:,.0f}" if value >= 100 else "{value:.1f}" if value >= 10 else "{value:.2f}"
    return shown(Message(text, value=value), language())


def _emit_knee(knee: Mapping[str, Any]) -> None:
    from cuadrilla.serve.load_report import BROKE

    why = BROKE.get(knee["broken_by"], "")
    low, high = (f"{rate:g}" if rate is not None else "" for rate in (knee["rate"], knee["broken_rate"]))
    if not low and not high:
        emit("\nno knee was found")
    elif not low:
        emit("\nthe knee is below {high} requests/s: {why}", high=high, why=why)
    elif not high:
        emit("\nno knee up to {low} requests/s", low=low)
    else:
        emit("\nknee: {low} requests/s; at {high} {why}", low=low, high=high, why=why)


def _emit_errors(stages: Sequence[Mapping[str, Any]]) -> None:
    from cuadrilla.serve.load_report import stage_name

    rows: list[dict[str, Any]] = [
        {
            Message("stage"): stage_name(stage),
            Message("kind"): Message(kind),
            Message("count"): str(error["count"]),
            Message("example"): error["example"],
        }
        for stage in stages
        for kind, error in stage["errors"].items()
    ]
    if rows:
        emit("")
        emit_table(rows)


def notes(found: Mapping[str, Any]) -> Iterator[Message]:
    """What a reader of the figures must know."""
    from cuadrilla.serve.load_report import stage_name

    stages = found["stages"]
    for stage in stages:
        client = stage["client"]
        if client["saturated"]:
            yield Message(
                "at {stage} this client was a limit itself (p99 {late:.1f} ms late, {share:.0%} of a core): "
                "these figures are not the server's",
                stage=stage_name(stage),
                late=1000 * client["late_seconds"],
                share=client["cpu_share"],
            )
        if stage["counts"]["held_back"]:
            yield Message(
                "at {stage} {count:,} requests waited for others to end (--most-open), {unsent:,} were never sent",
                stage=stage_name(stage),
                count=stage["counts"]["held_back"],
                unsent=stage["counts"]["unsent"],
            )
    streams = [stage for stage in stages if stage["output_tokens"]]
    per_piece = max((stage["tokens_per_piece"] or 0.0 for stage in streams), default=0.0)
    if any(stage["tokens_counted_by"] == "chunks" for stage in streams):
        yield Message("the server does not count its tokens: a piece of text counts as one")
    elif per_piece > WORTH_A_NOTE:
        text = "a piece of text has {number:.2f} tokens: `between tokens` is between pieces"
        yield Message(text, number=per_piece)
    if (together := max((stage["pieces_together"] or 0.0 for stage in stages), default=0.0)) > MANY_TOGETHER:
        yield Message(
            "up to {share:.0%} of the pieces of text came together with the one before: the service sends in bursts",
            share=together,
        )
    if any(stage["mode"] == "closed" for stage in stages):
        yield Message(
            "clients that wait send nothing: a slow server is asked less often; --rate R or --sweep does not wait"
        )


# -- comparing ---------------------------------------------------------------------------------------------------------


def _compare(first: Path, second: Path) -> None:
    from cuadrilla.serve.load_report import compare, differing, read_result

    one, other = read_result(first), read_result(second)
    rows, changed = compare(one, other), differing(one, other)
    if not rows:
        hint = "measure both with the same --rate or --clients"
        raise ConfigError("{first} and {second} have no stage in common", first=first, second=second, hint=hint)
    if options.json:
        emit_json({"first": str(first), "second": str(second), "differing": changed, "rows": list(map(asdict, rows))})
        return
    words = {True: Message("better"), False: Message("worse"), None: ""}
    emit_table(
        [
            {
                Message("stage"): row.stage,
                Message("figure"): Message("{figure}, ms", figure=row.figure) if row.is_time else row.figure,
                first.name: _number(_scaled(row.first, row.is_time)),
                f"{second.name} ": _number(_scaled(row.second, row.is_time)),
                Message("ratio"): _number(row.ratio),
                "": words[row.better],
            }
            for row in rows
        ]
    )
    for path, test in ((first, one), (second, other)):
        if test.get("complete") is not True:
            say("note: {path} is a test that was broken off", path=path)
    if changed:
        say("note: the two tests asked for different things: {settings}", settings=", ".join(changed))


def _scaled(value: float | None, is_time: bool) -> float | None:
    return 1000 * value if value is not None and is_time else value
