"""The figures of a load test by hand, its schedule, what it reads from a stream, and its page."""

import json
import math
import random
import re
from collections.abc import Iterator
from importlib import resources
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.cli.load import notes, read_address
from cuadrilla.errors import ConfigError
from cuadrilla.serve import load_client, load_report
from cuadrilla.serve.load import LoadPlan, LoadRun, check_plan
from cuadrilla.serve.load_asks import (
    Asking,
    Lengths,
    Prompt,
    StoryText,
    arrivals,
    asks,
    parse_lengths,
    read_bodies,
    read_prompts,
)
from cuadrilla.serve.load_client import BadAnswerError, EventReader, LoadTarget, read_event, said_in
from cuadrilla.serve.load_report import compare, differing, read_result, render_load, result
from cuadrilla.serve.load_stats import (
    LoadReply,
    LoadStage,
    Reservoir,
    Slo,
    broken_by,
    distribution,
    errors_by_kind,
    is_client_the_limit,
    knee,
    next_rate,
    percentile,
    summarise,
    timeline,
)

# -- percentiles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 15), (5, 15), (20, 15), (30, 20), (40, 20), (50, 35), (81, 50), (100, 50)]
)
def test_a_percentile_is_a_value_that_occurred(percent: float, value: float) -> None:
    """The textbook example of the nearest rank."""
    assert percentile([15, 20, 35, 40, 50], percent) == value


