"""KvtierdTier: vLLM's own CPU tier spills into kvtierd, and finds there what any engine on this host has stored.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
            "secondary_tiers": [{"type": "KvtierdTier", "module_path": "kvtierd.connectors.vllm_tier"}]}}'

Chunks go as they lie in the CPU tier. Lookups, loads and stores run in threads; vLLM's scheduler polls for their ends.
Without a daemon lookups find nothing and jobs fail, each at once; when it comes back it is used again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import queue
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ClassVar

import blake3
import numpy as np

try:
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingEvent,
        RequestOffloadingContext,
        get_offload_block_hash,
        get_offload_group_idx,
    )
    from vllm.v1.kv_offload.file_mapper import FileMapper
    from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
except ImportError as error:
    raise ImportError("kvtierd.connectors.vllm_tier wants vLLM 0.32 or later in this environment") from error

from kvtierd.connectors.objects import DROPPED, Flags, Objects
from kvtierd.connectors.opaque import opaque_geometry
from kvtierd.connectors.pieces import Pieces
from kvtierd.connectors.settings import read_settings
from kvtierd.connectors.vllm_identity import model_name, weights_revision
from kvtierd.connectors.vllm_tier_settings import Settings
from kvtierd.connectors.watch import Watch
from kvtierd.core.keys import KEY_BYTES, Keys
from kvtierd.core.namespace import Namespace
from kvtierd.protocol.client import Client
from kvtierd.protocol.results import NamespaceHandle

__all__ = ["KvtierdTier"]

_log = logging.getLogger("vllm.kvtierd")


@dataclasses.dataclass(frozen=True, slots=True)
class _Ended:
    """A job that has ended: which of its chunks arrived, and how long it took."""

    job: Any
    done: Flags
    seconds: float


class _Lookups(AsyncLookupManager):
    """vLLM's own bookkeeping of lookups; each batch is asked for in its thread."""

    def __init__(self, tier_type: str, present: Callable[[list[bytes]], Flags]) -> None:
        self._present = present
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[Any], req_context: Any) -> Iterable[bool]:  # noqa: ARG002 - vLLM's signature
        return [bool(flag) for flag in self._present(keys)]


