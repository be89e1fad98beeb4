"""What `doctor` says of the network, WSL and Docker, on the texts that real programs print."""

import json
from dataclasses import replace

import pytest

from cuadrilla.doctor.docker import open_ports
from cuadrilla.doctor.facts import (
    DockerSide,
    Firewalls,
    Folder,
    NvidiaPrograms,
    WslSide,
    parse_powershell,
)
from cuadrilla.doctor.network import judge, ufw_allows
from cuadrilla.doctor.wsl import portproxy
from cuadrilla.host.card import NetworkCard
from cuadrilla.host.reachability import Reachability
from tests.patients import (
    CONTAINER,
    DOCKER,
    GIB,
    INFO,
    LINUX,
    MAC,
    NO_DAEMON,
    PORT,
    WINDOWS,
    WSL,
    only,
    said,
    sick,
)

pytestmark = pytest.mark.unit


class TestWsl:
    def test_wsl1(self) -> None:
        seen = replace(WSL, host=replace(WSL.host, wsl=1), environ={"WSL_DISTRO_NAME": "Debian"})
        assert only(seen, "wsl.version").command == "wsl --set-version Debian 2"

    def test_a_folder_of_windows(self) -> None:
        slow = Folder(path="/mnt/c/Users/ana/run", mount="/mnt/c", filesystem="9p", read_bytes_per_second=61e6)
        home = replace(WSL.home, read_bytes_per_second=1.9e9)
        found = only(replace(WSL, folder=slow, home=home), "wsl.files")
        assert found.cause == ("/mnt/c/Users/ana/run is a folder of Windows: it reads 61 MB/s, and /home/ana 1900 MB/s")
        assert found.command == "cd ~"
        assert sick(replace(WSL, folder=home, home=home)) == []
        assert "ten times slower" in only(
            replace(WSL, folder=replace(slow, read_bytes_per_second=None)), "wsl.files"
        ).cause  # fmt: skip

    def test_little_of_windows_memory(self) -> None:
        small = replace(WSL, host=replace(WSL.host, memory_bytes=int(7.7 * GIB)))
        assert sick(replace(small, wsl=WslSide())) == []  # what Windows has is not known
        found = only(replace(small, wsl=WslSide(windows_memory_bytes=16 * GIB)), "wsl.memory")
        assert "memory=12GB" in found.remedy
        assert (found.command, found.shell) == ("notepad $env:USERPROFILE\\.wslconfig", "powershell")
        written = WslSide(windows_memory_bytes=16 * GIB, settings="[wsl2]\nmemory=8GB\n[experimental]\n")
        assert sick(replace(small, wsl=written)) == []  # its owner has decided
        broken = replace(written, settings="memory=8GB\n")
        assert only(replace(small, wsl=broken), "wsl.memory").level == "warning"
        assert sick(replace(small, wsl=WslSide(windows_memory_bytes=int(7.9 * GIB)))) == []  # it has all there is

    def test_behind_windows_address(self) -> None:
        found = only(replace(WSL, port=PORT), "wsl.network")
        assert found.level == "warning"
        assert found.shell == "administrator"
        assert found.command == (
            "netsh interface portproxy add v4tov4 listenaddress=WINDOWS_ADDRESS listenport=47470 "
            "connectaddress=172.30.98.229 connectport=47470; New-NetFirewallRule -DisplayName cuadrilla "
            "-Direction Inbound -Action Allow -Protocol TCP -LocalPort 47470 -Profile Private"
        )

    def test_a_forwarded_port(self) -> None:
        """The two lines around the table are Spanish here."""
        table = (
            "\nEscuchar en ipv4:             Conectar a ipv4:\n\n"
            "Dirección       Puerto      Dirección       Puerto\n"
            "--------------- ----------  --------------- ----------\n"
            "192.168.1.50    47470       {inner}    47470\n"
        )
        assert portproxy(table.format(inner="172.30.98.229")) == [("192.168.1.50", 47470, "172.30.98.229", 47470)]
        seen = replace(WSL, port=PORT)
        right = replace(seen, wsl=replace(WSL.wsl, portproxy=table.format(inner="172.30.98.229")))
        assert sick(right) == []
        old = replace(seen, wsl=replace(WSL.wsl, portproxy=table.format(inner="172.19.4.7")))
        found = only(old, "wsl.stale")
        assert found.command == (
            "netsh interface portproxy set v4tov4 listenaddress=192.168.1.50 listenport=47470 "
            "connectaddress=172.30.98.229 connectport=47470"
        )
        elsewhere = replace(seen, port=None, wsl=replace(WSL.wsl, portproxy=table.format(inner="192.168.1.77")))
        assert sick(elsewhere) == []  # a forward to another machine is the owner's

    @pytest.mark.parametrize(("ports", "is_open"), [(("47470",), True), (("47000-48000",), True), (("Any",), True),
                                                    (("80", "443"), False), ((), False), (None, False)])  # fmt: skip
    def test_the_hyper_v_firewall(self, ports: tuple[str, ...] | None, is_open: bool) -> None:
        mirrored = replace(WSL, port=PORT, reachability=Reachability("wsl-mirrored", "x"), address="192.168.1.50",
                           wsl=replace(WSL.wsl, firewall_ports=ports))  # fmt: skip
        if is_open:
            assert sick(mirrored) == []
        else:
            assert "-LocalPorts 47470" in only(mirrored, "wsl.network").command
        assert sick(replace(mirrored, port=None)) == []

    def test_what_powershell_prints(self) -> None:
        assert parse_powershell("34160648192\r\n47470\r\nAny\r\n") == (34160648192, ("47470", "Any"))
        assert parse_powershell("34160648192\n") == (34160648192, ())
        assert parse_powershell("Get-CimInstance : Access denied\n") == (None, None)
        assert parse_powershell("") == (None, None)