def test_percentiles_of_a_hundred_and_of_twenty_values() -> None:
    values = random.Random(0).sample(range(1, 101), 100)
    found = distribution(values)
    assert found == {"count": 100, "mean": 50.5, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
    assert percentile(range(1, 21), 95) == 19  # 0.95 * 20 is a little more than 19 in floating point
    assert distribution([]) is None
    assert distribution([7.0]) == {"count": 1, "mean": 7.0, "p50": 7.0, "p90": 7.0, "p95": 7.0, "p99": 7.0, "max": 7.0}


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_at_least_that_share_is_not_above_a_percentile(values: list[float], percent: float) -> None:
    found = percentile(sorted(values), percent)
    assert found in values
    assert sum(value <= found for value in values) >= math.floor(percent * len(values) / 100)


def test_a_reservoir_keeps_all_values_and_then_a_fair_sample() -> None:
    kept = Reservoir(1000)
    kept.add(range(1000))
    assert list(kept.values) == list(range(1000))
    kept.add(range(1000, 20_000))
    assert (kept.seen, len(kept.values)) == (20_000, 1000)
    assert 9_000 < sum(kept.values) / 1000 < 11_000  # the mean of all is 10,000; seeded, so always the same


# -- a stage, by hand --------------------------------------------------------------------------------------------------


def reply(scheduled: float, *, first: float = 0.1, end: float = 0.5, **more: Any) -> LoadReply:
    """Five tokens between `first` and `end` after it was due; sent at once."""
    values: dict[str, Any] = {
        "sent": scheduled, "first": scheduled + first, "last": scheduled + end, "ended": scheduled + end,
        "chunks": 5, "chunks_inside": 5, "tokens": 5, "by_usage": True, "prompt_tokens": 7, "finish": "length",
    }  # fmt: skip
    return LoadReply(scheduled=scheduled, **(values | more))


def failed(scheduled: float, problem: str) -> LoadReply:
    return LoadReply(scheduled=scheduled, sent=scheduled, ended=scheduled + 0.1, problem=problem, detail="why")


def stage_of(replies: list[LoadReply], **more: Any) -> LoadStage:
    """A window from second 1 to 11."""
    stage = LoadStage(**({"mode": "open", "rate": 1.0, "begin": 1.0, "end": 11.0, "complete": True} | more))
    for each in replies:
        stage.take(each)
    return stage


def test_the_figures_of_a_stage() -> None:
    replies = [
        reply(0.0, chunks_inside=0),  # warm-up: asked and answered before the window
        reply(0.8, chunks_inside=4),  # warm-up, answered in the window
        reply(2.0, gaps=[0.1, 0.1, 0.1, 0.1]),
        reply(3.0, first=0.3, gaps=[0.05] * 4),
        reply(4.0, sent=4.2, first=0.9, end=1.3, gaps=[0.1] * 4),  # sent late: what counts is when it was due
        failed(5.0, "status 429"),
        failed(6.0, "status 429"),
        failed(7.0, "time-out"),
        reply(10.8, chunks_inside=2, gaps=[0.1] * 4),  # asked in the window, answered after it
    ]
    found = summarise(stage_of(replies, unsent=1), slo=Slo(ttft=0.5))
    assert found["counts"] == {
        "offered": 8, "answered": 4, "failed": 4, "good": 3, "answered_in_window": 4, "in_flight_at_end": 0,
        "held_back": 0, "unsent": 1,
    }  # fmt: skip
    assert found["seconds"] == 10
    assert found["requests_per_second"] == 0.4
    assert found["goodput_per_second"] == 0.3
    assert found["attained"] == 3 / 8
    assert found["offered_per_second"] == 0.8
    assert found["tokens_per_second"] == pytest.approx((4 + 3 * 5 + 2) / 10)
    assert found["ttft_seconds"]["max"] == pytest.approx(0.9)
    assert found["ttft_seconds"]["p50"] == pytest.approx(0.1)
    assert found["ttft_seconds"]["mean"] == pytest.approx(1.4 / 4)
    assert found["service_ttft_seconds"]["max"] == pytest.approx(0.7)
    assert found["service_e2e_seconds"]["max"] == pytest.approx(1.1)
    assert found["e2e_seconds"]["max"] == pytest.approx(1.3)
    assert found["send_delay_seconds"]["max"] == pytest.approx(0.2)
    assert found["itl_seconds"]["count"] == 16
    assert found["pieces_together"] == 0
    assert found["itl_seconds"]["mean"] == pytest.approx((12 * 0.1 + 4 * 0.05) / 16)
    assert found["tpot_seconds"]["max"] == pytest.approx(0.1)
    assert found["errors"] == {
        "status 429": {"count": 2, "example": "why"},
        "time-out": {"count": 1, "example": "why"},
        "not sent": {"count": 1, "example": ""},
    }
    assert found["finish_reasons"] == {"length": 4}
    assert (found["tokens_counted_by"], found["tokens_per_piece"]) == ("usage", 1.0)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), True),
        (Slo(ttft=0.1), True),
        (Slo(ttft=0.09), False),
        (Slo(itl=0.1), True),
        (Slo(itl=0.09), False),
        (Slo(e2e=0.5), True),
        (Slo(e2e=0.4, ttft=1), False),
    ],
)
def test_a_good_answer_is_within_all_limits(slo: Slo, good: bool) -> None:
    assert slo.is_met(reply(0.0)) == good
    assert not slo.is_met(failed(0.0, "time-out"))


def test_a_stage_that_was_interrupted_has_the_window_that_there_was() -> None:
    stage = stage_of([reply(2.0), reply(3.0)], complete=False, stopped=5.0, in_flight=3)
    found = summarise(stage, slo=Slo())
    assert (found["seconds"], found["requests_per_second"], found["complete"]) == (4.0, 0.5, False)
    assert found["counts"]["in_flight_at_end"] == 3
    empty = summarise(stage_of([], complete=False, stopped=0.2), slo=Slo())
    assert (empty["counts"]["offered"], empty["attained"], empty["ttft_seconds"]) == (0, None, None)


def test_a_window_of_so_many_requests_ends_with_the_last_answer() -> None:
    found = summarise(stage_of([reply(1.0), reply(4.5)], end=math.inf), slo=Slo())
    assert (found["seconds"], found["requests_per_second"]) == (4.0, 0.5)


