"""The moving picture of the README, of a real practice run: three unequal workers, one is killed, the same bits.

    python tools/picture.py

Trains `micro` on built-in stories in strict mode, alone and with three workers of which one is killed in the middle.
Draws `docs/pictures/crew.svg` and `crew.es.svg`: losses of the crew's steps, and each worker's share of them.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from cuadrilla.data.prepare import PrepareOptions, prepare
from cuadrilla.model.weights import WEIGHTS, read_tensors
from cuadrilla.rundir import RunDir, last_rows
from cuadrilla.train.checkpoint import find_newest, tensors_sha256

STEPS, SPEEDS, VICTIM = 120, "1.0,0.7,0.4", "worker-2"
RUN = """
[data]
folder = "{data}"
[model]
preset = "micro"
context = 128
[train]
steps = {steps}
batch_sequences = 16
unit_sequences = 1
[sync]
strict = true
[sample]
tokens = 0
"""
WORDS = {
    "crew.svg": ("loss", "who computed each step", "killed", "weights after {steps} steps", "alone", "the crew"),
    "crew.es.svg": ("pérdida", "quién calculó cada paso", "muere", "pesos tras {steps} pasos", "sola", "la cuadrilla"),
}
COLOURS = {"worker-1": "#4477aa", "worker-2": "#cc6677", "worker-3": "#ccbb44"}
WIDTH, LEFT, CURVE, BARS, SECONDS = 720, 20, (40, 150), (180, 250), 8


def trained(run: RunDir, *, practice: bool) -> tuple[list[dict[str, Any]], str, int]:
    """Its rows, the SHA-256 of its weights, and the step at which the victim was killed."""
    command = [sys.executable, "-m", "cuadrilla", "train", str(run.path)]
    process, killed = subprocess.Popen([*command, *(["--practice", SPEEDS] if practice else [])]), 0
    while process.poll() is None:
        version = last_rows(run.metrics)[-1]["version"] if run.metrics.exists() and run.metrics.stat().st_size else 0
        if practice and not killed and version >= STEPS // 2:
            for child in psutil.Process(process.pid).children(recursive=True):
                if f"work {VICTIM} " in " ".join(child.cmdline()):
                    child.kill()
                    killed = version
        psutil.Process(process.pid).cpu_percent(0.05)
    newest = find_newest(run.checkpoints)
    assert process.returncode == 0
    assert newest is not None
    return last_rows(run.metrics), tensors_sha256(read_tensors(newest / WEIGHTS)), killed


def drawn(rows: Sequence[dict[str, Any]], *, hashes: tuple[str, str], killed: int, words: Sequence[str]) -> str:
    """The picture as SVG: a curtain that opens, and stays open for as long again."""
    loss, who, dies, weights, alone, crew = words
    across = (WIDTH - 2 * LEFT) / len(rows)
    losses = [float(row["loss"]) for row in rows]
    top, bottom = CURVE
    scale = (bottom - top) / (max(losses) - min(losses))
    heights = [bottom - (loss - min(losses)) * scale for loss in losses]
    points = " ".join(f"{LEFT + (i + 0.5) * across:.1f},{height:.1f}" for i, height in enumerate(heights))
    bars, end = [], BARS[1]
    for i, row in enumerate(rows):
        at = float(BARS[0])
        for worker, share in sorted(row["shares"].items()):
            tall = share * (end - BARS[0])
            place = f'x="{LEFT + i * across:.1f}" y="{at:.1f}" width="{across + 0.3:.1f}" height="{tall:.1f}"'
            bars.append(f'<rect {place} fill="{COLOURS.get(worker, "#888888")}"/>')
            at += tall
    x = LEFT + killed * across
    text = 'font-family="sans-serif" font-size="13" fill="#888888"'
    again = f'dur="{2 * SECONDS}s" repeatCount="indefinite"'
    opening = f'<animate attributeName="width" values="0;{WIDTH};{WIDTH}" keyTimes="0;0.6;1" {again}/>'
    late = f'<animate attributeName="opacity" values="0;0;1;1" keyTimes="0;0.6;0.62;1" {again}/>'
    said = [f"{name}: {hash[:32]}…" for name, hash in zip((alone, crew), hashes, strict=True)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 330" width="{WIDTH}" height="330">',
            f'<clipPath id="curtain"><rect x="0" y="0" width="{WIDTH}" height="330">{opening}</rect></clipPath>',
            f'<text x="{LEFT}" y="25" {text}>{loss}</text><text x="{LEFT}" y="{BARS[0] - 8}" {text}>{who}</text>',
            '<g clip-path="url(#curtain)">',
            f'<polyline points="{points}" fill="none" stroke="#228833" stroke-width="2"/>',
            *bars,
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{end}" stroke="#cc3311" stroke-dasharray="4 3"/>',
            f'<text x="{x + 6:.1f}" y="{top + 12}" {text}>{VICTIM} {dies} (kill -9)</text>',
            "</g>",
            f'<g><text x="{LEFT}" y="{end + 25}" {text}>{weights.format(steps=len(rows))}, SHA-256</text>{late}',
            *(f'<text x="{LEFT}" y="{end + 45 + 20 * i}" {text}>{line}</text>' for i, line in enumerate(said)),
            "</g></svg>",
        ]
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        data, runs = Path(name) / "data", [RunDir(Path(name) / each) for each in ("alone", "crew")]
        prepare(["cuentos:4000"], out=data, options=PrepareOptions(vocab=1024))
        for run in runs:
            run.path.mkdir()
            run.run_file.write_text(RUN.format(data=data, steps=STEPS))
        (_, alone, _), (rows, crew, killed) = (trained(run, practice=run is runs[1]) for run in runs)
    print(json.dumps({"alone": alone, "crew": crew, "killed at": killed}))
    for file, words in WORDS.items():
        picture = drawn(rows, hashes=(alone, crew), killed=killed, words=words)
        Path("docs/pictures", file).write_text(picture + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
