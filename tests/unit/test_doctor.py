"""Each check of `doctor`, on the texts that real programs print: what it says when they are there, and silence else.

The texts are those of `docker`, `nvidia-smi`, `netsh`, `ufw`, ... as their documentation and their users' reports show
them; a healthy machine of each kind gets no finding at all.
"""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.cli.doctor import report
from cuadrilla.doctor.checks import CHECKS, examine
from cuadrilla.doctor.facts import (
    DockerSide,
    Folder,
    NvidiaPrograms,
    Power,
    Symptoms,
    parse_packages,
    parse_pmset,
    parse_powercfg,
    parse_speed,
    read_kept,
)
from cuadrilla.doctor.programs import decoded
from cuadrilla.host.room import parse_mounts
from cuadrilla.messages import Message
from tests.patients import CARD, CONTAINER, CPU, GIB, HOST, KINDS, LINUX, MAC, NO_DEVICES, SMI, WSL, only, said, sick

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_machine_gets_no_finding(kind: str) -> None:
    assert sick(KINDS[kind]) == []
    assert {name for name, _ in examine(KINDS[kind])} >= {"machine.system", "nvidia.torch", "machine.disk"}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_known_is_no_finding(kind: str) -> None:
    """Where nothing could be found out nothing is said to be wrong, but for the network, of which there is none."""
    seen = Symptoms(host=KINDS[kind].host, installation=KINDS[kind].installation, now=1.8e9)
    assert {name for name, _ in sick(seen)} <= {"network.address", "network.own_name"}


