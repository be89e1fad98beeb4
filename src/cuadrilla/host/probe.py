"""Asking torch and NVML about devices, each in a child process with a time limit.

Drivers hang, crash with a signal (NVML on WSL2: microsoft/WSL#11277) and print rubbish. A child therefore prints one
JSON object per line as it goes; `ask` never raises, and what a child said before it died is kept. Output goes to
temporary files, not pipes: a grandchild that keeps a pipe open cannot hold us up.

`python -m cuadrilla.host.probe torch` (or `nvml`) is the child.
"""

import contextlib
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal

from cuadrilla.messages import Message

Row = Mapping[str, Any]

MAX_OUTPUT_BYTES = 1 << 20
POLL_SECONDS = 0.05
SPEED_SECONDS = 0.1
REAP_SECONDS = 2.0  # a child stuck inside a driver may not die at once; then it is left to the system


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


def child_argv(what: Literal["torch", "nvml"]) -> list[str]:
    """-P: a file torch.py or json.py in the user's folder must not shadow the real one."""
    return [sys.executable, "-P", "-m", "cuadrilla.host.probe", what]


def ask(argvs: Sequence[Sequence[str]], *, timeout_seconds: float) -> list[ProbeAnswer]:
    """Run the children at the same time and return what each said. Never raises."""
    deadline = time.monotonic() + timeout_seconds
    try:
        with contextlib.ExitStack() as stack:
            outputs = [
                (stack.enter_context(tempfile.TemporaryFile()), stack.enter_context(tempfile.TemporaryFile()))
                for _ in argvs
            ]
            started = [_start(argv, *files) for argv, files in zip(argvs, outputs, strict=True)]
            return [
                _finish(process, *files, deadline=deadline, timeout_seconds=timeout_seconds)
                for process, files in zip(started, outputs, strict=True)
            ]
    except OSError as error:  # no room for a temporary file
        return [_unasked(error) for _ in argvs]


def output_of(argv: Sequence[str], *, timeout_seconds: float) -> str | None:
    """What a program printed, or None if it failed or did not end in time. Never raises, never waits longer.

    Not `subprocess.run`: after its timeout that waits for the killed program, for ever if a driver holds it.
    """
    try:
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            process = _start(argv, stdout, stderr)
            if isinstance(process, OSError):
                return None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=timeout_seconds)
            finally:  # Ctrl-C does not reach it: it is in a group of its own
                kill(process)
            return _read(stdout) if process.returncode == 0 else None
    except OSError:
        return None


def _start(argv: Sequence[str], stdout: IO[bytes], stderr: IO[bytes]) -> subprocess.Popen[bytes] | OSError:
    """The child in its own process group, so that killing reaches what it started."""
    try:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            start_new_session=os.name == "posix",
        )
    except OSError as error:
        return error


def _finish(
    process: subprocess.Popen[bytes] | OSError,
    stdout: IO[bytes],
    stderr: IO[bytes],
    *,
    deadline: float,
    timeout_seconds: float,
) -> ProbeAnswer:
    """Wait for a child, kill it at the limit, read what it said."""
    if isinstance(process, OSError):
        return _unasked(process)
    too_much = False
    while process.poll() is None and time.monotonic() < deadline and not too_much:
        too_much = os.fstat(stdout.fileno()).st_size > MAX_OUTPUT_BYTES
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=POLL_SECONDS)
    timed_out = process.poll() is None and not too_much
    kill(process)
    rows, garbage = parse_rows(_read(stdout))
    if rows and rows[-1].get("stage") == "end":  # a crash after that, in a driver's own clean-up, changes nothing
        return ProbeAnswer(rows=tuple(rows))
    if too_much:
        fault = Message("printed more than {bytes} bytes", bytes=MAX_OUTPUT_BYTES)
    elif timed_out:
        fault = Message("did not answer within {seconds:g} s", seconds=timeout_seconds)
    else:
        fault = describe_exit(process.returncode, stderr=_read(stderr), garbage=garbage)
    return ProbeAnswer(rows=tuple(rows), fault=fault, timed_out=timed_out)


def _unasked(error: OSError) -> ProbeAnswer:
    return ProbeAnswer(fault=Message("could not be queried: {reason}", reason=error.strerror or error))


def kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    with contextlib.suppress(OSError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=REAP_SECONDS)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_OUTPUT_BYTES).decode(errors="replace")


def parse_rows(text: str) -> tuple[list[Row], str]:
    """The JSON objects of a child's output, and the first line that is none. Noise between them is allowed."""
    rows: list[Row] = []
    garbage = ""
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif line.strip() and not garbage:
            garbage = line.strip()
    return rows, garbage


def describe_exit(code: int | None, *, stderr: str, garbage: str) -> Message:
    """Why a child that is over did not finish its answer."""
    said = stderr.strip().splitlines()
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return Message("was killed by {signal}", signal=signal.Signals(-code).name)
        return Message("was killed by signal {number}", number=-code)
    if code:
        shown = f"0x{code:08X}" if code > 0xFFFF else str(code)  # Windows: 0xC0000005 is an access violation
        if not said:
            return Message("failed with exit code {code}", code=shown)
        return Message("failed with exit code {code}: {said}", code=shown, said=said[-1][:200])
    if not garbage:
        return Message("gave no complete answer")
    return Message("gave an answer that cannot be read: {answer!r}", answer=garbage[:80])


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


def tell_nvml() -> None:
    """The child that asks NVIDIA's management library; a machine without it has nothing to tell."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return
    except nvml.NVMLError as error:
        # No library or no driver is an ordinary machine; anything else is a sick one.
        if error.value not in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
            _emit("problem", error=_first_line(error))
        return
    known: Any = nvml.NVMLError

    def optional(name: str, *arguments: Any) -> Any:
        """A query's answer, or None: on WSL2 and in containers many are "not supported"."""
        try:
            value = getattr(nvml, name)(*arguments)
        except known:
            return None
        return value.decode(errors="replace") if isinstance(value, bytes) else value

    _emit("driver", driver=optional("nvmlSystemGetDriverVersion"))
    for index in range(optional("nvmlDeviceGetCount") or 0):
        card = optional("nvmlDeviceGetHandleByIndex", index)
        memory = optional("nvmlDeviceGetMemoryInfo", card) if card is not None else None
        _emit(
            "card",
            index=index,
            name=optional("nvmlDeviceGetName", card),
            uuid=optional("nvmlDeviceGetUUID", card),
            capability=optional("nvmlDeviceGetCudaComputeCapability", card),
            memory_bytes=getattr(memory, "total", None),
            free_bytes=getattr(memory, "free", None),
        )


if __name__ == "__main__":
    tell_torch() if sys.argv[1:] == ["torch"] else tell_nvml()
    _emit("end")
