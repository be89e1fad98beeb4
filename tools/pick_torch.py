"""Which torch to install on this machine, and why.

    pip install $(python tools/pick_torch.py)

prints the choice and its reason on stderr and pip's arguments on stdout. Needs nothing but Python. It does what no
installer does: it looks at the compute capability of the card, not only at the driver, so that a GTX 10xx with a new
driver does not get a build without kernels for it.

* Always `--index-url`, never `--extra-index-url`: with two indexes anyone may publish the higher version on one.
* The build is part of the version (`2.13.0+cpu`), so that pip replaces a build that no longer fits the machine.
* For the CPU build, a wheel that pip's own configuration offers (a mirror, a folder of wheels) comes first.

https://pytorch.org/get-started/locally/ · CUDA 13 needs driver 580 and has no Maxwell, Pascal or Volta.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

VERSION = "2.13.0"
INDEX = "https://download.pytorch.org/whl/"
CUDA_13_CAPABILITY = (7, 5)
CUDA_13_DRIVER = 580
CUDA_12_DRIVER = 525  # CUDA 12.6 runs on any driver of the 12 family; 560 is the one it was built with
BLACKWELL = (10, 0)
PYTHONS = ((3, 11), (3, 14))
NVIDIA_SMI_PLACES = ("/usr/lib/wsl/lib/nvidia-smi", r"C:\Windows\System32\nvidia-smi.exe")
SMI_TIMEOUT_SECONDS = 20.0
PIP_TIMEOUT_SECONDS = 120.0


class Refusal(Exception):
    """No torch fits this machine; the message says why and what to do."""


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Choice:
    requirement: str
    index_url: str | None  # None: wherever pip is configured to look, by default PyPI
    reason: str

    @property
    def arguments(self) -> list[str]:
        """What follows `pip install`. The CPU build takes its few dependencies from the ordinary index later."""
        place = ["--index-url", self.index_url] if self.index_url else []
        return [self.requirement, *place, *(["--no-deps"] if self.requirement.endswith("+cpu") else [])]


def choose(
    os_name: str,
    machine: str,
    gpus: Sequence[Gpu],
    driver: str | None,
    python_version: tuple[int, int],
) -> Choice:
    """Pure. `os_name` and `machine` as `platform.system()` and `.machine()` say. Raises Refusal."""
    machine = {"amd64": "x86_64", "aarch64": "arm64"}.get(machine.lower(), machine.lower())
    if not PYTHONS[0] <= python_version <= PYTHONS[1]:
        raise Refusal(
            f"Python {_dotted(python_version)} is outside {_dotted(PYTHONS[0])} to {_dotted(PYTHONS[1])}, for which "
            f"torch {VERSION} exists. Install one of those, then: make setup PYTHON=python{_dotted(PYTHONS[1])}"
        )
    if os_name == "Darwin":
        if machine != "arm64":
            raise Refusal(
                f"torch {VERSION} does not exist for Intel Macs (2.2.2 was the last). On Apple silicon this message "
                "means that Python runs under Rosetta: install an arm64 Python. An Intel Mac cannot take part."
            )
        return Choice(f"torch=={VERSION}", None, "macOS on Apple silicon: PyPI's build has MPS")
    if os_name not in ("Linux", "Windows") or machine not in ("x86_64", "arm64"):
        raise Refusal(f"there is no torch {VERSION} for {os_name} on {machine}")
    if os_name == "Windows" and machine == "arm64":
        raise Refusal("there is no torch for Windows on ARM that we know to work; use WSL2")
    if not gpus:
        return _build("cpu", "no NVIDIA GPU found")
    return _for_gpus(gpus, driver)


def _for_gpus(gpus: Sequence[Gpu], driver: str | None) -> Choice:
    best = max(gpus, key=lambda gpu: gpu.capability)
    oldest = min(gpus, key=lambda gpu: gpu.capability)
    head = (driver or "").split(".")[0]
    major = int(head) if head.isdigit() else CUDA_13_DRIVER
    about = f"{best.name}, compute capability {_dotted(best.capability)}, driver {driver or 'unknown'}"
    if major < CUDA_12_DRIVER:
        return _build("cpu", f"{about}: older than {CUDA_12_DRIVER}; update it and run this again to use the GPU")
    if major < CUDA_13_DRIVER:
        if best.capability >= BLACKWELL:
            return _build("cpu", f"{about}: this card needs driver {CUDA_13_DRIVER}; update it and run this again")
        return _build("cu126", f"{about}: CUDA 13 needs driver {CUDA_13_DRIVER}")
    if oldest.capability >= CUDA_13_CAPABILITY:
        return _build("cu130", about)
    if best.capability >= BLACKWELL:
        return _build("cu130", f"{about}; no build serves {oldest.name} as well, which stays unused")
    old = f"{oldest.name}, compute capability {_dotted(oldest.capability)}"
    return _build("cu126", f"{old}: CUDA 13 has no kernels for it")


def _build(build: str, reason: str) -> Choice:
    return Choice(f"torch=={VERSION}+{build}", INDEX + build, reason)


def prefer_configured(choice: Choice, *, offered: bool) -> Choice:
    """Without the index if pip's own configuration offers this very build."""
    if not offered:
        return choice
    return Choice(choice.requirement, None, f"{choice.reason}; from the wheels that pip is configured with")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def parse_gpus(text: str) -> tuple[list[Gpu], str | None]:
    """Cards and driver from `nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader`."""
    gpus: list[Gpu] = []
    driver: str | None = None
    for line in text.splitlines():
        fields = [field.strip() for field in line.rsplit(",", 2)]
        if len(fields) != 3:
            continue
        major, _, minor = fields[1].partition(".")
        if major.isdigit() and minor.isdigit():
            gpus.append(Gpu(fields[0], (int(major), int(minor))))
            driver = fields[2]
    return gpus, driver


