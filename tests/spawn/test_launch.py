"""`cuadrilla launch`: any program as several processes, their output, their ends."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.commands import COMMAND, wait_for

EXAMPLES = Path(__file__).parents[2] / "examples" / "launch"
Launch = Callable[..., "subprocess.Popen[bytes]"]

STUBBORN = """
import os, signal, subprocess, sys, time
from pathlib import Path
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(sys.argv[1], os.environ["RANK"]).write_text(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""
"""A rank with a process of its own, which no signal but SIGKILL ends."""

POLITE = """
import os, signal, sys, time
from pathlib import Path
def heard(number, frame):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, heard)
Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
while True:
    time.sleep(600)
"""
"""A rank that says what it is sent, and ends by SIGTERM only."""


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Starts the command; what the test leaves running is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: object, **options: Any) -> "subprocess.Popen[bytes]":
        command = [*COMMAND, "launch", *map(str, arguments)]
        environ = {**os.environ, "LANGUAGE": "en", "CUDA_VISIBLE_DEVICES": "-1", **options.pop("environ", {})}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        process = subprocess.Popen(command, env=environ, **pipes)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def python(code: str, *arguments: object) -> list[str]:
    return ["--", sys.executable, "-c", code, *map(str, arguments)]


def ends(process: "subprocess.Popen[bytes]") -> tuple[int, bytes, str]:
    """Exit code, standard output, standard error."""
    out, err = process.communicate(timeout=150)
    assert b"Traceback" not in err or b"] Traceback" in err, err
    return process.returncode, out, err.decode(errors="replace")


def pids(folder: Path, number: int) -> list[int]:
    """Of all ranks and what they have started, once all have said so."""
    files = [folder / str(rank) for rank in range(number)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(word) for file in files for word in file.read_text().split()]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # its new parent may never ask
    except psutil.NoSuchProcess:
        return True


# -- what ranks see and say --------------------------------------------------------------------------------------------


def test_each_rank_finds_its_place_and_its_output_is_marked(launch: Launch, tmp_path: Path) -> None:
    show = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'TF_CONFIG')), sep=';')"
    code, out, err = ends(launch("--processes", 3, "--log", tmp_path / "logs", *python(show)))
    assert code == 0, err
    lines = sorted(out.decode().splitlines())
    assert [line[:4] for line in lines] == ["[0] ", "[1] ", "[2] "]
    places = [line[4:].split(";") for line in lines]
    assert [place[:3] for place in places] == [[str(rank), "3", "127.0.0.1"] for rank in range(3)]
    configs = [json.loads(place[3]) for place in places]
    assert [config["task"]["index"] for config in configs] == [0, 1, 2]
    assert len(set(configs[0]["cluster"]["worker"])) == 3
    assert all(config["cluster"] == configs[0]["cluster"] for config in configs)
    for rank, line in enumerate(lines):
        assert (tmp_path / "logs" / f"{rank}.log").read_text() == line[4:] + "\n"


def test_long_lines_and_bytes_that_are_no_text_come_whole(launch: Launch, tmp_path: Path) -> None:
    write = """
import os
long = b"\\xff\\xfe\\x00" + os.environ["RANK"].encode() * 3_000_000 + b"\\r\\n" + b"10%\\r20%\\rno end"
left = memoryview(long)
while left:
    left = left[os.write(1, left):]
os.write(2, b"\\x80 to stderr\\n")
"""
    code, out, err = ends(launch("--processes", 2, "--log", tmp_path, *python(write)))
    assert code == 0, err
    for rank in (b"0", b"1"):
        long, mark = b"\xff\xfe\x00" + rank * 3_000_000 + b"\r\n", b"[" + rank + b"] "
        assert mark + long in out
        for part in (b"10%\r", b"20%\r", b"no end\n"):
            assert mark + part in out
        log = (tmp_path / f"{rank.decode()}.log").read_bytes()
        assert log.replace(b"\x80 to stderr\n", b"") == long + b"10%\r20%\rno end"
    assert len(out) == 2 * (3 + 3_000_000 + 2 + 4 + 4 + 7 + 4 * 4)
    assert err.count("] \ufffd to stderr") == 2


