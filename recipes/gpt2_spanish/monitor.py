"""How busy this machine is, a line every so often until Ctrl-C: processor, memory, GPUs. What cannot be read is -."""

import argparse
import time
from contextlib import suppress

from cuadrilla.cli.output import emit
from cuadrilla.host.usage import Sampler, Usage

GIB = 2**30
FIRST_SECONDS = 0.2
"""The processor's figure is a mean since the sample before."""


def line(usage: Usage) -> str:
    """Of one sample; a GPU that was not asked yet, or does not answer, is not in it."""
    parts = [
        time.strftime("%H:%M:%S"),
        f"CPU {shown(usage.cpu_percent)} %",
        f"RAM {shown(usage.memory_used_bytes, GIB)}/{shown(usage.memory_bytes, GIB)} GiB",
    ]
    for gpu in usage.gpus:
        memory = f"{shown(gpu.memory_used_bytes, GIB)}/{shown(gpu.memory_bytes, GIB)} GiB"
        parts.append(f"GPU {gpu.index} {gpu.name} {shown(gpu.busy_percent)} %, {memory}, "
                     f"{shown(gpu.temperature_celsius)} °C")  # fmt: skip
    return "  ".join(parts)


def shown(value: float | None, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interval", type=float, default=5.0, metavar="SECONDS")
    interval = max(0.1, parser.parse_args().interval)
    sampler = Sampler()
    sampler.sample()
    time.sleep(FIRST_SECONDS)
    while True:
        emit(line(sampler.sample()))
        time.sleep(interval)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
