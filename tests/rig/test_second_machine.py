"""The second machine of the README, at Spanish terminals of 80 columns: the texts on both until the end."""

import re
from pathlib import Path

import pytest

from tests.commands import wait_for
from tests.inside import cuadrilla
from tests.lan import Member
from tests.terminal import SPANISH, Terminal

SHORT = ("--set", "train.steps=3", "--set", "train.batch_sequences=8", "--set", "engine.workers=[]")
"""The coordinator has no worker beside it, so that it waits for the other machine."""
ENGLISH = r"\b(the|and|step|loss|machine|joined|working|done)\b"


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_an_invite_is_pasted_on_a_second_machine_and_both_say_in_spanish_what_they_do(
    network: list[Member], stories: Path, tmp_path: Path
) -> None:
    cuadrilla("new", "casa", "--preset", "gpt2-micro", "--data", str(stories), cwd=tmp_path, code=0)

    def opened(number: int, *arguments: str) -> Terminal:
        home = str(tmp_path / f"home-{number}")
        return Terminal(arguments, cwd=tmp_path, prefix=network[number].prefix, CUADRILLA_HOME=home, **SPANISH)

    here = opened(0, "up", "casa", *SHORT)
    there = opened(1, "join")
    try:
        wait_for(here.shows(r"cuadrilla1\.\S+"), here.process)
        wait_for(there.shows(r"invitación \(no se muestra\)"), there.process)
        found = re.search(r"cuadrilla1\.\S+", here.text())
        assert found is not None
        there.types(f"{found[0]}\n".encode())
        assert [each.process.wait(timeout=200) for each in (here, there)] == [0, 0], here.text() + there.text()
    finally:
        here.close()
        there.close()
    for said in ("en otra máquina: cuadrilla join", "se ha unido", "listo      en"):
        assert said in here.text()
    for said in ("unida      a la cuadrilla de", "trabajando como", "Ctrl-C lo deja", "hecho"):
        assert said in there.text()
    assert found[0] not in there.text()
    for terminal in (here, there):
        assert not re.search(ENGLISH, terminal.text())
        assert len(widest := max((line for line in terminal.lines() if found[0] not in line), key=len)) <= 80, widest
