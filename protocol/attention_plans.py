"""How a client opens sequences and asks for attention: plans for either client, and the checks that need no daemon."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvtierd.core.errors import ErrorCode
from kvtierd.core.keys import Keys, as_keys
from kvtierd.protocol.asking import Ask, Asking, Plan, as_frame, raw
from kvtierd.protocol.attention_messages import Loss
from kvtierd.protocol.messages import (
    AnyRequest,
    Attend,
    AttendReply,
    CloseSequence,
    CountReply,
    ErrorReply,
    Extend,
    OpenSequence,
    QueryDtype,
    SequenceReply,
)
from kvtierd.protocol.pending import Received
from kvtierd.protocol.results import NamespaceHandle
from kvtierd.protocol.service import Frame

Array = npt.NDArray[Any]
OutputDtype = Literal["", "fp32", "fp16", "bf16"]

ATTEND_TIMEOUT_S = 30.0
"""For what is asked of sequences: a long context on disk takes seconds."""

_DTYPE_NAMES: dict[Any, QueryDtype] = {np.dtype(np.float32): "fp32", np.dtype(np.float16): "fp16"}
_DTYPE_NAMES[np.dtype(np.uint16)] = "bf16"
_DTYPES: dict[str, type[Any]] = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """Attention of one layer: `output` [queries, heads, v_dim] and the natural log-sum-exp `lse`, float32
    [queries, heads]. `lossy` are the numbers of blocks whose copy was not exact, uint32.

    Join it with what was computed over other keys by `kvtierd.gpu.attend.merge`. bf16 is uint16 here.
    """

    output: Array
    lse: npt.NDArray[np.float32]
    lossy: npt.NDArray[np.uint32]


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What an attend may say beside its queries; see `kvtierd.protocol.messages.Attend`."""

    lengths: tuple[int, ...] = ()
    scale: float | None = None
    causal: bool = True
    position: int | None = None
    window: int = 0
    soft_cap: float = 0.0
    v_dim: int = 0
    output: OutputDtype = "fp32"
    loss: Loss = "any"


