"""Reads the page's feed many times over: PORT NUMBER CA-FILE. Says `all read` when all have begun."""

from __future__ import annotations

import asyncio
import ssl
import sys

REQUEST = b"GET /edgefl/v1/feed HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n"


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
