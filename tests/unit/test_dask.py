"""Which Dask schedulers are dialled, and when two machines have the same program."""

from pathlib import Path

import pytest
import trustme

from cuadrilla.errors import ConfigError, LinkError

pytest.importorskip("distributed", reason="Dask is not installed: pip install distributed")
from cuadrilla.engines import dask as engine
from cuadrilla.engines.dask import TlsFiles, differences, parse_scheduler, program


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    issued = authority.issue_cert("node")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "node.pem")
    issued.private_key_pem.write_to_path(folder / "node.key")
    return TlsFiles(ca=folder / "ca.pem", certificate=folder / "node.pem", key=folder / "node.key")


@pytest.mark.parametrize(
    ("text", "insecure", "dialled"),
    [
        ("tcp://127.0.0.1:8786", False, "tcp://127.0.0.1:8786"),
        ("tcp://127.0.0.1:8786/", False, "tcp://127.0.0.1:8786"),
        ("tcp://[::1]:8786", False, "tcp://[::1]:8786"),
        ("tcp://192.168.1.50:8786", True, "tcp://192.168.1.50:8786"),
        ("tcp://localhost:8786", False, "tcp://localhost:8786"),
    ],
)
def test_what_is_dialled_without_tls(text: str, insecure: bool, dialled: str) -> None:
    assert str(parse_scheduler(text, tls=None, insecure=insecure)) == dialled


def test_with_tls_any_address_is_dialled(tls: TlsFiles) -> None:
    for address in ("127.0.0.1:8786", "192.168.1.50:8786", "8.8.8.8:8786", "pc.example.org:8786"):
        assert str(parse_scheduler(f"tls://{address}", tls=tls, insecure=False)) == f"tls://{address}"


@pytest.mark.parametrize(
    ("text", "insecure"),
    [
        ("127.0.0.1:8786", False),
        ("", False),
        ("tls://", False),
        ("ucx://127.0.0.1:8786", False),
        ("inproc://x", False),
        ("tcp://127.0.0.1", False),
        ("tcp://127.0.0.1:0", False),
        ("tcp://127.0.0.1:99999", False),
        ("tcp://192.168.1.50:8786", False),
        ("tcp://8.8.8.8:8786", True),
        ("tcp://0.0.0.0:8786", True),
        ("tcp://user:secret@127.0.0.1:8786", False),
        ("tls://127.0.0.1:8786", False),  # no certificates
        ("tls://127.0.0.1:8786", True),
    ],
)
def test_what_is_not_dialled(text: str, insecure: bool) -> None:
    with pytest.raises((ConfigError, LinkError)) as caught:
        parse_scheduler(text, tls=None, insecure=insecure)
    assert caught.value.hint


def test_certificates_do_not_make_tcp_safe(tls: TlsFiles) -> None:
    with pytest.raises(ConfigError, match="not encrypted"):
        parse_scheduler("tcp://127.0.0.1:8786", tls=tls, insecure=False)


def test_certificates_are_tried_before_anything_is_sent(tls: TlsFiles, tmp_path: Path) -> None:
    other = trustme.CA().issue_cert("other").private_key_pem
    other.write_to_path(tmp_path / "other.key")
    (tmp_path / "empty").write_bytes(b"")
    for part, path in (
        ("ca", tmp_path / "missing"),
        ("ca", tmp_path / "empty"),
        ("ca", tmp_path),
        ("certificate", tmp_path / "empty"),
        ("key", tmp_path / "other.key"),
        ("key", tls.ca),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_scheduler("tls://127.0.0.1:1", tls=TlsFiles(**{**vars(tls), part: path}), insecure=False)
        assert str(path) in caught.value.message


def test_a_key_with_a_passphrase_is_refused_and_not_asked_for(tls: TlsFiles, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form

    key = form.load_pem_private_key(tls.key.read_bytes(), None)
    kind = form.BestAvailableEncryption(b"word")
    (tmp_path / "locked.key").write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, kind))
    locked = TlsFiles(ca=tls.ca, certificate=tls.certificate, key=tmp_path / "locked.key")
    with pytest.raises(ConfigError, match=r"locked\.key cannot be used"):
        parse_scheduler("tls://127.0.0.1:1", tls=locked, insecure=False)


def test_the_same_program_is_no_difference_and_another_is_named() -> None:
    assert differences(program()) == {}
    ours = {**program(), "cuadrilla": "9.9", "gigatoken": "9.9"}
    assert differences(ours)["cuadrilla"] == [program()["cuadrilla"], "9.9"]
    error = engine._other_program("tls://w:1", {"tokenizers": ["1", "2"], "gigatoken": ["-", "2"]})
    assert error.details == ("tokenizers: 1 there, 2 here", "gigatoken: - there, 2 here")
    assert "--encoder tokenizers" in error.hint
