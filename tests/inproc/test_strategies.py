"""The shared battery: properties of every strategy at its exact setting, over the crew link."""

from collections import defaultdict
from pathlib import Path

import pytest

from cuadrilla.link.base import Contribution, Link, TensorRef, Tensors, ToCoordinator
from cuadrilla.rundir import RunDir, read_jsonl
from cuadrilla.sync.kinds import Strategy, exact, windows
from cuadrilla.sync.work import Round, Rounds, Work
from cuadrilla.train.checkpoint import tensors_sha256
from tests.faults import PHASES, FaultyLink, Phase, Script, play
from tests.runs import UNEQUAL, execute, final, final_sha256, metrics, relative_difference, workers
from tests.tasks import RaggedRegression


class Alternating(Strategy):
    """Exact rounds and windows of four steps in turn, regardless of their time."""

    def rounds(self) -> Rounds:
        return AlternatingRounds()


class AlternatingRounds(Rounds):
    def choose(self, work: Work) -> Round:
        return Round(steps=1 if work.version % 5 in (0, 1, 2) else 4)


GRADIENT_STEPS = ('optim.kind="sgd"', "optim.momentum=0.0", "train.clip_norm=0.0")
"""With these settings the mean of weights after one step is the same as a step with the mean gradient."""
LANES = [0.5, 1.0, 0.25]
STRICT = ("strict", "strict windows", "strict windows of many steps")
STRATEGIES: dict[str, Strategy] = {
    "exact": exact(),
    "strict": exact(strict=True),
    "windows": windows(steps=1, bits=32),
    "strict windows": windows(steps=1, bits=32, lanes=LANES),
}
MANY_STEPS: dict[str, Strategy] = {
    "windows of many steps": windows(steps=4),
    "strict windows of many steps": windows(steps=4, lanes=LANES),
    "exact steps and windows": Alternating(kind="auto"),
}
ALL = STRATEGIES | MANY_STEPS
ROUNDING = 1e-6
like_one_worker = pytest.mark.parametrize("name", [*STRATEGIES, "strict windows of many steps"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one worker with plain gradient steps: the exact strategy, and each strict one."""
    folder = tmp_path_factory.mktemp("alone")
    for name in ("exact", *STRICT):
        execute(folder / name, RaggedRegression(), *GRADIENT_STEPS, strategy=ALL[name])
    return folder


def is_what_one_worker_gives(folder: Path, alone: Path, name: str) -> bool:
    """Whether the weights are those of one worker: bit by bit if strict, else up to rounding (if a step is a round)."""
    if name in STRICT and final_sha256(folder) != final_sha256(alone / name):
        return False
    return name in MANY_STEPS or relative_difference(final(folder), final(alone / "exact")) <= ROUNDING


@like_one_worker
@pytest.mark.parametrize("crew", UNEQUAL)
def test_unequal_workers_equal_one_worker(tmp_path: Path, alone: Path, name: str, crew: str) -> None:
    execute(tmp_path, RaggedRegression(), *GRADIENT_STEPS, workers(UNEQUAL[crew]), strategy=ALL[name])
    assert is_what_one_worker_gives(tmp_path, alone, name)
    one = name if name in MANY_STEPS else "exact"
    losses = [[row["loss"] for row in metrics(folder)] for folder in (tmp_path, alone / one)]
    assert losses[0] == pytest.approx(losses[1], rel=10 * ROUNDING)


@like_one_worker
@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_lost_at_any_phase_changes_nothing(tmp_path: Path, alone: Path, name: str, phase: Phase) -> None:
    wrap, played = play(Script(worker="worker-2", at=None, phase=phase))  # a slow worker may never see a given version
    crew = workers([1.0, 1.0, 1.0])
    execute(tmp_path, RaggedRegression(), *GRADIENT_STEPS, crew, strategy=ALL[name], wrap_link=wrap)
    assert played
    assert is_what_one_worker_gives(tmp_path, alone, name)
    left = [row["worker"] for row in read_jsonl(RunDir(tmp_path).events) if row["event"] == "left"]
    assert name in MANY_STEPS or left == ([] if phase == "hello" else ["worker-2"])  # it had not joined


@pytest.mark.parametrize("name", ALL)
def test_run_8_equals_run_3_and_resume_5(tmp_path: Path, name: str) -> None:
    """Equal are the weights and every loss, also with several steps in a lease."""
    strategy = ALL[name]
    execute(tmp_path / "whole", RaggedRegression(), *GRADIENT_STEPS, strategy=strategy)
    execute(tmp_path / "parts", RaggedRegression(), *GRADIENT_STEPS, strategy=strategy, stop_at=3)
    execute(tmp_path / "parts", RaggedRegression(), *GRADIENT_STEPS, strategy=strategy)
    assert final_sha256(tmp_path / "parts") == final_sha256(tmp_path / "whole")
    whole, parts = ([row["loss"] for row in metrics(tmp_path / name)] for name in ("whole", "parts"))
    assert parts == whole


class Listening:
    """A `wrap_link` that records the weights from which each answer was computed that went into a version.

    Other answers do not count: threads share the weights of record, and a late one may read while they change.
    """

    def __init__(self) -> None:
        self.read: dict[int, tuple[int, str]] = {}

    def weights(self, folder: Path) -> dict[int, set[str]]:
        """SHA-256s of these weights by version, for the run in this folder."""
        found: dict[int, set[str]] = defaultdict(set)
        discarded = {row["lease"] for row in read_jsonl(RunDir(folder).events) if row["event"] == "discarded"}
        for version, sha256 in (each for lease, each in self.read.items() if lease not in discarded):
            found[version].add(sha256)
        return found

    def __call__(self, worker: str, link: Link) -> Link:
        del worker
        return _Ear(link, self)


class _Ear(FaultyLink):
    def __init__(self, link: Link, heard: Listening) -> None:
        super().__init__("", link, [], [])
        self._heard, self._held = heard, ""

    def call(self, message: ToCoordinator) -> None:
        if isinstance(message, Contribution):
            self._heard.read[message.lease_id] = self._version, self._held
        super().call(message)

    def download(self, ref: TensorRef) -> Tensors:
        held = super().download(ref)
        self._held = tensors_sha256(held)
        return held


@pytest.mark.parametrize("name", STRATEGIES)
def test_all_members_hold_the_same_bits(tmp_path: Path, name: str) -> None:
    heard = Listening()
    crew = workers([1.0, 0.5, 0.25])
    execute(tmp_path, RaggedRegression(), *GRADIENT_STEPS, crew, strategy=ALL[name], wrap_link=heard)
    weights = heard.weights(tmp_path)
    assert len(weights) > 5
    assert all(len(hashes) == 1 for hashes in weights.values())


@pytest.mark.parametrize("phase", PHASES)
def test_kinds_of_rounds_change_though_a_worker_is_lost(tmp_path: Path, phase: Phase) -> None:
    """With AdamW, whose state passes between the kinds. All workers compute a version from the same weights."""
    heard, (wrap, played) = Listening(), play(Script(worker="worker-2", at=None, phase=phase))

    def both(worker: str, link: Link) -> Link:
        return heard(worker, wrap(worker, link))

    sets = ('optim.kind="adamw"', "train.steps=24", workers([1.0, 1.0, 1.0]))
    execute(tmp_path, RaggedRegression(), *sets, strategy=Alternating(kind="auto"), wrap_link=both)
    assert played
    rows = metrics(tmp_path)
    assert [row["version"] for row in rows] == [1, 2, 3, 7, 8, 12, 13, 17, 18, 22, 23, 24]
    assert [row.get("steps", 1) for row in rows] == [1, 1, 1, 4, 1, 4, 1, 4, 1, 4, 1, 1]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert all(len(hashes) == 1 for hashes in heard.weights(tmp_path).values())