def test_tokens_that_the_server_does_not_count_are_pieces() -> None:
    found = summarise(stage_of([reply(2.0), reply(3.0, by_usage=False)]), slo=Slo())
    assert found["tokens_counted_by"] == "chunks"
    several = summarise(stage_of([reply(2.0, tokens=15)]), slo=Slo())
    assert several["tokens_per_piece"] == 3
    bursts = summarise(stage_of([reply(2.0, gaps=[0.0, 0.0, 0.1, 0.0])]), slo=Slo())
    assert bursts["pieces_together"] == 0.75
    said = [str(note) for note in notes({"stages": [found, several, bursts]})]
    assert any("up to 75% of the pieces of text came together" in note for note in said)
    assert any("does not count its tokens" in note for note in said)


def test_a_timeline_has_a_row_a_second_and_never_too_many() -> None:
    rows = timeline([reply(1.2), reply(1.9, first=0.3), failed(3.5, "time-out")], begin=1.0, seconds=10)
    assert [row["second"] for row in rows] == [0.0, 2.0]
    assert (rows[0]["arrived"], rows[0]["failed"]) == (2, 0)
    assert rows[0]["ttft_max"] == pytest.approx(0.3)
    assert rows[1] == {"second": 2, "arrived": 1, "failed": 1, "ttft_p50": None, "ttft_max": None, "e2e_max": None}
    assert len(timeline([reply(float(n)) for n in range(5000)], begin=0.0, seconds=5000)) == 200


def test_a_client_that_is_late_or_busy_is_a_limit_itself() -> None:
    assert not is_client_the_limit(0.02, 0.5, typical=0.001)
    assert is_client_the_limit(0.03, 0.5, typical=0.001)
    assert not is_client_the_limit(0.03, 0.5, typical=1.0)
    assert is_client_the_limit(0.0, 0.95, typical=1.0)
    stage = stage_of([reply(2.0)])
    stage.lags.add([0.5] * 200)
    found = summarise(stage, slo=Slo())
    assert found["client"]["saturated"]
    assert broken_by(found, slo=Slo()) == "client"
    assert any("was a limit itself" in note for note in notes({"stages": [found]}))
    late = [reply(2.0, sent=2.1)]
    assert summarise(stage_of(late), slo=Slo())["client"]["saturated"]  # it had a connection, and came to it late
    assert not summarise(stage_of(late, held_back=1), slo=Slo())["client"]["saturated"]
    brief = stage_of([reply(2.0)])
    brief.lags.add([0.5])
    assert not summarise(brief, slo=Slo())["client"]["saturated"]


# -- the knee ----------------------------------------------------------------------------------------------------------


def swept(capacity: float, *, first: float) -> list[float]:
    tried: dict[float, bool] = {}
    while (rate := next_rate(tried, first=first, factor=1.6)) is not None:
        tried[rate] = rate <= capacity
    return list(tried)


@pytest.mark.parametrize("capacity", [0.3, 2.7, 19.0, 400.0])
@pytest.mark.parametrize("first", [1.0, 5.0])
def test_a_sweep_encloses_the_knee(capacity: float, first: float) -> None:
    tried = swept(capacity, first=first)
    low, high = max(rate for rate in tried if rate <= capacity), min(rate for rate in tried if rate > capacity)
    assert low <= capacity < high <= 1.16 * low
    assert len(tried) <= 20
    assert tried[0] == first


def test_a_service_that_never_keeps_up_ends_a_sweep() -> None:
    tried = swept(0.0, first=1.0)
    assert tried == sorted(tried, reverse=True)
    assert tried[-1] > 0.01


def stage_at(rate: float, **more: Any) -> dict[str, Any]:
    found = summarise(stage_of([reply(1.0 + n / 10) for n in range(100)], rate=rate), slo=Slo())
    return {**found, **more}


def test_what_breaks_at_a_rate() -> None:
    slo = Slo(ttft=1.0)
    assert broken_by(stage_at(1), slo=slo) == ""
    assert broken_by(stage_at(1, attained=0.9), slo=slo) == ""
    assert broken_by(stage_at(1, attained=0.89), slo=slo) == "goodput"
    assert broken_by(stage_at(1, ttft_seconds={"p99": 1.01}), slo=slo) == "ttft"
    assert broken_by(stage_at(1, ttft_seconds={"p99": 1.01}), slo=Slo()) == ""
    counts = stage_at(1)["counts"]
    assert broken_by(stage_at(1, counts={**counts, "answered_in_window": 87}), slo=slo) == ""
    assert broken_by(stage_at(1, counts={**counts, "answered_in_window": 86}), slo=slo) == "backlog"


