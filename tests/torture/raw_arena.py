"""The arena's socket for clients that say anything: attached, they are granted reservations and leases."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec

from kvtierd.protocol.endpoint import ARENA_NAME
from kvtierd.protocol.messages import AnyArenaReply, ArenaHello, ArenaReady


def arena_of(endpoint: str) -> socket.socket:
    """A connection to the socket beside an endpoint."""
    plug = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    plug.settimeout(20)
    plug.connect(str(Path(endpoint.removeprefix("ipc://")).with_name(ARENA_NAME)))
    return plug


def attach(endpoint: str, token: bytes) -> socket.socket:
    """One that is attached to a session and maps nothing. TypeError where that is refused."""
    arena = arena_of(endpoint)
    arena.send(msgspec.msgpack.encode(ArenaHello(token)))
    ready = msgspec.msgpack.decode(arena.recv(4096), type=AnyArenaReply)
    if not isinstance(ready, ArenaReady):
        arena.close()
        raise TypeError(f"the arena answered {ready}")
    return arena
