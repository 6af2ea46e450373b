"""Attention of several sequences at once: one round trip for all of them, and the caller works meanwhile.

At most `WAVE` requests are under way at a time: the daemon lets one client have a share of what it works on, and
answers `busy` beyond it. The others follow as these are answered.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from kvtierd.core.errors import ErrorCode
from kvtierd.protocol.asking import Ask, Asking, Begin, Begun, Finish, Plan, Work
from kvtierd.protocol.attention_plans import Attended, SequencePlans
from kvtierd.protocol.messages import AnyRequest, Attend, ErrorReply
from kvtierd.protocol.pending import Received
from kvtierd.protocol.service import Frame
from kvtierd.protocol.waiting import Driver

WAVE = 8
"""Half of what one client may have under way by default."""
BUSY_NS = 20_000_000
"""How long to wait where a daemon is busy and names no time."""


@dataclasses.dataclass(slots=True, eq=False)
class AttendOne:
    """One layer of one sequence, as `Sequence.ask` makes it."""

    plans: SequencePlans
    request: Attend
    frames: Sequence[Frame]
    reopened: bool = False


@dataclasses.dataclass(slots=True)
class _Wave:
    """What was sent together; `begun` is None where nobody was there."""

    numbers: list[int]
    begun: Begun | None


class AttendBatch:
    """Plans for many attends, all of which are answered, or one of which raises."""

    def __init__(self, asking: Asking, asks: Sequence[AttendOne], deadline_ns: int) -> None:
        self._asking = asking
        self._asks = asks
        self._deadline_ns = deadline_ns
        self._todo = collections.deque(range(len(asks)))
        self._wave = _Wave([], None)
        self._found: list[Attended | None] = [None] * len(asks)

    def begin(self) -> Plan[None]:
        """Send the first ones."""
        numbers = [self._todo.popleft() for _ in range(min(WAVE, len(self._todo)))]
        self._wave = _Wave(numbers, (yield from self._sent(numbers)) if numbers else None)

    def finish(self) -> Plan[list[Attended]]:
        """Wait for all. Raises what the first that cannot be answered raises."""
        while self._wave.numbers:
            wave = self._wave
            received: Iterable[Received | None] = [None] * len(wave.numbers)
            if wave.begun is not None:
                received = yield Finish(wave.begun)
            wave.begun = None
            wait_ns = 0
            for number, item in zip(wave.numbers, received, strict=True):
                wait_ns = max(wait_ns, self._take(number, item))
            if wait_ns:
                yield Work(functools.partial(time.sleep, wait_ns / 1e9))
            yield from self.begin()
        return [item for item in self._found if item is not None]

    def let_go(self) -> None:
        """Nobody wants the answers any more."""
        if self._wave.begun is not None:
            self._asking.let_go(self._wave.begun)
            self._wave.begun = None

    def _sent(self, numbers: Sequence[int]) -> Plan[Begun | None]:
        asks = [self._asks[number] for number in numbers]
        sessions: list[int] = []
        # A sequence's number means something in its session only: in a later one it may be another sequence's.
        while len(set(sessions)) != 1:
            sessions = []
            for one in asks:
                session_no = yield from one.plans.addressed(one.request, self._deadline_ns)
                if session_no is None:
                    return None
                sessions.append(session_no)
        requests: list[tuple[AnyRequest, Sequence[Frame]]] = [(one.request, one.frames) for one in asks]
        begun: Begun = yield Begin(Ask(requests, sessions[0], self._deadline_ns))
        return begun

    def _take(self, number: int, received: Received | None) -> int:
        """Note an answer; how long to wait before those that are asked again, in nanoseconds."""
        one = self._asks[number]
        reply = received[0] if received is not None else None
        now_ns = time.monotonic_ns()
        if isinstance(reply, ErrorReply) and reply.code == ErrorCode.BUSY and now_ns < self._deadline_ns:
            self._todo.append(number)
            return min(reply.retry_after_ms * 1_000_000 or BUSY_NS, self._deadline_ns - now_ns)
        if not one.reopened and one.plans.ended(received, self._deadline_ns):
            one.reopened = True
            self._todo.append(number)
            return 0
        (self._found[number],) = one.plans.answers(one.request, received)
        return 0


class AttendMany:
    """Attends under way, of `Client.attend_many`; as a context manager, those nobody waited for end with it."""

    def __init__(self, driver: Driver, batch: AttendBatch) -> None:
        self._driver = driver
        self._batch = batch
        driver.run(batch.begin())

    def result(self) -> list[Attended]:
        """Wait for all: one Attended each, in the order of asking.

        Raises RequestError naming a block that is lost, Unavailable where the daemon does not answer in time.
        """
        return self._driver.run(self._batch.finish())

    def close(self) -> None:
        """Give up what was not waited for; does not wait."""
        self._driver.post(self._batch.let_go)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
