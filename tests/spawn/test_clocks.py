"""Wall clocks that lie: a day behind, a day ahead, jumping during the run, back to 1970; the bits are one worker's."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuadrilla.rundir import last_rows, read_jsonl
from tests.commands import goes_on, make_run, train, wait_for
from tests.machines import Machine, invite, present, up
from tests.runs import final_sha256

pytestmark = pytest.mark.thorough

DAY = 26 * 3600
BEFORE = {"behind": -DAY, "ahead": DAY, "right": 0}
AFTER = {"behind": DAY, "ahead": -DAY, "right": -int(time.time()), "coordinator": DAY}

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *offset;  /* seconds, in a file: it may change while the process runs */

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_OFFSET_FILE"), O_RDONLY);
    offset = mmap(0, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    close(file);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
    return failed;
}
time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
long syscall(long number, ...) {  /* gRPC waits in the kernel until a moment of this clock */
    static long (*real)(long, ...);
    if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    va_list rest;
    va_start(rest, number);
    long a = va_arg(rest, long), op = va_arg(rest, long), c = va_arg(rest, long), until = va_arg(rest, long);
    long e = va_arg(rest, long), f = va_arg(rest, long);
    va_end(rest);
    struct timespec moment;
    if (number == SYS_futex && (op & FUTEX_CLOCK_REALTIME) && until && offset) {
        moment = *(struct timespec *)until;
        moment.tv_sec -= *offset;
        until = (long)&moment;
    }
    return real(number, a, op, c, until, e, f);
}
"""


@pytest.fixture
def clock(tmp_path: Path) -> Path:
    """A library that moves a process's wall clock; the monotonic one stays as it is."""
    if os.uname().sysname != "Linux" or shutil.which("cc") is None:
        pytest.skip("needs Linux and a C compiler (cc) to move a process's clock")
    (tmp_path / "clock.c").write_text(CLOCK)
    command = ["cc", "-shared", "-fPIC", "-O", "-o", str(tmp_path / "clock.so"), str(tmp_path / "clock.c"), "-ldl"]
    subprocess.run(command, check=True)
    return tmp_path / "clock.so"


def set_clock(file: Path, seconds: int) -> None:
    with open(file, "r+b" if file.exists() else "wb") as offset:
        offset.write(seconds.to_bytes(8, "little", signed=True))


@pytest.fixture
def machines(tmp_path: Path, clock: Path) -> Iterator[dict[str, Machine]]:
    made = {}
    for name in ("coordinator", *BEFORE):
        file = tmp_path / f"{name}.offset"
        set_clock(file, 0)
        made[name] = Machine(tmp_path / name, prefix=("env", f"LD_PRELOAD={clock}", f"CLOCK_OFFSET_FILE={file}"))
    yield made
    for machine in made.values():
        machine.stop()


def test_wall_clocks_decide_nothing(machines: dict[str, Machine], tmp_path: Path) -> None:
    """The workers' clocks are wrong from the start and jump during the run; so does the coordinator's."""
    run, alone = make_run(tmp_path / "run"), make_run(tmp_path / "alone")
    for each in (run, alone):
        each.run_file.write_text(each.run_file.read_text() + "[sync]\nstrict = true\n")
    for name, offset in BEFORE.items():
        set_clock(tmp_path / f"{name}.offset", offset)
    coordinator = machines["coordinator"]
    crew = up(coordinator, run, 0)
    text = invite(coordinator, "--uses", "3")
    workers = []
    for name in BEFORE:
        refused = machines[name].run("join", "--name", name, says=text).stderr
        assert "cuadrilla join --trust" in refused, f"{name}: {refused}"
        trusted = refused.split("cuadrilla join --trust ")[1].split()[0]
        assert machines[name].run("join", "--trust", trusted).returncode == 0
        workers.append(machines[name].start("join"))
    wait_for(lambda: present(run) == set(BEFORE), crew)
    for name, offset in AFTER.items():
        set_clock(tmp_path / f"{name}.offset", offset)
    wait_for(goes_on(run, steps=50), crew)
    assert coordinator.run("stop").returncode == 0
    said = crew.communicate(timeout=150)[1]
    assert crew.returncode == 130, said
    assert [worker.wait(timeout=150) for worker in workers] == [0, 0, 0]
    assert not [row for row in read_jsonl(run.events) if row["event"] == "evicted"]
    assert all(row["seconds"] >= 0 for row in last_rows(run.metrics))
    assert train(alone, "--stop-at", str(last_rows(run.metrics)[-1]["version"])).returncode == 0
    assert final_sha256(run.path) == final_sha256(alone.path)