class TestNvidia:
    """platforms.md §3.1: NV1 to NV5."""

    def test_a_wheel_without_kernels_for_the_card(self) -> None:
        hint = 'pip install "torch==2.13.0+cu126" --index-url https://download.pytorch.org/whl/cu126'
        error = Message("PyTorch {version} has no kernels for compute capability {capability} ({kernels})",
                        version="2.13.0+cu130", capability="6.1", kernels="sm_75, sm_80")  # fmt: skip
        old = replace(CARD, name="GTX 1080 Ti", capability=(6, 1), error=error, hint=hint)
        found = only(replace(LINUX, devices=(old, CPU)), "nvidia.cards")
        assert found.level == "failure"
        assert "GTX 1080 Ti: PyTorch 2.13.0+cu130 has no kernels for compute capability 6.1" in found.cause
        assert found.command == f"/home/ana/.venv/bin/python -m {hint}"
        assert found.fixable
        assert sick(replace(LINUX, devices=(replace(old, error=None, hint=""), CPU))) == []

    def test_a_torch_that_does_not_load(self) -> None:
        broken = replace(CPU, error=Message("PyTorch cannot be loaded: {reason}", reason="libcudart.so.13"), hint="x")
        found = only(replace(LINUX, devices=(CARD, broken)), "nvidia.torch")
        assert found.command == "/home/ana/.venv/bin/python -m pip install --force-reinstall torch"

    @pytest.mark.parametrize(
        ("version", "end"),
        [("2.9.1+cu118", '"torch>=2.10"'), ("2.5.0+cpu", "https://download.pytorch.org/whl/cpu"),
         ("1.13.1", '"torch>=2.10"')],
    )  # fmt: skip
    def test_a_torch_that_is_not_safe(self, version: str, end: str) -> None:
        old = replace(CPU, torch_version=version)
        found = only(replace(LINUX, devices=(old,)), "nvidia.torch")
        assert found.level == "failure"
        assert found.command.endswith(end)
        beside = replace(CARD, torch_version=version)
        assert only(replace(LINUX, devices=(beside, old)), "nvidia.torch").command.endswith("/whl/cu130")
        assert sick(replace(LINUX, devices=(replace(CPU, torch_version="2.10.0+cpu"),))) == []

    def test_two_torches(self) -> None:
        copies = (("2.9.0", "/home/ana/.local/lib"), ("2.13.0+cpu", "/home/ana/.venv/lib"))
        found = only(replace(LINUX, installation=replace(LINUX.installation, torch_copies=copies)), "nvidia.torch")
        assert found.command.endswith("-m pip uninstall -y torch")
        assert "/home/ana/.local/lib" in found.cause
        added = replace(LINUX.installation, torch_copies=(("2.9.0", "/opt/old/"), ("2.13.0+cpu", "/x")))
        found = only(replace(LINUX, installation=added, environ={"PYTHONPATH": "/opt/old:/y"}), "nvidia.torch")
        assert found.command == "unset PYTHONPATH"

    def test_wsl_was_started_before_the_driver(self) -> None:
        seen = replace(WSL, nvidia=NvidiaPrograms(smi=NO_DEVICES, windows_smi=SMI))
        found = only(seen, "nvidia.driver")
        assert (found.command, found.shell) == ("wsl --shutdown", "powershell")
        assert "NVIDIA GeForce RTX 4070 Ti" in found.cause

    def test_no_card_on_either_side(self) -> None:
        found = only(replace(WSL, nvidia=NvidiaPrograms(smi=NO_DEVICES, windows_smi=NO_DEVICES)), "nvidia.driver")
        assert found.command == "nvidia-smi.exe"

    def test_windows_has_a_card_and_wsl_lends_none(self) -> None:
        found = only(replace(WSL, nvidia=NvidiaPrograms(windows_smi=SMI, has_dxg=False)), "nvidia.wsl_driver")
        assert found.command == "wsl --update"

    def test_a_linux_driver_inside_wsl(self) -> None:
        listed = (
            "ii libnvidia-compute-535\nrc nvidia-driver-470\nun nvidia-driver-390\nii nvidia-driver-535\n"
            "dpkg-query: no packages found matching cuda-drivers*\n"
        )
        packages = parse_packages(listed)
        assert packages == ("libnvidia-compute-535", "nvidia-driver-535")
        found = only(replace(WSL, nvidia=replace(WSL.nvidia, driver_packages=packages)), "nvidia.wsl_driver")
        assert found.command == "sudo apt-get purge -y libnvidia-compute-535 nvidia-driver-535"
        assert sick(replace(LINUX, nvidia=replace(LINUX.nvidia, driver_packages=packages))) == []  # there it belongs

    def test_off_the_path(self) -> None:
        found = only(replace(WSL, nvidia=replace(WSL.nvidia, smi_off_path=True)), "nvidia.wsl_driver")
        assert found.command == "export PATH=$PATH:/usr/lib/wsl/lib"

    @pytest.mark.parametrize(
        ("text", "code", "command"),
        [
            ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.82", 18,
             "sudo reboot"),
            ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
             "NVIDIA driver is installed and running.", 9, "sudo ubuntu-drivers install"),
            ("Unable to determine the device handle for GPU0: 0000:01:00.0: Unknown Error", 255, "sudo reboot"),
            ("", None, "sudo reboot"),
        ],
    )  # fmt: skip
    def test_a_driver_that_fails(self, text: str, code: int | None, command: str) -> None:
        found = only(replace(LINUX, nvidia=NvidiaPrograms(smi=said(text, code)), docker=DockerSide()), "nvidia.driver")
        assert (found.level, found.command) == ("failure", command)

    def test_a_driver_that_is_not_built_for_the_kernel_of_a_debian(self) -> None:
        lost = NvidiaPrograms(
            smi=said("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9)
        )
        debian = replace(
            LINUX, host=replace(HOST, system_version="Debian GNU/Linux 13"), docker=DockerSide(), nvidia=lost
        )
        assert only(debian, "nvidia.driver").command == "sudo dkms autoinstall"

    def test_a_driver_that_hangs_under_wsl(self) -> None:
        found = only(replace(WSL, nvidia=NvidiaPrograms(smi=said("", None), windows_smi=SMI)), "nvidia.driver")
        assert (found.command, found.shell) == ("wsl --shutdown", "powershell")

    def test_the_card_vanishes_from_a_container(self) -> None:
        lost = NvidiaPrograms(smi=said("Failed to initialize NVML: Unknown Error", 255))
        assert only(replace(CONTAINER, nvidia=lost), "nvidia.driver").command == "docker restart NAME"

    def test_the_image_for_processors_says_itself_that_there_is_no_card(self) -> None:
        script = (Path(__file__).parents[2] / "docker" / "nvidia-smi").read_text()
        assert sick(replace(CONTAINER, nvidia=NvidiaPrograms(smi=said(script, 1)))) == []

    @pytest.mark.parametrize("value", ["", "-1"])
    def test_a_variable_hides_the_cards(self, value: str) -> None:
        seen = replace(LINUX, environ={"CUDA_VISIBLE_DEVICES": value})
        assert only(seen, "nvidia.hidden").command == "unset CUDA_VISIBLE_DEVICES"
        assert sick(replace(seen, environ={"CUDA_VISIBLE_DEVICES": "0"})) == []
        assert sick(replace(seen, nvidia=NvidiaPrograms())) == []


class TestMachine:
    def test_disk(self) -> None:
        full = replace(LINUX.folder, free_bytes=GIB // 2, mount="/home")
        found = only(replace(LINUX, folder=full, home=replace(full, path="/home/ana")), "machine.disk")
        assert (found.level, found.command) == ("failure", "du -xhd1 /home | sort -h | tail")
        assert only(replace(LINUX, folder=replace(full, free_bytes=3 * GIB)), "machine.disk").level == "warning"
        tmpfs = Folder(path="/mnt/x/a", mount="/mnt/x", filesystem="tmpfs", total_bytes=2**23, free_bytes=0)
        found = only(replace(LINUX, folder=tmpfs), "machine.disk")
        assert (found.command, found.fixable) == ("sudo mount -o remount,size=6G /mnt/x", True)

    def test_files_that_cannot_be_made(self) -> None:
        few = replace(LINUX.folder, free_files=12, mount="/home")
        found = only(replace(LINUX, folder=few, home=replace(few, path="/home/ana")), "machine.files")
        assert found.cause == "/home/ana/run takes 12 more files (inodes), however much room it has"
        assert (found.level, found.command) == ("failure", "du --inodes -xd1 /home | sort -n | tail")
        locked = replace(LINUX, home=replace(LINUX.home, writable=False), kept=Folder(path="/a", writable=False))
        assert only(locked, "machine.files").command.startswith("export CUADRILLA_HOME=")
        assert sick(replace(locked, kept=Folder(path="/data", writable=True))) == []
        given = replace(LINUX, kept=Folder(path="/a", writable=False), environ={"CUADRILLA_HOME": "/a"})
        assert only(given, "machine.files").command == "unset CUADRILLA_HOME"

    def test_what_this_machine_keeps(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where it is not there yet, it can be made; a file of that name is in the way."""
        monkeypatch.setenv("CUADRILLA_HOME", str(tmp_path / "a" / "b"))
        found = read_kept()
        assert (found.path, found.writable) == (str(tmp_path / "a" / "b"), True)
        assert found.free_bytes
        (tmp_path / "a").write_text("")
        assert read_kept().writable is False
        found = only(replace(LINUX, folder=replace(LINUX.folder, writable=False)), "machine.files")
        assert (found.level, found.command) == ("warning", "cd ~")

    def test_a_slow_network_folder(self) -> None:
        slow = replace(LINUX.folder, filesystem="nfs4", mount="/nas", path="/nas/run", read_bytes_per_second=11e6)
        assert "nfs4) reads 11 MB/s" in only(replace(LINUX, folder=slow), "machine.slow_disk").cause
        assert sick(replace(LINUX, folder=replace(slow, read_bytes_per_second=110e6))) == []

    def test_a_reader_that_hangs(self) -> None:
        found = only(replace(WSL, unanswered=("wsl", "reachability")), "machine.unanswered")
        assert "wsl, reachability" in found.cause
        assert (found.command, found.shell) == ("wsl --shutdown", "powershell")
        assert only(replace(LINUX, unanswered=("folder",)), "machine.unanswered").command == "df"

    def test_memory(self) -> None:
        def with_memory(have: float, free: float, swap: int = 0) -> Symptoms:
            host = replace(HOST, memory_bytes=int(have * GIB), available_bytes=int(free * GIB))
            return replace(LINUX, host=host, swap_bytes=swap)

        assert only(with_memory(1.9, 1.0), "machine.memory").level == "failure"
        assert only(with_memory(16, 0.3), "machine.memory").command.startswith("ps ")
        assert "swapon" in only(with_memory(3.8, 2.0), "machine.memory").command
        assert sick(with_memory(3.8, 2.0, swap=GIB)) == []
        limited = replace(CONTAINER, host=replace(CONTAINER.host, memory_limit_bytes=GIB))
        assert "docker run --memory" in only(limited, "machine.memory").remedy

    def test_power(self) -> None:
        found = only(replace(LINUX, power=Power(on_battery=True, percent=61.0)), "machine.power")
        assert found.cause == "on battery (61 %): slower, and not for long"
        for told_by, command in (
            ("pmset", "sudo pmset -c sleep 0"),
            ("powercfg", "powercfg /change standby-timeout-ac 0"),
            ("gsettings",
             "gsettings set org.gnome.settings-daemon.plugins.power sleep-inactive-ac-type nothing"),
        ):  # fmt: skip
            seen = replace(LINUX, power=Power(sleeps_after_seconds=900, told_by=told_by))
            assert only(seen, "machine.power").command == command
        assert sick(replace(LINUX, power=Power(on_battery=False, sleeps_after_seconds=0, told_by="pmset"))) == []

    def test_what_pmset_and_powercfg_print(self) -> None:
        pmset = (
            "Battery Power:\n lidwake              1\n sleep                1\n displaysleep         2\n"
            "AC Power:\n womp                 1\n sleep                10 (sleep prevented by powerd)\n"
        )
        assert parse_pmset(pmset) == 600
        assert parse_pmset(pmset.replace("10 (", "0 (")) == 0
        assert parse_pmset("") is None
        powercfg = (
            "GUID de subgrupo: 238c9fa8-0aad-41ed-83f4-97be242c8f20  (Suspender)\n"
            "    Incremento de configuración posible: 0x00000001\n"
            "  Índice de configuración de corriente alterna actual: 0x00000708\n"
            "  Índice de configuración de corriente continua actual: 0x00000258\n"
        )
        assert parse_powercfg(powercfg) == 1800
        assert parse_powercfg("The power scheme does not exist.") is None

    def test_clock(self) -> None:
        found = only(replace(LINUX, now=0.0), "machine.clock")
        assert (found.level, found.command) == ("failure", "sudo timedatectl set-ntp true")
        told = "Timezone=Europe/Madrid\nCanNTP=yes\nNTP=no\nNTPSynchronized=no\n"
        assert only(replace(LINUX, time_service=told), "machine.clock").level == "warning"
        assert sick(replace(LINUX, time_service=told.replace("NTP=no", "NTP=yes"))) == []
        assert sick(replace(LINUX, time_service=told.replace("zed=no", "zed=yes"))) == []  # chrony, say

    @pytest.mark.parametrize("name", ["localhost", "localhost.localdomain", ""])
    def test_name(self, name: str) -> None:
        assert only(replace(LINUX, hostname=name), "machine.name").command == "sudo hostnamectl set-hostname NAME"

    def test_python(self) -> None:
        own = LINUX.installation
        system = replace(own, in_environment=False, externally_managed=True)
        assert only(replace(LINUX, installation=system), "machine.python").command == "make setup"
        assert sick(replace(LINUX, installation=replace(own, in_environment=False))) == []  # pyenv's, say
        assert "3.15" in only(replace(LINUX, installation=replace(own, version=(3, 15))), "machine.python").cause

    @pytest.mark.parametrize(
        ("name", "value", "harmless"),
        [
            ("GLOO_DEVICE_TRANSPORT", "UV", None),
            ("GLOO_SOCKET_IFNAME", "eth99", "enp3s0"),
            ("NCCL_SOCKET_IFNAME", "wlan", "enp"),
            ("OMP_NUM_THREADS", "0", "4"),
            ("CUDA_LAUNCH_BLOCKING", "1", "0"),
            ("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.0", "0.8"),
        ],
    )
    def test_variables(self, name: str, value: str, harmless: str | None) -> None:
        assert only(replace(LINUX, environ={name: value}), "machine.variables").command == f"unset {name}"
        if harmless:
            assert sick(replace(LINUX, environ={name: harmless})) == []

    def test_a_folder_for_temporary_files_that_is_not_there(self) -> None:
        gone = replace(LINUX, environ={"TMPDIR": "/gone"}, temporary=False)
        assert only(gone, "machine.variables").command == "unset TMPDIR"


class TestMac:
    def test_rosetta_and_intel(self) -> None:
        rosetta = replace(MAC, host=replace(MAC.host, rosetta=True, machine="x86_64"))
        assert "arch -arm64" in only(rosetta, "mac.python").command
        assert only(replace(MAC, host=replace(MAC.host, machine="x86_64")), "mac.python").level == "failure"

    def test_old_system(self) -> None:
        old = replace(MAC, host=replace(MAC.host, system_version="13.6"))
        assert only(old, "mac.system").command == "softwareupdate --install --all"


def test_a_mount_is_found_by_its_longest_name() -> None:
    mounts = (
        "overlay / overlay rw 0 0\nC:\\134 /mnt/c 9p rw,aname=drvfs 0 0\ntmpfs /mnt/with\\040space tmpfs rw 0 0\n"
        "/dev/sdb /home ext4 rw 0 0\nbroken\n"
    )
    assert parse_mounts(mounts, "/mnt/c/Users") == ("/mnt/c", "9p")
    assert parse_mounts(mounts, "/mnt/cc") == ("/", "overlay")
    assert parse_mounts(mounts, "/mnt/with space/x") == ("/mnt/with space", "tmpfs")
    assert parse_mounts("", "/x") == ("/", "")


def test_a_speed_that_was_not_reached() -> None:
    assert parse_speed(said("100 50\n8000")) == (100, 50, 8000)
    assert parse_speed(said("100 50\nRead-only file system", 1)) == (100, 50, None)
    total, _, speed = parse_speed(said("100 50", None))
    assert total == 100
    assert speed is not None
    assert speed < 2e6
    assert parse_speed(said("", None)) == (None, None, 0)
    assert parse_speed(None) == (None, None, None)


def test_what_windows_programs_write() -> None:
    assert decoded("nat\r\n".encode("utf-16-le")) == "nat"
    assert decoded("\ufeffmirrored\r\n".encode()) == "mirrored"


def test_every_check_is_tested() -> None:
    """A check that is added without a test of its own is noticed: its name stands in these files, quoted."""
    text = "".join(file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("test_doctor*.py"))
    silent = {"machine.system"}  # says what the machine is
    assert {name for name in CHECKS if f'"{name}"' not in text} <= silent


def test_what_is_told_is_told_in_both_languages() -> None:
    little = Folder(path="/home/ana/run", filesystem="ext4", total_bytes=900 * GIB, free_bytes=3 * GIB)
    rows = {row["check"]: row for row in report([*examine(replace(LINUX, folder=little))])["findings"]}
    disk, spanish = rows["machine.disk"], rows["machine.disk"]["translations"]["es"]
    assert disk["remedy"] == "this lists what takes the room; delete what you do not need"
    assert (disk["cause"], disk["place"]) == ("/home/ana/run has 3.0 GiB left", "type here")
    assert spanish["remedy"] == "esto muestra qué ocupa el sitio; borra lo que no necesites"
    assert spanish["place"] == "escribe aquí"
    assert "3,0 GiB" in spanish["cause"]
    system = rows["machine.system"]
    assert system["cause"].endswith("16 cores")
    assert system["translations"]["es"]["cause"].endswith("16 núcleos")  # a message in a message
    assert (system["place"], system["translations"]["es"]["remedy"]) == ("", "")


def test_symptoms_are_plain_data() -> None:
    def plain(value: Any) -> bool:
        return isinstance(value, str | int | float | None | dict | tuple)

    assert all(plain(value) or dataclasses.is_dataclass(value) for value in vars(LINUX).values())
