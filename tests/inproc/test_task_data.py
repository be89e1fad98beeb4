"""The data of a user's task are sent to a node over the crew link: by hash, once, up to a size, and only if the node's
owner trusts the task's code."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cuadrilla.config import Config
from cuadrilla.crew import bundle
from cuadrilla.crew.bundle import fetch, offer
from cuadrilla.errors import DataError, LinkError, TaskError
from cuadrilla.home import Home
from cuadrilla.link.base import Offer, Refused, RunDescription, offered
from cuadrilla.link.client import Connection
from cuadrilla.link.identity import open_coordinator
from cuadrilla.link.nodes import AllowList
from cuadrilla.link.server import CrewServer
from cuadrilla.link.wire import CHUNK_BYTES
from cuadrilla.model.task import load_task
from cuadrilla.runfile import load_dumped, resolve
from tests.commands import task_hash
from tests.crews import join
from tests.hostile import LAYOUT, Heard
from tests.runs import prepare
from tests.tasks import RaggedRegression

TASK = """
import torch
from cuadrilla.model.task import TaskDefaults

class Lines:
    defaults = TaskDefaults(length=1)
    def __init__(self, path):
        self.path = path
    def model(self): return torch.nn.Linear(1, 1)
    def loss(self, model, batch): return (model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"])
    def data(self, split): return []
    def data_hash(self): return self.path.name
    def evaluate(self, model, batches): return {"loss": 0.0}
"""
RUN = """
[task]
kind = "file"
path = "task.py:Lines"
data = "{data}"
[train]
steps = 4
"""
IMAGES = bytes(range(256)) * (3 * CHUNK_BYTES // 256)


class Run:
    """A run whose task reads `digits/`, at a coordinator that nodes can reach."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, list[str]()
        self.run, self.home = folder / "run", Home(folder / "home")
        self.digits = self.run / "digits"
        (self.digits / "train").mkdir(parents=True)
        (self.run / "task.py").write_text(TASK)
        (self.digits / "train" / "images 1.bin").write_bytes(IMAGES)
        (self.digits / "labels.bin").write_bytes(b"0123456789")
        (self.digits / "empty.txt").write_bytes(b"")
        keys, nodes = open_coordinator(folder / "crew"), AllowList(folder / "crew" / "nodes.json")
        self.identity = join(folder / "ana", name="ana", crew=keys, nodes=nodes)
        self.server: CrewServer | None = None

    def config(self, *, data: str = "digits/") -> Config:
        return resolve(RUN.format(data=data)).config

    def opens(self, offered: Offer) -> Connection:
        self.close()
        parts = {"receive": Heard().deliver, "contributions": [LAYOUT]}
        self.server = CrewServer(Home(self.folder), offer=offered, **parts)  # type: ignore[arg-type]
        return Connection(f"127.0.0.1:{self.server.serve('127.0.0.1:0')}", identity=self.identity)

    def joins(self, *, approved: bool = True) -> tuple[Config, Path]:
        """Let a node join and fetch the files that it lacks. Its messages are in `said`."""
        self.said = []
        connection = self.opens(offer(self.config(), self.run))
        return self.fetches(connection, connection.describe(), approved=approved)

    def fetches(
        self, connection: Connection, description: RunDescription, *, approved: bool = True
    ) -> tuple[Config, Path]:
        if approved:
            self.home.trust(task_hash(self.run))
        try:
            return fetch(connection, description, home=self.home, report=self.said.append)
        finally:
            connection.close()

    def close(self) -> None:
        if self.server is not None:
            self.server.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_fetched_once_and_the_task_gets_its_path(run: Run) -> None:
    (run.digits / ".cache").mkdir()
    (run.digits / ".cache" / "private.txt").write_text("stays")
    config, folder = run.joins()
    assert run.said[0] == "fetching 0.0 MB (files: 1)"  # the code comes first
    assert run.said[1] == f"fetching {len(IMAGES) / 1e6:.1f} MB (files: 3)"
    assert config.task.kind == "file"
    task = load_task(config.task.path, folder=folder, data=config.task.data)
    seen: Path = task.path  # type: ignore[attr-defined]
    assert seen.is_absolute()
    expected = files_in(run.digits)
    del expected[".cache/private.txt"]
    assert files_in(seen) == expected
    (run.run / "task.py").write_text(TASK + "# another run, with the same data\n")
    (run.digits / "labels.bin").rename(run.digits / "digits.bin")
    _, other = run.joins()
    assert run.said == ["fetching 0.0 MB (files: 1)"]
    assert other != folder
    assert (other / "data" / "digits.bin").read_bytes() == b"0123456789"
    run.joins()
    assert run.said == []


def test_each_machine_chooses_its_own_device(tmp_path: Path) -> None:
    """The coordinator's choice is only for its own machine."""
    (tmp_path / "task.py").touch()
    sets = ('engine.kind="crew"', 'train.device="auto"', 'train.precision="auto"')
    context = prepare(tmp_path, RaggedRegression(), *sets)
    context.store.close()
    train = load_dumped(offer(context.config, tmp_path).config).train
    assert (train.device, train.precision) == ("auto", "auto")


def test_a_file_keeps_its_name(run: Run) -> None:
    connection = run.opens(offer(run.config(data="digits/labels.bin"), run.run))
    config, folder = run.fetches(connection, connection.describe())
    assert config.task.kind == "file"
    assert config.task.data == "data/labels.bin"
    assert (folder / config.task.data).read_bytes() == b"0123456789"


def test_data_are_fetched_for_code_that_is_trusted_and_need_no_trust(run: Run) -> None:
    with pytest.raises(Refused) as caught:
        run.joins(approved=False)
    approved = task_hash(run.run)
    assert f"--trust {approved}" in caught.value.hint
    assert not list(run.home.cache.rglob("data"))
    run.home.trust(approved)
    run.joins(approved=False)
    (run.digits / "labels.bin").write_bytes(b"9876543210")
    _, folder = run.joins(approved=False)
    assert (folder / "data" / "labels.bin").read_bytes() == b"9876543210"


def test_a_broken_download_goes_on_where_it_stopped(run: Run) -> None:
    connection = run.opens(offer(run.config(), run.run))
    (images,) = [file for file in connection.describe().files if file.num_bytes == len(IMAGES)]
    target = run.folder / "images.bin"

    def breaks(num_bytes: int) -> None:
        if num_bytes:
            raise LinkError("the line is cut")

    with pytest.raises(LinkError, match="the line is cut"):
        connection.fetch(images, to=target, arrived=breaks)
    assert not target.exists()
    arrived: list[int] = []
    connection.fetch(images, to=target, arrived=arrived.append)
    assert arrived[0] == CHUNK_BYTES
    assert sum(arrived) == len(IMAGES)
    assert target.read_bytes() == IMAGES
    connection.close()


def test_a_file_that_has_changed_since_is_refused_and_not_tried_again(run: Run) -> None:
    connection = run.opens(offer(run.config(), run.run))
    description = connection.describe()
    (run.digits / "labels.bin").write_bytes(b"0123456780")
    with pytest.raises(Refused, match=r"data/labels\.bin arrived damaged, or it has changed"):
        run.fetches(connection, description)


def test_an_edited_copy_of_the_code_is_fetched_anew(run: Run) -> None:
    _, folder = run.joins()
    (folder / "code" / "task.py").write_text("print('edited')")
    run.joins()
    assert (folder / "code" / "task.py").read_text() == TASK


# Files that are not sent


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        ("nowhere", DataError, "there is nothing in task.data .*nowhere"),
        (".", DataError, "holds the run itself"),
        ("..", DataError, "holds the run itself"),
        ("hollow", DataError, "there is nothing in task.data"),
        ("named", TaskError, "no machine takes these 2 files of a run: 'data/a:b'"),
    ],
)
def test_data_that_cannot_travel_are_named_before_the_run_begins(
    run: Run, data: str, error: type[Exception], says: str
) -> None:
    for name in ("hollow", "named"):
        (run.run / name).mkdir()
    (run.run / "named" / "a:b").write_text("")
    with pytest.raises(error, match=says):
        offer(run.config(data=data), run.run)


