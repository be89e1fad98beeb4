"""Speed and peak memory of `cuadrilla data prepare`, from text files to tokens.

    python -m bench.prepare TEXTS... [--rounds 3] [--processes N]

The whole command is timed: it reads, detects encodings, cleans, filters, drops equal and near-duplicate documents,
splits, encodes, and writes tokens and manifest. The tokenizer is trained before. The peak memory is that of all
processes of the command together; shared pages count once (PSS; RSS where the system has no PSS). It is sampled every
50 ms in a run of its own, because sampling costs time.
"""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from bench.common import options, report, summary, timed
from cuadrilla.data.folder import TOKENIZER, read_manifest
from cuadrilla.data.prepare import PrepareOptions, prepare
from cuadrilla.data.sources import list_sources
from cuadrilla.host.facts import read_facts
from tests.commands import COMMAND

SAMPLE_SECONDS = 0.05


def peak_mib(command: Sequence[str]) -> float:
    """Run a command; the most memory that all its processes have together at one time."""
    peak = 0
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    root = psutil.Process(child.pid)
    while child.poll() is None:
        with suppress(psutil.Error):
            peak = max(peak, sum(map(memory_of, [root, *root.children(recursive=True)])))
        time.sleep(SAMPLE_SECONDS)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {child.returncode}")
    return peak / 2**20


def memory_of(process: psutil.Process) -> int:
    """Bytes; 0 if the process has ended."""
    try:
        full = process.memory_full_info()
        return int(getattr(full, "pss", full.rss))
    except psutil.Error:
        return 0


def main() -> None:
    given = options(__doc__, texts=[str], rounds=3, processes=max(1, int(read_facts().cores)))
    with tempfile.TemporaryDirectory() as name:
        here, text, out = Path(name), Path(name) / "text", Path(name) / "out"
        text.mkdir()
        for number, each in enumerate(list_sources(given.texts, exclude=here).texts()):
            (text / f"{number:05d}.txt").write_text("".join(each.pieces), encoding="utf-8", newline="\n")
        prepare([str(text)], out=here / "first", options=PrepareOptions())
        chosen = ("--processes", str(given.processes), "--tokenizer", str(here / "first" / TOKENIZER))
        command = [*COMMAND, "data", "prepare", str(text), "--out", str(out), *chosen]

        def once() -> None:
            shutil.rmtree(out, ignore_errors=True)
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)

        num_bytes = sum(path.stat().st_size for path in text.iterdir())
        rates = [num_bytes / 1e6 / timed(once) for _ in range(given.rounds)]
        shutil.rmtree(out, ignore_errors=True)
        report(
            "prepare",
            megabytes=num_bytes / 1e6,
            processes=given.processes,
            megabytes_per_second=summary(rates),
            peak_mib=peak_mib(command),
            train_tokens=read_manifest(out).splits["train"].num_tokens,
        )


if __name__ == "__main__":
    main()
