"""The image of the container tests: built once, and kept under a name that is a hash of the files it is made from.

    python3 -m tests.images      builds it if it is not there, and says how long that took

Needs nothing but Python, so that it can be built while the environment of the tests is still being set up.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASE_VARIABLE, LOCAL_BASE = "CUADRILLA_BASE_IMAGE", "cuadrilla-base:local"
MADE_FROM = (
    "Dockerfile",
    "docker",
    "src",
    ".dockerignore",
    "constraints.txt",
    "pyproject.toml",
    "hatch_build.py",
    "README.md",
    "LICENSE",
    "tools/pick_torch.py",
)


class Missing(Exception):
    """This machine lacks what the message names."""


def docker(*arguments: str) -> str:
    """Run a command of Docker and return its output. Raises RuntimeError if it fails."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"docker {' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout.strip()


def has_image(name: str) -> bool:
    return subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False).returncode == 0


def base_image() -> str:
    """The base image that was given, or the local one. Raises Missing."""
    if shutil.which("docker") is None:
        raise Missing("needs the command docker")
    engine = ["docker", "version", "--format", "{{.Server.Version}}"]
    found = subprocess.run(engine, capture_output=True, text=True, check=False)
    if found.returncode:
        raise Missing(f"needs a Docker engine: {found.stderr.strip()}")
    if given := os.environ.get(BASE_VARIABLE):
        return given
    if not has_image(LOCAL_BASE):
        raise Missing(f"needs a base image: {BASE_VARIABLE}=python:3.12-slim-bookworm, or `docker/local-base-image`")
    return LOCAL_BASE


def files() -> Iterator[Path]:
    for name in MADE_FROM:
        path = ROOT / name
        found = [path] if path.is_file() else path.rglob("*")
        yield from (file for file in found if file.is_file() and "__pycache__" not in file.parts)


def name_of(base: str) -> str:
    """The image's name without its tag, which is `cpu`."""
    digest = hashlib.sha256(base.encode())
    for file in sorted(files()):
        digest.update(f"\0{file.relative_to(ROOT)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return f"cuadrilla-test-{digest.hexdigest()[:12]}"


def build() -> str:
    """The image's name, without the tag. Raises Missing, and RuntimeError if it cannot be built."""
    base = base_image()
    name = name_of(base)
    if has_image(f"{name}:cpu"):
        return name
    began = time.monotonic()
    settings = ("--network", "host", "--build-arg", f"BASE_IMAGE={base}")
    docker("build", "--quiet", *settings, "--tag", f"{name}:cpu", str(ROOT))
    print(f"images: built {name}:cpu on {base} in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return name


if __name__ == "__main__":
    try:
        print(build())
    except Missing as missing:
        print(f"images: {missing}", file=sys.stderr)