def test_the_knee_is_the_highest_rate_below_the_lowest_that_breaks() -> None:
    stages = [stage_at(1), stage_at(4, attained=0.5), stage_at(2), stage_at(8), stage_at(3, complete=False)]
    assert knee(stages, slo=Slo()) == {"rate": 2, "broken_rate": 4, "broken_by": "goodput"}
    assert knee(stages[:1], slo=Slo()) == {"rate": 1, "broken_rate": None, "broken_by": ""}
    assert knee([], slo=Slo()) == {"rate": None, "broken_rate": None, "broken_by": ""}


# -- when and what is asked --------------------------------------------------------------------------------------------


def test_arrivals_follow_from_the_seed() -> None:
    once = list(islice(arrivals(10.0, seed=3), 50))
    assert once == list(islice(arrivals(10.0, seed=3), 50))
    assert once != list(islice(arrivals(10.0, seed=4), 50))
    assert once == sorted(once)


def test_arrivals_are_those_of_a_poisson_process() -> None:
    """10,000 of them: their number in a second has the variance of its mean, and the gaps are exponential."""
    times = list(islice(arrivals(10.0, seed=0), 10_000))
    assert times[-1] == pytest.approx(1000, rel=0.03)
    counts = [0] * int(times[-1])
    for time in times:
        if time < len(counts):
            counts[int(time)] += 1
    mean = sum(counts) / len(counts)
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)
    assert variance == pytest.approx(mean, rel=0.15)
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert sum(gap > 0.1 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.02)


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("64", 64, 64),
        ("32:256", 32, 256),
        ("1:1", 1, 1),
        ("lognormal:64:0.8", 1, 640),
        ("lognormal:64:0.8:100", 1, 100),
    ],
)
def test_lengths_are_drawn_from_what_was_asked_for(text: str, least: int, most: int) -> None:
    lengths, dice = parse_lengths(text, option="--max-tokens"), random.Random(0)
    drawn = sorted(lengths.draw(dice) for _ in range(2000))
    assert least <= drawn[0] <= drawn[-1] <= most
    if text == "32:256":
        assert sum(drawn) / 2000 == pytest.approx(144, rel=0.05)
    if text.startswith("lognormal"):
        assert drawn[1000] == pytest.approx(64, rel=0.1)


BAD_LENGTHS = ("", "0", "-3", "x", "3.5", "9:3", "1:2:3", "nan", "1e3", "lognormal:64", "lognormal:nan:1",
               "lognormal:64:-1", "lognormal:64:0.8:0", "lognormal:64:inf", "10000001")  # fmt: skip


@pytest.mark.parametrize("text", BAD_LENGTHS)
def test_no_length(text: str) -> None:
    with pytest.raises(ConfigError, match="is no length") as caught:
        parse_lengths(text, option="--max-tokens")
    assert "uniform" in caught.value.hint


def test_prompts_of_stories_begin_anywhere_and_have_their_length() -> None:
    text, dice = StoryText(), random.Random(0)
    pieces = [text.piece(400, dice) for _ in range(500)]
    assert all(350 < len(piece) <= 400 for piece in pieces)
    assert len({piece[:60] for piece in pieces}) > 490
    assert len(text.piece(600_000, dice)) > 590_000
    assert text.piece(1, dice)


def bodies(asking: Asking, count: int, *, stage: int = 1) -> list[dict[str, Any]]:
    return [json.loads(ask.body) for ask in islice(asks(asking, stage=stage), count)]


