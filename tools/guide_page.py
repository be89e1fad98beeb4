"""Makes docs/older-guides.md and docs/es/older-guides.md of docs/older-guides.toml: what each line of a guide is here.

python tools/guide_page.py [--check]     with --check: only says whether they are as they should be, by exit code
"""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
ROWS = DOCS / "older-guides.toml"
PAGES = {"en": DOCS / "older-guides.md", "es": DOCS / "es/older-guides.md"}
HEADS = {
    "en": """# Older guides, line by line

[En español](es/older-guides.md)

cuadrilla began with four guides, in Spanish, to training on machines of one's own. Each of their commands, files,
components and pieces of advice is here, with what to type now and the test that runs it. *Not verified* is what no
machine of the tests has: Windows, macOS, NVIDIA cards.
""",
    "es": """# Guías anteriores, línea por línea

[In English](../older-guides.md)

cuadrilla empezó con cuatro guías para entrenar en máquinas propias. Aquí está cada orden, archivo, componente y consejo
de ellas, qué escribir ahora, y la prueba que lo ejecuta. *Sin verificar* está lo que ninguna máquina de las pruebas
tiene: Windows, macOS, tarjetas NVIDIA.
""",
}
COLUMNS = {"en": "| the guide | here | test |", "es": "| la guía | aquí | prueba |"}


def guides() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(ROWS.read_text(encoding="utf-8"))["guide"]
    return found


def page(language: str) -> str:
    return HEADS[language] + "".join(_section(guide, language) for guide in guides())


def _section(guide: dict[str, Any], language: str) -> str:
    return "\n".join([f"\n## {guide[language]}\n", COLUMNS[language], "|---|---|---|", *_rows(guide, language), ""])


def _rows(guide: dict[str, Any], language: str) -> Iterator[str]:
    for row in guide["row"]:
        lines = "<br>".join(_code(line) for line in row["lines"])
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in row.get("tests", []))
        yield f"| {lines} | {row[language]} | {tests} |"


def _code(line: str) -> str:
    text = line.replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def main() -> None:
    if "--check" not in sys.argv:
        for language, path in PAGES.items():
            path.write_text(page(language), encoding="utf-8")
        return
    old = [
        path.name for language, path in PAGES.items() if not path.exists() or path.read_text("utf-8") != page(language)
    ]
    if old:
        sys.exit(f"not as docs/older-guides.toml says: {', '.join(old)}; python tools/guide_page.py makes them")


if __name__ == "__main__":
    main()
