"""KvtierdConnector: vLLM keeps the KV of prompts in kvtierd, and loads what any engine on this host has computed.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvtierdConnector",
        "kv_connector_module_path": "kvtierd.connectors.vllm", "kv_role": "kv_both"}'

Loads and saves run beside the engine's steps and never delay one; a lookup may for 3 ms. Blocks that cannot be loaded
are computed.
The daemon is never a condition: without it every prompt is computed, and when it comes back it is used again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any, ClassVar

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
except ImportError as error:
    raise ImportError("kvtierd.connectors.vllm wants vLLM 0.32 or later in this environment") from error

from kvtierd.connectors.daemon_events import DaemonEvents
from kvtierd.connectors.vllm_adapters import Adapters
from kvtierd.connectors.vllm_events import SavesEnded, announcements_of
from kvtierd.connectors.vllm_identity import check_config, model_facts
from kvtierd.connectors.vllm_lookups import Lookups
from kvtierd.connectors.vllm_plan import Plan, RankShape
from kvtierd.connectors.vllm_scheduler import SchedulerSide
from kvtierd.connectors.vllm_settings import read_settings
from kvtierd.connectors.vllm_tensors import CacheLayout, device_backend, engine_pages
from kvtierd.connectors.vllm_transfers import Transfers
from kvtierd.connectors.vllm_worker import WorkerSide
from kvtierd.connectors.watch import Watch
from kvtierd.protocol.client import Client
from kvtierd.protocol.endpoint import is_remote

__all__ = ["KvtierdConnector"]

_log = logging.getLogger("vllm.kvtierd")

IDLE_WAIT_S = 0.005
"""A step that computes nothing, since all requests wait for copies, ends when the first copy does, or after that time.
vLLM would make such steps without a pause, and take the CPU and Python's lock from the threads that copy."""


