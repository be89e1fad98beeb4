"""Prepare text on the workers of a Dask cluster. The bytes are those of `cuadrilla data prepare` on one machine.

    python prepare_dask.py texts/ --out data --scheduler 192.168.1.50:8786   # how to start one: docs/other-tools.md

Workers need none of this machine's files: a job carries the text that it cleans, and returns the bytes of its result.
It depends on nothing else, so Dask repeats it elsewhere if a worker dies. Dask's own configuration says how to reach
the scheduler (TLS: https://distributed.dask.org/en/stable/tls.html).
"""

import argparse
import sys
from pathlib import Path

import distributed

import cuadrilla
from cuadrilla.data.corpus import program


def show(stage: str, done: int, total: int) -> None:
    """Write how far a stage is, over the line before."""
    print(f"\r{stage}: {done:,} of {total:,}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--out", type=Path, default=Path("data"))
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--scheduler", required=True, metavar="HOST:PORT")
    given = parser.parse_args()
    with distributed.Client(given.scheduler, set_as_default=False) as client:
        found = sorted(set(client.run(program).values()))
        if found != [program()]:  # other versions would give other bytes
            sys.exit(f"the workers have {found}, this machine has {program()!r}: install the same and restart them")
        options = cuadrilla.PrepareOptions(vocab=given.vocab, processes=sum(client.nthreads().values()))
        executor = client.get_executor(pure=False)
        made = cuadrilla.prepare(given.sources, out=given.out, options=options, progress=show, executor=executor)
    print(f"\n{given.out}: {made.manifest.splits['train'].num_tokens:,} tokens; {made.note}")


if __name__ == "__main__":
    main()
