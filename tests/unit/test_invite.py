"""Invites: what is printed is read back; no typing error passes; the coordinator's side counts, expires and forgets."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.errors import LinkError
from cuadrilla.link.address import Address
from cuadrilla.link.base import Refused, check_node_name
from cuadrilla.link.invite import SECRET_BYTES, VALID_SECONDS, Invite, Invites
from tests.clock import Clock

NAMES = st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,5})?(\.[a-z][a-z0-9]{0,8}){0,3}", fullmatch=True)
HOSTS = st.one_of(
    NAMES,
    st.ip_addresses(v=4).filter(lambda host: not host.is_unspecified).map(str),
    st.ip_addresses(v=6).filter(lambda host: not host.is_unspecified).map(str),
)
INVITES = st.builds(
    Invite,
    address=st.builds(Address, HOSTS, st.integers(1, 65535)),
    key_hash=st.binary(min_size=32, max_size=32),
    secret=st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES),
)
# Replacements of a character by a typing error: all of ASCII, and characters that look or behave like them.
WRONG_CHARACTERS = "".join(map(chr, range(32, 127))) + "\n\t\u00a0\u200bóñ\u0131\u212a«"
SAMPLE = Invite(address=Address("192.168.1.20", 47470), key_hash=bytes(range(32)), secret=bytes(range(20)))
SAMPLE_TEXT = (
    "cuadrilla1.192.168.1.20:47470.aaaqeayeaudaocajbifqydiob4ibceqtcqkrmfyy"
    "denbwha5dypqaaicamcakbqhbaequcymbuha6earcijwcn6obi"
)


def refusal(text: str) -> LinkError:
    with pytest.raises(LinkError) as caught:
        Invite.parse(text)
    assert caught.value.exit_code == 5
    assert caught.value.hint
    return caught.value


def test_the_text_is_a_promise() -> None:
    """An invite may be printed by one version and read by another, so its form may change only with its prefix."""
    assert str(SAMPLE) == SAMPLE_TEXT
    assert Invite.parse(SAMPLE_TEXT) == SAMPLE


@given(INVITES, st.data())
def test_parse_reads_what_str_writes_however_it_travels(invite: Invite, data: st.DataObject) -> None:
    text = str(invite)
    if data.draw(st.booleans()):
        text = text.upper()
    for place in sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)), reverse=True):
        text = text[:place] + data.draw(st.sampled_from(["\n", "\r\n  ", " ", "\u200b", "\ufeff", "\t"])) + text[place:]
    before, after = data.draw(
        st.sampled_from([("", ""), ('"', '"'), ("«", "»"), ("  `", "`\n"), ("<", ">."), ("'", "',")])
    )
    assert Invite.parse(before + text + after) == invite


@pytest.mark.parametrize("host", ["fd00::7", "portatil-ana.local"])
def test_every_wrong_character_of_an_invite(host: str) -> None:
    """All substitutions, deletions, insertions and swaps. One secret is enough, because the checksum is linear."""
    invite = Invite(address=Address(host, 47470), key_hash=SAMPLE.key_hash, secret=SAMPLE.secret)
    text = str(invite)
    for place in range(len(text)):
        rest = text[place + 1 :]
        for character in ["", *WRONG_CHARACTERS]:
            assert same_or_refused(text[:place] + character + rest, invite)
            assert same_or_refused(text[:place] + text[place] + character + rest, invite)
        assert same_or_refused(text[:place] + rest[:1] + text[place] + rest[1:], invite)


def same_or_refused(text: str, invite: Invite) -> bool:
    try:
        return Invite.parse(text) == invite
    except LinkError as error:
        return error.exit_code == 5


NO_INVITES = ["hola", "192.168.1.20:47470", "https://example.org/cuadrilla1.x", SAMPLE_TEXT + SAMPLE_TEXT]
NO_INVITES += [SAMPLE_TEXT[5:], SAMPLE_TEXT.replace("cuadrilla1", "cuadrilla2")]


def test_what_is_no_whole_invite() -> None:
    beginnings = [SAMPLE_TEXT[:length] for length in range(len(SAMPLE_TEXT))]
    for text in (*NO_INVITES, *beginnings):
        assert "cut off or mistyped" in refusal(text).message


def test_the_secret_shows_only_in_the_text(tmp_path: Path) -> None:
    secret = Invites(tmp_path).issue(uses=1)
    invite = Invite(address=Address("ana.local", 47470), key_hash=bytes(32), secret=secret)
    code = str(invite).rpartition(".")[2][52:]
    assert code not in repr(invite)
    assert repr(secret) not in repr(invite)
    broken = str(invite).replace("ana", "ane")
    assert code not in refusal(broken).message + refusal(broken).hint
    (file,) = tmp_path.iterdir()
    assert secret.hex() not in file.name + file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    assert len(secret) == SECRET_BYTES == 20


@pytest.mark.parametrize(
    ("text", "dialled"),
    [
        ("Ana.LOCAL", "ana.local:47470"),
        ("FD00:0:0::7", "[fd00::7]:47470"),
        (" 10.0.0.1 ", "10.0.0.1:47470"),
        ("a_b-c.d1:5000", "a_b-c.d1:5000"),
        ("[fd00::5]:5000", "[fd00::5]:5000"),
    ],
)
def test_one_spelling_per_address(text: str, dialled: str) -> None:
    assert str(Address.parse(text, port=47470)) == dialled


HOSTS_OF_NOBODY = ["", "0.0.0.0", "192.168.1.300", "fe80::1%eth0", "a b", "a-", "a..b", "peña.local", "x" * 64]


@pytest.mark.parametrize(("host", "port"), [*((host, 5) for host in HOSTS_OF_NOBODY), ("ana", -1), ("ana", 65536)])
def test_an_address_nobody_can_dial(host: str, port: int) -> None:
    with pytest.raises(LinkError) as caught:
        Address(host, port)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["", "Ana", "a-", "../a", "a.b", "a\n", "\x1b[31m", "niña", "x" * 64])
def test_bad_node_names(name: str) -> None:
    with pytest.raises(LinkError, match="cannot be the name"):
        check_node_name(name)


# The coordinator's side


OVER = "the invite has been used, or it has expired"


def let_in(invites: Invites, secret: bytes) -> str:
    """The reason of the refusal, or "" if the secret is accepted."""
    try:
        with invites.letting_in(secret):
            return ""
    except Refused as error:
        return error.message


def test_for_so_many_machines_and_fifteen_minutes(tmp_path: Path) -> None:
    """Also when the coordinator is restarted in between. The next invite removes those that have expired."""
    assert VALID_SECONDS == 900.0
    clock = Clock()
    invites = Invites(tmp_path, clock=clock)
    early, other = invites.issue(uses=3), invites.issue(uses=1)
    clock.now = 899.999
    late = invites.issue(uses=1)
    invites = Invites(tmp_path, clock=clock)
    assert [let_in(invites, early) for _ in range(2)] == ["", ""]
    assert [let_in(invites, other) for _ in range(2)] == ["", OVER]
    clock.now = 900.0
    assert let_in(invites, early) == OVER
    assert let_in(invites, late) == ""
    invites.issue(uses=1)
    assert len(list(tmp_path.iterdir())) == 2
