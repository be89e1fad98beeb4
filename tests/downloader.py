"""Downloads that do not wait: each wait before another attempt is recorded instead."""

import random
from pathlib import Path

import pytest

from cuadrilla.data import download
from cuadrilla.data.download import DownloadRequest, Fetched, fetch
from cuadrilla.data.prepare import no_progress

TEXT = random.Random(0).randbytes(300_000).hex().encode()
OTHER = random.Random(1).randbytes(250_000).hex().encode()
THIRD = len(TEXT) // 3


class Downloader:
    """`fetch` from the web into one folder."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.waits: list[float] = []
        self.said: list[str] = []
        patch.setattr(download, "sleep", self.waits.append)

    def __call__(self, url: str, **known: object) -> Fetched:
        wanted = DownloadRequest(url=url, **known)  # type: ignore[arg-type]
        return fetch(wanted, to=self.folder, progress=no_progress, report=self.said.append)

    def names(self) -> set[str]:
        return {path.name for path in self.folder.rglob("*")}
