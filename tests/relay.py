"""A relay that imitates a distant network: it forwards TCP connections, each byte a number of seconds later.

python tests/relay.py HERE:PORT THERE:PORT SECONDS
"""

import asyncio
import sys
from contextlib import suppress

CHUNK_BYTES = 2**16
UNDERWAY = 256
"""Chunks of one direction that may be under way; then the relay reads no more, so the sender waits."""


async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter, *, seconds: float) -> None:
    underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(UNDERWAY)
    clock = asyncio.get_running_loop().time

    async def receive() -> None:
        data = b"."
        while data:
            with suppress(ConnectionError):
                data = await source.read(CHUNK_BYTES)
            await underway.put((clock() + seconds, data))

    receiver = asyncio.ensure_future(receive())
    with suppress(ConnectionError):
        while (item := await underway.get())[1]:
            await asyncio.sleep(item[0] - clock())
            target.write(item[1])
            await target.drain()
    receiver.cancel()
    target.close()


async def main(here: str, there: str, seconds: float) -> None:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = there.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(carry(reader, far_writer, seconds=seconds), carry(far_reader, writer, seconds=seconds))

    host, _, port = here.rpartition(":")
    async with await asyncio.start_server(relay, host, int(port)) as server:
        print("ready", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
