"""A start that has to download its model first, from a local stand-in of the Hub that takes its time."""

import contextlib
import hashlib
import json
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import conftest
from conftest import ROOT
from test_lifecycle import ask, listening, reports

REPO, COMMIT = "acme/tiny", "0123456789abcdef0123456789abcdef01234567"
GOLDEN = ROOT / "tests/golden/qwen2"
PIECES = 40


def tokenizer() -> dict:
    """Every printable character is a token of its own; the first three are those that the model's configuration names."""
    characters = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["Ġ"]
    vocab = {name: index for index, name in enumerate(["<unk>", "<s>", "</s>", *characters])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    special = [{"id": vocab[name], "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False} for name in ("<unk>", "<s>", "</s>")]
    model = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": None, "dropout": None, "fuse_unk": False, "byte_fallback": False, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model}


FILES = {
    "config.json": (GOLDEN / "config.json").read_bytes(),
    "generation_config.json": (GOLDEN / "generation_config.json").read_bytes(),
    "model.safetensors": (GOLDEN / "model.safetensors").read_bytes(),
    "tokenizer.json": json.dumps(tokenizer()).encode(),
}


class Hub(BaseHTTPRequestHandler):
    """What the Hub answers for one repository: its tree, metadata with a redirect, and the files."""

    protocol_version = "HTTP/1.1"
    # Weights come a piece at a time; the last when the test has seen enough.
    enough: threading.Event

    def log_message(self, *_):
        pass

    def send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.head(len(body), status, **headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def head(self, length: int, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def do_GET(self):
        path = self.path.split("?")[0]
        if path.startswith(f"/api/models/{REPO}/revision/"):
            return self.send(json.dumps({"sha": COMMIT}).encode(), Content_Type="application/json")
        if path.startswith(f"/api/models/{REPO}/tree/"):
            return self.send(json.dumps([entry(name) for name in FILES]).encode(), Content_Type="application/json")
        if path.startswith("/cdn/"):
            return self.transfer(path.removeprefix("/cdn/"))
        name = path.rsplit("/", 1)[-1]
        if name not in FILES:
            return self.send(b"{}", 404)
        etag = f'"{oid(name)}"'
        headers = {"x_repo_commit": COMMIT, "x_linked_size": str(len(FILES[name])), "x_linked_etag": etag, "ETag": etag}
        if self.command == "HEAD":
            return self.head(len(FILES[name]), **headers)
        return self.send(b"", 302, Location=f"/cdn/{name}", **headers)

    do_HEAD = do_GET

    def transfer(self, name: str) -> None:
        data = FILES[name]
        if name != "model.safetensors":
            return self.send(data)
        self.head(len(data))
        piece = -(-len(data) // PIECES)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for at in range(0, len(data), piece):
                if at + piece >= len(data):
                    self.enough.wait(60)
                self.wfile.write(data[at : at + piece])
                time.sleep(0.05)


def oid(name: str) -> str:
    sha256 = hashlib.sha256(FILES[name]).hexdigest()
    return sha256 if name == "model.safetensors" else sha256[:40]


def entry(name: str) -> dict:
    """Of the repository's tree."""
    size = len(FILES[name])
    lfs = {"lfs": {"oid": oid(name), "size": size, "pointerSize": 134}} if name == "model.safetensors" else {}
    return {"type": "file", "oid": "0", "size": size, "path": name} | lfs


@contextlib.contextmanager
def hub():
    handler = type("SlowHub", (Hub,), {"enough": threading.Event()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.enough
    finally:
        handler.enough.set()
        server.shutdown()


def test_ready_says_how_far_a_download_is(tmp_path, monkeypatch):
    with hub() as (endpoint, enough):
        for name, value in {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub"), "HF_XET_TELEMETRY_ENABLED": "0"}.items():
            monkeypatch.setenv(name, value)
        for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        with conftest.process(tmp_path, REPO, "--max-model-len", "64", "--max-num-seqs", "2") as (child, port, log):
            connection = listening(child, port, log)
            seen, page = [], b""
            for response, report in reports(child, connection, log):
                if response.status == 200:
                    break
                seen.append(report)
                downloads = [report for report in seen if report["phase"] == "download"]
                if len({report["percent"] for report in downloads}) >= 5 and not enough.is_set():
                    page = ask(connection, "/metrics")[1]
                    # Whoever asks again before it can be done is asked to wait.
                    assert int(response.headers["retry-after"]) >= 1
                    enough.set()
                time.sleep(0.02)
            answer, text = ask(connection, "/v1/completions", {"prompt": "abc", "max_tokens": 2, "ignore_eos": True})
            assert answer.status == 200, text
            connection.close()
            child.send_signal(signal.SIGTERM)
            assert child.wait(60) == 0
    percents = [report["percent"] for report in downloads]
    assert percents == sorted(percents) and len(set(percents)) >= 5 and percents[-1] < 100, percents
    # Of a start that downloads, most is that.
    assert percents[0] < 10 and percents[-1] > 15, percents
    assert any(" of " in (report["detail"] or "") for report in downloads)
    phases = list(dict.fromkeys(report["phase"] for report in seen))
    assert phases.index("download") <= 1 and phases[-1] != "download", phases
    assert b'phase="download"' in page
