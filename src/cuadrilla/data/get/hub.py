"""Datasets of the Hugging Face hub: parquet files only, listed by huggingface_hub and fetched like any other file.

No script of a dataset is ever run: what is not parquet is not seen. A revision becomes the commit it stands for, so
that all files are of one state and the record says which; the hub knows each file's SHA-256. The endpoint and the
token are the library's own (`HF_ENDPOINT`, `hf auth login`, `HF_TOKEN`).
"""

import re
from collections.abc import Sequence
from typing import Any, cast

import httpx2 as httpx

from cuadrilla.data.get.download import DownloadRequest, names_below
from cuadrilla.data.get.record import UNKNOWN
from cuadrilla.errors import ConfigError, DataError, EnvironmentProblem, LinkError

PREFIX = "hf:"
ENCRYPTED_OR_HERE = ("https://", "http://127.0.0.1:", "http://localhost:")
"""Beginnings of the addresses that the hub's token is sent to."""
_ADDRESS = re.compile(r"hf:([\w-][\w.-]*/[\w-][\w.-]*)(?:/([\w+-][\w.+-]*))?")


def list_parquet(
    address: str, *, split: str = "", revision: str = "", licence: str = "", endpoint: str | None = None
) -> list[DownloadRequest]:
    """The files of a split of `hf:OWNER/NAME[/CONFIG]`, by name; from the library's own endpoint if none is given.

    Raises ConfigError for what the dataset does not have, DataError if it has no parquet, LinkError.
    """
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise EnvironmentProblem(
            "hf: needs huggingface_hub: {error}", error=error, hint='pip install "cuadrilla[hf]"'
        ) from error
    given = _ADDRESS.fullmatch(address)
    if not given:
        hint = "write hf:OWNER/NAME or hf:OWNER/NAME/CONFIG"
        raise ConfigError("{text!r} is not a dataset of the hub", text=address, hint=hint)
    repo, config, split = given[1], given[2] or "", split or "train"
    api = hub.HfApi(endpoint=endpoint)
    if hub.get_token() and not api.endpoint.startswith(ENCRYPTED_OR_HERE):
        problem = "{endpoint} would receive the hub's token unencrypted"
        raise ConfigError(problem, endpoint=api.endpoint, hint="set HF_ENDPOINT to an https:// address")
    try:
        info = api.dataset_info(repo, revision=revision or "main")
        card: Any = info.card_data or {}
        patterns = data_files(card, repo, config=config, split=split)
        files = hub.HfFileSystem(endpoint=endpoint, skip_instance_cache=True)
        root = f"datasets/{repo}@{info.sha}/"
        found = {
            path: facts
            for pattern in patterns or ["**/*.parquet"]
            for path, facts in cast(dict[str, Any], files.glob(root + pattern, detail=True)).items()
            if path.endswith(".parquet") and (patterns or _is_of(path, config=config, split=split))
        }
    except (OSError, httpx.HTTPError) as error:  # what the hub answers is an OSError, what does not answer is none
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = "check name, revision and network; private and gated ones need `hf auth login`"
        raise LinkError("{where} cannot be listed: {reason}", where=address, reason=reason, hint=hint) from error
    if not found:
        what = f"{config} {split}".strip()
        hint = "check configuration and --split; scripts of datasets are not run, only parquet is read"
        raise DataError("{where} has no parquet files for {what!r}", where=address, what=what, hint=hint)
    names = names_below(sorted(found))
    return [
        DownloadRequest(
            url=hub.hf_hub_url(
                repo, path.removeprefix(root), repo_type="dataset", revision=info.sha, endpoint=endpoint
            ),
            name=name,
            subfolder="-".join(filter(None, (repo.split("/")[1], config, split))),
            licence=licence or str(card.get("license") or UNKNOWN),
            sha256=lfs["sha256"] if (lfs := found[path].get("lfs")) else "",
            vouched_by="hub",
            revision=info.sha or "",
            token=hub.get_token() or "",
        )
        for path, name in names.items()
    ]


def data_files(card: Any, repo: str, *, config: str, split: str) -> Sequence[str]:
    """Patterns of the files that the card names for a configuration and split; none if it has no list.

    Raises ConfigError for a configuration or a split that is not in it.
    """
    configs = {
        str(each.get("config_name", "default")): each for each in card.get("configs") or [] if each.get("data_files")
    }
    if not configs:
        return []
    default = next((name for name, each in configs.items() if each.get("default")), "default")
    name = config or (next(iter(configs)) if len(configs) == 1 else default)
    if name not in configs:
        raise ConfigError(
            "hf:{repo} has no configuration {name!r}",
            repo=repo,
            name=name,
            hint="write hf:{repo}/CONFIG with one of: {some}",
            some=", ".join(sorted(configs)[:8]),
        )
    splits: dict[str, list[str]] = {}
    files = configs[name]["data_files"]
    for entry in files if isinstance(files, list) else [files]:
        each = entry if isinstance(entry, dict) else {"path": entry}
        paths = each.get("path", [])
        splits.setdefault(str(each.get("split", "train")), []).extend([paths] if isinstance(paths, str) else paths)
    if split not in splits:
        raise ConfigError(
            "hf:{repo} has no split {split!r}",
            repo=repo,
            split=split,
            hint="choose with --split: {splits}",
            splits=", ".join(sorted(splits)),
        )
    return splits[split]


def _is_of(path: str, *, config: str, split: str) -> bool:
    """Datasets without a list: CONFIG is a folder, SPLIT a folder or the beginning of the file's name."""
    *folders, name = path.split("/")
    if config and config not in folders:
        return False
    return split in folders or re.match(rf"{re.escape(split)}([-_.]|$)", name) is not None
