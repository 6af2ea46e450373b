"""The real LMCache of an environment of its own (make test-engines), and a daemon from its own."""

from __future__ import annotations

import importlib.util
import itertools
import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtierd.testing.ready_daemon import ReadyDaemon

if importlib.util.find_spec("lmcache") is None:
    collect_ignore_glob = ["test_*.py"]

ROOT = Path(__file__).parents[3]
HOST_BYTES = 512 << 20
SETTINGS = {"host__capacity": HOST_BYTES, "gpu__capacity": "64MiB", "nvme__capacity": "1GiB"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engines)
            item.add_marker(pytest.mark.timeout(300))  # importing LMCache and starting its server take their time
            # LMCache's dependencies are not ours to clean up.
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def make_daemon(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ReadyDaemon]:
    return lambda name: ReadyDaemon(tmp_path_factory.mktemp(name), **SETTINGS)


@pytest.fixture(scope="module")
def daemon(make_daemon: Callable[[str], ReadyDaemon]) -> Iterator[ReadyDaemon]:
    with make_daemon("daemon") as running:
        yield running


@pytest.fixture(scope="session")
def command() -> dict[str, Any]:
    """How to run `lmcache`, and with which environment."""
    program = ROOT / ".venv-engines-lmcache" / "bin" / "lmcache"
    environment = {**os.environ, "LMCACHE_DISABLE_BANNER": "1", "PYTHONPATH": str(ROOT)}
    return {"program": str(program), "env": environment}


class Caller:
    """Calls an adapter as LMCache's controllers do: submit, wait for the descriptor, take the result."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter

    def store(self, keys: list[Any], objects: list[Any]) -> Any:
        number = self.adapter.submit_store_task(keys, objects)
        results: dict[int, Any] = {}

        def taken() -> Any:
            results.update(self.adapter.pop_completed_store_tasks())
            return results.get(number)

        return self._await(self.adapter.get_store_event_fd(), taken)

    def find(self, keys: list[Any], layouts: dict[int, Any] | None = None) -> list[int]:
        number = self.adapter.submit_lookup_and_lock_task(keys, layouts or {})
        query = self.adapter.query_lookup_and_lock_result
        found = self._await(self.adapter.get_lookup_and_lock_event_fd(), lambda: query(number))
        assert query(number) is None, "a result is given once"
        return sorted(found.get_indices_list())

    def load(self, keys: list[Any], objects: list[Any]) -> list[int]:
        number = self.adapter.submit_load_task(keys, objects)
        query = self.adapter.query_load_result
        loaded = self._await(self.adapter.get_load_event_fd(), lambda: query(number))
        return sorted(loaded.get_indices_list())

    def _await(self, descriptor: int, query: Callable[[], Any]) -> Any:
        from lmcache.v1.platform import consume_fd

        while True:
            assert select.select([descriptor], [], [], 30)[0], "no signal within 30 s"
            consume_fd(descriptor)
            if (result := query()) is not None:
                return result


@pytest.fixture
def caller(daemon: ReadyDaemon) -> Iterator[Caller]:
    made = make_adapter(daemon.endpoint)
    yield Caller(made)
    made.close()


def make_adapter(endpoint: str, **parameters: Any) -> Any:
    """As LMCache's factory makes it. Patient by default: tests are about answers."""
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

    settings = {"endpoint": endpoint, "lookup_timeout_ms": 20000, **parameters}
    spec = {
        "module_path": "kvtierd.connectors.lmcache",
        "class_name": "KvtierdL2Adapter",
        "adapter_params": settings,
    }
    return create_l2_adapter(PluginL2AdapterConfig.from_dict(spec))


@pytest.fixture
def adapter_at() -> Callable[..., Any]:
    return make_adapter


@pytest.fixture
def calling() -> type[Caller]:
    return Caller


_numbers = itertools.count(1)


@pytest.fixture
def keys() -> Callable[..., list[Any]]:
    """Fresh keys of one model."""

    def make(count: int, *, model: str = "", salt: str = "", group: int = 0, rank: int = 0x01000100) -> list[Any]:
        from lmcache.v1.distributed.api import ObjectKey

        name = model or f"model-{next(_numbers)}"
        return [ObjectKey(i.to_bytes(16, "big"), name, rank, group, salt) for i in range(count)]

    return make


@pytest.fixture
def objects() -> Callable[..., list[Any]]:
    """Memory objects of LMCache, with random bytes or zeros."""

    def make(count: int, nbytes: int = 64 << 10, seed: int | None = None) -> list[Any]:
        import torch
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

        whole = np.zeros((count, nbytes), np.uint8)
        if seed is not None:
            whole = np.random.default_rng(seed).integers(0, 256, (count, nbytes), np.uint8)
        made = []
        for row in whole:
            metadata = MemoryObjMetadata(
                shape=torch.Size([nbytes]),
                dtype=torch.uint8,
                address=0,
                phy_size=nbytes,
                fmt=MemoryFormat.KV_2LTD,
                ref_count=1,
            )
            made.append(TensorMemoryObj(torch.from_numpy(row), metadata, None))
        return made

    return make


@pytest.fixture
def layout() -> Callable[[int], dict[int, Any]]:
    """What LMCache says of the size of objects in a lookup."""

    def make(nbytes: int, group: int = 0) -> dict[int, Any]:
        import torch
        from lmcache.v1.distributed.api import MemoryLayoutDesc

        return {group: MemoryLayoutDesc([torch.Size([nbytes // 2])], [torch.bfloat16])}

    return make
