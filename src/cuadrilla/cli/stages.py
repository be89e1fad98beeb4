"""How far long work on data is: a bar on a terminal, a line for each stage elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cuadrilla.cli.output import say, stderr
from cuadrilla.data import sources
from cuadrilla.messages import Message, language, shown
from cuadrilla.printable import one_line

STAGES = (
    Message("cleaning"),
    Message("looking for near-duplicates"),
    Message("training the tokenizer"),
    Message("writing tokens"),
)
"""Stages of a preparation: they come as plain texts."""


@contextmanager
def shown_progress() -> Iterator[sources.Progress]:
    """What is to be called with each step."""
    if not stderr.is_terminal:
        seen: set[str] = set()

        def line(stage: str, _done: int, _total: int) -> None:
            if stage not in seen:
                seen.add(stage)
                say(Message(stage))

        yield line
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def bar(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for task in tasks.values():
                    bars.stop_task(task)
                tasks[stage] = bars.add_task(one_line(shown(Message(stage), language())))
            bars.update(tasks[stage], completed=done, total=total or None)

        yield bar
