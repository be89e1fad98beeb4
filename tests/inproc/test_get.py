"""Downloads over real sockets from servers that cut, lie, stall and redirect."""

import gzip
import hashlib
import re

import pytest

from cuadrilla.data import download
from cuadrilla.data.record import RECORD
from cuadrilla.errors import DataError, LinkError
from tests.downloader import TEXT, THIRD
from tests.ports import free_port
from tests.web import chunked, fixed, moved, silent, whole


def test_a_file_and_its_record(server, pull):
    url = server.on("/libros/a%C3%B1o%201.txt", whole(TEXT))
    assert pull(url, name="año 1.txt")
    assert (pull.folder / "año 1.txt").read_bytes() == TEXT
    assert pull.names() == {"año 1.txt", RECORD}
    assert pull.record.files == {"año 1.txt": hashlib.sha256(TEXT).hexdigest()}
    assert (pull.record.url, pull.record.licence) == (url, "CC0 1.0")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", pull.record.date)
    assert not pull(url, name="año 1.txt")
    assert len(server.seen) == 1  # no request for files that are here
    assert server.seen[0][1]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (whole(TEXT, after=THIRD), "received 200000 bytes, expected 600000"),
        (fixed(200, TEXT, length=len(TEXT) + 100), "received 600000 bytes, expected 600100"),
        (chunked(TEXT, is_cut=True), "incomplete chunked read"),
        (silent(TEXT, after=THIRD), "timed out"),
    ],
    ids=["cut", "a lie", "cut without a length", "silent"],
)
def test_what_is_not_whole_leaves_nothing_and_the_same_command_fetches_it(server, pull, monkeypatch, answer, reason):
    monkeypatch.setattr(download, "SILENCE_SECONDS", 1.0)
    url = server.on("/a.txt", answer, whole(TEXT))
    with pytest.raises(LinkError, match=reason) as caught:
        pull(url)
    assert caught.value.exit_code == 5
    assert "same command" in caught.value.hint
    assert pull.names() == set()
    assert pull(url)
    assert (pull.folder / "a.txt").read_bytes() == TEXT
    assert [headers.get("Range") for _, headers in server.seen] == [None, None]


def test_something_else_with_status_200(server, pull):
    with pytest.raises(DataError) as caught:
        pull(server.on("/a.txt", fixed(200, b"Sign in", kind="text/html; charset=utf-8")))
    assert caught.value.hint
    assert pull.names() == set()


def test_statuses(server, pull):
    assert pull.folder.exists() is False
    for status in (403, 404, 429, 503):
        with pytest.raises(LinkError, match=f"/{status}: {status} "):
            pull(server.on(f"/{status}", fixed(status)))
    with pytest.raises(LinkError):
        pull(f"http://127.0.0.1:{free_port()}/a.txt")
    assert pull.names() == set()


def test_redirects(server, pull):
    server.on("/f.txt", whole(TEXT))
    for step in range(5):
        server.on(f"/{step}", moved(f"/{step + 1}" if step < 4 else "f.txt", 301 + step % 3))
    with pytest.raises(LinkError, match="maximum allowed redirects"):
        pull(server.on("/loop", moved("/loop")))
    for target in ("file:///etc/passwd", "http://"):
        with pytest.raises(LinkError, match="/away: "):
            pull(server.on("/away", moved(target)))
    pull(server.url("/0"), name="ok.txt")
    assert (pull.folder / "ok.txt").read_bytes() == TEXT
    assert pull.names() == {"ok.txt", RECORD}


def test_a_stored_gz_stays_one(server, pull):
    """Servers label it as gzip-encoded; decoding it would change the file."""
    stored = gzip.compress(TEXT, mtime=0)
    pull(server.on("/b.txt.gz", fixed(200, stored, Content_Encoding="x-gzip")), name="b.txt.gz")
    assert (pull.folder / "b.txt.gz").read_bytes() == stored