class KvtierdTier(SecondaryTierManager):
    """vLLM's secondary tier over one client of the daemon; all methods but the jobs run in its scheduler.

    Raises ValueError, naming what is wrong, for settings that do not exist, and for chunks of a size that cannot be
    stored.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._settings = mine = read_settings(Settings, settings, f"secondary tier {tier_type}")
        self.locality = Locality(locality) if locality is not None else None
        self._chunks = np.frombuffer(primary_kv_view.cast("B"), np.uint8).reshape(-1, self.block_size_bytes)
        self._handle = NamespaceHandle(_namespace(offloading_spec, self.block_size_bytes, mine), allow_loss=False)
        self._client = Client(mine.endpoint or None, timeout_s=mine.lookup_timeout_ms / 1e3, name="vllm:tier")
        self._objects = Objects(
            self._client,
            load_timeout_s=mine.load_timeout_ms / 1e3,
            store_timeout_s=mine.store_timeout_ms / 1e3,
        )
        self._lookups = _Lookups(tier_type, self._present)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="kvtierd-load")
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="kvtierd-save")
        self._ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self._running: set[Future[None]] = set()
        self._events: list[OffloadingEvent] | None = [] if _wants_events(offloading_spec, mine) else None
        self._watch = Watch(self._client, _log, logging.WARNING, "chunks are computed meanwhile")
        state = "not there yet" if self._watch.away else "connected"
        _log.info("kvtierd: tier of chunks of %d bytes at %s: %s", self.block_size_bytes, self._client.endpoint, state)

    # Lookups

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:  # noqa: ARG002 - vLLM's signature
        """Chunks are offloaded as they come."""
        return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """HIT or MISS, or RETRY while the answer is under way."""
        result = self._lookups.lookup(key, req_context)
        if result is None:
            return LookupResult.RETRY
        return LookupResult.HIT if result else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:  # noqa: ARG002 - vLLM's signature
        """Ask for what this step wanted to know."""
        self._lookups.flush()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget a request's answers."""
        self._lookups.cleanup(req_context.req_id)

    def _present(self, keys: list[bytes]) -> Flags:
        return np.asarray(self._objects.present(self._handle, self._names(keys)) > 0)

    # Jobs

    def submit_store(self, job_metadata: Any) -> None:
        """Copy chunks from the CPU tier into the daemon."""
        self._submit(self._saver, job_metadata, self._store)

    def submit_load(self, job_metadata: Any) -> None:
        """Copy chunks from the daemon into their places in the CPU tier."""
        self._submit(self._loader, job_metadata, self._load)

    def _store(self, names: Keys, places: list[Pieces]) -> Flags:
        return np.asarray(self._objects.store(self._handle, names, places) != DROPPED)

    def _load(self, names: Keys, places: list[Pieces]) -> Flags:
        return self._objects.load(self._handle, names, places)

    def _submit(self, pool: ThreadPoolExecutor, job: Any, work: Callable[[Keys, list[Pieces]], Flags]) -> None:
        self._running = {future for future in self._running if not future.done()}
        self._running.add(pool.submit(self._run, job, work))

    def _run(self, job: Any, work: Callable[[Keys, list[Pieces]], Flags]) -> None:
        begin, done = time.monotonic(), np.zeros(len(job.keys), np.bool_)
        try:
            done = work(self._names(job.keys), [[self._chunks[int(at)]] for at in job.chunk_ids])
        except Exception:  # noqa: BLE001 - whatever it was, vLLM must get the job back: its chunks are pinned
            _log.exception("kvtierd: job %s failed", job.job_id)
        self._ended.put(_Ended(job, done, time.monotonic() - begin))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that have ended since the last call; chunks that could not be loaded are misses from now on."""
        results: list[JobResult] = []
        while True:
            try:
                ended = self._ended.get_nowait()
            except queue.Empty:
                return results
            results.append(self._result(ended))

    def _result(self, ended: _Ended) -> JobResult:
        job, keys = ended.job, list(ended.job.keys)
        there = [key for key, flag in zip(keys, ended.done, strict=True) if flag]
        whole = len(there) == len(keys)
        if job.is_promotion and not whole:
            self._lookups.mark_miss([key for key, flag in zip(keys, ended.done, strict=True) if not flag])
        if self._events is not None and there and not job.is_promotion:
            self._events.append(OffloadingEvent(there, self.medium, removed=False, locality=self.locality))
        return JobResult(
            job_id=job.job_id,
            success=whole,
            successful_keys=tuple(there) if job.is_promotion and there and not whole else None,
            transfer_time=ended.seconds,
            transfer_bytes=len(there) * self.block_size_bytes,
        )

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Chunks that were stored, for vLLM's KV events (`enable_kv_events`)."""
        taken, self._events = self._events or [], None if self._events is None else []
        return taken

    def drain_jobs(self) -> None:
        """Return when every job has ended."""
        wait(self._running)

    def shutdown(self) -> None:
        """End the threads, when what is under way has ended, and the client; let go of the CPU tier's memory."""
        self._lookups.shutdown()
        for pool in (self._loader, self._saver):
            pool.shutdown(cancel_futures=True)
        self._chunks = np.empty((0, self.block_size_bytes), np.uint8)
        self._watch.close()
        self._objects.close()
        self._client.close()

    def _names(self, keys: Collection[bytes]) -> Keys:
        """[n, 32] uint8: vLLM's block hash never enters raw; it has the group's index behind it."""
        out = np.empty((len(keys), KEY_BYTES), np.uint8)
        for i, key in enumerate(keys):
            name = get_offload_group_idx(key).to_bytes(4, "little") + get_offload_block_hash(key)
            out[i] = np.frombuffer(blake3.blake3(self._handle.digest + name).digest(), np.uint8)
        return out


def _namespace(spec: Any, nbytes: int, settings: Settings) -> Namespace:
    """What vLLM's own file tier tells apart, and which weights these are."""
    mapper = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, parallel_agnostic=True)
    facts = json.dumps({**mapper.get_run_config(), "rank": mapper.rank}, sort_keys=True)
    model = str(spec.config.model.name)
    layout = f"{getattr(spec.config, 'kv_cache_layout', None)}|{getattr(spec.config, 'canonical_layout', False)}"
    return Namespace(
        model=model_name(model),
        revision=settings.revision or weights_revision(model),
        tenant_salt=settings.tenant_salt,
        quantisation=f"{blake3.blake3(facts.encode()).hexdigest()}|{layout}",
        geometry=opaque_geometry(nbytes, "opaque:vllm-tier"),
    )


def _wants_events(spec: Any, settings: Settings) -> bool:
    if settings.enable_kv_events and not spec.kv_events_config.enable_kv_cache_events:
        _log.warning("kvtierd: enable_kv_events has no effect: vLLM's KV events are off")
        return False
    return settings.enable_kv_events
