"""Messages that a daemon must survive: noise, broken headers, wrong frames, and right requests about anything."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from kvtierd import Geometry, Namespace, block_keys
from kvtierd.core.checksum import block_sum, layer_sums
from kvtierd.protocol import messages as m
from kvtierd.protocol.codec import encode

Message = list[bytes]

SHAPE = Geometry(block_size=64, layers=2, kv_heads=1, k_dim=16, v_dim=16)
"""4 KiB a layer of a block."""
SPACE = Namespace(model="garbage", geometry=SHAPE)
KEYS = block_keys(SPACE.digest(), range(12 * SHAPE.block_size), SHAPE.block_size).tobytes()
BLOCK = bytes(SHAPE.block_bytes)
_SUMS = layer_sums(np.zeros(SHAPE.slot_bytes, np.uint8), SHAPE)
_WHOLE = block_sum(_SUMS).to_bytes(8, "little")
_FIELDS = ("op", "id", "epoch", "deadline_ns", "namespace", "namespaces", "index", "leases", "sequence", "sequences",
           "reservation", "ttl_ms", "parts", "parent", "layers", "lengths", "queries", "heads", "begin", "end", "token",
           "resume", "versions", "tier", "tiers", "wait", "verify", "quiet", "scale", "position", "dtype")  # fmt: skip
_OPERATIONS = ("hello", "register_namespace", "lookup", "reserve", "commit", "abort", "acquire", "acquire_part",
               "release", "put", "get", "prefetch", "pin", "unpin", "delete", "reshape", "purge", "flush", "stats",
               "open_sequence", "extend", "attend", "close_sequence", "nothing")  # fmt: skip
EDGES = (0, 1, -1, 2, 255, 65_536, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)


class Garbage:
    """An endless supply from a seed. `epoch` is that of the session it is sent in."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.epoch = 0
        self.granted: dict[str, list[int]] = {"namespace": [], "lease": [], "reservation": [], "sequence": []}
        self.kinds: list[Callable[[], Message]] = [self.noise, self.mutated, self.misframed, self.maps, self.right]

    def message(self) -> Message:
        """One message: header and raw frames."""
        return self.rng.choices(self.kinds, (1, 3, 3, 1, 4))[0]()

    def noise(self) -> Message:
        """Bytes without any meaning; sometimes none, sometimes many frames."""
        sizes = [self.rng.choice((0, 1, 7, 40, 300)) for _ in range(self.rng.randint(1, 5))]
        return [self.rng.randbytes(size) for size in sizes]

    def mutated(self) -> Message:
        """A right message whose header was flipped, cut, grown or repeated in a few places."""
        header, *frames = self.right()
        changed = bytearray(header)
        for _ in range(self.rng.randint(1, 4)):
            at = self.rng.randrange(len(changed) + 1)
            match self.rng.randrange(4):
                case 0 if at < len(changed):
                    changed[at] ^= 1 << self.rng.randrange(8)
                case 1:
                    del changed[at:]
                case 2:
                    changed[at:at] = self.rng.randbytes(self.rng.randint(1, 8))
                case _:
                    changed[at:at] = changed[at : at + 8]
        return [bytes(changed), *frames]

    def misframed(self) -> Message:
        """A right header with frames that are too few, too many, or of other lengths."""
        header, *frames = self.right()
        match self.rng.randrange(4):
            case 0:
                frames = frames[:-1]
            case 1:
                frames.append(self.rng.randbytes(self.rng.choice((0, 1, 32, 33, 4096))))
            case 2:
                frames = [frame[: self.rng.randrange(len(frame) + 1)] for frame in frames]
            case _:
                frames = [self.rng.randbytes(len(frame)) for frame in frames]
        return [header, *frames]

    def maps(self) -> Message:
        """A map of fields that exist with values of any type."""
        fields = {self.rng.choice(_FIELDS): self.value(2) for _ in range(self.rng.randrange(6))}
        fields["op"] = self.rng.choice(_OPERATIONS)
        if self.rng.random() < 0.5:
            fields["epoch"] = self.epoch
        return [msgspec.msgpack.encode(fields), KEYS[: 32 * self.rng.randrange(4)]]

    def value(self, depth: int) -> Any:
        """Anything that MessagePack can say."""
        rng = self.rng
        makers: list[Callable[[], Any]] = [
            lambda: rng.choice(EDGES),
            lambda: rng.choice((0.0, -0.0, 1e308, float("nan"), float("inf"), 0.5)),
            lambda: rng.choice((None, True, False)),
            lambda: "x" * rng.choice((0, 1, 300)),
            lambda: rng.randbytes(rng.choice((0, 16, 32))),
            lambda: rng.randrange(4),
        ]
        if depth:
            makers.append(lambda: [self.value(depth - 1) for _ in range(rng.randrange(4))])
            makers.append(lambda: {str(self.value(0)): self.value(depth - 1) for _ in range(rng.randrange(3))})
        return rng.choice(makers)()

    def right(self) -> Message:
        """A request that could be one, about numbers that may be taken, with fitting frames."""
        count = self.rng.randrange(4)
        request, frames = self.request(count)
        request.id = self.rng.randrange(1, 1 << 40)
        request.epoch = self.epoch if self.rng.random() < 0.95 else self.rng.randrange(1 << 32)
        request.deadline_ns = self.rng.choices((0, 1, 1 << 62), (1, 1, 18))[0]
        return [encode(request), *frames]

    def note(self, reply: m.AnyReply) -> None:
        """Remember what was granted, so that later requests are about it."""
        for kind in self.granted:
            if number := getattr(reply, kind, 0):
                self.granted[kind] = [*self.granted[kind][-7:], number]

    def number(self, kind: str) -> int:
        """Of a namespace, lease, reservation or sequence: mostly one that was granted, now and then an absurd one."""
        if self.rng.random() < 0.1 or not self.granted[kind]:
            return self.rng.choice(EDGES) & ((1 << 63) - 1)
        return self.rng.choice(self.granted[kind])

    def request(self, count: int) -> tuple[m.AnyRequest, list[bytes]]:
        """A request of any kind about `count` blocks, and its frames."""
        rng, number, keys = self.rng, self.number("namespace"), KEYS[: 32 * count]
        reservation, sequence = self.number("reservation"), self.number("sequence")
        flag = rng.random() < 0.5
        makers: list[Callable[[], tuple[m.AnyRequest, list[bytes]]]] = [
            lambda: (m.RegisterNamespace(id=0, namespace=SPACE, ttl_s=rng.randrange(2)), []),
            lambda: (m.Lookup(id=0, namespaces=[number] * count), [keys] * count),
            lambda: (m.Reserve(id=0, namespace=number), [keys]),
            lambda: (m.Commit(id=0, reservation=reservation, verify=flag), [_SUMS.tobytes() * count, _WHOLE * count]),
            lambda: (m.Abort(id=0, reservation=reservation), []),
            lambda: (m.Acquire(id=0, namespace=number, ttl_ms=rng.randrange(20), verify=flag), [keys]),
            lambda: (m.AcquirePart(id=0, namespace=number, begin=rng.randrange(9), end=rng.randrange(300)), [keys]),
            lambda: (m.Release(id=0, leases=[self.number("lease") for _ in range(count)], quiet=flag), []),
            lambda: (m.Put(id=0, namespace=number), [keys, _WHOLE * count, *[BLOCK] * count]),
            lambda: (m.Get(id=0, namespace=number), [keys]),
            lambda: (m.Prefetch(id=0, namespace=number, tier=rng.choice(("gpu", "host", "nvme")), wait=flag), [keys]),
            lambda: (m.Pin(id=0, namespace=number), [keys]),
            lambda: (m.Unpin(id=0, namespace=number), [keys]),
            lambda: (m.Delete(id=0, namespace=number), [keys]),
            lambda: (m.Reshape(id=0, namespace=number, parts=[rng.choice((0, 64, 128, 512, -1))] * count), [keys]),
            lambda: (m.Purge(id=0, namespace=number, tiers=["host"] * flag), []),
            lambda: (m.OpenSequence(id=0, namespace=number, ttl_ms=rng.choice((0, 1, 20, 60_000))), [keys]),
            lambda: (m.Extend(id=0, sequence=sequence), [keys]),
            lambda: self.attend(sequence),
            lambda: (m.CloseSequence(id=0, sequences=[sequence], quiet=flag), []),
            lambda: (m.Stats(id=0), []),
        ]
        return rng.choice(makers)()

    def attend(self, sequence: int) -> tuple[m.AnyRequest, list[bytes]]:
        """Queries of the right size, mostly, over a sequence that may be there."""
        rng, queries = self.rng, self.rng.randrange(3)
        heads = rng.choices((1, 2, 4, 1 << 20), (6, 6, 6, 1))[0]
        layers = [rng.choices((0, 1, 2, -1), (9, 9, 1, 1))[0] for _ in range(rng.randrange(3))]
        request = m.Attend(
            id=0,
            sequence=sequence,
            layers=layers,
            queries=queries,
            heads=heads,
            lengths=[rng.choice((0, 1, 63, 64, 200))] * (rng.random() < 0.3),
            window=rng.choice((0, 5, 1 << 40)),
            position=rng.choices((-1, 0, 1 << 40), (6, 1, 1))[0],
        )
        return request, [bytes(2 * SHAPE.k_dim * queries * min(heads, 8))] * len(layers)
