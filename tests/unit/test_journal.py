"""The journal gives back exactly what was appended, up to the first torn or damaged record."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuadrilla.errors import TaskError
from cuadrilla.link.wire import DTYPES
from cuadrilla.train.journal import Journal, read_records


def write(folder: Path, *, count: int) -> list[int]:
    """Append `count` records to the segment of step 5; the file size after each."""
    sizes = []
    with closing(Journal(folder)) as journal:
        journal.begin_segment(5)
        for version in range(6, 6 + count):
            gradients = {"w": torch.full((3, 4), float(version)), "empty": torch.zeros(0), "s": torch.tensor(1.5)}
            journal.append({"version": version, "units": [version]}, gradients)
            sizes.append((folder / "v00000005.log").stat().st_size)
    return sizes


def test_every_truncation_gives_the_whole_records_before_it(tmp_path: Path) -> None:
    sizes = write(tmp_path, count=2)
    path = tmp_path / "v00000005.log"
    raw = path.read_bytes()
    for cut in range(len(raw)):
        path.write_bytes(raw[:cut])
        assert len(list(read_records(tmp_path, 5))) == sum(size <= cut for size in sizes)


@settings(deadline=None)
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_never_gives_a_wrong_record(
    tmp_path_factory: pytest.TempPathFactory, position: float, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    write(folder, count=3)
    good = {record.version: record for record in read_records(folder, 5)}
    path = folder / "v00000005.log"
    raw = bytearray(path.read_bytes())
    raw[int(position * len(raw))] ^= 1 << bit
    path.write_bytes(raw)
    for record in read_records(folder, 5):
        assert record.header == good[record.version].header
        assert all(torch.equal(t, good[record.version].update[name]) for name, t in record.update.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
def test_every_type_of_numbers_that_travels_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    update = {
        "a": torch.tensor([[1, 0, 2]]).to(dtype),
        "b": torch.tensor(3).to(dtype),
        "c": torch.empty(0, dtype=dtype),
    }
    with closing(Journal(tmp_path)) as journal:
        journal.begin_segment(0)
        journal.append({"version": 1}, update)
    [record] = read_records(tmp_path, 0)
    assert all(torch.equal(record.update[name], update[name]) for name in update)
    assert all(record.update[name].dtype == dtype for name in update)


def test_a_type_of_numbers_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.begin_segment(0)
        with pytest.raises(TaskError, match="complex64 can be neither sent nor kept"):
            journal.append({"version": 1}, {"a": torch.zeros(2, dtype=torch.complex64)})
    assert not [*read_records(tmp_path, 0)]
