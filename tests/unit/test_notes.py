"""What is said before a training that other settings may serve better."""

import pytest

from cuadrilla.engines.run import MANY_EPOCHS, regularisation_notes
from cuadrilla.runfile import resolve

pytestmark = pytest.mark.unit

RUN = '[data]\nfolder = "data"\n[train]\nsteps = 1\n'


@pytest.mark.parametrize(
    ("sets", "epochs", "noted"),
    [
        ([], MANY_EPOCHS, True),
        ([], 16.4, True),
        ([], MANY_EPOCHS - 0.1, False),
        (["optim.weight_decay=1"], 16, False),
        (["model.dropout=0.1"], 16, False),
        (["optim.kind=adamw"], 16, False),
        (["train.teacher=../first"], 16, False),
        (["task.kind=file", "task.path=task.py:task"], 16, False),
    ],
)
def test_a_text_that_is_read_many_times(sets: list[str], epochs: float, noted: bool) -> None:
    found = regularisation_notes(resolve(RUN, sets=sets).config, epochs=epochs)
    assert [key for key, _ in found] == ["optim.weight_decay"] * noted
    assert all(f"{epochs:.0f} times" in note for _, note in found)
