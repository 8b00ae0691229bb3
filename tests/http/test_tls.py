"""TLS with a certificate made here: HTTP/1.1 and HTTP/2, a renewed certificate, a drain."""

import contextlib
import json
import signal
import socket
import ssl
import subprocess
import time
from pathlib import Path

import conftest
import httpx2 as httpx
import pytest
from test_sim import CHAT, HELLO


def make_certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """A certificate of its own for 127.0.0.1, and its key."""
    certificate, key = directory / "cert.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
               "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@pytest.fixture
def tls(tmp_path):
    """A process that serves TLS, ready, with its port and its certificate."""
    certificate, key = make_certificate(tmp_path, "first")
    # One after the other, what is drained takes at least four seconds.
    with conftest.process(tmp_path, "sim:0.002", "--max-model-len", "8192", "--max-num-seqs", "1", "--drain-timeout", "3m",
                          "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)) as (process, port, log):
        trust = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trust, timeout=conftest.PATIENCE) as client:
            end = time.monotonic() + conftest.PATIENCE
            while True:
                assert process.poll() is None and time.monotonic() < end, log.read_text()
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/ready").status_code == 200:
                        break
                time.sleep(0.05)
            yield process, port, client, certificate


def issuer(port: int) -> str:
    """The name on the certificate that new connections see."""
    text = ssl.get_server_certificate(("127.0.0.1", port))
    shown = subprocess.run(["openssl", "x509", "-noout", "-subject"], input=text, text=True, check=True, capture_output=True)
    return shown.stdout.strip().split("=")[-1].strip()


def alpn(port: int, protocols: list[str]) -> str | None:
    context = ssl._create_unverified_context()
    context.set_alpn_protocols(protocols)
    with socket.create_connection(("127.0.0.1", port)) as raw, context.wrap_socket(raw) as connection:
        return connection.selected_alpn_protocol()


def test_tls(tls, tmp_path):
    process, port, client, certificate = tls
    answer = client.post(CHAT, json={"messages": HELLO, "max_tokens": 3})
    assert answer.status_code == 200 and answer.http_version == "HTTP/1.1"
    with httpx.Client(base_url=client.base_url) as stranger, pytest.raises(httpx.ConnectError, match="(?i)certificate"):
        stranger.get("/health")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{port}/health")
    assert alpn(port, ["h2", "http/1.1"]) == "h2"
    assert alpn(port, ["http/1.1"]) == "http/1.1"
    two = subprocess.run(["curl", "--silent", "--show-error", "--http2", "--cacert", str(certificate), "--write-out", "%{http_version}",
                          f"https://127.0.0.1:{port}{CHAT}", "--json", json.dumps({"messages": HELLO, "max_tokens": 3})],
                         check=True, capture_output=True, text=True)
    assert two.stdout.endswith("}2"), two.stdout

    assert issuer(port) == "first"
    make_certificate(tmp_path, "second")
    end = time.monotonic() + conftest.PATIENCE
    while issuer(port) != "second":
        assert time.monotonic() < end, "a renewed certificate is never shown"
        time.sleep(0.2)

    # As without TLS: a stop lets streams end, and then the process.
    body = {"messages": HELLO, "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 4}
    with httpx.Client(verify=ssl.create_default_context(cafile=str(certificate)), timeout=conftest.PATIENCE) as renewed:
        with renewed.stream("POST", f"https://127.0.0.1:{port}{CHAT}", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait(conftest.PATIENCE) == 0


def test_wrong_files_are_told_at_once(tmp_path):
    certificate, key = make_certificate(tmp_path, "first")
    for flags, expected in [
        (["--ssl-certfile", str(certificate)], "--ssl-keyfile"),
        (["--ssl-certfile", str(certificate), "--ssl-keyfile", "/no/such/key"], "/no/such/key"),
        (["--ssl-certfile", str(certificate), "--ssl-keyfile", str(certificate)], "cert.pem"),
    ]:
        ended = subprocess.run([str(conftest.BINARY), "serve", "sim", "--port", "0", *flags], capture_output=True, text=True)
        assert ended.returncode in (1, 2) and expected in ended.stderr, ended.stderr
