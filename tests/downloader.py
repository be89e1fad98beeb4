"""A download whose patience costs no time and is remembered."""

import random
from dataclasses import replace
from pathlib import Path

from cuadrilla.data.get.download import DownloadPolicy, DownloadRequest, Fetched, fetch
from cuadrilla.data.get.web import Web

TEXT = random.Random(0).randbytes(300_000).hex().encode()
OTHER = random.Random(1).randbytes(250_000).hex().encode()
THIRD = len(TEXT) // 3


class Downloader:
    """`fetch` from the web into one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.waits: list[float] = []
        self.said: list[str] = []
        self.policy = DownloadPolicy(sleep=self.waits.append, report=self.said.append)

    def __call__(
        self, url: str, *, limit: int | None = 10**9, silence_seconds: float = 60.0, **known: object
    ) -> Fetched:
        origin = Web(url, silence_seconds=silence_seconds)
        wanted = DownloadRequest(origin=origin, url=url, **known)  # type: ignore[arg-type]
        return fetch(wanted, to=self.folder, policy=replace(self.policy, limit_bytes=limit))

    def names(self) -> set[str]:
        return {path.name for path in self.folder.rglob("*")}
