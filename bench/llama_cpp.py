"""Our service beside llama.cpp's (llama-cpp-python): the same weights, clients and prompts, one after the other.

    python -m bench.llama_cpp --python OTHER [--halves] [--shape 124m] [--clients 1 16] [--rounds 3]

OTHER: a Python in whose environment `llama-cpp-python[server]` is installed (without one only ours is measured). Both
have the same random weights, in fp32, or with `--halves` llama.cpp's in fp16 and ours in bf16. Its server answers one
request after the other (`--interrupt_requests False`: by default a newcomer breaks off the one at hand). Tokens per
second, as `cuadrilla load` counts them; medians of rounds in turn.
"""

import argparse
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from bench.common import report, tokenizer_of
from bench.gateway import started
from bench.generate import SHAPES, random_model
from bench.serve import stage_of, written
from cuadrilla.model.gguf import Description, write_gguf
from cuadrilla.model.hf import save_hf

START_SECONDS = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, metavar="OTHER")
    parser.add_argument("--halves", action="store_true")
    parser.add_argument("--shape", choices=SHAPES, default="124m")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        report("llama_cpp", halves=arguments.halves, rows=compare(Path(temporary), arguments))


def compare(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    model = random_model(arguments.shape, seed=0)
    tokenizer_path = written(tokenizer_of(model.config.vocab_size), folder)
    text = re.sub(r"<unused (\d+)>", r"u\1", tokenizer_path.read_text())  # llama.cpp wants letters,
    text = re.sub(r'"merges":\s*\[\]', '"merges": [["a", "b"]]', text).replace('"u300"', '"ab"')  # and a merge
    tokenizer_path.write_text(text)
    save_hf(model, folder, tokenizer_path=tokenizer_path)
    state = model.state_dict()
    gguf = folder / "model.gguf"
    write_gguf(
        gguf,
        config=model.config,
        tokenizer_path=tokenizer_path,
        read=lambda name: state[name],
        half=arguments.halves,
        about=Description(name="random weights"),
    )
    precision = "bf16" if arguments.halves else "fp32"
    options = ["--slots", 16, "--queue", 1000, "--precision", precision]
    peer = llama(gguf, arguments) if arguments.python else nullcontext("")
    with started("serve", f"ours={folder}", *options) as ours, peer as theirs:
        return [of(clients, ours=ours, theirs=theirs, arguments=arguments) for clients in arguments.clients]


def of(clients: int, *, ours: str, theirs: str, arguments: argparse.Namespace) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"ours": [], "llama_cpp": []}
    for _ in range(arguments.rounds if clients == 1 else 1):
        for name, url in (("ours", ours), ("llama_cpp", theirs)):
            if url:
                asked = {"--clients": clients, "--requests": max(4, clients), "--warm-up": 2}
                rates[name].append(stage_of(url, arguments, asked)["tokens_per_second"])
    found = {name: statistics.median(each) if each else None for name, each in rates.items()}
    ratio = found["ours"] / found["llama_cpp"] if found["ours"] and found["llama_cpp"] else None
    return {"clients": clients, "tokens_per_second": found, "ours_over_llama_cpp": ratio}


@contextmanager
def llama(gguf: Path, arguments: argparse.Namespace) -> Iterator[str]:
    """The address of llama.cpp's server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [arguments.python, "-m", "llama_cpp.server", "--model", gguf, "--host", "127.0.0.1", "--port", port]
    command += [
        "--n_threads",
        arguments.threads,
        "--n_ctx",
        1024,
        "--verbose",
        "False",
        "--interrupt_requests",
        "False",
    ]
    with subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=sys.stderr) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    if time.monotonic() > deadline or process.poll() is not None:
                        raise SystemExit("llama.cpp's server did not start") from None
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