class KvtierdConnector(KVConnectorBase_V1, SupportsHMA):
    """Both halves of the connector, as vLLM makes them: one in its scheduler, one in each worker.

    Raises ValueError, saying what to do, for a model or a configuration whose KV cannot be reused.
    """

    transfers_type: ClassVar[type[Transfers]] = Transfers
    staged: ClassVar[bool] = False
    """Whether a cache in host memory is treated as one on a device; tests want that."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings = read_settings(self._kv_transfer_config.kv_connector_extra_config or {})
        self._spec = check_config(vllm_config, kv_cache_config)
        # vLLM's default answers a request whose blocks could not be loaded with an error instead of computing them;
        # its scheduler reads the policy after it has made its connector.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        self._client: Client | None = None
        self._watch: Watch | None = None
        self._events: DaemonEvents | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._shape: RankShape | None = None
        self._idle = False

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that is not saved is a later miss, no loss."""
        return False

    # The worker's half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the engine's cache as pages."""
        names = self._kv_cache_config.kv_cache_groups[0].layer_names
        tensors = [kv_caches[name] for name in names]
        backend = device_backend(tensors[0].device, _backend_name(self))
        layout = CacheLayout(self._spec, self._kv_cache_config.num_blocks, backend)
        geometry, pages = engine_pages(tensors, names, layout, staged=self.staged)
        self._shape = _rank_shape(geometry)
        self._client = self._connect("worker", self._settings.load_timeout_ms / 1e3)
        transfers = self.transfers_type(
            self._client,
            self._shape,
            pages,
            load_timeout_s=self._settings.load_timeout_ms / 1e3,
            save_timeout_s=self._settings.save_timeout_ms / 1e3,
        )
        self._worker = WorkerSide(transfers, patience_s=self._settings.save_timeout_ms / 1e3)
        self._watch = Watch(self._client, _log, logging.DEBUG)

    def get_handshake_metadata(self) -> Any:
        """What this rank holds of each block, for the scheduler's half."""
        return self._shape

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Give up saves from pages that are about to be overwritten."""
        if self._worker is not None:
            self._worker.preempt(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002 - vLLM's signature
        """Start this step's loads."""
        if self._worker is not None:
            plan = self._step_plan()
            self._idle = plan.idle
            self._worker.load(plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before their request is scheduled: there is nothing to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks are saved after the step, in `wait_for_save`."""

    def wait_for_save(self) -> None:
        """Start this step's saves; they read pages that nobody changes, so the step waits for none."""
        if self._worker is not None:
            self._worker.save(self._step_plan())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Requests whose pages may go, and requests whose loads have ended."""
        if self._worker is None:
            return None, None
        sent, received = self._worker.results(IDLE_WAIT_S if self._idle else 0.0)
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages that the engine must compute."""
        return self._worker.failed_pages() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> Any:
        """Saves that have ended, where vLLM's KV events are on."""
        saves = self._worker.saves() if self._worker is not None else {}
        return SavesEnded(saves) if saves else None

    # The scheduler's half

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """All workers have told what they hold: the namespaces are known, and work can begin."""
        shapes = [metadata[rank] for rank in sorted(metadata)]
        started = time.monotonic()
        adapters = Adapters(model_facts(self._vllm_config, self._settings))
        seconds = time.monotonic() - started
        self._client = self._connect("scheduler", self._settings.lookup_timeout_ms / 1e3)
        lookups = Lookups(self._client, shapes, self._settings.lookup_timeout_ms / 1e3)
        self._watch = Watch(self._client, _log, logging.WARNING)
        if not self._watch.away:
            lookups.introduce(adapters.base)
        block_size = int(self._spec.block_size)
        announcements = announcements_of(self._vllm_config, len(shapes), block_size)
        if announcements is not None and not is_remote(self._client.endpoint):
            client = self._client
            self._events = DaemonEvents(client.endpoint, announcements.announced, lambda: client.epoch)
        self._scheduler = SchedulerSide(lookups, adapters, block_size, announcements)
        _log.info(
            "kvtierd: %s %s (named in %.1f s), %d rank(s), blocks of %d tokens and %d KiB a rank, daemon at %s: %s",
            adapters.base.model,
            adapters.base.revision[:20],
            seconds,
            len(shapes),
            shapes[0].geometry.block_size,
            shapes[0].geometry.block_bytes >> 10,
            self._client.endpoint,
            "not there yet" if self._watch.away else "connected",
        )

    def on_new_request(self, request: Any) -> None:
        """Begin to look it up."""
        if self._scheduler is not None:
            self._scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """What can be loaded behind what the engine has."""
        return self._scheduler.matched(request, num_computed_tokens) if self._scheduler is not None else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The engine has given a request its pages."""
        if self._scheduler is not None and num_external_tokens:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """What the workers do beside this step."""
        return self._scheduler.plan(scheduler_output) if self._scheduler is not None else Plan()

    def update_connector_output(self, connector_output: Any) -> None:
        """Loads that have ended, and saves."""
        if self._scheduler is not None:
            self._scheduler.received(connector_output.finished_recving or (), connector_output.invalid_block_ids)
            if isinstance(connector_output.kv_connector_worker_meta, SavesEnded):
                self._scheduler.saved(connector_output.kv_connector_worker_meta.saves)

    def take_events(self) -> Iterable[Any]:
        """vLLM's KV events of blocks that the daemon has, or has no longer, since the last call."""
        return self._scheduler.take_events() if self._scheduler is not None else ()

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],  # noqa: ARG002 - vLLM's signature
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether its pages must stay until saves have read them."""
        return self._scheduler.finished(request) if self._scheduler is not None else False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, for the one group there is."""
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool:
        """Forget what this engine has stored so far, because its weights were changed in place."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # Both

    def shutdown(self) -> None:
        """End threads and connections; what is stored is stored."""
        for part in (self._events, self._watch, self._scheduler, self._worker, self._client):
            if part is not None:
                part.close()
        self._events = self._watch = self._scheduler = self._worker = self._client = None

    def _step_plan(self) -> Plan:
        plan: Plan = self._get_connector_metadata()
        return plan

    def _connect(self, half: str, timeout_s: float) -> Client:
        engine = str(self._kv_transfer_config.engine_id)[:8]
        return Client(self._settings.endpoint or None, timeout_s=timeout_s, name=f"vllm:{half}:{engine}")


def _rank_shape(geometry: Any) -> RankShape:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group  # they exist in workers only

    tp, pp = get_tp_group(), get_pp_group()
    return RankShape(
        geometry=geometry,
        tp_rank=tp.rank_in_group,
        tp_size=tp.world_size,
        pp_rank=pp.rank_in_group,
        pp_size=pp.world_size,
    )


def _backend_name(connector: KvtierdConnector) -> str:
    """The attention backend that decides how a page is laid out, and vLLM's own name for the order of its axes."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(connector._vllm_config, AttentionLayerBase)
    first = layers[connector._kv_cache_config.kv_cache_groups[0].layer_names[0]]
    return str(first.get_attn_backend().get_name())
