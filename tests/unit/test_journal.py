"""The journal gives back exactly what was appended, up to the first torn, damaged or missing record."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuadrilla.errors import TaskError
from cuadrilla.link.wire import DTYPES
from cuadrilla.train.journal import append, read_records, remove_records


def write(folder: Path, *versions: int, after: int, factor: float = 1.0) -> list[int]:
    """Append a record for each version; return their CRCs. `after`: CRC of the record before."""
    crcs = [after]
    for version in versions:
        update = {"w": torch.full((3, 4), factor * version), "empty": torch.zeros(0), "s": torch.tensor(1.5)}
        crcs.append(append(folder, {"version": version, "steps": 1, "units": [version]}, update, after=crcs[-1]))
    return crcs[1:]


def read(folder: Path, version: int, *, after: int) -> list[int]:
    return [record.version for record in read_records(folder, version, after=after)]


def test_every_truncation_gives_the_whole_records_before_it(tmp_path: Path) -> None:
    write(tmp_path, 6, 7, 8, after=3)
    path = tmp_path / "v00000007.step"
    raw = path.read_bytes()
    for cut in range(len(raw)):
        path.write_bytes(raw[:cut])
        assert read(tmp_path, 5, after=3) == [6]
    path.write_bytes(bytes(len(raw)))
    assert read(tmp_path, 5, after=3) == [6]
    path.write_bytes(raw + b" ")
    assert read(tmp_path, 5, after=3) == [6]
    path.unlink()
    assert read(tmp_path, 5, after=3) == [6]
    path.write_bytes(raw)
    assert read(tmp_path, 5, after=3) == [6, 7, 8]


@settings(deadline=None)
@given(version=st.integers(6, 8), position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_ends_the_journal_before_its_record(
    tmp_path_factory: pytest.TempPathFactory, version: int, position: float, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    write(folder, 6, 7, 8, after=3)
    path = folder / f"v{version:08d}.step"
    raw = bytearray(path.read_bytes())
    raw[int(position * len(raw))] ^= 1 << bit
    path.write_bytes(raw)
    assert read(folder, 5, after=3) == [*range(6, version)]


def test_a_record_of_another_history_does_not_follow(tmp_path: Path) -> None:
    """Neither after a record that was made again, nor after a checkpoint that another record led to."""
    crcs = write(tmp_path, 6, 7, 8, 9, after=3)
    assert read(tmp_path, 7, after=crcs[1]) == [8, 9]
    other = write(tmp_path, 7, after=crcs[0], factor=2.0)
    assert read(tmp_path, 5, after=3) == [6, 7]
    assert read(tmp_path, 7, after=other[0]) == []
    write(tmp_path, 8, after=other[0], factor=2.0)
    assert read(tmp_path, 5, after=3) == [6, 7, 8]
    assert read(tmp_path, 5, after=4) == []


def test_a_record_follows_only_the_version_that_it_was_made_from(tmp_path: Path) -> None:
    """One CRC led to two checkpoints, because the steps in between could not be kept."""
    append(tmp_path, {"version": 9, "steps": 2}, {}, after=3)
    assert read(tmp_path, 5, after=3) == []
    assert read(tmp_path, 7, after=3) == [9]
    append(tmp_path, {"version": 8, "steps": 1}, {}, after=4)  # one of another history, in between
    assert read(tmp_path, 7, after=3) == [9]


def test_records_are_removed_by_version(tmp_path: Path) -> None:
    remove_records(tmp_path / "nothing", unwanted=lambda _version: True)
    write(tmp_path, *range(1, 12), after=0)
    (tmp_path / ".v00000012.step.17.4.tmp").touch()  # left by a killed process
    remove_records(tmp_path, unwanted=lambda version: version <= 9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v00000010.step", "v00000011.step"]


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
def test_every_type_of_numbers_that_travels_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    update = {
        "a": torch.tensor([[1, 0, 2]]).to(dtype),
        "b": torch.tensor(3).to(dtype),
        "c": torch.empty(0, dtype=dtype),
    }
    append(tmp_path, {"version": 1, "steps": 1}, update, after=0)
    [record] = read_records(tmp_path, 0, after=0)
    assert all(torch.equal(record.update[name], update[name]) for name in update)
    assert all(record.update[name].dtype == dtype for name in update)


def test_a_type_of_numbers_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="complex64 can be neither sent nor kept"):
        append(tmp_path, {"version": 1, "steps": 1}, {"a": torch.zeros(2, dtype=torch.complex64)}, after=0)
    assert not [*read_records(tmp_path, 0, after=0)]