# A coordinator that offers hostile paths


def offered_by(run: Run, *, name: str = "", data: str = "data") -> RunDescription:
    """The description of a run that also offers a file of this name, or names this path as its task's data."""
    usual = offer(run.config(), run.run)
    config = usual.config.replace('"data": "data"', f'"data": "{data}"')
    more = [bundle.OfferedFile(path=name, sha256="00" * 32, num_bytes=1)] if name else []
    return RunDescription(config=config, files=(*offered(usual.files), *more))


NOWHERE = "127.0.0.1:9"


def test_other_names_are_refused_before_anything_is_written(run: Run) -> None:
    for name in (
        "data", "data/", "data/../task.py", "data/./a", "data/.a", "data//a", "data/a/../../b", "/etc/passwd",
        "data\\a", "data/a\nb", "data/C:a", "code/../a.py", "code/a/b.py", "code/a", "task.py",
        ".initial", "teachers/../a", "run.toml",
    ):  # fmt: skip
        with pytest.raises(TaskError, match="no machine takes these"):
            run.fetches(Connection(NOWHERE, identity=run.identity), offered_by(run, name=name))
    assert not run.home.cache.exists()


def test_a_task_is_given_no_other_path_of_the_node(run: Run) -> None:
    for data in ("/etc", "../../joined", "data/../..", "data/not-there"):
        with pytest.raises(TaskError, match="no machine takes these"):
            run.fetches(Connection(NOWHERE, identity=run.identity), offered_by(run, data=data))
