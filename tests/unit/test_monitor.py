"""`cuadrilla monitor` of this machine, one sample: as lines, as JSON."""

import json
from pathlib import Path

from cuadrilla.host.usage import Usage
from tests.inside import cuadrilla


def test_this_machine_once(tmp_path: Path) -> None:
    done = cuadrilla("monitor", "--once", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].startswith("CPU ")
    assert "\x1b" not in done.stdout
    (line,) = cuadrilla("monitor", "--once", "--json", cwd=tmp_path).stdout.splitlines()
    told = json.loads(line)
    assert set(told) == {"time", "machine", "processor", "gpus_silent", *Usage.__dataclass_fields__}
    assert 0 <= told["cpu_percent"] <= 100
    assert told["disk_bytes"] > 0
