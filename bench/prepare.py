"""Text to token shards, end to end: `cuadrilla data prepare` against `datasets.map` with the same tokenizer.

    python -m bench.prepare FOLDER [FILE ...] [--rounds 3] [--processes N] [--peer-python PATH] [--memory-only]

Ours: read, detect encodings, clean, filter, drop equal and near-duplicate documents, split, encode, write shards and
manifest. The peer, run by a Python that has `datasets` and `tokenizers`: read, encode with `map(batched=True,
num_proc=N)`, write the ids as uint16 to one file; it cleans and drops nothing. Both are commands timed from their start
to their end, taking turns; the tokenizer is trained before. The peak of memory is that of all processes of a command,
shared pages counted once (PSS; RSS where the system has no PSS), sampled every 50 ms.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.common import ratios, report, summary
from cuadrilla.data.encode import FAST, PLAIN, WORDS
from cuadrilla.data.options import Options
from cuadrilla.data.pool import available_cores
from cuadrilla.data.prepare import prepare
from cuadrilla.data.shards import TOKENIZER, read_manifest
from cuadrilla.data.sources import open_sources

SAMPLE_SECONDS = 0.05
PEER = Path(__file__).with_name("prepare_peer.py")


@dataclass
class Run:
    seconds: float
    peak_mib: float


def measured(command: Sequence[str]) -> Run:
    """Run a command; its time, and the peak of the memory of all its processes."""
    peak = 0
    over = threading.Event()
    began = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    root = psutil.Process(child.pid)

    def watch() -> None:
        nonlocal peak
        while not over.wait(SAMPLE_SECONDS):
            try:
                tree = [root, *root.children(recursive=True)]
            except psutil.Error:
                return
            peak = max(peak, sum(map(memory_of, tree)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = child.wait()
    seconds = time.perf_counter() - began
    over.set()
    watcher.join()
    if code:
        raise SystemExit(f"{' '.join(command)} failed with {code}")
    return Run(seconds, peak / 2**20)


def memory_of(process: psutil.Process) -> int:
    """Bytes; 0 if it is gone."""
    try:
        full = process.memory_full_info()
        return int(getattr(full, "pss", full.rss))
    except psutil.Error:
        return 0


def ours(sources: Sequence[str], out: Path, *options: str) -> Run:
    shutil.rmtree(out, ignore_errors=True)
    return measured([sys.executable, "-m", "cuadrilla", "data", "prepare", *sources, "--out", str(out), *options])


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sources", nargs="+", help="folders or files of text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=available_cores())
    parser.add_argument("--encoder", nargs="+", default=[PLAIN, WORDS, FAST], choices=[PLAIN, WORDS, FAST])
    parser.add_argument("--peer-python", help="a Python that has datasets and tokenizers")
    parser.add_argument("--memory-only", action="store_true", help="one run of ours, without copies: for large files")
    arguments = parser.parse_args()
    count = str(arguments.processes)
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        if arguments.memory_only:
            num_bytes = sum(
                path.stat().st_size for each in arguments.sources for path in [Path(each), *Path(each).glob("**/*.txt")]
            )
            run = ours(arguments.sources, here / "out", "--processes", count)
            tokens = read_manifest(here / "out").splits["train"].num_tokens
            report("prepare: memory", megabytes=num_bytes / 1e6, processes=count, train_tokens=tokens, **vars(run))
            return
        text = here / "text"
        text.mkdir()
        num_bytes = as_utf8(arguments.sources, text)
        prepare([str(text)], out=here / "first", options=Options())
        tokenizer = str(here / "first" / TOKENIZER)
        runs: dict[str, list[Run]] = {}
        for _ in range(arguments.rounds):
            for encoder in arguments.encoder:
                options = ("--tokenizer", tokenizer, "--processes", count, "--encoder", encoder)
                runs.setdefault(encoder, []).append(ours([str(text)], here / "out", *options))
            if arguments.peer_python:
                command = [arguments.peer_python, str(PEER), str(text), tokenizer, str(here / "peer"), count]
                runs.setdefault("datasets.map", []).append(measured(command))
                shutil.rmtree(here / "peer")
        result = {
            name: {
                "megabytes_per_second": summary([num_bytes / 1e6 / run.seconds for run in some]),
                "peak_mib": max(run.peak_mib for run in some),
            }
            for name, some in runs.items()
        }
        peer = [run.seconds for run in runs.get("datasets.map", [])]
        faster = {
            name: ratios(peer, [run.seconds for run in some])
            for name, some in runs.items()
            if peer and name != "datasets.map"
        }
        report("prepare", megabytes=num_bytes / 1e6, processes=arguments.processes, runs=result, times_peer=faster)


if __name__ == "__main__":
    main()
