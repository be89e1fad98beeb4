"""Which device is taken, and what is said about one that is not there."""

import pytest

from cuadrilla.errors import DeviceError
from cuadrilla.train.precision import choose_device

pytestmark = pytest.mark.unit


def test_the_processor_is_always_there() -> None:
    assert str(choose_device("cpu")) == "cpu"


@pytest.mark.parametrize("name", ["", "nada", "gpu", "meta", "cuda:", "cuda:x", "cuda:-1", "cuda:01", "CPU", "cpu\n"])
def test_a_device_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(DeviceError, match="is not a device") as caught:
        choose_device(name)
    assert "cuda:1" in caught.value.hint