def test_json_is_alone_on_standard_output(launch: Launch) -> None:
    fails = "import os, sys; print('said'); sys.exit(5 * int(os.environ['RANK']))"
    code, out, err = ends(launch("--json", "--processes", 2, *python(fails)))
    assert code == 5
    summary = json.loads(out)
    assert (summary["exit_code"], summary["failed_rank"], summary["world_size"]) == (5, 1, 2)
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    assert summary["error"] == "rank 1 was the first to fail: exit code 5"
    assert "[1] said" in err


def test_nobody_reads_any_more(launch: Launch, tmp_path: Path) -> None:
    chatty = "import os\nwhile True: print('x' * 1000)"
    process = launch("--processes", 2, "--grace", 1, *python(chatty))
    assert process.stdout is not None
    assert process.stdout.read(10)
    process.stdout.close()
    process.stdout = None
    code, _, err = ends(process)
    assert code == 141, err


def test_a_full_disk_ends_all_with_its_reason(launch: Launch, tmp_path: Path, small_disk: Path) -> None:
    chatty = "while True: print('x' * 100000)"
    code, _, err = ends(
        launch("--processes", 2, "--grace", 1, "--log", small_disk, *python(chatty), stdout=subprocess.DEVNULL)
    )
    assert code == 8
    assert "No space left on device" in err


# -- how they end ------------------------------------------------------------------------------------------------------


def test_the_first_that_fails_ends_all_that_was_started(launch: Launch, tmp_path: Path) -> None:
    """The others ignore SIGTERM, and have processes of their own."""
    fails = f"""
import os, sys, time
from pathlib import Path
if os.environ["RANK"] != "2":
    exec({STUBBORN!r})
while len([file for file in Path(sys.argv[1]).glob("?") if file.read_text()]) < 2:
    time.sleep(0.01)
sys.exit(43)
"""
    process = launch("--processes", 3, "--grace", 0.5, *python(fails, tmp_path))
    code, _, err = ends(process)
    assert code == 43
    assert "rank 2 was the first to fail: exit code 43" in err
    assert all(map(gone, pids(tmp_path, 2)))


def test_a_killed_rank_is_named_with_its_signal(launch: Launch, tmp_path: Path) -> None:
    process = launch("--processes", 2, *python(POLITE, tmp_path))
    os.kill(pids(tmp_path, 2)[1], signal.SIGKILL)
    code, out, err = ends(process)
    assert code == 128 + signal.SIGKILL
    assert "rank 1 was the first to fail: signal 9 (Killed)" in err
    assert out == b"[0] SIGTERM\n"