class TestDocker:
    @pytest.mark.parametrize(
        ("docker", "command"),
        [
            (DockerSide(info=said(NO_DAEMON, 1)), "sudo systemctl start docker"),
            (DockerSide(info=said(NO_DAEMON, 1), context="tcp://10.0.0.9:2375"), "unset DOCKER_HOST"),
            (DockerSide(info=said("permission denied while trying to connect to the Docker daemon socket at "
                                  "unix:///var/run/docker.sock", 1)), "sudo usermod -aG docker $USER"),
            (DockerSide(info=said("", None)), "sudo systemctl restart docker"),
        ],
    )  # fmt: skip
    def test_it_does_not_answer(self, docker: DockerSide, command: str) -> None:
        found = only(replace(LINUX, docker=docker), "docker.service")
        assert (found.level, found.command) == ("warning", command)

    def test_who_starts_it(self) -> None:
        dead = DockerSide(info=said(NO_DAEMON, 1))
        no_systemd = replace(LINUX, docker=dead, systemd=False, is_root=True)
        assert only(no_systemd, "docker.service").command == "service docker start"
        assert only(replace(MAC, docker=dead), "docker.service").command == "open -a Docker"

    def test_warnings_before_the_answer_do_not_matter(self) -> None:
        noisy = said("WARNING: No swap limit support\n" + json.dumps(INFO))
        assert sick(replace(LINUX, docker=DockerSide(info=noisy))) == []

    def test_the_card_is_not_lent(self) -> None:
        plain = said(json.dumps({**INFO, "Runtimes": {"runc": {}}}))
        found = only(replace(LINUX, docker=DockerSide(info=plain, has_toolkit=True)), "docker.cards")
        assert found.command == "sudo nvidia-ctk runtime configure --runtime=docker"
        assert "systemctl restart docker" in found.remedy
        found = only(replace(LINUX, docker=DockerSide(info=plain)), "docker.cards")
        assert found.command == "sudo apt-get install -y nvidia-container-toolkit"
        assert sick(replace(LINUX, docker=DockerSide(info=plain), nvidia=NvidiaPrograms())) == []  # there is no card
        desktop = said(json.dumps({**INFO, "OperatingSystem": "Docker Desktop", "Runtimes": {"runc": {}}}))
        assert sick(replace(WSL, docker=DockerSide(info=desktop))) == []
        cdi = said(json.dumps({**INFO, "Runtimes": {"runc": {}}, "DiscoveredDevices": [{"ID": "nvidia.com/gpu=all"}]}))
        assert sick(replace(LINUX, docker=DockerSide(info=cdi))) == []

    def test_snap(self) -> None:
        snap = DockerSide(info=DOCKER.info, program="/snap/bin/docker")
        assert only(replace(LINUX, docker=snap), "docker.cards").command == "sudo snap remove docker"

    @pytest.mark.parametrize(
        ("version", "old"),
        [("20.10.24+dfsg1", True), ("24.0.7", True), ("27.5.1-ce", True), ("28.0.0", False), ("29.1.3", False),
         ("dev", False)],
    )  # fmt: skip
    def test_an_engine_that_lets_the_network_in(self, version: str, old: bool) -> None:
        info = said(json.dumps({**INFO, "ServerVersion": version}))
        seen = replace(LINUX, docker=DockerSide(info=info))
        assert [name for name, _ in sick(seen)] == (["docker.engine"] if old else [])

    def test_what_to_do_about_an_old_engine(self) -> None:
        info = {**INFO, "ServerVersion": "24.0.7"}
        seen = replace(LINUX, docker=DockerSide(info=said("WARNING: No swap limit\n" + json.dumps(info))))
        found = only(seen, "docker.engine")
        assert found.cause.startswith("Docker 24.0.7: machines on the network may reach ports")
        assert found.command == "sudo apt-get install -y --only-upgrade docker-ce docker-ce-cli containerd.io"
        for more in ({"OperatingSystem": "Docker Desktop"}, {"SecurityOptions": ["name=seccomp", "name=rootless"]}):
            assert sick(replace(seen, docker=DockerSide(info=said(json.dumps({**info, **more}))))) == []
        elsewhere = replace(seen.docker, context="tcp://10.0.0.9:2375")
        assert sick(replace(seen, docker=elsewhere)) == []
        assert only(replace(seen, docker=replace(elsewhere, context="unix:///run/docker.sock")), "docker.engine")

    LISTED = (
        "web\t0.0.0.0:8080->80/tcp, [::]:8080->80/tcp\n"
        "db\t127.0.0.1:5432->5432/tcp\n"
        "old\t0.0.0.0:9000-9001->9000-9001/tcp, :::9000-9001->9000-9001/tcp, 9443/tcp\n"
        "crew\t192.168.1.20:47470->47470/tcp\n"
        "alone\t\n"
    )

    def test_ports_that_pass_by_ufw(self) -> None:
        assert open_ports(self.LISTED) == [("web", "8080", "80"), ("old", "9000-9001", "9000-9001")]
        seen = replace(LINUX, docker=replace(DOCKER, containers=said(self.LISTED)))
        assert sick(seen) == []  # no ufw
        guarded = replace(seen, firewalls=Firewalls(ufw_enabled=True))
        found = only(guarded, "docker.past_ufw")
        assert found.cause.endswith("from ports of containers: web 8080, old 9000-9001")
        assert found.command == "docker run -p 127.0.0.1:8080:80 ..."
        assert found.remedy == 'in a compose file: ports: ["127.0.0.1:8080:80"]'
        many = "".join(f"c{n}\t0.0.0.0:{n}->80/tcp\n" for n in range(1, 7))
        named = only(replace(guarded, docker=replace(DOCKER, containers=said(many))), "docker.past_ufw").cause
        assert named.endswith("c1 1, c2 2, c3 3, c4 4, ...")
        closed = "db\t127.0.0.1:5432->5432/tcp\n"
        assert sick(replace(guarded, docker=replace(DOCKER, containers=said(closed)))) == []
        desktop = said(json.dumps({**INFO, "OperatingSystem": "Docker Desktop"}))
        assert sick(replace(guarded, docker=DockerSide(info=desktop, containers=said(self.LISTED)))) == []

    def test_a_port_that_its_host_must_publish(self) -> None:
        found = only(replace(CONTAINER, port=PORT), "docker.published")
        assert (found.command, found.shell) == ("docker run -p HOST_ADDRESS:47470:47470 ...", "host")
        assert sick(replace(CONTAINER, port=PORT, port_state="ours")) == []
        assert sick(replace(CONTAINER, port=PORT, reachability=Reachability("plain"))) == []  # its host's network

    def test_a_container_on_a_mac(self) -> None:
        host = replace(CONTAINER.host, machine="aarch64", kernel="6.10.14-linuxkit")
        assert "no GPU" in only(replace(CONTAINER, host=host), "docker.mac_host").cause
        assert sick(replace(CONTAINER, host=replace(host, kernel="6.8.0-1010-raspi"))) == []

    def test_shared_memory(self) -> None:
        tiny = Folder(path="/dev/shm", mount="/dev/shm", filesystem="tmpfs", total_bytes=2**20)
        assert "--shm-size" in only(replace(CONTAINER, shm=tiny), "docker.shared_memory").command
        found = only(replace(LINUX, shm=tiny), "docker.shared_memory")
        assert (found.command, found.fixable) == ("sudo mount -o remount,size=2G /dev/shm", True)


