"""One message to a web address, in a process of its own, which whoever started it can end at any moment.

    python -P -m cuadrilla.train.webhook

reads `{"url", "body", "seconds"}` from standard input and prints `{"problem", "detail"}`, both empty if all went well.
A name server, a handshake or an answer that comes a byte at a time can hold up a thread longer than any time limit of
a socket; a process can be killed.

Invariants
* The address is a secret: it comes through standard input, and nothing that is printed holds it.
* Certificates are verified. Redirects are not followed: whoever was given the message has it, nobody else.
* Of an answer only its first line and headers are read. The system's proxies are used, but not for this machine.
"""

import http.client
import ipaddress
import json
import ssl
import sys
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request

from cuadrilla.version import __version__

MOST_INPUT_BYTES = 2**16
MOST_DETAIL = 100
LOCAL_NAMES = ("localhost", "ip6-localhost")


def is_loopback(host: str) -> bool:
    """Whether a host, as an address names it, is this machine."""
    if host.lower() in LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def post(url: str, body: bytes, *, seconds: float) -> tuple[str, str]:
    """What went wrong and its detail; "" and "" if the message was taken."""
    opener = OpenerDirector()
    local = is_loopback(urlsplit(url).hostname or "")
    for handler in (ProxyHandler({} if local else None), HTTPHandler()):
        opener.add_handler(handler)
    opener.add_handler(HTTPSHandler(context=ssl.create_default_context()))
    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": f"cuadrilla/{__version__}"}
    try:
        response = opener.open(Request(url, data=body, headers=headers, method="POST"), timeout=seconds)
    except ssl.SSLCertVerificationError as error:
        return "certificate", error.verify_message.partition(",")[0]
    except URLError as error:
        return _unreachable(error.reason)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return _unreachable(error)
    assert isinstance(response, http.client.HTTPResponse), "only http and https are opened"
    with response:
        status = response.status
    if 300 <= status < 400:
        return "redirect", str(status)
    return ("", "") if 200 <= status < 300 else ("status", str(status))


def _unreachable(reason: object) -> tuple[str, str]:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return "certificate", reason.verify_message.partition(",")[0]
    if isinstance(reason, OSError) and reason.strerror:
        return "network", reason.strerror
    return "network", type(reason).__name__  # what else it says may hold the address


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.stdin.buffer.read(MOST_INPUT_BYTES))
    problem, detail = post(asked["url"], json.dumps(asked["body"]).encode(), seconds=asked["seconds"])
    sys.stdout.write(json.dumps({"problem": problem, "detail": detail[:MOST_DETAIL]}))


if __name__ == "__main__":
    main()
