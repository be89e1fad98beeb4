"""Datasets of the Hugging Face hub: parquet files only, listed by huggingface_hub and fetched like any other file.

No script of a dataset is ever run: what is not parquet is not seen. A revision becomes the commit it stands for, so
that all files are of one state and the record says which; the hub knows each file's SHA-256. The endpoint and the
token are the library's own (`HF_ENDPOINT`, `hf auth login`, `HF_TOKEN`); the token goes to the endpoint only, and only
over TLS or on the loopback.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from cuadrilla.data.get.address import distinct_names, safe_name
from cuadrilla.data.get.download import DownloadRequest
from cuadrilla.data.get.web import Web
from cuadrilla.errors import ConfigError, DataError, EnvironmentProblem, LinkError

PREFIX = "hf:"
_ADDRESS = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:/([\w.+-]+))?")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    repo: str
    config: str
    """Empty: the only one, or the one that the dataset calls its default."""
    split: str
    revision: str

    @classmethod
    def parse(cls, text: str, *, split: str, revision: str) -> "HubDataset":
        """`hf:OWNER/NAME[/CONFIG]`. Raises ConfigError."""
        given = _ADDRESS.fullmatch(text)
        if not given or ".." in text:
            raise ConfigError(
                "{text!r} is not a dataset of the hub", text=text, hint="write hf:OWNER/NAME or hf:OWNER/NAME/CONFIG"
            )
        return cls(repo=given[1], config=given[2] or "", split=split or "train", revision=revision or "main")

    @property
    def folder(self) -> str:
        """A name for what was asked for."""
        return safe_name("-".join(filter(None, (self.repo.split("/")[1], self.config, self.split))))


def list_parquet(dataset: HubDataset, *, licence: str = "", endpoint: str | None = None) -> list[DownloadRequest]:
    """The files of a split, by name; from the library's own endpoint if none is given.

    Raises ConfigError for what the dataset does not have, DataError if it has no parquet, LinkError.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise EnvironmentProblem(
            "hf: needs huggingface_hub: {error}", error=error, hint='pip install "cuadrilla[hf]"'
        ) from error
    token = huggingface_hub.get_token() or ""
    api = huggingface_hub.HfApi(endpoint=endpoint)
    if not _may_carry(api.endpoint, token):
        raise ConfigError(
            "{endpoint} would receive the hub's token unencrypted",
            endpoint=api.endpoint,
            hint="set HF_ENDPOINT to an https:// address",
        )
    with _translated(f"{PREFIX}{dataset.repo}"):
        info = api.dataset_info(dataset.repo, revision=dataset.revision)
        patterns = _patterns(info.card_data, dataset)
        found = {
            entry.path: entry
            for folder in sorted({_fixed_part(pattern) for pattern in patterns} or {""})
            for entry in api.list_repo_tree(
                dataset.repo, folder or None, recursive=True, revision=info.sha, repo_type="dataset"
            )
            if isinstance(entry, huggingface_hub.RepoFile)
        }
    paths = choose(sorted(found), patterns, dataset)
    names = distinct_names(paths)

    def request(path: str) -> DownloadRequest:
        url = huggingface_hub.hf_hub_url(
            dataset.repo, path, repo_type="dataset", revision=info.sha, endpoint=api.endpoint
        )
        return DownloadRequest(
            origin=Web(url, token=token),
            url=url,
            name=names[path],
            subfolder=dataset.folder,
            licence=licence or _licence(info.card_data),
            num_bytes=found[path].size,
            sha256=lfs.sha256 if (lfs := found[path].lfs) else "",
            vouched_by="hub",
            revision=info.sha or "",
        )

    return [request(path) for path in paths]


@contextlib.contextmanager
def _translated(where: str) -> Iterator[None]:
    """The library's errors in our tree."""
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except HFValidationError as error:
        raise ConfigError(
            "{where}: {error}", where=where, error=error, hint="write hf:OWNER/NAME or hf:OWNER/NAME/CONFIG"
        ) from error
    except OSError as error:  # those of HTTP are OSErrors, too
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LinkError(
            "{where} cannot be listed: {reason}",
            where=where,
            reason=first,
            hint="check name, revision and network; private and gated ones need `hf auth login`",
        ) from error


def choose(paths: Sequence[str], patterns: Sequence[str], dataset: HubDataset) -> list[str]:
    """The parquet files of a configuration and split: by the patterns of the dataset's card, else by their names."""
    from fsspec.utils import glob_translate

    if patterns:
        found = [path for path in paths if any(re.match(glob_translate(pattern), path) for pattern in patterns)]
    else:
        found = [path for path in paths if _is_of(path, dataset)]
    parquet = [path for path in found if path.endswith(".parquet")]
    if not parquet:
        what = " ".join(filter(None, (dataset.config, dataset.split)))
        seen = sorted({PurePosixPath(path).suffix or path for path in found or paths})[:5]
        raise DataError(
            "hf:{repo} has no parquet files for {what!r} (only {seen})",
            repo=dataset.repo,
            what=what,
            seen=", ".join(seen),
            hint="check configuration and --split; scripts of datasets are not run, only parquet is read",
        )
    return parquet


def _may_carry(endpoint: str, token: str) -> bool:
    parts = urlsplit(endpoint)
    return not token or parts.scheme == "https" or parts.hostname in _LOOPBACK


def _patterns(card: Any, dataset: HubDataset) -> list[str]:
    """Of the files that the card names for this configuration and split; none if it has no list.

    Raises ConfigError for a configuration or a split that is not in it.
    """
    configs = [each for each in (card or {}).get("configs") or [] if isinstance(each, dict) and each.get("data_files")]
    if not configs:
        return []
    by_name = {str(each.get("config_name", "default")): each for each in configs}
    default = next((name for name, each in by_name.items() if each.get("default")), "default")
    name = dataset.config or (next(iter(by_name)) if len(by_name) == 1 else default)
    if name not in by_name:
        some = ", ".join(sorted(by_name)[:8]) + (" ..." if len(by_name) > 8 else "")
        raise ConfigError(
            "hf:{repo} has no configuration {name!r}",
            repo=dataset.repo,
            name=name,
            hint="write hf:{repo}/CONFIG with one of: {some}",
            some=some,
        )
    files = by_name[name]["data_files"]
    splits: dict[str, list[str]] = {}
    for entry in files if isinstance(files, list) else [files]:
        is_plain = isinstance(entry, str)
        split, path = ("train", entry) if is_plain else (str(entry.get("split", "train")), entry.get("path", []))
        splits.setdefault(split, []).extend([path] if isinstance(path, str) else map(str, path))
    if dataset.split not in splits:
        raise ConfigError(
            "hf:{repo} has no split {split!r}",
            repo=dataset.repo,
            split=dataset.split,
            hint="choose with --split: {splits}",
            splits=", ".join(sorted(splits)),
        )
    return splits[dataset.split]


def _fixed_part(pattern: str) -> str:
    """The folder before the first wildcard: large datasets have more files than one wants to list."""
    return re.split(r"[^/]*[*?\[]|[^/]*$", pattern)[0].rstrip("/")


def _is_of(path: str, dataset: HubDataset) -> bool:
    """Datasets without a list: CONFIG is a folder, SPLIT a folder or the beginning of the file's name."""
    *folders, name = path.split("/")
    if dataset.config and dataset.config not in folders:
        return False
    return dataset.split in folders or re.match(rf"{re.escape(dataset.split)}([-_.]|$)", name) is not None


def _licence(card: Any) -> str:
    licence = (card or {}).get("license")
    return ", ".join(map(str, licence)) if isinstance(licence, list) else str(licence or "unknown")
