"""Malformed requests in a process of their own: `malformed.py PORT SEED COUNT KEY` prints what came back as JSON."""

import collections
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "http"))

from ledger import FAILED, LATE, judge, parse_error  # noqa: E402
from load import stream_error  # noqa: E402
from malform import Client, complaint, shots  # noqa: E402


def main(port: int, seed: int, count: int, key: str) -> dict:
    client, codes, wrong, unseen = Client(port), collections.Counter(), [], 0
    for shot in shots(seed, count):
        if key:
            # Else nothing but the key would be looked at.
            shot = shot._replace(data=shot.data.replace(b"Host: x\r\n", f"Host: x\r\nAuthorization: Bearer {key}\r\n".encode(), 1))
        try:
            status, body = client.send(shot)
        except TimeoutError:
            client.close()
            wrong.append(f"no answer in time to {shot.data[:500]!r}")
            continue
        # Sent again on a fresh connection, or not read to its end: who knows what the server made of it.
        unseen += not shot.framed or status == 0
        codes[status] += shot.framed and status > 0
        problem = complaint(shot, status, body)
        error = parse_error(body)
        if problem and not (error and judge(status, error, None, True)[0] in (FAILED, LATE)) and not is_injected(body):
            wrong.append(f"{problem}: status {status}, {body[:300]!r} to {shot.data[:500]!r}")
    client.close()
    return {"codes": codes, "wrong": wrong[:10], "wrong_count": len(wrong), "unseen": unseen, "sent": count}


def is_injected(body: bytes) -> bool:
    """Whether a stream that began well ended with an error that was made on purpose."""
    data = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: {")]
    error = next(filter(None, map(stream_error, map(json.loads, data))), None)
    return error is not None and judge(200, error, None, True)[0] in (FAILED, LATE)


if __name__ == "__main__":
    json.dump(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]), sys.stdout)
