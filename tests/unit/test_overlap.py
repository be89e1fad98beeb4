"""How much of a held-out text is in the training text."""

import numpy as np
import pytest

from cuadrilla.data import overlap
from cuadrilla.data.shards import ShardWriter

pytestmark = pytest.mark.unit

END = 0
random = np.random.default_rng(3)


def measured(held_out, train, *, width=13):
    return overlap.measure(iter(held_out), iter(train), name="x", width=width, end_of_text=END)


def by_hand(held_out, train, *, width):
    """(windows, those in train) counted with sets."""

    def windows(tokens):
        rows = [tuple(tokens[start : start + width].tolist()) for start in range(len(tokens) - width + 1)]
        return [row for row in rows if END not in row]

    known = set(windows(train))
    found = windows(held_out)
    return len(found), sum(row in known for row in found)


@pytest.mark.parametrize("block", [50, 64, 2**20])
def test_windows_are_counted_as_by_hand_whatever_the_blocks_and_shards(monkeypatch, tmp_path, block):
    monkeypatch.setattr(overlap, "BLOCK_TOKENS", block)
    train = random.integers(0, 9, 1000)
    held_out = np.concatenate([random.integers(0, 9, 200), train[300:400], [END], train[-60:]])
    streams = []
    for split, tokens in (("train", train), ("val", held_out)):
        writer = ShardWriter(tmp_path, split=split, dtype="uint16", shard_tokens=333)
        writer.append(tokens)
        streams.append(overlap.blocks(tmp_path, writer.close(), dtype="uint16", overlap=12))
    result = measured(streams[1], streams[0])
    assert (result.checked, result.found) == by_hand(held_out, train, width=13)
    assert 0 < result.share < 1


def test_of_a_long_text_a_sample_is_looked_up(monkeypatch):
    monkeypatch.setattr(overlap, "FEW_WINDOWS", 1000)
    text = random.integers(1, 5000, 100_000)
    whole = measured([text], [text])
    assert whole.share == 1.0
    assert 100_000 / overlap.RARITY * 0.9 < whole.checked < 100_000 / overlap.RARITY * 1.1
    half = measured([text], [text[:50_000]])
    assert abs(half.share - 0.5) < 0.03
    assert measured([text], [random.integers(1, 5000, 1000)]).found == 0


def test_a_text_shorter_than_a_window_has_none():
    assert measured([np.arange(1, 5)], [np.arange(1, 50)]).checked == 0
    assert measured([], [np.arange(1, 50)]).share == 0.0


def test_a_window_is_about_fifty_characters():
    assert overlap.window_tokens(3.9) == 13
    assert overlap.window_tokens(1.4) == 36
    assert overlap.window_tokens(20.0) == overlap.MIN_WINDOW_TOKENS
