"""Progress of a training (a sink) and of work on data: a live bar on a terminal, plain lines elsewhere."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cuadrilla.cli.output import say, stderr
from cuadrilla.data import sources
from cuadrilla.messages import Message, language, shown
from cuadrilla.monitor.screen import duration
from cuadrilla.printable import one_line
from cuadrilla.train.sinks import Scalars, Sink

LINE_SECONDS = 10.0
PATIENCE_SECONDS = 3.0
SAMPLE_CHARACTERS = 160
WIDE, SPEED_SECONDS = 100, 600
"""A terminal of this many columns has room for all numbers in a line. The bar averages its speed over these seconds."""


class ProgressSink(Sink):
    """Shows the rows of a run of `total_versions` steps. `done`: the steps made before this start."""

    def __init__(
        self,
        *,
        total_versions: int,
        done: int,
        counted: str = "tokens",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._counted, self._clock = total_versions, counted, clock
        self._begun = clock(), float(done)
        """When this start's first step began, and how many steps were done then."""
        self._step_began: float | None = None  # until a worker is heard
        self._last_line, self._evaluation = -1e9, ""
        self._bar = Progress(
            TextColumn(f"{shown(Message('step'), language())} {{task.completed:.0f}}/{{task.total:.0f}}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=stderr,
            refresh_per_second=4,
            speed_estimate_period=SPEED_SECONDS,
            disable=not stderr.is_terminal,
        )
        self._task = self._bar.add_task("train", total=total_versions, completed=done, numbers="")
        self._bar.start()

    def log(self, step: int, scalars: Scalars) -> None:
        self._step_began = self._clock()
        is_narrow = stderr.is_terminal and stderr.width < WIDE
        if "val_loss" in scalars:
            self._evaluation = describe_evaluation(scalars, short=is_narrow)
        numbers = Message(
            "loss {loss:.3f} {evaluation} {speed:,.0f}/s"
            if is_narrow
            else "loss {loss:.3f} {evaluation} {speed:,.0f} {counted}/s",
            loss=_number(scalars, "loss"),
            evaluation=self._evaluation,
            speed=_number(scalars, "tokens_per_second"),
            counted=self._counted,
        )
        self._show(step, numbers, at_once=step == self._total or "val_loss" in scalars)
        if sample := str(scalars.get("sample", "")).replace("\n", " ")[:SAMPLE_CHARACTERS]:
            stderr.tell(Message("step {step} «{sample}»", step=step, sample=sample), style="dim")

    def working(self, step: int, part: float) -> None:
        """Show a step that takes long before it is done."""
        now, done = self._clock(), step - 1 + part
        if self._step_began is None:  # the time before was the workers' start
            self._step_began, self._begun = now, (now, done)
        seconds = now - self._step_began
        if seconds >= PATIENCE_SECONDS and self._begun[1] < done < step:
            self._show(done, Message("{part:.0%} done in {seconds:.0f} s", part=part, seconds=seconds))

    def _show(self, done: float, numbers: Message, *, at_once: bool = False) -> None:
        """Show how far the run is, in steps, and the time that it will take."""
        now, step, (began, before) = self._clock(), math.ceil(done), self._begun
        eta = duration((now - began) / max(done - before, 1e-9) * (self._total - done))
        if stderr.is_terminal:
            if done < step:  # the bar itself knows whole steps only
                numbers = Message("{numbers}  ETA {eta}", numbers=numbers, eta=eta)
            self._bar.update(self._task, completed=math.floor(done), numbers=shown(numbers, language()))
        elif at_once or now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            template = "step {step}/{total}  {numbers}  ETA {eta}"
            stderr.tell(Message(template, step=step, total=self._total, numbers=numbers, eta=eta))

    def close(self) -> None:
        with suppress(OSError):
            self._bar.stop()


def describe_evaluation(row: Scalars, *, short: bool = False) -> Message:
    """The held-out measures of a row in a few words; `short`: without their uncertainty."""
    if "val_bits_per_byte" in row:
        bits, error = _number(row, "val_bits_per_byte"), row.get("val_bits_per_byte_error")
        if isinstance(error, float) and not short:
            return Message("held-out {bits:.3f} ± {error:.3f} bits/byte", bits=bits, error=error)
        return Message("held-out {bits:.3f} bits/byte", bits=bits)
    return Message("held-out loss {loss:.3f}", loss=_number(row, "val_loss"))


def _number(row: Scalars, key: str) -> float:
    value: Any = row.get(key, float("nan"))
    return float(value)


@contextmanager
def shown_progress() -> Iterator[sources.Progress]:
    """Gives the function to call with a stage, the work done and all of it."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for task in tasks.values():
                    bars.stop_task(task)
                tasks[stage] = bars.add_task(one_line(shown(Message(stage), language())))
                if bars.disable:
                    say(stage)
            bars.update(tasks[stage], completed=done, total=total or None)

        yield show
