"""KV events as a router of vLLM reads them: libzmq, and vLLM's own structs by msgspec. And what they say is cached."""

import json
import random
from dataclasses import dataclass, field

import msgspec
import zmq

# Tokens of each of the servers' blocks.
BLOCK = 16
BATCHES = "plimsoll_kv_event_batches"
TOPIC = "kv@10.0.0.1:8000@sim"
# What a busy machine may take for a message.
PATIENCE_MS = 60_000


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True, forbid_unknown_fields=True):
    """As vLLM declares it."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    # Dynamo's.
    cache_salt: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(Batch)


@dataclass
class Cache:
    """What is cached in each cache group."""

    # By hash: parent, tokens, salt.
    blocks: dict[int, tuple] = field(default_factory=dict)
    # Hashes by group, and each group's window.
    held: dict[int, set[int]] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    removed: int = 0
    cleared: int = 0

    def apply(self, batch: Batch) -> None:
        assert batch.data_parallel_rank == 0 and batch.ts > 1.7e9
        for event in batch.events:
            match event:
                case AllBlocksCleared():
                    self.held = {group: set() for group in self.held}
                    self.cleared += 1
                case BlockRemoved(block_hashes=hashes, medium=medium, group_idx=group):
                    assert medium == "GPU"
                    self.removed += len(hashes)
                    for one in hashes:
                        self.held[group].remove(one)
                case BlockStored():
                    self.store(event)

    def store(self, event: BlockStored) -> None:
        assert (event.medium, event.lora_id, event.lora_name) == ("GPU", None, None)
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        keys = event.extra_keys or [None] * len(event.block_hashes)
        assert len(keys) == len(event.block_hashes) and (keys[0] or (None,))[0] == event.cache_salt
        group, parent, window = event.group_idx, event.parent_block_hash, event.kv_cache_spec_sliding_window
        assert event.kv_cache_spec_kind == ("sliding_window" if window else "full_attention")
        assert self.windows.setdefault(group, window) == window
        held = self.held.setdefault(group, set())
        assert parent is None or window or parent in held
        for index, (one, key) in enumerate(zip(event.block_hashes, keys, strict=True)):
            tokens = event.token_ids[index * event.block_size:][:event.block_size]
            block = (parent, tuple(tokens), key and key[0])
            assert one not in held and one != 0 and self.blocks.setdefault(one, block) == block
            held.add(one)
            parent = one

    def __len__(self) -> int:
        return sum(len(held) for held in self.held.values())

    def longest(self, tokens: list[int], block_size: int, salt: str | None = None) -> int:
        """Tokens at the beginning of `tokens` that a request finds: every group has what the next token sees."""
        by_content = {content: one for one, content in self.blocks.items()}
        parent, row = None, []
        for start in range(0, len(tokens) - block_size + 1, block_size):
            content = (parent, tuple(tokens[start:start + block_size]), salt if parent is None else None)
            if content not in by_content:
                break
            parent = by_content[content]
            row.append(parent)

        def is_found(end: int) -> bool:
            seen = {group: max(0, end * block_size + 1 - window) // block_size if window else 0 for group, window in self.windows.items()}
            return all(set(row[seen[group]:end]) <= held for group, held in self.held.items())

        return next((end * block_size for end in range(len(row), 0, -1) if is_found(end)), 0)


class Subscriber:
    """Hears everything from the first event on."""

    def __init__(self, port: int, replay_port: int):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.port, self.replay_port = port, replay_port
        # By sequence number.
        self.payloads: dict[int, bytes] = {}
        # The number of the batch heard last.
        self.last = -1
        self.gaps = 0
        self.cache = Cache()

    def close(self) -> None:
        self.context.destroy(linger=0)

    def hears(self) -> bool:
        """Whether the subscription has taken effect; what was said before is asked for then."""
        if not self.socket.poll(50):
            return False
        for sequence, payload in self.replay(0):
            self.take(sequence, payload)
        return True

    def take(self, sequence: int, payload: bytes) -> None:
        if sequence <= self.last:
            return
        batch = DECODER.decode(payload)
        if sequence > self.last + 1:
            # The server gave some up; it says so by beginning anew.
            assert isinstance(batch.events[0], AllBlocksCleared), f"batches between {self.last} and {sequence} are missing"
            self.gaps += 1
        self.last, self.payloads[sequence] = sequence, payload
        self.cache.apply(batch)

    def read(self) -> None:
        """Takes in what is there."""
        while self.socket.poll(0):
            topic, sequence, payload = self.socket.recv_multipart()
            assert topic == TOPIC.encode() and len(sequence) == 8
            self.take(int.from_bytes(sequence, "big"), payload)

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """What the server kept from `start` on, as vLLM's subscribers ask for it."""
        socket = self.context.socket(zmq.DEALER)
        socket.connect(f"tcp://127.0.0.1:{self.replay_port}")
        socket.send_multipart((b"", start.to_bytes(8, "big")))
        batches = []
        while True:
            assert socket.poll(PATIENCE_MS), "the replay does not end"
            empty, topic, sequence, payload = socket.recv_multipart()
            assert empty == b""
            if not payload:
                assert (topic, sequence) == (b"", (-1).to_bytes(8, "big", signed=True))
                socket.close(linger=0)
                return batches
            assert topic == TOPIC.encode()
            batches.append((int.from_bytes(sequence, "big"), payload))


def wait_until_known(server, subscriber: Subscriber) -> None:
    """The subscriber knows the cache of a server that nobody else asks anything."""
    server.wait_until_empty()
    # What came last: behind it nothing is on its way. Where the cache is full, the number of its blocks says nothing.
    mark = [random.randrange(97, 123) for _ in range(BLOCK)]
    body = {"model": "sim", "prompt": mark, "max_tokens": 1, "ignore_eos": True}
    # A step may have been told to fail.
    server.wait_for("a mark", lambda: server.http.post("/v1/completions", json=body).status_code == 200)
    server.wait_until_empty()

    def known() -> bool:
        subscriber.read()
        # The two are counted on different ways.
        sent = sum(server.metric(f"{BATCHES}_{fate}_total") for fate in ("published", "dropped"))
        cached = {group: server.metric("plimsoll_kv_group_blocks", group=str(group), state="cached") for group in subscriber.cache.held}
        heard = {group: len(held) for group, held in subscriber.cache.held.items()}
        return subscriber.cache.longest(mark, BLOCK) > 0 and (heard, subscriber.last + 1) == (cached, sent)

    server.wait_for("a subscriber that knows the cache", known)


def config(port: int, replay_port: int, **more) -> str:
    return json.dumps({
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{replay_port}", "topic": TOPIC, **more,
    })
