"""CURVE keys (ZeroMQ RFC 26): who a client of another machine is, and that the daemon is the one it wants.

A key is 32 bytes, written as 40 characters (Z85, RFC 32). Key files have the form of ZeroMQ's certificates, as
`zmq.auth` reads and writes them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

import zmq

from kvtierd.protocol.endpoint import is_remote

SERVER_KEY_VARIABLE = "KVTIERD_SERVER_KEY"
"""The daemon's public key, for clients of `tcp://` endpoints."""
KEY_FILE_VARIABLE = "KVTIERD_KEY_FILE"
"""The client's secret key file."""
MAX_FILE_BYTES = 4096
RECONNECT_MAX_MS = 1000
"""A key that is refused is tried again, but not twenty times a second."""
HEARTBEAT_MS = 5000

_KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
_LINE = re.compile(r'^\s*(public-key|secret-key)\s*=\s*"([^"]*)"\s*$', re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret one, which stays out of every text that is made of this."""

    public: str
    secret: str = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        check_key(self.public, "the public key")
        check_key(self.secret, "the secret key")
        if zmq.curve_public(self.secret.encode()) != self.public.encode():
            raise ValueError("the two keys are not of one pair")

    @classmethod
    def new(cls) -> KeyPair:
        """A fresh pair, of the system's random numbers."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @classmethod
    def load(cls, path: str | Path) -> KeyPair:
        """Read a secret key file. Raises OSError, or ValueError for one that is none or that others may read."""
        with Path(path).open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise ValueError(f"{path} may be read by others; take that right away (chmod 0600)")
            text = file.read(MAX_FILE_BYTES).decode(errors="replace")
        found = dict(_LINE.findall(text))
        if "secret-key" not in found:
            raise ValueError(f"{path} has no secret key; `kvtierctl keygen` makes such files")
        secret = check_key(found["secret-key"], f"the secret key in {path}")
        return cls(found.get("public-key") or zmq.curve_public(secret.encode()).decode(), secret)

    def save(self, path: str | Path) -> None:
        """Write a secret key file for nobody but its owner. Raises FileExistsError where there is a file already."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(
                "# A CURVE key pair of kvtierd. Whoever can read this file can be who it stands for.\n"
                f'metadata\ncurve\n    public-key = "{self.public}"\n    secret-key = "{self.secret}"\n'
            )


@dataclasses.dataclass(frozen=True, slots=True)
class CurveKeys:
    """What a client needs for a `tcp://` endpoint: the daemon's public key, and a pair of its own."""

    server: str
    own: KeyPair

    def __post_init__(self) -> None:
        check_key(self.server, "the server's public key")

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Set a client's socket up with these keys, before it connects."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.own.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret.encode())
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> CurveKeys | None:
        """Those that $KVTIERD_SERVER_KEY and $KVTIERD_KEY_FILE name; None where neither is set.

        Raises ValueError where one is missing or wrong.
        """
        environment = os.environ if environment is None else environment
        server, file = environment.get(SERVER_KEY_VARIABLE, ""), environment.get(KEY_FILE_VARIABLE, "")
        if not server and not file:
            return None
        if not server or not file:
            raise ValueError(f"${SERVER_KEY_VARIABLE} and ${KEY_FILE_VARIABLE} go together; one of them is not set")
        try:
            return cls(server, KeyPair.load(file))
        except OSError as error:
            raise ValueError(f"${KEY_FILE_VARIABLE}: {file} cannot be read: {error.strerror}") from error


def keys_for(endpoint: str, curve: CurveKeys | None) -> CurveKeys | None:
    """Keys for an endpoint: these, or those of the environment; None for `ipc://`, which has none.

    Raises ValueError for a `tcp://` endpoint without keys, and for one that is neither.
    """
    if not is_remote(endpoint):
        return None
    if (found := curve or CurveKeys.from_environment()) is None:
        raise ValueError(
            f"{endpoint} wants CURVE keys: give them, or set ${SERVER_KEY_VARIABLE} and ${KEY_FILE_VARIABLE}"
        )
    return found


def check_key(key: str, what: str) -> str:
    """The key. Raises ValueError when it is none; the text does not hold it, since it may be secret."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"{what} has {len(key)} characters and is no CURVE key, which has 40 (Z85)")
    return key
