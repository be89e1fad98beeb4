"""Asking torch about devices, in a child process with a time limit.

Drivers hang, crash with a signal and print rubbish. The child therefore prints one JSON object per line as it goes;
`ask` never raises, and what a child said before it died is kept.

`python -m cuadrilla.host.probe` is the child.
"""

import contextlib
import importlib
import json
import math
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cuadrilla.host.programs import MAX_OUTPUT_BYTES, run
from cuadrilla.messages import Message

Row = Mapping[str, Any]

SPEED_SECONDS = 0.1
CHILD = (sys.executable, "-P", "-m", "cuadrilla.host.probe")
"""-P: a file torch.py or json.py in the user's folder must not shadow the real one."""


@dataclass(frozen=True, kw_only=True)
class ProbeAnswer:
    """What a child said, line by line, and how it failed if it did not reach its end."""

    rows: tuple[Row, ...] = ()
    fault: str | None = None
    timed_out: bool = False

    def first(self, stage: str) -> Row:
        return next(iter(self.all(stage)), {})

    def all(self, stage: str) -> list[Row]:
        return [row for row in self.rows if row.get("stage") == stage]


def ask(argv: Sequence[str] = CHILD, *, seconds: float) -> ProbeAnswer:
    """What a child said. Never raises."""
    said = run(argv, seconds=seconds)
    if said is None:
        return ProbeAnswer(fault=Message("could not be queried"))
    rows, garbage = parse_rows(said.text)
    if rows and rows[-1].get("stage") == "end":  # a crash after that, in a driver's own clean-up, changes nothing
        return ProbeAnswer(rows=tuple(rows))
    if said.code is not None:
        return ProbeAnswer(rows=tuple(rows), fault=describe_exit(said.code, garbage=garbage))
    if len(said.text) > MAX_OUTPUT_BYTES // 2:
        return ProbeAnswer(rows=tuple(rows), fault=Message("printed more than {bytes} bytes", bytes=MAX_OUTPUT_BYTES))
    fault = Message("did not answer within {seconds:g} s", seconds=seconds)
    return ProbeAnswer(rows=tuple(rows), fault=fault, timed_out=True)


def parse_rows(text: str) -> tuple[list[Row], list[str]]:
    """The JSON objects of a child's output, and the lines that are none. Noise between them is allowed."""
    rows: list[Row] = []
    garbage = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif line.strip():
            garbage.append(line.strip())
    return rows, garbage


def describe_exit(code: int, *, garbage: Sequence[str]) -> Message:
    """Why a child that is over did not finish its answer. `garbage`: what it said beside it."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return Message("was killed by {signal}", signal=signal.Signals(-code).name)
        return Message("was killed by signal {number}", number=-code)
    if code:
        shown = f"0x{code:08X}" if code > 0xFFFF else str(code)  # Windows: 0xC0000005 is an access violation
        if not garbage:
            return Message("failed with exit code {code}", code=shown)
        return Message("failed with exit code {code}: {said}", code=shown, said=garbage[-1][:200])
    if not garbage:
        return Message("gave no complete answer")
    return Message("gave an answer that cannot be read: {answer!r}", answer=garbage[0][:80])


def _emit(stage: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"stage": stage, **fields}) + "\n")
    sys.stdout.flush()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def tell_torch() -> None:
    """The child that imports torch and tries every accelerator it sees."""
    try:
        # By name: no module of this layer imports torch, and only a child process runs this line.
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library is missing or broken
        _emit("torch", error=_first_line(error))
        return
    _emit("torch", version=str(torch.__version__), cuda=torch.version.cuda, hip=torch.version.hip)
    for kind, available, describe in (
        ("cuda", torch.cuda.is_available, _cuda_devices),
        ("mps", torch.backends.mps.is_available, _mps_devices),
        ("xpu", torch.xpu.is_available, _xpu_devices),
    ):
        _emit("begin", kind=kind)
        try:
            for index, fields in enumerate(describe(torch) if available() else ()):
                _emit("device", kind=kind, index=index, **fields)
                _emit("tested", kind=kind, index=index, **_try_out(torch, f"{kind}:{index}"))
        except (RuntimeError, AssertionError, OSError) as error:
            _emit("problem", kind=kind, error=_first_line(error))
    _emit("tested", kind="cpu", index=0, **_try_out(torch, "cpu"))


def _try_out(torch: Any, device: str) -> dict[str, Any]:
    """One small computation and its gradient, the only proof that a device works; and how fast it multiplies."""
    try:
        x = torch.ones(8, 8, device=device, requires_grad=True)
        (x @ x).sum().backward()
        total = float(x.grad.sum())
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return {"error": _first_line(error)}
    if total != 1024.0:
        return {"error": f"it computes wrongly: {total} instead of 1024"}
    return {"error": None, "gflops": max(_gflops(torch, device, dtype) for dtype in ("float32", "bfloat16"))}


def _gflops(torch: Any, device: str, dtype: str) -> float:
    """Thousand millions of operations a second in products of matrices; 0 for arithmetic that the device lacks."""
    size = 512 if device == "cpu" else 2048
    try:
        x = torch.ones(size, size, device=device, dtype=getattr(torch, dtype))
        fastest, end = math.inf, time.monotonic() + SPEED_SECONDS
        while time.monotonic() < end:  # the first ones wake the device up
            began = time.monotonic()
            float((x @ x)[0, 0])  # to be read it must have been computed
            fastest = min(fastest, time.monotonic() - began)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError):
        return 0.0
    return round(2 * size**3 / fastest / 1e9, 1)


def _cuda_devices(torch: Any) -> Iterator[dict[str, Any]]:
    arches = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        yield {
            "name": about.name,
            "memory_bytes": about.total_memory,
            "free_bytes": torch.cuda.mem_get_info(index)[0],
            "capability": None if torch.version.hip else [about.major, about.minor],
            "arches": arches,
            "uuid": str(getattr(about, "uuid", "")),
        }


def _mps_devices(torch: Any) -> Iterator[dict[str, Any]]:
    limit = torch.mps.recommended_max_memory()
    yield {"name": None, "memory_bytes": limit, "free_bytes": limit - torch.mps.driver_allocated_memory()}


def _xpu_devices(torch: Any) -> Iterator[dict[str, Any]]:
    for index in range(torch.xpu.device_count()):
        about = torch.xpu.get_device_properties(index)
        yield {"name": about.name, "memory_bytes": about.total_memory, "driver": about.driver_version}


if __name__ == "__main__":
    tell_torch()
    _emit("end")
