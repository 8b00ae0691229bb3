"""Malformed requests from a seed, and a client that sends them: `malform.py PORT SEED COUNT` prints what came back as JSON.

Half of the requests are well-framed HTTP with a body that is wrong somewhere; the others are also broken as text, as
HTTP, or both. With `--valid` the same number of requests is sent as they are before they are mutated.
"""

import argparse
import collections
import http.client
import json
import random
import socket
import sys
from typing import NamedTuple

from endpoints import EVERY, VALID

# Longer than any answer takes on a busy machine.
PATIENCE = 60
# Bytes that the buffers of a connection take even if nobody reads them.
UNREAD = 1 << 14
# Bytes of a body; mutations may multiply each other.
LARGEST = 1 << 20


class Raw(str):
    """Goes into the JSON text as it is."""


class Pairs(list):
    """An object, which may name a key twice."""


class Shot(NamedTuple):
    """What goes over the wire, and whether it is HTTP that must be answered."""

    data: bytes
    framed: bool


def text_of(value) -> str:
    """JSON, but for what is `Raw` in it."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, dict):
        value = Pairs(value.items())
    if isinstance(value, Pairs):
        return "{" + ", ".join(f"{json.dumps(key)}: {text_of(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(text_of, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def nested(depth: int, shape: str) -> Raw:
    opening, closing = {"list": ("[", "]"), "object": ('{"a":', "}")}[shape]
    return Raw(opening * depth + "1" + closing * depth)


NUMBERS = [
    0, -1, 1, 2, 0.5, -0.5, 1e-9, 127, 128, 129, 255, 256, 257, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63,
    -(2**63), 2**64, 10**30, -(10**30), 1e308, Raw("1e999"), Raw("-1e999"), Raw("-0"), Raw("-0.0"), Raw("1E400"), Raw("00"),
    Raw("+1"), Raw(".5"), Raw("1."), Raw("0x10"), Raw("1_000"), Raw("9" * 400), Raw("0." + "0" * 400 + "1"),
]
WORDS = [
    "", " ", "\0", "a\0b", "é", "€", "\U0001f4a9", "e" + "\u0301" * 50, "\u202e", "\ufeff", "\ufffd", "\u2028", "<|eos|>",
    "<think>", "</think>", "{{ 7 * 7 }}", "{% raw %}", "../../etc/passwd", "true", "null", "NaN", "1", "[", "\\", '"', "\n",
    "text", "auto", "none", "required", "json_object", "user", "tool", "x" * 300,
    Raw('"\\ud800"'), Raw('"\\udfff\\ud800"'), Raw('"\\u0000"'), Raw('"\\x"'), Raw('"\n"'), Raw('"unended'), Raw("'single'"),
]
OTHERS = [
    None, True, False, [], {}, [[]], [None], [{}], {"": ""}, {"type": "text"}, {"type": None}, Raw("NaN"), Raw("Infinity"),
    Raw("-Infinity"), Raw("nul"), Raw("TRUE"), Raw("undefined"), Raw(""), Raw("[1,]"), Raw('{"a":1,}'), Raw("/* c */ 1"),
]


def odd_value(rng: random.Random):
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(NUMBERS)
    if kind < 0.65:
        return rng.choice(WORDS)
    if kind < 0.95:
        return rng.choice(OTHERS)
    if kind < 0.97:
        return nested(rng.choice([10, 120, 127, 128, 129, 1000, 20_000]), rng.choice(["list", "object"]))
    # Enormous ones are a few, since they are what takes the time; as text, so that this costs the server more than us.
    item = rng.choice(["0", "97", '"a"', "[]", "[97]", '{"role": "user", "content": "x"}', '{"type": "text", "text": "x"}'])
    return rng.choice([
        lambda: Raw("[" + ", ".join([item] * rng.choice([100, 3000, 30_000])) + "]"),
        lambda: Raw('"' + "x" * rng.choice([5000, 100_000]) + '"'),
        lambda: Raw("{" + ", ".join(f'"k{i}": {item}' for i in range(2000)) + "}"),
    ])()


def places(value, path=()) -> list:
    """Every place in `value` as a path of keys and indices."""
    found = [path]
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(item, (*path, key))
    return found


def mutate(rng: random.Random, value):
    """`value` with one thing wrong, or odd."""
    path = rng.choice(places(value))
    if not path:
        return odd_value(rng) if rng.random() < 0.1 else add_field(rng, value)
    return change(rng, value, path)


def add_field(rng: random.Random, value):
    if not isinstance(value, dict):
        return odd_value(rng)
    others = [key for bodies in EVERY.values() for body in bodies for key in body]
    name = rng.choice(["temprature", "", "\0", "__proto__", "é", *others])
    return {**value, name: odd_value(rng)}


def change(rng: random.Random, value, path: tuple):
    key, *rest = path
    changed = dict(value) if isinstance(value, dict) else list(value)
    if rest:
        changed[key] = change(rng, changed[key], tuple(rest))
        return changed
    how = rng.randrange(8)
    if how == 0:
        del changed[key]
    elif how == 1 and isinstance(changed, dict):
        at = rng.randrange(len(changed) + 1)
        pairs = Pairs(changed.items())
        pairs.insert(at, (key, odd_value(rng)))
        return pairs
    elif how == 2 and isinstance(changed, dict):
        changed[rng.choice([key.upper(), key + " ", key[:-1], f"{key}.{key}"])] = changed.pop(key)
    elif how == 3:
        changed[key] = rng.choice([[changed[key]], {key: changed[key]} if isinstance(key, str) else [[changed[key]]],
                                   str(changed[key])])
    elif how == 4 and isinstance(changed[key], list):
        changed[key] = changed[key] * rng.choice([2, 100, 300])
    else:
        changed[key] = odd_value(rng)
    return changed


def break_text(rng: random.Random, body: bytes) -> bytes:
    """`body` with something that no JSON text has."""
    at = rng.randrange(len(body) + 1)
    junk = rng.choice([b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\x00", b"\x1b[31m", b"\xe2\x82", b'"', b"}"])
    return rng.choice([
        lambda: body[:at],
        lambda: body[:at] + junk + body[at:],
        lambda: body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :],
        lambda: body + junk,
        lambda: b"\xef\xbb\xbf" + body,
        lambda: body.decode(errors="replace").encode("utf-16", "replace"),
        lambda: body + body,
        lambda: rng.randbytes(rng.randrange(1, 300)),
        lambda: b"",
    ])()


def head(method: str, path: str, headers: list) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def framed(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    kind = [] if any(h.lower().startswith("content-type") for h in headers) else ["Content-Type: application/json"]
    return head(method, path, [*kind, f"Content-Length: {len(body)}", *headers]) + body


def odd_headers(rng: random.Random, path: str, body: bytes) -> bytes:
    """A body that is framed well under headers that are not what the server wants."""
    return rng.choice([
        lambda: framed(path, body, rng.choice([
            "Content-Type: text/plain", "Content-Type: ", "Content-Type: \xff\xfe", "Content-Type: application/jsonx",
            "Content-Type: multipart/form-data; boundary=x", "Content-Type: application/json; charset=utf-16",
            "Content-Type: application/x-www-form-urlencoded", "Content-Type: application/json, text/plain",
        ])),
        lambda: framed(path, body, rng.choice([
            "Content-Encoding: gzip", "Accept: image/png", "Authorization: Bearer", "Authorization: " + "x" * 5000,
            "X-Request-Id: " + "\xe9" * 300, "Cookie: " + "a=b; " * 500, "Origin: null", "traceparent: 00-zz-zz-zz",
            "Accept-Encoding: \xff", "If-Match: *", "Range: bytes=0-1", "Upgrade: websocket", "X-Forwarded-For: " + "1," * 999,
            "anthropic-version: never", "Expect: 100-continue", "TE: trailers",
        ])),
        lambda: framed(path, body, method=rng.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW", "get"])),
        lambda: framed(rng.choice([
            path + "/", path + "?stream=true&x=%ff", "/" + path, path.upper(), path + "%00", "/v1/models/%ff%fe", "/v1/models/..%2f..",
            "/v1/" + "x" * 5000, "/%", "/v1/models/%c3%28", "/metrics", "/health", "/v1/models",
        ]), body),
    ])()


def broken_http(rng: random.Random, path: str, body: bytes) -> bytes:
    """What a server cannot read to its end, or not at all."""
    kind = "Content-Type: application/json"
    good = framed(path, body)
    return rng.choice([
        lambda: good[: rng.randrange(1, len(good))],
        lambda: head("POST", path, [kind, f"Content-Length: {len(body) + rng.randrange(1, 1000)}"]) + body,
        lambda: head("POST", path, [kind, f"Content-Length: {max(len(body) - rng.randrange(1, 20), 0)}"]) + body,
        lambda: head("POST", path, [kind, rng.choice([
            "Content-Length: -1", "Content-Length: x", "Content-Length: 99999999999999999999", "Content-Length: 1, 2",
            "Content-Length: 5\r\nContent-Length: 6", "Transfer-Encoding: chunked\r\nContent-Length: 5", "Transfer-Encoding: gzip",
            "Content-Length:", "Content-Length: 0x10", "Content-Length: 18446744073709551615",
        ])]) + body,
        lambda: head("POST", path, [kind, "Transfer-Encoding: chunked"]) + rng.choice([
            b"zz\r\n" + body, b"5\r\n" + body, b"ffffffffffffffffff\r\n" + body, b"-1\r\n\r\n", b"0\r\n", b"3;" + b"x" * 9000,
            f"{len(body):x}\r\n".encode() + body + b"\r\n", f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\nX: y\r\n\r\n",
        ]),
        lambda: rng.choice([
            b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST  /v1/completions HTTP/1.1\r\n\r\n", b"\r\n" * 50, b"\x16\x03\x01\x02\x00\x01",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 500 + b"\r\n", b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\n X: folded\r\n\r\n", b"GET / HTTP/1.1\r\nX y\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000,
            b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", b"GET http://[::1]:x/ HTTP/1.1\r\nHost: x\r\n\r\n", b"A" * 20_000,
            b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /v1/models/\xe9 HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \x01\r\n\r\n", b"GET / HTTP/1.1\nHost: x\n\n", rng.randbytes(rng.randrange(1, 500)),
        ]),
    ])()


def shots(seed: int, count: int, valid: bool = False):
    """`count` requests, always the same for a seed."""
    rng = random.Random(seed)
    for _ in range(count):
        path = rng.choice(list(VALID if valid else EVERY))
        body = rng.choice(EVERY[path])
        data = text_of(body).encode()
        if valid:
            yield Shot(framed(path, data), True)
            continue
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            mutated = mutate(rng, body)
            text = text_of(mutated)
            if len(text) > LARGEST:
                break
            body, data = mutated, text.encode()
        how = rng.random()
        if how < 0.6:
            yield Shot(framed(path, data), True)
        elif how < 0.8:
            yield Shot(framed(path, break_text(rng, data)), True)
        elif how < 0.9:
            # What is refused by its headers is not read, and a client that still sends then may miss the answer.
            yield Shot(odd_headers(rng, path, data), len(data) < UNREAD)
        else:
            yield Shot(broken_http(rng, path, data), False)


class Client:
    """Sends over one connection for as long as the server keeps it open."""

    def __init__(self, port: int):
        self.port = port
        self.connection = None

    def send(self, shot: Shot) -> tuple[int, bytes]:
        """Status and body of the answer, (0, b"") where the connection was closed instead of one."""
        kept = self.connection is not None
        if not shot.framed:
            self.close()
        try:
            return self.send_once(shot)
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException):
            self.close()
            # A connection that was kept may have been closed meanwhile, which is no answer to this request.
            if kept and shot.framed:
                return self.send(shot)
            return 0, b""

    def send_once(self, shot: Shot) -> tuple[int, bytes]:
        if self.connection is None:
            self.connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.sendall(shot.data)
        if not shot.framed:
            # The server must not wait for more.
            self.connection.shutdown(socket.SHUT_WR)
        response = http.client.HTTPResponse(self.connection)
        response.begin()
        body = response.read()
        if response.will_close or not shot.framed:
            self.close()
        return response.status, body

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


def complaint(shot: Shot, status: int, body: bytes) -> str | None:
    """What is wrong with an answer."""
    if status >= 500 or b'"server_error"' in body:
        return "a server error"
    if status == 0:
        return "no answer" if shot.framed else None
    # A request that is no HTTP is answered by the HTTP library, without a body.
    if status >= 400 and (shot.framed or body):
        try:
            error = json.loads(body)["error"]
            if not error["message"]:
                return "an error without a message"
        except (ValueError, KeyError, TypeError):
            return "an error in another shape"
    return None


def attack(port: int, seed: int, count: int, valid: bool) -> dict:
    client = Client(port)
    statuses = collections.Counter()
    wrong = []
    for shot in shots(seed, count, valid):
        try:
            status, body = client.send(shot)
            problem = complaint(shot, status, body)
        except TimeoutError:
            client.close()
            status, body, problem = -1, b"", "no answer in time"
        statuses[status] += 1
        if problem and len(wrong) < 10:
            wrong.append({"problem": problem, "sent": repr(shot.data[:1500]), "status": status, "got": repr(body[:500])})
    client.close()
    return {"statuses": statuses, "wrong": wrong}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--valid", action="store_true")
    args = parser.parse_args()
    json.dump(attack(args.port, args.seed, args.count, args.valid), sys.stdout)
