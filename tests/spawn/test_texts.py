"""`cuadrilla train TEXT…`: from a text to a model with one command."""

import re
import shlex
from pathlib import Path

import pytest

from cuadrilla.rundir import RunDir, last_rows
from tests.inside import cuadrilla
from tests.terminal import SPANISH, Terminal

WORDS = ("la casa", "el río", "una noche", "los caballos", "mi madre", "aquel día", "el camino", "la ciudad")


@pytest.fixture
def novel(tmp_path: Path) -> Path:
    """Two thousand sentences of which no two are alike."""
    sentences = (
        f"{WORDS[i % 8].capitalize()} {i} veía {WORDS[i // 8 % 8]} y {WORDS[i // 64 % 8]}, "
        f"que tenía {i * 7 % 997} años."
        for i in range(2000)
    )
    path = tmp_path / "Mi novela.txt"
    path.write_text("\n\n".join(sentences))
    return path


def typed(words: str, *, folder: Path) -> str:
    """What a Spanish terminal of 80 columns has shown when the command has ended; no line is broken by the terminal."""
    terminal = Terminal(shlex.split(words), cwd=folder, **SPANISH)
    assert terminal.process.wait(timeout=200) == 0, terminal.text()
    terminal.close()
    assert len(widest := max(terminal.lines(), key=len)) <= 80, widest
    return terminal.text()


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_a_text_becomes_a_model_in_the_given_time(novel: Path, tmp_path: Path) -> None:
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

    again = cuadrilla("train", novel.name, "--time", "12s", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "nothing was left to train; more: --epochs" in again.stderr
    assert len(last_rows(run.metrics)) == len(rows)

    other = tmp_path / "otra.txt"
    other.write_text(novel.read_text()[::-1])
    bigger = cuadrilla("train", novel.name, "--preset", "gpt2-mini", cwd=tmp_path)
    assert (bigger.returncode, "is of gpt2-micro" in bigger.stderr) == (2, True), bigger.stderr
    refused = cuadrilla("train", other.name, "--name", run.path.name, cwd=tmp_path)
    assert refused.returncode != 0
    assert "--name" in refused.stderr
