"""Text to token shards, end to end: `cuadrilla data prepare` against `datasets.map` with the same tokenizer.

    python -m bench.prepare FOLDER [FILE ...] [--rounds 3] [--processes N] [--peer-python PATH]
    python -m bench.prepare FOLDER [FILE ...] --memory MEGABYTES [--one-line]

Ours: read, detect encodings, clean, filter, drop equal and near-duplicate documents, split, encode, write shards and
manifest. The peer, run by a Python that has `datasets` and `tokenizers`: read, encode with `map(batched=True,
num_proc=N)`, write the ids as uint16 to one file; it cleans and drops nothing. Both are commands timed from their start
to their end, taking turns; the tokenizer is trained before. The peak of memory is that of all processes of a command,
shared pages counted once (PSS; RSS where the system has no PSS), sampled every 50 ms in a round of its own: looking
costs time. `--memory`: that peak for one file of this size, in paragraphs or in one line, made of runs of words of the
given text (so little of it repeats).
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from bench.common import ratios, report, summary
from cuadrilla.data.encode import FAST, PLAIN
from cuadrilla.data.options import PrepareOptions
from cuadrilla.data.pool import available_cores
from cuadrilla.data.prepare import prepare
from cuadrilla.data.shards import TOKENIZER, read_manifest
from cuadrilla.data.sources import open_sources

SAMPLE_SECONDS = 0.05
PEER_NAME = "datasets.map"
PEER = Path(__file__).with_name("prepare_peer.py")


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
    """The same text for both: UTF-8 files in `folder`; their bytes in all."""
    total = 0
    found = open_sources(sources, exclude=folder, progress=lambda _stage, _done, _total: None)
    for number, source in enumerate(found.sources):
        for part, pieces in enumerate(source.texts()):
            path = folder / f"{number:05d}-{part}.txt"
            path.write_text("".join(pieces), encoding="utf-8", newline="\n")
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
    found = open_sources(sources, exclude=path.parent, progress=lambda _stage, _done, _total: None)
    words = [word for source in found.sources for text in source.texts() for word in "".join(text).split()]
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
    parser.add_argument("--encoder", nargs="+", default=[PLAIN, FAST], choices=[PLAIN, FAST])
    parser.add_argument("--peer-python", help="a Python that has datasets and tokenizers")
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

        def contenders() -> Iterator[tuple[str, list[str]]]:
            for encoder in arguments.encoder:
                options = ("--tokenizer", tokenizer, "--processes", count, "--encoder", encoder)
                yield encoder, ours([str(text)], here / "out", *options)
            if arguments.peer_python:
                shutil.rmtree(here / "peer", ignore_errors=True)
                yield PEER_NAME, [arguments.peer_python, str(PEER), str(text), tokenizer, str(here / "peer"), count]

        seconds: dict[str, list[float]] = {}
        for _ in range(arguments.rounds):
            for name, command in contenders():
                seconds.setdefault(name, []).append(seconds_of(command))
        result = {
            name: {
                "megabytes_per_second": summary([num_bytes / 1e6 / each for each in seconds[name]]),
                "peak_mib": peak_mib(command),
            }
            for name, command in contenders()
        }
        peer = seconds.pop(PEER_NAME, [])
        faster = {name: ratios(peer, some) for name, some in seconds.items() if peer}
        report("prepare", megabytes=num_bytes / 1e6, processes=arguments.processes, runs=result, times_peer=faster)


if __name__ == "__main__":
    main()
