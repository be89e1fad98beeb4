"""Spanish corpora by name, and what else may be asked for: addresses, datasets of the hub.

Sizes are approximate, for the question before a large download; what is fetched is measured. The catalogue knows no
hashes: the archives of repositories are made on request, and the texts are corrected by their editors.
"""

from dataclasses import dataclass, replace

from cuadrilla.data.get.download import WEB_SCHEMES, DownloadRequest, names_below, safe_name
from cuadrilla.data.get.store import HUB, list_store
from cuadrilla.errors import ConfigError
from cuadrilla.messages import Message


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    name: str
    what: str
    address: str
    licence: str
    about_bytes: int
    """Size of the download; for an archive that is made on request that of its repository."""
    file: str = ""
    inside: str = ""

    @property
    def size(self) -> str:
        return Message("about {megabytes:,.0f} MB", megabytes=self.about_bytes / 1e6)


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
        address="hf:HuggingFaceFW/fineweb-2/data/spa_Latn/test",
        licence="ODC-By 1.0",
        about_bytes=59_700_000,
    ),
    CatalogueEntry(
        name="wikipedia-es",
        what=Message("Spanish Wikipedia of November 2023, about 1.9 M articles"),
        address="hf:wikimedia/wikipedia/20231101.es",
        licence="CC BY-SA, GFDL",
        about_bytes=4_000_000_000,
    ),
)


def resolve(argument: str, *, sha256: str = "") -> list[DownloadRequest]:
    """The files that a name of the catalogue or an address stands for.

    Raises ConfigError for what is neither, LinkError if it has to be listed and cannot be.
    """
    corpus = next((each for each in CATALOGUE if each.name == argument), None)
    address = corpus.address if corpus else argument
    if address.startswith(WEB_SCHEMES):
        found = [DownloadRequest(url=address)]
        if corpus:
            found = [replace(found[0], name=corpus.file, inside=corpus.inside)]
    elif "://" in address or address.startswith(HUB):
        found = _of_store(address)
    else:
        hint = "`cuadrilla data get --list` shows the known corpora"
        raise ConfigError("{name!r} is neither a known corpus nor an address", name=argument, hint=hint)
    if corpus:
        found = [replace(each, subfolder=corpus.name, licence=corpus.licence) for each in found]
    return [replace(each, sha256=sha256, vouched_by="option") for each in found] if sha256 else found


def _of_store(address: str) -> list[DownloadRequest]:
    hashes, licence = list_store(address)
    names = names_below(hashes)
    place = address.partition("/")[2].replace("/", "-") if address.startswith(HUB) else address.rstrip("/")
    subfolder = safe_name(place) if len(names) > 1 else ""
    return [
        DownloadRequest(url=url, name=name, subfolder=subfolder, licence=licence, sha256=hashes[url], vouched_by="hub")
        for url, name in names.items()
    ]
