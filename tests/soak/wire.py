"""HTTP/1.1 over asyncio, as little of it as the soak needs: it must leave the machine to the server, and see every byte."""

import asyncio
import contextlib
import json
import socket

# Longer than any answer takes: requests end by the server's own deadline before.
PATIENCE = 120


class Closed(Exception):
    """The server closed the connection before the end of its answer."""


class Exchange:
    """One request on a connection of its own, and its answer as it comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        self.status = 0
        self.headers: dict[str, str] = {}

    async def head(self) -> None:
        """Reads status and headers."""
        try:
            text = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Closed(f"no answer: {error}") from error
        first, *lines = text.decode("latin-1").split("\r\n")
        self.status = int(first.split(" ", 2)[1])
        for line in filter(None, lines):
            name, _, value = line.partition(":")
            self.headers[name.lower()] = value.strip()

    async def chunks(self):
        """Pieces of the body until its end."""
        try:
            if self.headers.get("transfer-encoding") != "chunked":
                yield await self.reader.readexactly(int(self.headers.get("content-length", "0")))
                return
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                yield (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Closed(f"the answer broke off: {error}") from error

    async def body(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def events(self):
        """Data of server-sent events, as text; comments are left out."""
        rest = b""
        async for chunk in self.chunks():
            *whole, rest = (rest + chunk).split(b"\n\n")
            for event in whole:
                data = [line[6:] for line in event.split(b"\n") if line.startswith(b"data: ")]
                if data:
                    yield b"\n".join(data).decode()

    def abort(self) -> None:
        """Hangs up at once."""
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def exchange(port: int, method: str, path: str, body=None, key: str | None = None, buffer: int = 1 << 20):
    """Sends a request; the connection ends with the block. `buffer`: bytes that are taken before they are asked for."""
    raw = socket.socket()
    if buffer < 1 << 16:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    raw.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
    except OSError:
        raw.close()
        raise
    one = Exchange(*await asyncio.open_connection(sock=raw, limit=buffer))
    try:
        one.writer.write(message(method, path, body, key))
        await one.head()
        yield one
    finally:
        one.abort()


def message(method: str, path: str, body=None, key: str | None = None) -> bytes:
    """A request as it goes over the wire."""
    data = b"" if body is None else json.dumps(body).encode()
    head = [f"{method} {path} HTTP/1.1", "Host: soak", "Connection: close", f"Content-Length: {len(data)}"]
    if body is not None:
        head.append("Content-Type: application/json")
    if key:
        head.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*head, "", ""]).encode() + data


async def call(port: int, method: str, path: str, body=None, key: str | None = None) -> tuple[int, bytes, dict]:
    """Status, body and headers of an answer."""
    async with asyncio.timeout(PATIENCE), exchange(port, method, path, body, key) as one:
        return one.status, await one.body(), one.headers
