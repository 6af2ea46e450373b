"""A worker's side of the vLLM connector: loads and saves in threads of their own, so that no step waits for them.

A load writes pages that the engine keeps free for it; a save reads pages that stay as they are while their request
runs, and that the engine keeps until we say so when it ends. Only preemption takes pages away: what was copied from
them by then is kept, and what is being copied is given back.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvtierd.connectors.vllm_plan import Plan, Transfer
from kvtierd.connectors.vllm_transfers import Saved, Transfers
from kvtierd.core.errors import KvtierdError

_log = logging.getLogger("vllm.kvtierd")
_NOTHING = Saved(0, 0)
T = TypeVar("T")


@dataclasses.dataclass(slots=True)
class _Save:
    transfer: Transfer
    fence: Any
    deadline_s: float
    cancelled: bool = False


class WorkerSide:
    """vLLM calls it from its model runner. `patience_s` bounds how long a save may wait for its turn: the pages of
    requests that have ended are not held for longer by a daemon that does not keep up."""

    def __init__(self, transfers: Transfers, patience_s: float) -> None:
        self._transfers = transfers
        self._patience_s = patience_s
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="kvtierd-load")
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="kvtierd-save")
        self._lock = threading.Lock()
        self._change = threading.Condition(self._lock)
        self._loading = 0
        self._saves: dict[str, list[_Save]] = {}
        self._ended: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[int] = set()
        self._troubled: set[str] = set()
        self._told: dict[int, list[int]] = {}
        self.counts = {"loaded": 0, "failed": 0, "saved": 0, "unsaved": 0}
        """Blocks, since the start."""

    def preempt(self, plan: Plan) -> None:
        """Called before a step overwrites the pages of preempted requests; does not wait."""
        with self._lock:
            for request_id in plan.preempted:
                for save in self._saves.get(request_id, ()):
                    save.cancelled = True

    def load(self, plan: Plan) -> None:
        """Start the loads of a step; does not wait."""
        if plan.loads:
            fence = self._transfers.fence()
            with self._lock:
                self._loading += len(plan.loads)
            for transfer in plan.loads:
                self._loader.submit(self._run_load, transfer, fence)
        self._ended |= plan.finished

    def save(self, plan: Plan) -> None:
        """Start the saves of a step, after its forward pass; does not wait."""
        if not plan.saves:
            return
        deadline_s, fence = time.monotonic() + self._patience_s, self._transfers.fence()
        for transfer in plan.saves:
            save = _Save(transfer, fence, deadline_s)
            with self._lock:
                self._saves.setdefault(transfer.request_id, []).append(save)
            self._saver.submit(self._run_save, save)

    def results(self, wait_s: float = 0.0) -> tuple[set[str], set[str]]:
        """Requests that ended and whose pages nobody reads any more, and requests whose loads have ended, each once.

        Waits up to `wait_s` for the first of them where something is under way that will end so.
        """
        with self._lock:
            if wait_s and (self._loading or self._ended):
                self._change.wait_for(self._has_results, wait_s)
            sent = {request_id for request_id in self._ended if request_id not in self._saves}
            self._ended -= sent
            received, self._received = self._received, set()
        return sent, received

    def _has_results(self) -> bool:
        return bool(self._received) or any(request_id not in self._saves for request_id in self._ended)

    def saves(self) -> dict[int, list[int]]:
        """Saves with a number that have ended, each once: how many of its leading blocks are stored."""
        with self._lock:
            told, self._told = self._told, {}
        return told

    def failed_pages(self) -> set[int]:
        """Pages that could not be loaded, each once, no later than their request is among those received."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        """End the threads; saves that have not begun are dropped."""
        with self._lock:
            for saves in self._saves.values():
                for save in saves:
                    save.cancelled = True
        self._loader.shutdown(cancel_futures=True)
        self._saver.shutdown(cancel_futures=True)
        self._transfers.close()

    def _run_load(self, transfer: Transfer, fence: Any) -> None:
        count = self._guarded("load", lambda: self._transfers.load(transfer, fence), 0)
        with self._lock:
            self._failed.update(transfer.pages[count:])
            self._received.add(transfer.request_id)
            self._loading -= 1
            self._change.notify_all()
            self.counts["loaded"] += count
            self.counts["failed"] += len(transfer.pages) - count

    def _run_save(self, save: _Save) -> None:
        transfer, saved = save.transfer, _NOTHING
        if time.monotonic() < save.deadline_s and not save.cancelled:
            saved = self._guarded(
                "store", lambda: self._transfers.save(transfer, lambda: save.cancelled, save.fence), _NOTHING
            )
        with self._lock:
            mine = self._saves[transfer.request_id]
            mine.remove(save)
            if not mine:
                del self._saves[transfer.request_id]
                self._change.notify_all()
            if transfer.number:
                self._told[transfer.number] = [saved.leading]
            self.counts["saved"] += saved.stored
            self.counts["unsaved"] += len(transfer.pages) - saved.stored

    def _guarded(self, what: str, work: Callable[[], T], nothing: T) -> T:
        """Run a transfer; trouble is logged, the first of a kind as a warning, and no block of it counts."""
        try:
            return work()
        except KvtierdError as error:
            level = logging.DEBUG if what in self._troubled else logging.WARNING
            self._troubled.add(what)
            _log.log(level, "kvtierd: blocks were not %sed: %s", what, error)
        except Exception:  # noqa: BLE001 - see below
            # The thread must go on, and the request it works for must be answered: it is computed instead.
            _log.exception("kvtierd: blocks were not %sed", what)
        return nothing
