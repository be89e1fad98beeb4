"""A machine's address may change while it coordinates."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from cuadrilla.host.card import Whereabouts

pytestmark = pytest.mark.unit


def cards(monkeypatch: pytest.MonkeyPatch, **addresses: list[str]) -> None:
    family = {True: socket.AF_INET6, False: socket.AF_INET}
    found = {
        card: [SimpleNamespace(family=family[":" in text], address=text) for text in texts]
        for card, texts in addresses.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


def test_another_address_of_the_same_card(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, lan=["192.168.1.5", "fe80::1%lan", "02:42:ac:11:00:02"], other=["10.0.0.1"])
    here = Whereabouts("192.168.1.5")
    assert here.moved_to() == ""
    cards(monkeypatch, lan=["fe80::1%lan"], other=["10.0.0.1"])
    assert here.moved_to() == ""  # none yet, and another card's is not asked for
    cards(monkeypatch, lan=["fe80::1%lan", "192.168.1.9"], other=["10.0.0.1"])
    assert here.moved_to() == "192.168.1.9"
    cards(monkeypatch, other=["10.0.0.1"])
    assert here.moved_to() == ""  # the card itself has gone


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "::", "192.168.7.7"])
def test_what_is_no_cards_address_never_changes(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    cards(monkeypatch, lan=["192.168.1.5"])
    here = Whereabouts(host)
    cards(monkeypatch, lan=["192.168.1.9"])
    assert here.moved_to() == ""
