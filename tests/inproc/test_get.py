"""Downloads over real sockets from servers that cut, lie, stall, redirect and change their mind."""

import gzip
import hashlib
import json
import re

import pytest

from cuadrilla.data import download
from cuadrilla.data.record import RECORD
from cuadrilla.errors import DataError, LinkError
from tests.downloader import OTHER, TEXT, THIRD
from tests.ports import free_port
from tests.web import fixed, moved, silent, whole


def test_a_file_and_its_record(server, pull):
    url = server.on("/libros/a%C3%B1o%201.txt", whole(TEXT))
    done = pull(url)
    assert (pull.folder / "año 1.txt").read_bytes() == TEXT
    assert pull.names() == {"año 1.txt", RECORD}
    (row,) = json.loads((pull.folder / RECORD).read_text(encoding="utf-8"))["files"]
    sha256 = hashlib.sha256(TEXT).hexdigest()
    assert row == {
        "url": url, "name": "año 1.txt", "licence": "unknown", "num_bytes": len(TEXT), "sha256": sha256,
        "date": row["date"],
    }  # fmt: skip
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", row["date"])
    assert not done.already
    again = pull(url)
    assert again.already
    assert len(server.seen) == 1  # no request for files that are here
    assert server.seen[0][1]["Accept-Encoding"] == "identity"


DATE = "Wed, 21 Oct 2015 07:28:00 GMT"
CUT = whole(TEXT, after=THIRD)
REST, OTHERS_REST = (f"bytes {THIRD}-{len(body) - 1}/{len(body)}" for body in (TEXT, OTHER))
AGAIN = [None, f"bytes={THIRD}-"]
AFTER = f"bytes={len(TEXT)}-"


@pytest.mark.parametrize(
    ("answers", "body", "asked", "validator"),
    [
        ([CUT, whole(TEXT, after=2 * THIRD), whole(TEXT)], TEXT, [*AGAIN, f"bytes={2 * THIRD}-"], '"one"'),
        ([whole(TEXT, after=THIRD, etag=""), whole(TEXT, etag="")], TEXT, [None, None], None),
        ([whole(TEXT, after=THIRD, etag='W/"weak"'), whole(TEXT, etag='W/"weak"')], TEXT, [None, None], None),
        ([fixed(200, TEXT[:THIRD], length=len(TEXT), Last_Modified=DATE),
          fixed(206, TEXT[THIRD:], Content_Range=REST, Last_Modified=DATE)], TEXT, AGAIN, DATE),
        ([fixed(200, TEXT, length=len(TEXT) + 9, ETag='"one"'), whole(TEXT)], TEXT, [None, AFTER], '"one"'),
        *(([CUT, second, whole(OTHER, etag='"two"')], OTHER, None, '"one"') for second in (
            whole(OTHER, etag='"two"'),
            fixed(206, OTHER[THIRD:], ETag='"two"', Content_Range=OTHERS_REST),
            fixed(416, b"", ETag='"two"', Content_Range=f"bytes */{len(OTHER)}"),
            fixed(206, OTHER[5:], ETag='"one"', Content_Range=f"bytes 5-{len(OTHER) - 1}/{len(OTHER)}"),
        )),
    ],
    ids=["cut twice", "no validator", "weak", "a date", "complete", "changed", "rest changed", "shorter", "forgetful"],
)  # fmt: skip
def test_it_resumes_with_a_validator_and_else_starts_over(server, pull, answers, body, asked, validator):
    pull(server.on("/a.txt", *answers))
    assert (pull.folder / "a.txt").read_bytes() == body
    assert asked in (None, server.ranges())
    assert server.seen[1][1].get("If-Range") == validator


def test_a_length_that_is_a_lie(server, pull):
    url = server.on("/a.txt", fixed(200, TEXT, length=len(TEXT) + 100, ETag='"one"'))
    with pytest.raises(LinkError, match=r"received 600000 bytes, expected 600100") as caught:
        pull(url)
    assert caught.value.exit_code == 5
    assert len(pull.waits) == 5
    assert "a.txt" not in pull.names()


def test_something_else_with_status_200(server, pull):
    with pytest.raises(DataError) as caught:
        pull(server.on("/a.txt", fixed(200, b"Sign in", kind="text/html; charset=utf-8")))
    assert caught.value.hint
    assert pull.names() == set()


def test_a_server_that_falls_silent(server, pull, monkeypatch):
    monkeypatch.setattr(download, "SILENCE_SECONDS", 1.0)
    url = server.on("/a.txt", silent(TEXT, after=THIRD), whole(TEXT))
    pull(url)
    assert (pull.folder / "a.txt").read_bytes() == TEXT
    assert server.ranges()[0] is None
    assert server.ranges()[-1] == f"bytes={THIRD}-"
    assert "trying again" in pull.said[0]


def test_statuses(server, pull):
    assert pull.folder.exists() is False
    with pytest.raises(LinkError, match="404"):
        pull(server.url("/nothing.txt"))
    with pytest.raises(LinkError, match="403"):
        pull(server.on("/mine.txt", fixed(403)))
    assert pull.waits == []  # another attempt would be useless
    pull(server.on("/busy.txt", fixed(503), fixed(429), fixed(500), whole(TEXT)))
    assert pull.waits == [2, 4, 8]
    with pytest.raises(LinkError, match="502"):
        pull(server.on("/never.txt", fixed(502)))
    pull.waits.clear()
    with pytest.raises(LinkError):  # said at once: a wrong address is likelier than a broken network
        pull(f"http://127.0.0.1:{free_port()}/a.txt")
    assert pull.waits == []


def test_redirects(server, pull):
    server.on("/f.txt", whole(TEXT))
    for step in range(5):
        server.on(f"/{step}", moved(f"/{step + 1}" if step < 4 else "f.txt", 301 + step % 3))
    pull(server.url("/0"), name="ok.txt")
    assert (pull.folder / "ok.txt").read_bytes() == TEXT
    with pytest.raises(LinkError, match="maximum allowed redirects"):
        pull(server.on("/loop", moved("/loop")))
    for target in ("file:///etc/passwd", "http://"):
        with pytest.raises(LinkError, match="/away: "):
            pull(server.on("/away", moved(target)))
    assert {name for name in pull.names() if not name.startswith(".")} == {"ok.txt", RECORD}


def test_a_stored_gz_stays_one(server, pull):
    """Servers label it as gzip-encoded; decoding it would change the file."""
    stored = gzip.compress(TEXT, mtime=0)
    pull(server.on("/b.txt.gz", fixed(200, stored, Content_Encoding="x-gzip")))
    assert (pull.folder / "b.txt.gz").read_bytes() == stored
