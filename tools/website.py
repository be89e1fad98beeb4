"""A hook of mkdocs (`mkdocs.yml`): the site is the repository's tree of pages, with `docs` as its root.

README is the first page in each language; examples and other files that pages link to come along. Links are written for
the repository, and rewritten here to where their targets lie in the site, so that mkdocs checks each of them.
"""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = ("README*.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/*", "recipes/*/README*.md", "recipes/serving/*")
FIRST = {"README.md": "index.md", "README.es.md": "es/index.md"}
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")


def in_site(path: str) -> str:
    """Where a file of the repository lies in the site."""
    return FIRST.get(path, path.removeprefix("docs/"))


def moved(link: str, *, page: str) -> str:
    """A link of a page, which is named by its path in the repository, as the site needs it."""
    return relpath(in_site(normpath(join(dirname(page), link))), dirname(in_site(page)) or ".")


def on_files(files: Any, *, config: Any) -> None:
    for path in (path for pattern in OUTSIDE for path in sorted(ROOT.glob(pattern)) if path.is_file()):
        place = in_site(path.relative_to(ROOT).as_posix())
        files.append(File.generated(config, place, abs_src_path=str(path)))


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001
    source = Path(page.file.abs_src_path).relative_to(ROOT).as_posix()
    return LINK.sub(lambda found: f"]({moved(found[1], page=source)}", markdown)
