"""Spanish corpora by name, and what else may be asked for: addresses, datasets of the hub.

Sizes are approximate, for the question before a large download; what is fetched is measured. The catalogue knows no
hashes: the archives of repositories are made on request, and the texts are corrected by their editors. So the first
bytes that come are trusted, recorded, and from then on compared; the hub vouches for its own files.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from cuadrilla.data.get import hub
from cuadrilla.data.get.address import WEB_SCHEMES, check_address, distinct_names, safe_name
from cuadrilla.data.get.download import LARGE_BYTES, DownloadRequest
from cuadrilla.data.get.mount import list_mount
from cuadrilla.data.get.web import Web
from cuadrilla.errors import ConfigError
from cuadrilla.messages import Message


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    name: str
    what: str
    address: str
    licence: str
    about_bytes: int
    """Of the download; of an archive that is made on request the size of its repository."""
    split: str = ""
    file: str = ""
    inside: str = ""

    @property
    def size(self) -> str:
        return Message("about {megabytes:,.0f} MB", megabytes=self.about_bytes / 1e6)

    @property
    def asks(self) -> bool:
        return self.about_bytes > LARGE_BYTES


CATALOGUE = (
    CatalogueEntry(
        name="quijote",
        what=Message("Don Quijote de la Mancha, Project Gutenberg's edition 2000"),
        address="https://www.gutenberg.org/cache/epub/2000/pg2000.txt",
        licence="Project Gutenberg License",
        about_bytes=2_200_000,
        file="quijote.txt",
    ),
    CatalogueEntry(
        name="conha19",
        what=Message("234 Spanish-American novels, 1830 to 1910, plain text"),
        address="https://github.com/cligs/conha19/archive/refs/heads/main.zip",
        licence="Public Domain Mark 1.0",
        about_bytes=809_000_000,
        file="conha19.zip",
        inside="txt",
    ),
    CatalogueEntry(
        name="eltec-spa",
        what=Message("about 100 novels of Spain, 1840 to 1920, TEI-XML (level 1)"),
        address="https://github.com/COST-ELTeC/ELTeC-spa/archive/HEAD.zip",
        licence="texts public domain, markup CC BY 4.0",
        about_bytes=180_000_000,
        file="eltec-spa.zip",
        inside="level1",
    ),
    CatalogueEntry(
        name="fineweb2-test",
        what=Message("web pages, test split of FineWeb-2 spa_Latn (23.7 M words): a first real corpus"),
        address="hf:HuggingFaceFW/fineweb-2/spa_Latn",
        licence="ODC-By 1.0",
        about_bytes=59_700_000,
        split="test",
    ),
    CatalogueEntry(
        name="wikipedia-es",
        what=Message("Spanish Wikipedia of November 2023, about 1.9 M articles"),
        address="hf:wikimedia/wikipedia/20231101.es",
        licence="CC BY-SA, GFDL",
        about_bytes=4_000_000_000,
        split="train",
    ),
)


def resolve(argument: str, *, sha256: str = "", split: str = "", revision: str = "") -> list[DownloadRequest]:
    """The files that a name of the catalogue or an address stands for.

    Raises ConfigError for what is neither, LinkError if it has to be listed and cannot be.
    """
    corpus = next((each for each in CATALOGUE if each.name == argument), None)
    address = corpus.address if corpus else argument
    scheme = urlsplit(address).scheme if "://" in address else ""
    if address.startswith(hub.PREFIX):
        split = split or (corpus.split if corpus else "")
        dataset = hub.HubDataset.parse(address, split=split, revision=revision)
        found = hub.list_parquet(dataset, licence=corpus.licence if corpus else "")
        if corpus:
            found = [replace(each, subfolder=corpus.name) for each in found]
    elif split or revision:
        raise ConfigError(
            "{name} has no splits or revisions", name=argument, hint="--split and --revision are for hf:OWNER/NAME"
        )
    elif scheme in WEB_SCHEMES:
        found = [_from_web(check_address(address), corpus)]
    elif scheme:
        found = _from_mount(argument)
    else:
        raise _unknown(argument)
    return _with_hash(argument, found, sha256) if sha256 else found


def _from_web(url: str, corpus: CatalogueEntry | None) -> DownloadRequest:
    wanted = DownloadRequest(origin=Web(url), url=url)
    if corpus is None:
        return wanted
    return replace(wanted, name=corpus.file, subfolder=corpus.name, licence=corpus.licence, inside=corpus.inside)


def _from_mount(address: str) -> list[DownloadRequest]:
    files = list_mount(address)
    names = distinct_names([url for url, _, _ in files])
    subfolder = safe_name(address.rstrip("/")) if len(files) > 1 else ""
    return [
        DownloadRequest(origin=origin, url=url, name=names[url], subfolder=subfolder, num_bytes=num_bytes or None)
        for url, num_bytes, origin in files
    ]


def _with_hash(argument: str, found: Sequence[DownloadRequest], sha256: str) -> list[DownloadRequest]:
    if len(found) != 1:
        raise ConfigError(
            "{name} has {files} files; --sha256 is for one", name=argument, files=len(found), hint="leave --sha256 out"
        )
    return [replace(found[0], sha256=sha256, vouched_by="option")]


def _unknown(argument: str) -> ConfigError:
    if Path(argument).exists():
        return ConfigError(
            "{name} is already on this machine", name=argument, hint="cuadrilla data prepare {name} --out data"
        )
    close = difflib.get_close_matches(argument, [each.name for each in CATALOGUE], n=1)
    return ConfigError(
        "{name!r} is neither a known corpus nor an address",
        name=argument,
        hint="did you mean {close}?" if close else "`cuadrilla data get --list` shows the known corpora",
        close="".join(close),
    )
