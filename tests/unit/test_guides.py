"""What older guides ask for has an answer, and the tests that are named as proof are there."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cuadrilla.cli.verbs import VERBS
from tools.guide_lines import lines_of
from tools.guide_page import PAGES, guides

ROOT = Path(__file__).parents[2]
GUIDES = "CUADRILLA_GUIDES"
"""A folder with the guides, which are not part of this repository."""
ROWS = [row for guide in guides() for row in guide["row"]]


def answers(row_line: str, line: str) -> bool:
    return line.startswith(row_line[:-1]) if row_line.endswith("…") else line == row_line


def without_answer(text: str) -> list[str]:
    answered = [line for row in ROWS for line in row["lines"]]
    return [line for line in lines_of(text) if not any(answers(known, line) for known in answered)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["lines"][0][:40])
def test_the_tests_of_a_row_exist(row: dict[str, object]) -> None:
    """A row without a proof only links to a page of comparisons, or to pages of other projects."""
    assert row.get("tests") or "other-tools.md" in str(row["en"]) or str(row["en"]).startswith("To read")  # type: ignore[attr-defined]
    for test in row.get("tests", []):  # type: ignore[attr-defined]
        file, _, name = test.partition("::")
        names = {
            node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert not name or name in names, test


@pytest.mark.parametrize("language", PAGES)
def test_answers_name_commands_that_there_are(language: str) -> None:
    typed = [code for row in ROWS for code in re.findall(r"`([^`]*)`", row[language])]
    named = {verb for code in typed for verb in re.findall(r"\bcuadrilla ([a-z]+)", code)}
    assert named <= set(VERBS)
    assert {"train", "join", "doctor", "serve"} & named


def test_the_pages_are_as_the_rows_say() -> None:
    subprocess.run([sys.executable, "tools/guide_page.py", "--check"], cwd=ROOT, check=True)


def test_every_line_of_the_guides_has_an_answer() -> None:
    if not (folder := os.environ.get(GUIDES)):
        pytest.skip(f"needs the guides: {GUIDES}=FOLDER")
    guides_there = [path.read_text(encoding="utf-8") for path in sorted(Path(folder).iterdir())]
    assert guides_there
    assert [line for text in guides_there for line in without_answer(text)] == []
    asked = [line for text in guides_there for line in lines_of(text)]
    answered = [known for row in ROWS for known in row["lines"]]
    assert [known for known in answered if not any(answers(known, line) for line in asked)] == []
