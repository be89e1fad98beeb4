"""`cuadrilla load` against a small real server that answers, stalls and fails as a script says.

What is asserted of times are lower bounds that the script guarantees: a slow machine passes, too.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.serve.load_asks import arrivals
from cuadrilla.serve.load_stats import percentile
from tests.inside import cuadrilla
from tests.openai_stand_in import Script, StandIn, stand_in
from tests.ports import free_port

KEY = "a-key-that-is-not-to-be-seen"


def measured(server: StandIn, *arguments: object, code: int = 0, says: str = "") -> dict[str, Any]:
    """All figures, of a short test without a warm-up unless `arguments` say so."""
    done = cuadrilla("load", server.url, "--json", "--warm-up", "0", *arguments, says=says)
    assert done.returncode == code, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def only_stage(found: dict[str, Any]) -> dict[str, Any]:
    (stage,) = found["stages"]
    assert isinstance(stage, dict)
    return stage


def test_an_open_loop_measures_no_less_than_the_server_waits(tmp_path: Path) -> None:
    out, page = tmp_path / "a.json", tmp_path / "a.html"
    with stand_in(script=Script(first=0.05, gap=0.02, extra_tokens=4)) as server:
        found = measured(
            server, "--rate", 20, "--seconds", 1.5, "--max-tokens", 4, "--warm-up", 0.5, "--out", out, "--html", page
        )
    stage = only_stage(found)
    due = list(takewhile(lambda at: at < 2, arrivals(20, seed=0)))
    assert len(server.seen) == 1 + len(due)
    assert stage["counts"]["offered"] == stage["counts"]["answered"] == sum(at >= 0.5 for at in due)
    assert stage["ttft_seconds"]["p50"] >= 0.05
    assert stage["service_ttft_seconds"]["p50"] >= 0.05
    assert stage["itl_seconds"]["mean"] >= 0.019  # of three gaps; the first packet may be read late
    assert stage["e2e_seconds"]["p50"] >= 0.05 + 3 * 0.02
    assert stage["output_tokens"]["mean"] == 8
    assert (stage["tokens_counted_by"], stage["tokens_per_piece"]) == ("usage", 2.0)
    assert stage["prompt_tokens"]["mean"] == 7
    assert stage["finish_reasons"] == {"length": stage["counts"]["answered"]}
    assert (found["complete"], found["target"]["model"]) == (True, "stand-in")
    assert json.loads(out.read_text()) == found
    assert "data-ready" not in page.read_text()
    assert '"p99"' in page.read_text()


def test_a_closed_loop_has_never_more_requests_than_clients() -> None:
    with stand_in(script=Script(first=0.02)) as server:
        found = measured(server, "--clients", "1,3", "--requests", 12, "--max-tokens", "1:3", "--slo-ttft", 30)
    one, three = found["stages"]
    assert (one["clients"], three["clients"]) == (1, 3)
    assert one["counts"]["answered"] == three["counts"]["answered"] == one["counts"]["good"] == 12
    assert one["seconds"] >= 12 * 0.02
    assert three["seconds"] >= 4 * 0.02
    assert server.most_at_once == 3
    assert {body["max_tokens"] for body in server.seen[1:]} == {1, 2, 3}


def test_chats_and_predictions(tmp_path: Path) -> None:
    file = tmp_path / "inputs.json"
    file.write_text('{"inputs": [1, 2]}')
    with stand_in() as server:
        chat = only_stage(measured(server, "--chat", "--requests", 3, "--fields", '{"top_p": 0.5}', "--seed", 9))
        assert chat["output_tokens"]["count"] == 3
        assert server.seen[-1]["messages"][0]["content"]
        assert (server.seen[-1]["top_p"], server.seen[-1]["seed"]) == (0.5, 11)
        prediction = only_stage(measured(server, "--predict", file, "--requests", 3))
        assert server.seen[-1] == {"inputs": [1, 2]}
        refused = cuadrilla("load", server.url, "--predict", file, "--requests", 3, "--slo-ttft", "0.1")
        assert (refused.returncode, "a prediction has no first token" in refused.stderr) == (2, True), refused.stderr
    assert prediction["e2e_seconds"]["count"] == 3
    assert prediction["ttft_seconds"] is prediction["output_tokens"] is None


@pytest.mark.thorough
def test_the_requests_follow_from_the_seed() -> None:
    asked = []
    for seed in (3, 3, 4):
        with stand_in() as server:
            measured(server, "--rate", 50, "--requests", 10, "--seed", seed, "--max-tokens", "1:9")
            asked.append(sorted((body["seed"] - seed, body["prompt"], body["max_tokens"]) for body in server.seen[1:]))
    assert asked[0] == asked[1] != asked[2]


# -- errors ------------------------------------------------------------------------------------------------------------


HUGE = b"data: " + b"x" * (2 * 2**20)
FAILURES = {
    "status 429": Script(status=429),
    "status 503": Script(status=503),
    "broken stream": Script(cut_after=2),
    "broken stream ": Script(done=False, finish=""),
    "malformed answer": Script(raw=b'data: {"choices": [{"text": "\n\n'),
    "malformed answer ": Script(raw=b"data: \xff\xfe\n\n"),
    "error in the stream": Script(raw=b'data: {"error": {"message": "out of memory"}}\n\n'),
    "finish_reason error": Script(finish="error"),
    "not a stream": Script(content_type="application/json"),
    "answer too large": Script(raw=HUGE),
    "more text than asked for": Script(endless=b'data: {"choices": [{"text": "x"}]}\n\n'),
    "answer too large ": Script(endless=b": nothing\n\n" * 2000),
}


def test_errors_are_counted_by_kind() -> None:
    """Each failure once, between answers; memory stays small whatever is sent without end."""
    failures = list(FAILURES.values())

    def script(number: int) -> Script:
        return failures[number // 2] if number % 2 and number // 2 < len(failures) else Script()

    with stand_in(script=script) as server:
        stage = only_stage(measured(server, "--clients", 1, "--requests", 2 * len(failures), "--max-tokens", 5))
    assert stage["counts"]["answered"] == len(failures)
    counted = {kind: error["count"] for kind, error in stage["errors"].items()}
    kinds = [kind.strip() for kind in FAILURES]
    assert counted == {kind: kinds.count(kind) for kind in kinds}
    assert stage["errors"]["status 429"]["example"] == "scripted 429"
    assert stage["errors"]["error in the stream"]["example"] == "out of memory"
    assert stage["attained"] == 0.5


def test_an_answer_that_does_not_come_is_a_time_out() -> None:
    with stand_in(script=lambda number: Script(hangs=number == 1)) as server:
        stage = only_stage(measured(server, "--requests", 3, "--timeout", 1))
    assert {kind: error["count"] for kind, error in stage["errors"].items()} == {"time-out": 1}
    assert stage["counts"]["answered"] == 2


def test_nothing_but_errors_is_a_failure_itself() -> None:
    with stand_in(script=Script(status=500)) as server:
        found = measured(server, "--rate", 20, "--requests", 5, code=5)
    assert found["error"] == "no request was answered: status 500 scripted 500"
    assert only_stage(found)["counts"]["failed"] == 5


def test_servers_that_are_none() -> None:
    done = cuadrilla("load", f"http://127.0.0.1:{free_port()}")
    assert (done.returncode, done.stdout) == (5, "")
    assert "nothing answers at" in done.stderr
    assert "hint: start the service" in done.stderr
    for models, says in ((404, "says 404"), (b"<html>", "not a list of models"), ({"data": []}, "has no model"),
                         ({"data": [3]}, "not a list"), (b"[" * 100_000, "not a list")):  # fmt: skip
        with stand_in(models=models) as server:
            done = cuadrilla("load", server.url)
        assert done.returncode == 5
        assert says in done.stderr
        assert server.seen == []


@pytest.mark.parametrize(
    ("trial", "says"),
    [
        (Script(status=404), "--model NAME"),
        (Script(status=503), "it is not ready"),
        (Script(content_type="text/plain"), "only services that stream"),
        (Script(endless=b'data: {"choices": [{"text": "x"}]}\n\n'), "more text than asked for"),
    ],
)
def test_a_first_request_that_fails_ends_the_test(trial: Script, says: str) -> None:
    with stand_in(trial=None, script=trial) as server:
        done = cuadrilla("load", server.url)
    assert done.returncode == 5
    assert says in done.stderr
    assert len(server.seen) == 1


def test_an_old_server_that_counts_no_tokens_is_measured_by_pieces() -> None:
    def script(_number: int) -> Script:
        return Script(status=400) if "stream_options" in server.seen[-1] else Script()

    with stand_in(trial=None) as server:
        server.script = script
        done = cuadrilla("load", server.url, "--requests", 3, "--warm-up", 0, "--max-tokens", 4, "--json")
    stage = only_stage(json.loads(done.stdout))
    assert (stage["tokens_counted_by"], stage["output_tokens"]["mean"]) == ("chunks", 4)
    assert "does not count its tokens" in done.stderr


def test_a_key_is_shown_to_the_server_and_to_nobody_else(tmp_path: Path) -> None:
    file, out, page = tmp_path / "key", tmp_path / "a.json", tmp_path / "a.html"
    file.write_text(KEY + "\n")
    with stand_in(key=KEY) as server:
        without = cuadrilla("load", server.url)
        assert (without.returncode, "wants a key" in without.stderr, server.seen) == (5, True, [])
        wrong = cuadrilla("load", server.url, "--key-file", "-", says="wrong\n")
        assert (wrong.returncode, "wants another key" in wrong.stderr, server.seen) == (5, True, [])
        asked = ("--requests", 2, "--warm-up", 0, "--out", out, "--html", page)
        done = cuadrilla("load", server.url, "--key-file", file, *asked)
        typed = cuadrilla("load", server.url, "--key-file", "-", *asked, says=KEY)
    assert (done.returncode, typed.returncode) == (0, 0)
    assert set(server.keys) == {f"Bearer {KEY}"}
    for text in (done.stdout, done.stderr, out.read_text(), page.read_text()):
        assert KEY not in text


# -- who waits is counted ----------------------------------------------------------------------------------------------


STALL, RATE, SECONDS, AT = 1.0, 40.0, 2, 20


def waits() -> list[float]:
    """How long each request must wait at least for a server that stops at request number `AT`, in order."""
    due = list(takewhile(lambda at: at < SECONDS, arrivals(RATE, seed=0)))
    return sorted(max(0.0, due[AT] + STALL - at) if number >= AT else 0.0 for number, at in enumerate(due))


@pytest.mark.parametrize("most_open", [pytest.param(1000, marks=pytest.mark.thorough), 1])
def test_a_stall_is_charged_for_all_who_had_to_wait(most_open: int) -> None:
    """With one connection the others cannot even be sent: counted from the sending, one alone would be slow."""

    def script(number: int) -> Script:
        return Script(first=STALL if number == AT else 0.0)

    with stand_in(script=script, one_at_a_time=True) as server:
        asked = ("--rate", RATE, "--seconds", SECONDS, "--max-tokens", 1, "--most-open", most_open)
        stage = only_stage(measured(server, *asked))
    least = waits()
    assert stage["counts"]["answered"] + stage["counts"]["unsent"] == len(least)
    assert percentile(least, 90) > 0.5
    if stage["counts"]["unsent"]:  # on a machine that is slow itself: those are errors, and in no percentile
        return
    for percent in (90, 95, 99):
        assert stage["ttft_seconds"][f"p{percent}"] >= percentile(least, percent) - 0.001
    assert (stage["counts"]["held_back"] > 0) == (most_open == 1)
    if most_open == 1:
        assert stage["send_delay_seconds"]["p90"] >= percentile(least, 90) - 0.1


@pytest.mark.thorough
def test_arrivals_that_never_find_a_connection_are_errors() -> None:
    with stand_in(script=Script(hangs=True)) as server:
        found = measured(server, "--rate", 20, "--seconds", 1, "--timeout", 1.5, "--most-open", 2, code=5)
    stage = only_stage(found)
    due = sum(1 for _ in takewhile(lambda at: at < 1, arrivals(20, seed=0)))
    assert stage["counts"]["offered"] == stage["counts"]["failed"] == due
    assert {kind: error["count"] for kind, error in stage["errors"].items()} == {"not sent": due - 2, "time-out": 2}


@pytest.mark.thorough
def test_a_sweep_finds_where_a_server_cannot_keep_up() -> None:
    """One answer at a time takes 50 ms: 20 a second are its end, and 40 cannot hold."""
    with stand_in(script=Script(first=0.05), one_at_a_time=True) as server:
        found = measured(server, "--sweep", "--rate", 40, "--seconds", 2, "--max-tokens", 1, "--slo-ttft", 0.5)
    assert (found["stages"][0]["rate"], found["stages"][0]["attained"] < 0.9) == (40, True)
    assert found["knee"]["broken_rate"] <= 40
    assert found["knee"]["broken_by"] in ("goodput", "backlog", "ttft", "client")
    assert (found["knee"]["rate"] or 0) < 40


# -- in words, and interrupted -----------------------------------------------------------------------------------------


def reads(language: str) -> dict[str, str]:
    return {**os.environ, "LANGUAGE": language}


def test_the_tables_in_both_languages(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    with stand_in() as server:
        asked = ("--requests", 3, "--warm-up", 0, "--max-tokens", 2)
        english = cuadrilla("load", server.url, *asked, "--out", first, env=reads("en"))
        spanish = cuadrilla("load", server.url, *asked, "--clients", "1,2", "--out", second, env=reads("es"))
    assert re.search(r"first token +[\d.]+ +[\d.]+", english.stdout)
    assert "goodput" in english.stdout
    assert "etapa" in spanish.stdout
    assert "2 clientes" in spanish.stdout
    assert "los clientes que esperan no envían nada" in spanish.stderr
    compared = cuadrilla("load", "--compare", first, second, env=reads("es"))
    assert "1 cliente " in compared.stdout
    assert "2 clientes" not in compared.stdout
    assert "cosas distintas: requests" not in compared.stderr
    rows = json.loads(cuadrilla("load", "--compare", first, first, "--json").stdout)["rows"]
    assert {row["ratio"] for row in rows} <= {1.0, None}


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ctrl_c_ends_at_once_with_the_figures_until_then(tmp_path: Path) -> None:
    """Two requests have been answered, the next ones never will be."""
    out = tmp_path / "a.json"
    with stand_in(script=lambda number: Script(hangs=number >= 2)) as server:
        command = [sys.executable, "-m", "cuadrilla", "load", server.url, "--rate", "20", "--seconds", "3600"]
        process = subprocess.Popen(
            [*command, "--warm-up", "0", "--timeout", "3600", "--json", "--out", str(out)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        wait_until(server.reached.is_set)
        process.send_signal(signal.SIGINT)
        said, told = process.communicate(timeout=60)
    assert process.returncode == 130
    found = json.loads(said)
    assert found == json.loads(out.read_text())
    stage = only_stage(found)
    assert (found["complete"], stage["complete"]) == (False, False)
    assert stage["counts"]["answered"] == 2
    assert stage["counts"]["in_flight_at_end"] >= 1
    assert stage["seconds"] < 3600
    assert "interrupted: these are the figures until then" in told
    assert "Traceback" not in told