def test_the_same_seed_asks_the_same() -> None:
    asking = Asking(model="m", max_tokens=Lengths(kind="uniform", low=1, high=9), seed=5)
    once = bodies(asking, 20)
    assert once == bodies(asking, 20)
    assert once != bodies(asking, 20, stage=2)
    assert {body["max_tokens"] for body in once} <= set(range(1, 10))
    assert [body["seed"] for body in once[:3]] == [5, 6, 7]
    assert once[0]["stream_options"] == {"include_usage": True}


def test_what_a_request_says() -> None:
    asking = Asking(model="m", prompts=[Prompt(text="uno"), Prompt(text="dos", most_tokens=3)], temperature=0.0)
    first, second, third = bodies(asking, 3)
    assert (first["prompt"], first["max_tokens"], first["stream"]) == ("uno", 64, True)
    assert (second["prompt"], second["max_tokens"]) == ("dos", 3)
    assert third["prompt"] == "uno"
    assert "seed" not in first
    chat = Asking(model="m", is_chat=True, prompts=[Prompt(text="uno")], asks_usage=False, fields={"top_p": 0.5})
    assert bodies(chat, 1)[0]["messages"] == [{"role": "user", "content": "uno"}]
    assert bodies(chat, 1)[0]["top_p"] == 0.5
    assert "stream_options" not in bodies(chat, 1)[0]
    assert [ask.body for ask in islice(asks(Asking(bodies=[b"1", b"2"]), stage=1), 3)] == [b"1", b"2", b"1"]


def test_files_of_prompts_and_of_bodies(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('Había una vez\n\n{"prompt": "dos", "max_tokens": 5}\n', encoding="utf-8")
    assert read_prompts(file) == [Prompt(text="Había una vez"), Prompt(text="dos", most_tokens=5)]
    file.write_text("[1,\n 2]")
    assert read_bodies(file) == [b"[1,\n 2]"]
    file.write_text('{"x": 1}\n{"x": 2}\n')
    assert read_bodies(file) == [b'{"x": 1}', b'{"x": 2}']
    for text in (
        '{"prompt": 3}',
        '{"prompt": "x", "max_tokens": 0}',
        '{"prompt": "x", "max_tokens": true}',
        "{",
        "",
        "\n",
    ):
        file.write_text(text)
        with pytest.raises(ConfigError):
            read_prompts(file)
    for raw in (b"", b"nothing", b"\xff\xfe", b"[" * 100_000):
        file.write_bytes(raw)
        with pytest.raises(ConfigError):
            read_bodies(file)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("https://example.org/v1/", "https://example.org"),
        ("http://[::1]:8000/prefix/v1", "http://[::1]:8000/prefix"),
    ],
)
def test_an_address_ends_before_its_v1(url: str, address: str) -> None:
    assert read_address(url) == address


BAD_URLS = ("", "127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://x:y", "http://x/?key=1", "http://x/#a",
            "http://u:p@x", "http://u@x", "http://x/\n")  # fmt: skip


@pytest.mark.parametrize("url", BAD_URLS)
def test_no_address(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_address(url)
    assert caught.value.hint


def test_a_test_that_would_never_end_is_refused() -> None:
    target, asking = LoadTarget(url="http://127.0.0.1:1"), Asking()
    plan = LoadPlan(target=target, asking=asking, mode="open", levels=(10.0, 10_000.0), seconds=60.0)
    with pytest.raises(ConfigError, match="10000 requests/s for that long"):
        check_plan(plan)
    check_plan(LoadPlan(target=target, asking=asking, mode="open", levels=(10_000.0,), seconds=None, requests=50))


# -- what is in a stream -----------------------------------------------------------------------------------------------


STREAM = b': hello\n\ndata: {"a": 1}\n\nevent: x\r\ndata: one\r\ndata: two\r\n\r\nid: 3\n\ndata:[DONE]\n\n'
EVENTS = [b'{"a": 1}', b"one\ntwo", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM))))
def test_events_do_not_depend_on_how_they_were_cut(cuts: list[int]) -> None:
    reader, found = EventReader(), []
    ends = [0, *sorted(cuts), len(STREAM)]
    for start, end in pairwise(ends):
        found += reader.feed(STREAM[start:end])
    assert found == EVENTS


