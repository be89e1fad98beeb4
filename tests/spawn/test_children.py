"""Processes that this one starts, and what they say last."""

import os
import sys
from pathlib import Path

from cuadrilla.crew.children import Children
from tests.commands import wait_for

LEAVES_A_PROCESS = """
import os, sys, time
if os.fork() == 0:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
else:
    print("done", flush=True)
"""


def test_who_leaves_a_process_behind_is_not_waited_for(tmp_path: Path) -> None:
    """It has the pipe of the answer, too."""
    enough, ended = tmp_path / "enough", {}
    children = Children(died=lambda name, reason: None)
    children.start("ana", [sys.executable, "-c", LEAVES_A_PROCESS, str(enough)], environment=os.environ)
    wait_for(lambda: ended.update(children.poll()) or bool(ended))
    enough.touch()
    assert (ended, children.last_words["ana"].strip()) == ({"ana": 0}, "done")
