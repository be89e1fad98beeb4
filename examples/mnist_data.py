"""Handwritten digits: the four files of MNIST, or the coarser images that come with scikit-learn.

MNIST lies in a folder, as published (.gz) or unpacked: `mnist` beside this file, if no other is named. What is missing
there is downloaded and must have the known hash; what is there is only parsed, so that files in the same format may
take its place.
"""

import gzip
import hashlib
import logging
import math
import urllib.request
import zlib
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cuadrilla.errors import DataError, EnvironmentProblem
from cuadrilla.rundir import storage_errors, write_atomic

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "mnist"
URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
TIMEOUT_SECONDS = 30.0
MAX_FILE_BYTES = 64 * 2**20  # the largest, unpacked, has 47 MB
SHA256 = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}


@dataclass(frozen=True)
class Examples:
    """Images of unsigned bytes, shape (N, 28, 28), and N digits: a map-style dataset."""

    images: NDArray[np.uint8]
    digits: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.generic] | np.int64]:
        return {"image": self.images[index], "digit": self.digits[index]}

    def split(self, first: int) -> tuple["Examples", "Examples"]:
        """The first so many, and the rest."""
        return (
            Examples(self.images[:first], self.digits[:first]),
            Examples(self.images[first:], self.digits[first:]),
        )

    def sha256(self) -> str:
        return hashlib.sha256(self.images.tobytes() + self.digits.tobytes()).hexdigest()


def load(split: Literal["train", "t10k"], *, folder: Path = FOLDER, url: str = URL) -> Examples:
    """MNIST's 60,000 training or 10,000 test images. Raises DataError, and ResourceError if the disk is full."""
    images = read_idx(find(f"{split}-images-idx3-ubyte", folder=folder, url=url), num_dimensions=3)
    labels = read_idx(find(f"{split}-labels-idx1-ubyte", folder=folder, url=url), num_dimensions=1)
    if images.shape != (len(labels), 28, 28) or (labels > 9).any():
        raise DataError(
            f"{folder}: {split} images have shape {images.shape}; {len(labels)} labels up to {labels.max(initial=0)}",
            hint="28 x 28 pixels and a label from 0 to 9 for each image are needed: files of two datasets?",
        )
    return Examples(images, labels.astype(np.int64))


def find(name: str, *, folder: Path, url: str) -> Path:
    """The file of this name in `folder`, unpacked or .gz; downloaded if neither is there."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return download(f"{name}.gz", folder=folder, url=url)


def download(name: str, *, folder: Path, url: str) -> Path:
    """Fetch one file: it appears in `folder` whole and verified, or not at all."""
    log.warning("downloading %s%s", url, name)  # a level that reaches the terminal
    try:
        with urllib.request.urlopen(url + name, timeout=TIMEOUT_SECONDS) as answer:
            content: bytes = answer.read(MAX_FILE_BYTES)
    except (OSError, HTTPException) as error:
        raise DataError(f"cannot fetch {url}{name}: {error}", hint=f"try again, or put it into {folder}") from error
    if hashlib.sha256(content).hexdigest() != SHA256[name]:
        raise DataError(
            f"{url}{name} answered {len(content):,} bytes that are not this file of MNIST (SHA-256)",
            hint=f"a cut connection or a login page of the network? try again, or put the file into {folder}",
        )
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / name, content)  # temporary name, fsync, os.replace
    return folder / name


def read_idx(path: Path, *, num_dimensions: int) -> NDArray[np.uint8]:
    """An array of unsigned bytes: 0, 0, 8, the number of dimensions, each size (4 bytes, big-endian), the data."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            raw = file.read(MAX_FILE_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}", hint="delete it, and the next run downloads it") from error
    header_bytes = 4 + 4 * num_dimensions
    if len(raw) < header_bytes or raw[:4] != bytes([0, 0, 8, num_dimensions]):
        raise DataError(
            f"{path} is not an idx file of bytes in {num_dimensions} dimensions: it begins with {raw[:4].hex(' ')}",
            hint=f"expected 00 00 08 {num_dimensions:02x}; images have 3 dimensions and labels 1: swapped files?",
        )
    shape = [int(size) for size in np.frombuffer(raw[4:header_bytes], dtype=">u4")]
    if len(raw) - header_bytes != math.prod(shape):
        raise DataError(
            f"{path} holds {len(raw) - header_bytes:,} bytes of data and announces {math.prod(shape):,}",
            hint="delete it, and the next run downloads it",
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=header_bytes).reshape(shape).copy()  # a copy is writable


def load_sklearn() -> Examples:
    """scikit-learn's 1,797 digits of 8 x 8 pixels, each pixel as a square of nine, with a margin."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise EnvironmentProblem(f"scikit-learn cannot be used: {error}", hint="pip install scikit-learn") from error
    found = load_digits()  # pixels from 0 to 16
    pixels = np.pad(np.kron(found.images, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2))) * (255 / 16)
    return Examples(pixels.astype(np.uint8), found.target.astype(np.int64))
