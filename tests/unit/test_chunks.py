"""Finished pieces of work: written whole, verified, read in parts."""

import numpy as np
import pytest

from cuadrilla.data.chunks import Chunk, chunk_bytes, is_whole, key_of, write_chunk
from cuadrilla.errors import ResourceError

pytestmark = pytest.mark.unit

ARRAYS = {
    "numbers": np.arange(7, dtype=np.uint32),
    "table": np.arange(12, dtype=np.uint64).reshape(4, 3),
    "none": np.zeros((5, 0), dtype=np.uint32),
    "text": np.frombuffer("año".encode(), dtype=np.uint8),
}


@pytest.fixture
def path(tmp_path):
    write_chunk(tmp_path / "a.clean", chunk_bytes({"counts": {"x": 1}}, ARRAYS))
    return tmp_path / "a.clean"


def test_what_is_written_is_read(path):
    assert is_whole(path)
    for chunk in (Chunk(path), Chunk(path.read_bytes())):
        assert chunk.header["counts"] == {"x": 1}
        for name, array in ARRAYS.items():
            assert (chunk.array(name) == array).all()
            assert chunk.array(name).shape == array.shape
    assert [name.name for name in path.parent.iterdir()] == ["a.clean"]


def test_damage_is_seen(path):
    raw = path.read_bytes()
    begin = raw.index("año".encode())
    path.write_bytes(raw[:begin] + b"x" + raw[begin + 1 :])
    assert not is_whole(path)
    for end in range(0, len(raw), 11):
        path.write_bytes(raw[:end])
        assert not is_whole(path)
    path.unlink()
    assert not is_whole(path)
    with pytest.raises(ResourceError):
        Chunk(path).array("table")


def test_keys_tell_where_parts_end():
    assert key_of("ab", "c") != key_of("a", "bc")
    assert key_of(b"ab") == key_of("ab")