class SequencePlans:
    """A sequence as the client remembers it: its keys, and its number in the session in which it is open."""

    def __init__(self, asking: Asking, handle: NamespaceHandle, keys: Keys, ttl_ms: int) -> None:
        self._asking = asking
        self._handle = handle
        self._ttl_ms = ttl_ms
        self._keys: list[Keys] = [as_keys(keys).copy()]
        self._number = 0
        self._session_no = -1
        self.closed = False

    @property
    def count(self) -> int:
        """Blocks of the sequence."""
        return sum(len(keys) for keys in self._keys)

    def open(self, deadline_ns: int) -> Plan[None]:
        """Open it anew in the session of now."""
        limit = self._asking.connection.max_batch
        keys = np.concatenate(self._keys)
        received = yield from self._asking.request(
            [self._handle],
            lambda numbers: OpenSequence(id=0, namespace=numbers[0], ttl_ms=self._ttl_ms),
            (as_frame(keys[:limit]),),
            deadline_ns,
        )
        reply = self._asking.insist(received, SequenceReply)
        assert received is not None
        self._number, self._session_no = reply.sequence, received[2]
        for begin in range(limit, len(keys), limit):
            yield from self._extend(keys[begin : begin + limit], deadline_ns)

    def extend(self, keys: Keys, deadline_ns: int) -> Plan[int]:
        """Add keys; how many blocks the sequence has then."""
        self._check_open()
        more = as_keys(keys).copy()
        limit = self._asking.connection.max_batch
        for begin in range(0, len(more), limit):
            piece = more[begin : begin + limit]
            yield from self._extend(piece, deadline_ns)
            self._keys.append(piece)
        return self.count

    def attend(
        self,
        layers: Sequence[int],
        queries: Sequence[Array],
        sinks: Sequence[Array] | None,
        options: Options,
        deadline_ns: int,
    ) -> Plan[list[Attended]]:
        """Attention of each layer's queries."""
        request, frames = self.prepare(layers, queries, sinks, options)
        return self.answers(request, (yield from self._ask(request, frames, deadline_ns)))

    def prepare(
        self, layers: Sequence[int], queries: Sequence[Array], sinks: Sequence[Array] | None, options: Options
    ) -> tuple[Attend, list[Frame]]:
        """The request, but for the number of the sequence, and its frames. Raises ValueError for what is no query."""
        self._check_open()
        shape, dtype = _common_shape(layers, queries)
        frames: list[Frame] = [raw(np.ascontiguousarray(q)) for q in queries]
        if sinks is not None:
            frames += [raw(np.ascontiguousarray(part, np.float32)) for part in sinks]
        request = Attend(
            id=0,
            sequence=0,
            layers=list(layers),
            queries=shape[0],
            heads=shape[1],
            dtype=dtype,
            lengths=list(options.lengths),
            scale=options.scale,
            causal=options.causal,
            position=-1 if options.position is None else options.position,
            window=options.window,
            soft_cap=options.soft_cap,
            v_dim=options.v_dim,
            sinks=sinks is not None,
            output=options.output,
            loss=options.loss,
        )
        return request, frames

    def answers(self, request: Attend, received: Received | None) -> list[Attended]:
        """What a reply says, layer by layer. Raises Unavailable where there is none, RequestError for an error."""
        self._asking.insist(received, AttendReply)
        assert received is not None
        v_dim = self._handle.geometry.v_dim or request.v_dim
        shape = (request.queries, request.heads, v_dim)
        return _answers(received[1], len(request.layers), shape, request.output or request.dtype)

    def addressed(self, request: Extend | Attend, deadline_ns: int) -> Plan[int | None]:
        """Put its number into a request, opening it anew where it must be: the session; None without a daemon."""
        connection = self._asking.connection
        if (yield from self._asking.ready([self._handle], deadline_ns)) is None:
            return None
        if self._session_no != connection.session_no:
            yield from self.open(deadline_ns)
        request.sequence = self._number
        return self._session_no

    def ended(self, received: Received | None, deadline_ns: int) -> bool:
        """Whether a reply says that it has ended there, or that nobody was reached: it may be asked again, once."""
        if not self._has_ended(received, deadline_ns):
            return False
        self._session_no = -1
        return True

    def give_back(self) -> None:
        """End it, without waiting; a second call does nothing."""
        if not self.closed and self._session_no == self._asking.connection.session_no:
            self._asking.connection.post(CloseSequence(id=0, sequences=[self._number], quiet=True))
        self.closed = True

    def _extend(self, keys: Keys, deadline_ns: int) -> Plan[None]:
        received = yield from self._ask(Extend(id=0, sequence=0), (as_frame(keys),), deadline_ns)
        self._asking.insist(received, CountReply)

    def _ask(self, request: Extend | Attend, frames: Sequence[Frame], deadline_ns: int) -> Plan[Received | None]:
        """Ask about the sequence; once more where it had ended, or its session had, and could be opened again."""
        received: Received | None = None
        for attempt in range(2):
            session_no = yield from self.addressed(request, deadline_ns)
            if session_no is None:
                return None
            asked: list[tuple[AnyRequest, Sequence[Frame]]] = [(request, frames)]
            (received,) = yield Ask(asked, session_no, deadline_ns)
            if attempt or not self.ended(received, deadline_ns):
                break
        return received

    def _has_ended(self, received: Received | None, deadline_ns: int) -> bool:
        if received is not None and isinstance(received[0], ErrorReply) and received[0].code == ErrorCode.NOT_YOURS:
            return time.monotonic_ns() < deadline_ns
        return self._asking.undelivered(received, deadline_ns)

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("this sequence was closed; open another one")


def _common_shape(layers: Sequence[int], queries: Sequence[Array]) -> tuple[tuple[int, int, int], QueryDtype]:
    """Shape and dtype of all queries. Raises ValueError where they differ or are none."""
    if not len(layers) or len(layers) != len(queries):
        raise ValueError(f"{len(queries)} arrays of queries for {len(layers)} layers; one for each is wanted")
    for q in queries:
        if not isinstance(q, np.ndarray) or q.ndim != 3 or q.dtype not in _DTYPE_NAMES:
            what = f"{q.dtype} {q.shape}" if isinstance(q, np.ndarray) else type(q).__name__
            raise ValueError(f"q is {what}; [queries, heads, k_dim] of float32, float16, or bf16 as uint16 is wanted")
        if q.shape != queries[0].shape or q.dtype != queries[0].dtype:
            raise ValueError(f"q of layers differ: {q.dtype} {q.shape} and {queries[0].dtype} {queries[0].shape}")
    first = queries[0]
    return (first.shape[0], first.shape[1], first.shape[2]), _DTYPE_NAMES[first.dtype]


def _answers(frames: Sequence[memoryview], layers: int, shape: tuple[int, int, int], dtype: str) -> list[Attended]:
    """Arrays over the frames of a reply, without a copy."""
    lossy = np.frombuffer(frames[-1], "<u4")
    return [
        Attended(
            np.frombuffer(frames[2 * i], _DTYPES[dtype]).reshape(shape),
            np.frombuffer(frames[2 * i + 1], np.float32).reshape(shape[:2]),
            lossy,
        )
        for i in range(layers)
    ]
