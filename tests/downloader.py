"""Downloads of corpora that are in no catalogue."""

import random
from pathlib import Path

from cuadrilla.data.catalogue import CatalogueEntry
from cuadrilla.data.download import fetch
from cuadrilla.data.prepare import no_progress
from cuadrilla.data.record import DownloadRecord, read_record

TEXT = random.Random(0).randbytes(300_000).hex().encode()
THIRD = len(TEXT) // 3


class Downloader:
    """`fetch` from the web into one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, url: str, *, name: str = "a.txt", licence: str = "CC0 1.0", inside: str = "") -> bool:
        corpus = CatalogueEntry(what="", url=url, licence=licence, file=name, inside=inside, about_bytes=0)
        return fetch(corpus, self.folder, progress=no_progress)

    @property
    def record(self) -> DownloadRecord:
        found = read_record(self.folder)
        assert found is not None
        return found

    def names(self) -> set[str]:
        return {path.name for path in self.folder.rglob("*")}