def test_an_event_that_never_ends_is_not_kept() -> None:
    reader = EventReader()
    for _ in range(10):
        assert reader.feed(b"x" * 100_000) == []
    with pytest.raises(BadAnswerError) as caught:
        reader.feed(b"x" * 100_000)
    assert caught.value.kind == load_client.TOO_LARGE


def test_what_an_event_says() -> None:
    event = read_event(b'{"choices": [{"text": "ho", "finish_reason": null}]}')
    assert (event.has_text, event.finish) == (True, "")
    event = read_event(b'{"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}], "usage": null}')
    assert (event.has_text, event.finish) == (True, "stop")
    event = read_event(b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}')
    assert (event.has_text, event.prompt_tokens, event.tokens) == (False, 3, 4)
    assert not read_event(b'{"choices": [{"delta": {"role": "assistant"}}]}').has_text


STRANGE = (b"", b"nothing", b"\xff", b"[]", b"3", b"null", b'{"choices": 3}', b"{}", b"[" * 100_000, b"9" * 5000)


@pytest.mark.parametrize("payload", STRANGE, ids=lambda payload: ascii(payload[:12]))
def test_an_event_of_another_shape_is_malformed(payload: bytes) -> None:
    with pytest.raises(BadAnswerError) as caught:
        read_event(payload)
    assert caught.value.kind == load_client.MALFORMED
    assert len(caught.value.detail) <= load_client.EXAMPLE_CHARACTERS


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, [3], [None], [{"text": 3}], [{"delta": 3, "text": None}]])
def test_strange_choices_and_counts_do_no_harm(value: Any) -> None:
    usage = {"prompt_tokens": value, "completion_tokens": -1}
    payload = json.dumps({"choices": value if isinstance(value, list) else [value], "usage": usage}).encode()
    assert read_event(payload).tokens is None
    assert read_event(json.dumps({"choices": [], "usage": {"completion_tokens": True}}).encode()).tokens is None


def test_the_message_of_an_error() -> None:
    assert said_in(b'{"error": {"message": "too long", "type": "x"}}') == "too long"
    assert said_in(b'{"error": "no"}') == "no"
    assert said_in(b'{"detail": "Not Found"}') == "Not Found"
    assert said_in(b"<html>\xff" + b"x" * 1000).startswith("<html>")
    with pytest.raises(BadAnswerError) as caught:
        read_event(b'{"error": {"message": "out of memory"}}')
    assert (caught.value.kind, caught.value.detail) == (load_client.SAID_ERROR, "out of memory")


# -- two tests, and the page -------------------------------------------------------------------------------------------


def a_result(*stages: LoadStage, sweep: bool = False, **options: Any) -> dict[str, Any]:
    asking = Asking(model="m")
    plan = LoadPlan(target=LoadTarget(url="http://127.0.0.1:1", key="SECRET-KEY"), asking=asking, is_sweep=sweep)
    run = LoadRun(asking=asking, stages=list(stages), is_complete=True)
    return json.loads(json.dumps(result(plan, run, options=options, made=1e9)))


def test_two_results_side_by_side() -> None:
    one = a_result(stage_of([reply(2.0), reply(3.0)], rate=2.0), stage_of([], rate=9.0), max_tokens="64")
    other = a_result(stage_of([reply(2.0, first=0.2, end=0.6)], rate=2.0), max_tokens="32")
    rows = {row.figure: row for row in compare(one, other)}
    assert {row.stage for row in rows.values()} == {"2/s"}
    assert (rows["requests/s"].first, rows["requests/s"].second, rows["requests/s"].ratio) == (0.2, 0.1, 0.5)
    assert rows["requests/s"].better is False
    assert rows["first token p50"].ratio == pytest.approx(2)
    assert (rows["first token p50"].better, rows["first token p50"].is_time) == (False, True)
    assert (rows["errors"].ratio, rows["errors"].better) == (None, None)
    assert (rows["between tokens p50"].first, rows["between tokens p50"].ratio) == (None, None)
    assert differing(one, other) == ["max_tokens"]
    assert differing(one, one) == []
    alone = a_result(stage_of([reply(2.0)], mode="closed", rate=None, clients=4))
    assert compare(one, alone) == []
    assert compare(other, alone) != []  # one stage each: these, whatever they were


