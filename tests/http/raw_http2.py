"""A client of HTTP/2 that takes no more of an answer than it wants to: clients of libraries take all they can get."""

import socket
import struct
import threading

import conftest

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """RFC 9113, section 4.1."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header that no table knows (RFC 7541, section 6.2.2)."""
    assert len(name) < 127 and len(value) < 127
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class Client:
    """Answers pings and settings, and lets the server send `window` bytes of each answer."""

    def __init__(self, port: int, window: int):
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=conftest.PATIENCE)
        self.writing = threading.Lock()
        self.streams = 0
        # Bytes of data, and streams whose head came.
        self.taken, self.answered = 0, set()
        self.closed = threading.Event()
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, window)
        self.write(PREFACE + frame(SETTINGS, 0, 0, settings))
        threading.Thread(target=self.read, daemon=True).start()

    def write(self, data: bytes) -> None:
        with self.writing:
            self.connection.sendall(data)

    def get(self, path: str, **headers: str) -> None:
        pseudo = [(":method", "GET"), (":scheme", "http"), (":path", path), (":authority", "x")]
        block = b"".join(literal(name, value) for name, value in [*pseudo, *headers.items()])
        self.write(frame(HEADERS, END_HEADERS | END_STREAM, 2 * self.streams + 1, block))
        self.streams += 1

    def exactly(self, count: int) -> bytes:
        got = b""
        while len(got) < count:
            more = self.connection.recv(count - len(got))
            if not more:
                raise ConnectionError
            got += more
        return got

    def read(self) -> None:
        try:
            while True:
                head = self.exactly(9)
                length, (kind, flags, stream) = int.from_bytes(head[:3]), struct.unpack(">BBI", head[3:])
                payload = self.exactly(length)
                if kind == PING and not flags & ACK:
                    self.write(frame(PING, ACK, 0, payload))
                elif kind == SETTINGS and not flags & ACK:
                    self.write(frame(SETTINGS, ACK, 0))
                elif kind == HEADERS:
                    self.answered.add(stream)
                elif kind == DATA:
                    self.taken += length
        except OSError:
            self.closed.set()

    def close(self) -> None:
        self.connection.close()
