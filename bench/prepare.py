"""Text to tokens, end to end: `cuadrilla data prepare`, its speed and its peak of memory.

    python -m bench.prepare FOLDER [FILE ...] [--rounds 3] [--processes N]
    python -m bench.prepare FOLDER [FILE ...] --memory MEGABYTES [--one-line]

Read, detect encodings, clean, filter, drop equal and near-duplicate documents, split, encode, write tokens and
manifest: a command timed from its start to its end; the tokenizer is trained before. The peak of memory is that of all
processes of the command, shared pages counted once (PSS; RSS where the system has no PSS), sampled every 50 ms in a
round of its own: looking costs time. `--memory`: that peak for one file of this size, in paragraphs or in one line,
made of runs of words of the given text (so little of it repeats).
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from bench.common import report, summary
from cuadrilla.data.executor import available_cores
from cuadrilla.data.folder import TOKENIZER, read_manifest
from cuadrilla.data.prepare import PrepareOptions, prepare
from cuadrilla.data.sources import list_sources

SAMPLE_SECONDS = 0.05


def seconds_of(command: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def peak_mib(command: Sequence[str]) -> float:
    """The most memory that all processes of a command have at one time."""
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
    """Bytes; 0 if it is gone."""
    try:
        full = process.memory_full_info()
        return int(getattr(full, "pss", full.rss))
    except psutil.Error:
        return 0


def ours(sources: Sequence[str], out: Path, *options: str) -> list[str]:
    """The command; `out` is emptied."""
    shutil.rmtree(out, ignore_errors=True)
    return [sys.executable, "-m", "cuadrilla", "data", "prepare", *sources, "--out", str(out), *options]


def as_utf8(sources: Sequence[str], folder: Path) -> int:
    """The same text as UTF-8 files in `folder`; their bytes in all."""
    total = 0
    for number, text in enumerate(list_sources(sources, exclude=folder).texts()):
        path = folder / f"{number:05d}.txt"
        path.write_text("".join(text.pieces), encoding="utf-8", newline="\n")
        total += path.stat().st_size
    return total


def memory(arguments: argparse.Namespace, here: Path) -> None:
    """Prepare one generated file, once."""
    file = here / "generated.txt"
    write_text(
        arguments.sources, file, num_bytes=arguments.memory * 10**6, separator=" " if arguments.one_line else "\n\n"
    )
    began = time.perf_counter()
    peak = peak_mib(ours([str(file)], here / "out", "--processes", str(arguments.processes)))
    report(
        "prepare: memory",
        megabytes=arguments.memory,
        one_line=arguments.one_line,
        train_tokens=read_manifest(here / "out").splits["train"].num_tokens,
        seconds=time.perf_counter() - began,
        peak_mib=peak,
    )


def write_text(sources: Sequence[str], path: Path, *, num_bytes: int, separator: str) -> None:
    """Paragraphs of 25 to 196 words, each of runs of 5 to 14 words from anywhere in `sources`."""
    texts = list_sources(sources, exclude=path.parent).texts()
    words = "\n".join(piece for text in texts for piece in text.pieces).split()
    chance = random.Random(0)
    written = 0
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sources", nargs="+", help="folders or files of text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=available_cores())
    parser.add_argument("--memory", type=int, metavar="MEGABYTES", help="one run of ours on a file of this size")
    parser.add_argument("--one-line", action="store_true", help="that file has no line ends")
    arguments = parser.parse_args()
    count = str(arguments.processes)
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        if arguments.memory:
            memory(arguments, here)
            return
        text = here / "text"
        text.mkdir()
        num_bytes = as_utf8(arguments.sources, text)
        prepare([str(text)], out=here / "first", options=PrepareOptions())
        tokenizer = str(here / "first" / TOKENIZER)

        options = ("--tokenizer", tokenizer, "--processes", count)
        seconds = [seconds_of(ours([str(text)], here / "out", *options)) for _ in range(arguments.rounds)]
        report(
            "prepare",
            megabytes=num_bytes / 1e6,
            processes=arguments.processes,
            megabytes_per_second=summary([num_bytes / 1e6 / each for each in seconds]),
            peak_mib=peak_mib(ours([str(text)], here / "out", *options)),
        )


if __name__ == "__main__":
    main()
