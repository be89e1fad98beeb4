"""Spanish corpora by name, and what else may be asked for: addresses, datasets of the Hugging Face hub.

A folder of a dataset stands for the files in it that `data prepare` reads, at the commit that its revision stands for;
no script of a dataset is ever run. `hf auth login` and the hub's own variables decide the account and the endpoint.

Sizes are approximate, for the question before a large download; what is fetched is measured. The catalogue knows no
hashes: the archives of repositories are made on request, and the texts are corrected by their editors.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import httpx2 as httpx

from cuadrilla.data.download import DownloadRequest, names_below, safe_name
from cuadrilla.data.formats.files import form_of
from cuadrilla.data.record import UNKNOWN
from cuadrilla.errors import ConfigError, EnvironmentProblem, LinkError
from cuadrilla.messages import Message

WEB_SCHEMES = ("http://", "https://")
HUB = "hf:"
_DATASET = re.compile(r"hf:([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w.-]+))?(/[^@]*)?")


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
    if address.startswith(HUB):
        found = _of_hub(address)
    elif address.startswith(WEB_SCHEMES):
        found = [DownloadRequest(url=address)]
    else:
        hint = "`cuadrilla data get --list` shows the known corpora"
        raise ConfigError("{name!r} is neither a known corpus nor an address", name=argument, hint=hint)
    if corpus:
        known = {"subfolder": corpus.name, "licence": corpus.licence, "inside": corpus.inside}
        found = [replace(each, name=corpus.file or each.name, **known) for each in found]
    return [replace(each, sha256=sha256) for each in found] if sha256 else found


def _of_hub(address: str) -> list[DownloadRequest]:
    """The files of a dataset or its folder that are read, with their hashes as far as the hub knows them, and the
    licence that its card names."""
    try:
        import huggingface_hub as hub
    except ImportError as error:
        hint = 'pip install "cuadrilla[hf]"'
        raise EnvironmentProblem("{address} needs huggingface_hub", address=address, hint=hint) from error
    given = _DATASET.fullmatch(address)
    if not given:
        hint = "write hf:OWNER/NAME, hf:OWNER/NAME/FOLDER or hf:OWNER/NAME@REVISION/FOLDER"
        raise ConfigError("{text!r} is not a dataset of the hub", text=address, hint=hint)
    name, folder = given[1], (given[3] or "").strip("/")
    api: Any = hub.HfApi()
    try:
        info = api.dataset_info(name, revision=given[2] or "main")
        where: Any = {"revision": info.sha, "repo_type": "dataset"}
        if _is_read(folder):
            found = api.get_paths_info(name, [folder], **where)
        else:
            found = api.list_repo_tree(name, folder or None, recursive=True, **where)
        read = {each.path: each for each in found if hasattr(each, "lfs") and _is_read(each.path)}
        if not read:
            raise FileNotFoundError("there is no such file")
    except (OSError, ValueError, httpx.HTTPError) as error:
        hint = "check the spelling and the network, and log in to the hub: `hf auth login`"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise LinkError("{url}: {reason}", url=address, reason=reason, hint=hint) from error
    card: Any = info.card_data or {}
    subfolder = safe_name(f"{name}/{folder}".partition("/")[2].strip("/").replace("/", "-")) if len(read) > 1 else ""
    return [
        DownloadRequest(
            url=hub.hf_hub_url(name, path, repo_type="dataset", revision=info.sha),
            name=short,
            subfolder=subfolder,
            licence=str(card.get("license") or UNKNOWN),
            sha256=read[path].lfs.sha256 if read[path].lfs else "",
            token=hub.get_token() or "",
        )
        for path, short in names_below(sorted(read)).items()
    ]


def _is_read(path: str) -> bool:
    """Whether `data prepare` reads such a file."""
    name = path.rpartition("/")[2]
    return bool(name) and not name.startswith(".") and form_of(name) is not None
