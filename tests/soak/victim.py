"""A client in a process of its own, to be stopped or killed while it reads: `victim.py PORT KEY`. Says `reading` once the
stream has begun, and at its end `complete`, or `cut` where the server gave it up."""

import socket
import sys

from wire import message


def main(port: int, key: str) -> str:
    # So much text that the buffers between the two are soon full.
    body = {"messages": [{"role": "user", "content": "Talk."}], "max_tokens": 900, "n": 4, "ignore_eos": True, "stream": True,
            "logprobs": True, "top_logprobs": 20}
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(message("POST", "/v1/chat/completions", body, key or None))
        end = connection.recv(64)
        if not end.startswith(b"HTTP/1.1 200 "):
            return "refused"
        print("reading", flush=True)
        try:
            while data := connection.recv(4096):
                end = (end + data)[-64:]
        except ConnectionError:
            return "cut"
    return "complete" if b"[DONE]" in end else "cut"


if __name__ == "__main__":
    print(main(int(sys.argv[1]), sys.argv[2]), flush=True)