def test_ctrl_c_is_handed_on_once_and_then_sigterm(launch: Launch, tmp_path: Path) -> None:
    process = launch("--processes", 2, "--grace", 1, *python(POLITE, tmp_path))
    pids(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    code, out, err = ends(process)
    assert code == 130
    assert "interrupted" in err
    for rank in range(2):
        said = [line for line in out.decode().splitlines() if line.startswith(f"[{rank}]")]
        assert said == [f"[{rank}] SIGINT", f"[{rank}] SIGTERM"]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_kills(launch: Launch, tmp_path: Path, first: signal.Signals) -> None:
    if signal.getsignal(first) == signal.SIG_IGN:
        pytest.skip(f"whoever started the tests has {first.name} ignored (nohup), and so do their children")
    process = launch("--processes", 2, "--grace", 600, *python(STUBBORN, tmp_path))
    started = pids(tmp_path, 2)
    process.send_signal(first)
    time.sleep(0.2)  # two signals of one number at once are one
    process.send_signal(signal.SIGINT)
    code, _, _ = ends(process)
    assert code == 130
    assert all(map(gone, started))


def test_nothing_stays_when_the_launcher_is_killed(launch: Launch, tmp_path: Path) -> None:
    process = launch("--processes", 2, "--grace", 0.5, *python(STUBBORN, tmp_path))
    started = pids(tmp_path, 2)
    process.kill()
    process.wait()
    wait_for(lambda: all(map(gone, started)))


def test_without_the_keeper_nothing_goes_on(launch: Launch, tmp_path: Path) -> None:
    process = launch("--processes", 2, "--grace", 1, *python(POLITE, tmp_path))
    started = pids(tmp_path, 2)
    (keeper,) = [child for child in psutil.Process(process.pid).children() if child.pid not in started]
    keeper.kill()
    code, _, err = ends(process)
    assert code == 3
    assert "the process that keeps the ranks together was killed" in err
    assert all(map(gone, started))


def test_what_a_rank_leaves_behind_is_ended(launch: Launch, tmp_path: Path) -> None:
    """The rank itself has ended well."""
    leaves = "import subprocess, sys; from pathlib import Path; " \
        "p = subprocess.Popen(['sleep', '600']); Path(sys.argv[1], '0').write_text(str(p.pid))"  # fmt: skip
    code, _, err = ends(launch("--grace", 0.5, *python(leaves, tmp_path)))
    assert code == 0, err
    assert "the ranks have left 1 processes" in err
    assert all(map(gone, pids(tmp_path, 1)))


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--", "no-such-program-anywhere"), 2, "cannot start no-such-program-anywhere: No such file or directory"),
        (("--", "/"), 2, "cannot start /: Permission denied"),
        (("--processes", "0", "--", "true"), 2, "--processes '0' is no number"),
        (("--processes", "1", "--hosts", "8.8.8.8,192.168.1.2", "--", "true"), 3, "8.8.8.8 is a public address"),
        (("--processes", "1", "--hosts", "240.0.0.1,240.0.0.2", "--", "true"), 2, "names 0 addresses of this machine"),
        (("--hosts", "127.0.0.1,10.9.8.7", "--", "true"), 2, "--hosts needs --processes"),
        (("--processes", "2", "--master-port", "65535", "--", "true"), 2, "leaves no ports"),
        (("--log", "/dev/null/logs", "--", "true"), 8, "cannot write /dev/null/logs/0.log: Not a directory"),
        ((), 2, "Missing argument"),
    ],
)
def test_what_cannot_be_is_refused(launch: Launch, arguments: tuple[str, ...], code: int, said: str) -> None:
    found, _, err = ends(launch(*arguments))
    assert found == code, err
    assert said in err


# -- the examples ------------------------------------------------------------------------------------------------------


def trained(launch: Launch, interpreter: str, script: str, environ: dict[str, str] | None = None) -> list[str]:
    """The lines of standard output."""
    code, out, err = ends(launch("--processes", 2, "--", interpreter, EXAMPLES / script, environ=environ or {}))
    assert code == 0, err
    return out.decode().splitlines()


def other_python(variable: str, library: str) -> str:
    found = os.environ.get(variable)
    if not found and importlib.util.find_spec(library.partition(" ")[0]) is not None:
        return sys.executable
    if not found:
        pytest.skip(f"{variable} is not set: the Python of an environment with {library}")
    return found


@pytest.mark.thorough
def test_the_example_with_torch(launch: Launch) -> None:
    lines = trained(launch, sys.executable, "torch_ddp.py")
    assert "[0] 2 processes, weights differ by 0" in lines
    losses = [float(line.split()[-1]) for line in lines if "step 200/200" in line]
    assert len(losses) == 2
    assert max(losses) < 0.1  # 0.44 for a model that always says 0


@pytest.mark.thorough
def test_the_example_with_accelerate(launch: Launch) -> None:
    interpreter = other_python("CUADRILLA_ACCELERATE_PYTHON", "accelerate and torch")
    lines = trained(launch, interpreter, "with_accelerate.py")
    assert "[0] 2 processes, MULTI_CPU" in lines
    assert len([line for line in lines if "epoch 4/4  32 batches here" in line]) == 2


@pytest.mark.thorough
def test_the_example_with_tensorflow(launch: Launch) -> None:
    interpreter = other_python("CUADRILLA_TENSORFLOW_PYTHON", "tensorflow-cpu")
    lines = trained(launch, interpreter, "with_tensorflow.py")
    ends_with = {line[4:] for line in lines if line[4:].startswith("2 processes, weights sum to")}
    assert len(ends_with) == 1, lines
    assert len([line for line in lines if "epoch 4/4  32 steps" in line]) == 2
