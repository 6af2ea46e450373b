"""Tasks of one kind, run in a thread or two of their own. No engine in here."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_log = logging.getLogger("kvtierd")


class Tasks(Generic[T]):
    """Runs what is submitted, `threads` at a time in the order of its coming; `notify` is called when a result can be
    had. Thread-safe.

    `failed` makes the result of a task that raised: its trouble is logged, and the caller goes on without its objects.
    """

    def __init__(
        self, name: str, numbers: itertools.count[int], notify: Callable[[], None], *, threads: int = 1
    ) -> None:
        self._name = name
        self._numbers = numbers
        self._notify = notify
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(threads, thread_name_prefix=f"kvtierd-{name}")
        self._done: dict[int, T] = {}
        self._closed = False

    def submit(self, work: Callable[[], T], failed: Callable[[], T]) -> int:
        """The number that the result will have."""
        number = next(self._numbers)
        self._thread.submit(self._run, number, work, failed)
        return number

    def post(self, work: Callable[[], Any]) -> None:
        """Run something without a result, in its turn where there is one thread; after `close` nothing is run."""
        with self._lock:
            if not self._closed:
                self._thread.submit(self._guarded, work)

    def take(self, number: int) -> T | None:
        """A result, once; None where there is none yet."""
        with self._lock:
            return self._done.pop(number, None)

    def take_all(self) -> dict[int, T]:
        """All results that were not taken."""
        with self._lock:
            done, self._done = self._done, {}
        return done

    def close(self) -> None:
        """End the threads; what has not begun is dropped."""
        with self._lock:
            self._closed = True
        self._thread.shutdown(cancel_futures=True)

    def _run(self, number: int, work: Callable[[], T], failed: Callable[[], T]) -> None:
        results: list[T] = []
        self._guarded(lambda: results.append(work()))
        with self._lock:
            self._done[number] = results[0] if results else failed()
            if not self._closed:
                self._notify()

    def _guarded(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception:  # noqa: BLE001 - whatever it was, the engine must get its answer and the thread go on
            _log.exception("kvtierd: a %s failed", self._name)
