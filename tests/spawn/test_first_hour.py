"""A newcomer's first commands at a terminal: time estimates, progress, the answer to Ctrl-C, and kept settings."""

import os
import re
import shlex
from contextlib import closing
from pathlib import Path

import pytest

from cuadrilla.rundir import RunDir, last_rows, read_jsonl
from tests.commands import wait_for
from tests.inside import cuadrilla
from tests.terminal import CTRL_C, SPANISH, Terminal

ENDLESS = ("--set", "train.tokens=40_000_000_000")
WORDS = ("la casa", "el río", "una noche", "los caballos", "mi madre", "aquel día", "el camino", "la ciudad")


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("measured_soon")
def test_a_first_run_says_how_long_it_takes_hears_ctrl_c_and_goes_on(stories: Path, tmp_path: Path) -> None:
    made = cuadrilla("new", "mio", "--preset", "gpt2-mini", "--data", os.path.relpath(stories, tmp_path), cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert re.search(r"gpt2-mini takes about \d+ \w+ here\n.*gpt2-micro takes about", made.stderr)
    (tmp_path / "mio" / "report.html").touch()  # a page that a training writes anew, once it has made a step

    words = ("train", "mio", *ENDLESS, "--set", "train.batch_sequences=960")
    with closing(Terminal(words, cwd=tmp_path)) as first:
        wait_for(first.shows(r"device +cpu, \w+ \("), first.process)
        wait_for(first.shows(r"step 0/[\d]+.* \d+% done in \d+ s +ETA"), first.process)
        first.types(CTRL_C)
        wait_for(first.shows("stopping +after this pass"), first.process)
        assert first.process.wait(timeout=150) == 130
        said = "the run was stopped by Ctrl-C at step 0 and saved; the same command continues from there"
        wait_for(first.shows(said))

    with closing(Terminal(words, cwd=tmp_path)) as again:
        wait_for(again.shows(r"\d+% done"), again.process)
        again.types(CTRL_C)
        assert again.process.wait(timeout=150) == 130
    ends = [row["complete"] for row in read_jsonl(RunDir(tmp_path / "mio").events) if row["event"] == "finished"]
    assert ends == [False, False]


def test_an_invite_is_taken_that_was_pasted_before_it_is_asked_for(tmp_path: Path) -> None:
    with closing(Terminal(["join"], cwd=tmp_path)) as joins:
        joins.types(b"cuadrilla1.not-an-invite\n")
        assert joins.process.wait(timeout=60) == 5
        wait_for(joins.shows("this is not an invite"))


# -- `cuadrilla train TEXT…`: from a text to a model with one command --------------------------------------------------


def typed(words: str, *, folder: Path) -> str:
    """Run a command at a Spanish terminal of 80 columns, and return what it shows. The terminal breaks no line."""
    with closing(Terminal(shlex.split(words), cwd=folder, **SPANISH)) as terminal:
        assert terminal.process.wait(timeout=200) == 0, terminal.text()
    assert len(widest := max(terminal.lines(), key=len)) <= 80, widest
    return terminal.text()


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_a_text_becomes_a_model_in_the_given_time(tmp_path: Path) -> None:
    """Two thousand sentences of which no two are alike."""
    sentences = (
        f"{WORDS[i % 8].capitalize()} {i} veía {WORDS[i // 8 % 8]} y {WORDS[i // 64 % 8]}, "
        f"que tenía {i * 7 % 997} años."
        for i in range(2000)
    )
    novel = tmp_path / "Mi novela.txt"
    novel.write_text("\n\n".join(sentences))
    shown = typed(f"train '{novel.name}' --time 12s", folder=tmp_path)
    run = RunDir(tmp_path / "Mi-novela-gpt2")
    for said in ("tokens para entrenar", "gpt2-micro lee el texto", "listo      en", "bits/byte", "escribe:"):
        assert said in shown
    assert not re.search(r"\b(the|and|step|held-out|loss)\b", shown)
    rows = last_rows(run.metrics)
    assert rows[-1]["val_bits_per_byte"] < rows[0].get("val_bits_per_byte", 9)
    assert (run.path / "report.html").stat().st_size > 10_000
    advised = re.findall(r"cuadrilla (\w+ Mi-novela-gpt2)", shown)
    assert [words.split()[0] for words in advised] == ["eval", "generate", "serve"]
    assert re.search(r"bits por byte +\d,\d{4} ± 0,\d{4}", typed(advised[0], folder=tmp_path))
    assert "\nLa casa" in typed(f"{advised[1]} 'La casa' --tokens 9", folder=tmp_path)

    again = cuadrilla("train", novel.name, "--time", "12s", cwd=tmp_path, code=0)
    assert "nothing was left to train; more: --epochs" in again.stderr
    assert len(last_rows(run.metrics)) == len(rows)

    other = tmp_path / "otra.txt"
    other.write_text(novel.read_text()[::-1])
    bigger = cuadrilla("train", novel.name, "--preset", "gpt2-mini", cwd=tmp_path)
    assert (bigger.returncode, "is of gpt2-micro" in bigger.stderr) == (2, True), bigger.stderr
    refused = cuadrilla("train", other.name, "--name", run.path.name, cwd=tmp_path)
    assert refused.returncode != 0
    assert "--name" in refused.stderr
