"""Messages through a pipe between a process of ours and one that it started: some JSON, and bytes behind it."""

import json
import struct
from typing import IO, Any

FRAME = struct.Struct("<IQ")
"""Before each message: the bytes of its JSON and of what follows it."""
_MOST_BYTES = 2**40


def send(file: IO[bytes], header: dict[str, Any], payload: bytes = b"") -> None:
    """Write a message, and let nothing of it wait."""
    text = json.dumps(header).encode()
    file.write(FRAME.pack(len(text), len(payload)) + text)
    file.write(payload)
    file.flush()


def receive(file: IO[bytes], *, most_bytes: int = _MOST_BYTES) -> tuple[dict[str, Any], bytes] | None:
    """The next message; None when the other end is gone, or announces one of more than `most_bytes`."""
    head = file.read(FRAME.size)
    if len(head) < FRAME.size:
        return None
    num_text, num_payload = FRAME.unpack(head)
    if num_text + num_payload > most_bytes:
        return None
    text, payload = file.read(num_text), file.read(num_payload)
    return (json.loads(text), payload) if len(payload) == num_payload else None
