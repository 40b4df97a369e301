"""Reads the page's feed many times over: PORT NUMBER CA-FILE. Says `all read` when all have begun."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REQUEST = b"GET /edgefl/v1/feed HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n"


@contextlib.contextmanager
def reading(port: int, ca: Path, num_pages: int) -> Iterator[None]:
    """Has a process read so many feeds meanwhile."""
    words = [sys.executable, __file__, str(port), str(num_pages), str(ca)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == "all read"
        yield
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


async def read(port: int, context: ssl.SSLContext, begun: asyncio.Semaphore) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(REQUEST)
    await reader.readuntil(b"event: snapshot")
    begun.release()
    while await reader.read(65536):
        pass


async def main(port: int, number: int, ca: str) -> None:
    context, begun = ssl.create_default_context(cafile=ca), asyncio.Semaphore(0)
    tasks = [asyncio.create_task(read(port, context, begun)) for _ in range(number)]
    for _ in range(number):
        await begun.acquire()
    print("all read", flush=True)
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