def read_gpus() -> tuple[list[Gpu], str | None, str]:
    """(cards, driver, trouble): what nvidia-smi says, and why it says nothing if it should have."""
    program = shutil.which("nvidia-smi") or next((path for path in NVIDIA_SMI_PLACES if os.path.exists(path)), None)
    if program is None:
        return [], None, ""
    try:
        done = subprocess.run(
            [program, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SMI_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [], None, f"nvidia-smi did not answer within {SMI_TIMEOUT_SECONDS:g} s"
    except OSError as error:
        return [], None, f"nvidia-smi cannot be run: {error}"
    gpus, driver = parse_gpus(done.stdout)
    said = (done.stdout + done.stderr).strip().splitlines()
    return gpus, driver, "" if gpus else f"nvidia-smi names no GPU ({said[0] if said else 'it says nothing'})"


def is_offered(requirement: str) -> bool:
    """Does pip, as it is configured, find this very build? A local version is on no public index, so that nothing
    large is downloaded to find out."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "-q"]
    try:
        done = subprocess.run(
            [*command, "--disable-pip-version-check", "--no-input", "--retries", "1", requirement],
            capture_output=True,
            timeout=PIP_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Choose the torch build for this machine.")
    parser.add_argument("--cpu", action="store_true", help="the CPU build, whatever the machine has")
    options = parser.parse_args()
    gpus, driver, trouble = ([], None, "") if options.cpu or platform.system() == "Darwin" else read_gpus()
    try:
        choice = choose(platform.system(), platform.machine(), gpus, driver, sys.version_info[:2])
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 3
    if choice.requirement.endswith("+cpu"):
        choice = prefer_configured(choice, offered=is_offered(choice.requirement))
    reason = choice.reason + (f"; {trouble}" if trouble else "")
    print(f"{choice.requirement} ({reason})", file=sys.stderr)
    print(" ".join(choice.arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
