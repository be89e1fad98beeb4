"""Speed and peak memory of `cuadrilla data prepare`, from text files to tokens.

    python -m bench.prepare TEXTS... [--rounds 3] [--processes N]
    python -m bench.prepare TEXTS... --memory MEGABYTES [--one-line]

The whole command is timed: it reads, detects encodings, cleans, filters, drops equal and near-duplicate documents,
splits, encodes, and writes tokens and manifest. The tokenizer is trained before. The peak memory is that of all
processes of the command together; shared pages count once (PSS; RSS where the system has no PSS). It is sampled every
50 ms in a run of its own, because sampling costs time. `--memory` measures only the peak, for one file of this size, in
paragraphs or in one line. The file is made of runs of words of the given texts, so little of it repeats.
"""

import random
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


def write_text(words: Sequence[str], path: Path, *, num_bytes: int, separator: str) -> None:
    """Write paragraphs of 5 to 14 runs of words. A run is 5 to 14 words from a random place of the text."""
    chance, written = random.Random(0), 0
    with open(path, "w", encoding="utf-8") as file:
        while written < num_bytes:
            paragraph: list[str] = []
            for _ in range(chance.randint(5, 14)):
                start = chance.randrange(len(words) - 14)
                paragraph += words[start : start + chance.randint(5, 14)]
            text = " ".join(paragraph) + separator
            file.write(text)
            written += len(text.encode())


def main() -> None:
    given = options(__doc__, texts=[str], rounds=3, processes=max(1, int(read_facts().cores)), memory=0, one_line=False)
    with tempfile.TemporaryDirectory() as name:
        here, text, out = Path(name), Path(name) / "text", Path(name) / "out"
        text.mkdir()
        texts = ["".join(each.pieces) for each in list_sources(given.texts, exclude=here).texts()]
        if given.memory:
            words, separator = "\n".join(texts).split(), " " if given.one_line else "\n\n"
            write_text(words, text / "generated.txt", num_bytes=given.memory * 10**6, separator=separator)
        else:
            for number, each in enumerate(texts):
                (text / f"{number:05d}.txt").write_text(each, encoding="utf-8", newline="\n")
        command = [*COMMAND, "data", "prepare", str(text), "--out", str(out), "--processes", str(given.processes)]
        if not given.memory:
            prepare([str(text)], out=here / "first", options=PrepareOptions())
            command += ["--tokenizer", str(here / "first" / TOKENIZER)]

        def once() -> None:
            shutil.rmtree(out, ignore_errors=True)
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)

        num_bytes = sum(path.stat().st_size for path in text.iterdir())
        rates = [num_bytes / 1e6 / timed(once) for _ in range(0 if given.memory else given.rounds)]
        shutil.rmtree(out, ignore_errors=True)
        report(
            "prepare",
            megabytes=num_bytes / 1e6,
            processes=given.processes,
            megabytes_per_second=summary(rates) if rates else None,
            peak_mib=peak_mib(command),
            train_tokens=read_manifest(out).splits["train"].num_tokens,
        )


if __name__ == "__main__":
    main()