def test_tests_of_two_kinds_are_said_to_be() -> None:
    rates = a_result(stage_of([reply(2.0)], rate=2.0), rate="2", clients="")
    closed = a_result(stage_of([reply(2.0)], mode="closed", rate=None, clients=2), rate="", clients="2")
    assert differing(rates, closed) == ["rate", "clients"]


def test_what_a_server_says_can_be_written_and_shown(tmp_path: Path) -> None:
    found = a_result(stage_of([failed(1.0, "\ud800")], rate=2.0))
    assert "?" in json.dumps(found["stages"][0]["errors"], ensure_ascii=False)
    (tmp_path / "a.json").write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
    assert "<html" in render_load(found)


def test_sweeps_are_compared_by_their_knees() -> None:
    stage = stage_of([reply(1.0 + n / 10) for n in range(100)], rate=4.0)
    one = a_result(stage, sweep=True)
    assert one["knee"] == {"rate": 4.0, "broken_rate": None, "broken_by": ""}
    row = compare(one, {**one, "stages": [], "knee": {"rate": 6.0}})[-1]
    assert (row.figure, row.ratio, row.better) == ("the knee", 1.5, True)


WITHOUT_CLIENTS = {"kind": "cuadrilla load", "target": {}, "options": {}, "slo": {}, "stages": [{"mode": "closed"}]}


@pytest.mark.parametrize("value", [None, 3, [], {}, {"kind": "cuadrilla load", "stages": [3]}, "x", WITHOUT_CLIENTS])
def test_what_is_no_result_is_refused(value: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match="is not the result of a load test"):
        read_result(file)


def test_a_result_of_another_version_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(a_result(stage_of([reply(2.0)]))))
    assert read_result(file)["schema"] == 1
    file.write_text(json.dumps({**a_result(stage_of([reply(2.0)])), "schema": 99}))
    with pytest.raises(ConfigError, match="another version"):
        read_result(file)


def test_the_page_is_whole_and_shows_text_as_text() -> None:
    hostile = "</script><script>alert(1)</script> %%SCRIPT%% <!-- \ud800"
    stage = stage_of([reply(2.0), LoadReply(scheduled=3.0, sent=3.0, ended=3.1, problem="status 500", detail=hostile)])
    page = render_load(a_result(stage, model=hostile))
    assert "default-src 'none'" in page
    assert not re.search(r"<(?:link|img|iframe)|\ssrc=|@import|url\(", page)
    assert "<script>alert" not in page
    data = re.search(r'<script id="report" type="application/json">(.*?)</script', page, re.DOTALL)
    assert data
    shown = json.loads(data[1])
    assert shown["stages"][0]["errors"]["status 500"]["example"].startswith("</script>")
    assert "SECRET-KEY" not in page


def words_of_the_page() -> Iterator[str]:
    here = resources.files("cuadrilla.serve")
    script, page = ((here / name).read_text(encoding="utf-8") for name in ("load.js", "load.html"))
    yield from re.findall(r'say\(\s*"([^"]+)"', script)
    yield from re.findall(r'name: "([^"]+)"', script)
    yield from (word for word in re.findall(r"%%([^%]+)%%", page) if word != word.upper())


def test_all_words_of_the_page_can_be_translated() -> None:
    known = {str(word) for word in load_report.WORDS}
    assert set(words_of_the_page()) <= known
    assert set(load_client.KINDS) == {str(word) for word in load_report.ERRORS}


def test_errors_are_listed_by_how_often_they_were() -> None:
    found = errors_by_kind(
        [failed(1, "time-out"), failed(2, "connection"), failed(3, "connection"), reply(4)], {}, unsent=3
    )
    assert list(found) == ["not sent", "connection", "time-out"]
