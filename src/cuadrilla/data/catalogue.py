"""Spanish corpora by name.

Sizes are approximate: they serve the question before a large download. The catalogue has no hashes, because archives of
repositories are made on request, and editors correct the texts.
"""

from dataclasses import dataclass

from cuadrilla.messages import Message


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    what: str
    url: str
    licence: str
    file: str
    """Name of the downloaded file."""
    inside: str = ""
    """Folder in a zip archive whose files are unpacked. Empty: the downloaded file is kept as it is."""
    about_bytes: int
    """Approximate size of the download; of an archive that is made on request, the size of its repository."""

    @property
    def size(self) -> str:
        return Message("about {megabytes:,.0f} MB", megabytes=self.about_bytes / 1e6)


CATALOGUE = {
    "quijote": CatalogueEntry(
        what=Message("Don Quijote de la Mancha, Project Gutenberg's edition 2000"),
        url="https://www.gutenberg.org/cache/epub/2000/pg2000.txt",
        licence="Project Gutenberg License",
        about_bytes=2_200_000,
        file="quijote.txt",
    ),
    "conha19": CatalogueEntry(
        what=Message("234 Spanish-American novels, 1830 to 1910, plain text"),
        url="https://github.com/cligs/conha19/archive/refs/heads/main.zip",
        licence="Public Domain Mark 1.0",
        about_bytes=809_000_000,
        file="conha19.zip",
        inside="txt",
    ),
    "eltec-spa": CatalogueEntry(
        what=Message("about 100 novels of Spain, 1840 to 1920, TEI-XML (level 1)"),
        url="https://github.com/COST-ELTeC/ELTeC-spa/archive/HEAD.zip",
        licence="texts public domain, markup CC BY 4.0",
        about_bytes=180_000_000,
        file="eltec-spa.zip",
        inside="level1",
    ),
    "fineweb2-test": CatalogueEntry(
        what=Message("web pages, test split of FineWeb-2 spa_Latn (23.7 M words): a first real corpus"),
        url="https://huggingface.co/datasets/HuggingFaceFW/fineweb-2/resolve/main/data/spa_Latn/test/000_00000.parquet",
        licence="ODC-By 1.0",
        about_bytes=59_700_000,
        file="fineweb2-test.parquet",
    ),
}
"""The known corpora by name. The files of each go into a folder of its name."""
