"""The lines of a guide in Markdown that ask for something: commands, code, items of lists, names, links.

    python tools/guide_lines.py GUIDE.md ...

Prints each once: a shell command with its continuations, another block of code as one line, an item of a list, and
between these a code span, a name in bold, the address of a link. `docs/older-guides.toml` answers them.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

FENCE = re.compile(r"^\s*```(\w*)\s*$")
SPANS = re.compile(r"`([^`]+)`|\*\*([^*]+)\*\*|\]\((http[^)]+)\)")
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+(.*)$")
SHELL = ("bash", "sh", "powershell", "console", "Dockerfile")


def lines_of(text: str) -> Iterator[str]:
    lines = iter(text.splitlines())
    for line in lines:
        if fence := FENCE.match(line):
            yield from _block(lines, language=fence[1])
        elif item := ITEM.match(line):
            yield " ".join(re.sub(r"[`*]", "", item[1]).split())
        else:
            for span in SPANS.finditer(line):
                yield next(group for group in span.groups() if group).strip()


def _block(lines: Iterator[str], *, language: str) -> Iterator[str]:
    block: list[str] = []
    for line in lines:
        if FENCE.match(line):
            break
        block.append(line)
    if language not in SHELL:
        yield "; ".join(line.strip() for line in block if line.strip())
        return
    for command in "\n".join(block).replace("\\\n", " ").splitlines():
        if command.strip():
            yield " ".join(command.split())


def main() -> None:
    found = (line for path in sys.argv[1:] for line in lines_of(Path(path).read_text(encoding="utf-8")))
    print("\n".join(dict.fromkeys(found)))


if __name__ == "__main__":
    main()