class TestNetwork:
    def test_no_network(self) -> None:
        assert only(replace(LINUX, address="", cards=()), "network.address").level == "warning"

    def test_no_router_answers(self) -> None:
        cards = (NetworkCard(name="eth0", addresses=("169.254.3.4",)),)
        assert only(replace(LINUX, address="169.254.3.4", cards=cards), "network.address").command == "sudo dhclient -v"

    VPN = NetworkCard(name="tun0", addresses=("10.8.0.2",), has_router=True, is_tunnel=True)

    def test_a_vpn_is_the_way_out(self) -> None:
        seen = replace(LINUX, cards=(*LINUX.cards, self.VPN), way_out="10.8.0.2")
        found = only(seen, "network.vpn")
        assert found.cause == (
            "the way out of this machine is tun0, a VPN or a modem; "
            "others on the local network reach it at 192.168.1.20"
        )
        assert (found.level, found.command) == ("warning", "cuadrilla up --listen 192.168.1.20")
        assert found.remedy.endswith("if they are in the VPN too: cuadrilla up --listen 10.8.0.2")
        assert sick(replace(seen, port=PORT, port_state="ours")) == []  # its owner has chosen
        assert sick(replace(seen, way_out="192.168.1.20")) == []  # only some addresses are reached over it
        several = (*LINUX.cards, NetworkCard(name="eth1", addresses=("10.0.0.1",)), self.VPN)
        found = only(replace(seen, address="", cards=several), "network.vpn")
        assert found.cause.endswith("on several networks besides: 192.168.1.20, 10.0.0.1")
        assert found.command == "cuadrilla up --listen 192.168.1.20"

    def test_a_vpn_is_all_there_is(self) -> None:
        seen = replace(LINUX, address="", cards=(self.VPN,), way_out="10.8.0.2")
        found = only(seen, "network.vpn")
        assert "only network of this machine is tun0" in found.cause
        assert found.command == "cuadrilla up --listen 10.8.0.2"
        assert sick(replace(seen, port=PORT, port_state="ours")) == []

    def test_only_ipv6(self) -> None:
        card = NetworkCard(name="enp3s0", addresses=("2001:db8::5", "fd77::5", "fe80::1"))
        seen = replace(LINUX, address="", cards=(card,))
        found = only(seen, "network.address")
        assert "only IPv6 addresses" in found.cause
        assert (found.level, found.command) == ("warning", "cuadrilla up --listen '[fd77::5]'")
        assert only(replace(seen, cards=(card, self.VPN), way_out="10.8.0.2"), "network.address") == found
        assert sick(replace(seen, port=PORT, port_state="ours")) == []
        only_here = replace(card, addresses=("fe80::1",))
        assert "no network" in only(replace(seen, cards=(only_here,)), "network.address").cause

    def test_several_networks(self) -> None:
        cards = tuple(NetworkCard(name=f"eth{n}", addresses=(f"10.0.{n}.1",)) for n in range(2))
        found = only(replace(LINUX, address="", cards=cards), "network.address")
        assert found.cause.endswith("none has a default route: 10.0.0.1, 10.0.1.1")
        assert found.command == "cuadrilla up --listen 10.0.0.1"

    def test_tiny_packets(self) -> None:
        small = replace(LINUX.cards[0], mtu=576)
        found = only(replace(LINUX, cards=(small,)), "network.mtu")
        assert found.command == "sudo ip link set dev enp3s0 mtu 1500"
        bridge = NetworkCard(name="docker0", addresses=("172.17.0.1",), mtu=576)
        assert sick(replace(LINUX, cards=(replace(small, mtu=1400), bridge))) == []

    def test_a_name_that_leads_nowhere(self) -> None:
        found = only(replace(LINUX, hostname_leads_to=None), "network.own_name")
        assert found.command == "echo '127.0.1.1 pc' | sudo tee -a /etc/hosts"

    def test_the_port_is_taken(self) -> None:
        found = only(replace(LINUX, port=PORT, port_state="taken"), "network.port")
        assert found.command == "sudo ss -ltnp sport = :47470"
        assert sick(replace(LINUX, port=PORT, port_state="ours")) == sick(replace(LINUX, port=PORT)) == []

    ACTIVE = (
        "Status: active\n\nTo                         Action      From\n--                         ------      ----\n"
    )

    @pytest.mark.parametrize(
        ("rows", "is_open"),
        [
            ("22/tcp                     ALLOW       Anywhere\n", False),
            ("47470/tcp                  ALLOW       Anywhere\n", True),
            ("47470                      DENY        Anywhere\n", False),
            ("47000:48000/tcp            ALLOW       192.168.1.0/24\n", True),
            ("47470/udp                  ALLOW       Anywhere\n", False),
            ("Anywhere                   ALLOW       192.168.1.0/24\n", True),
            ("", False),
        ],
    )
    def test_ufw(self, rows: str, is_open: bool) -> None:
        assert ufw_allows(self.ACTIVE + rows, PORT) == is_open
        seen = replace(LINUX, port=PORT, firewalls=Firewalls(ufw=said(self.ACTIVE + rows), ufw_enabled=True))
        if is_open:
            assert sick(seen) == []
        else:
            assert only(seen, "network.firewall").command == "sudo ufw allow 47470/tcp"
        assert sick(replace(seen, port=None)) == []

    def test_ufw_of_somebody_who_is_not_root(self) -> None:
        denied = said("ERROR: You need to be root to run this script", 1)
        seen = replace(LINUX, port=PORT, firewalls=Firewalls(ufw=denied, ufw_enabled=True))
        assert only(seen, "network.firewall").level == "warning"
        assert sick(replace(seen, firewalls=Firewalls(ufw=denied))) == []
        assert sick(replace(seen, firewalls=Firewalls(ufw=said("Status: inactive"), ufw_enabled=True))) == []

    def test_firewalld(self) -> None:
        seen = replace(LINUX, port=PORT, firewalls=Firewalls(firewalld=said("22/tcp 8000-8100/tcp")))
        assert only(seen, "network.firewall").command == "sudo firewall-cmd --add-port=47470/tcp"
        assert sick(replace(seen, firewalls=Firewalls(firewalld=said("47470/tcp")))) == []
        assert sick(replace(seen, firewalls=Firewalls(firewalld=said("FirewallD is not running", 252)))) == []

    @pytest.mark.parametrize(
        ("rules", "command"),
        [
            ("-P INPUT ACCEPT\n", ""),
            ("-P INPUT DROP\n", "sudo iptables -I INPUT -p tcp --dport 47470 -j ACCEPT"),
            ("-P INPUT DROP\n-A INPUT -p tcp -m tcp --dport 47470 -j ACCEPT\n", ""),
            ("-P INPUT ACCEPT\n-A INPUT -p tcp -m tcp --dport 47470 -j DROP\n",
             "sudo iptables -D INPUT -p tcp -m tcp --dport 47470 -j DROP"),
            ("-P INPUT ACCEPT\n-A INPUT -p tcp -m tcp --dport 47470 -j REJECT --reject-with icmp-port-unreachable\n",
             "sudo iptables -D INPUT -p tcp -m tcp --dport 47470 -j REJECT --reject-with icmp-port-unreachable"),
            ("-P INPUT ACCEPT\n-A INPUT -p tcp -m multiport --dports 22,47000:48000 -j DROP\n",
             "sudo iptables -I INPUT -p tcp --dport 47470 -j ACCEPT"),
            ("-P INPUT ACCEPT\n-A INPUT -p udp -m udp --dport 47470 -j DROP\n", ""),
            ("-P INPUT ACCEPT\n-A INPUT -p tcp -m tcp --dport 22 -j DROP\n", ""),
            ("-P INPUT ACCEPT\n-A INPUT -s 10.0.0.9/32 -p tcp -m tcp --dport 47470 -j DROP\n", ""),
            ("-P INPUT DROP\n-A INPUT -i lo -j ACCEPT\n"
             "-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n",
             "sudo iptables -I INPUT -p tcp --dport 47470 -j ACCEPT"),
            ("-P INPUT ACCEPT\n-A INPUT -j REJECT --reject-with icmp-host-prohibited\n",
             "sudo iptables -I INPUT -p tcp --dport 47470 -j ACCEPT"),
            ("iptables v1.8.9: can't initialize iptables table: Permission denied (you must be root)", ""),
        ],
    )  # fmt: skip
    def test_iptables(self, rules: str, command: str) -> None:
        seen = replace(LINUX, port=PORT, firewalls=Firewalls(iptables=rules))
        if command:
            assert only(seen, "network.firewall").command == command
        else:
            assert sick(seen) == []
            assert judge(rules, PORT) is None or judge(rules, PORT).target == "ACCEPT"  # type: ignore[union-attr]

    def test_windows_firewall(self) -> None:
        rule = said("Nombre de regla:  cuadrilla\nPuerto local:     47470\n")
        seen = replace(WINDOWS, port=PORT, firewalls=Firewalls(defender_rule=rule))
        assert sick(seen) == []
        none = replace(seen, firewalls=Firewalls(defender_rule=said("No rules match the specified criteria.", 1)))
        found = only(none, "network.firewall")
        assert found.shell == "administrator"
        assert "-LocalPort 47470" in found.command

    def test_the_firewall_of_a_mac(self) -> None:
        on = Firewalls(mac=said("Firewall is enabled. (State = 1)"), mac_program=said("not part of the firewall"))
        found = only(replace(MAC, port=PORT, firewalls=on), "network.firewall")
        assert found.command.endswith("--unblockapp /home/ana/.venv/bin/python")
        permitted = replace(on, mac_program=said("Incoming connections to the application are permitted"))
        assert sick(replace(MAC, port=PORT, firewalls=permitted)) == []
        off = Firewalls(mac=said("Firewall is disabled. (State = 0)"))
        assert sick(replace(MAC, port=PORT, firewalls=off)) == []
