"""SGLang's own abstract class and factory, from the installed package's sources: the package itself wants a GPU's
libraries when it is imported, and these two files do not. The daemon is a real one from its own environment."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.ready_daemon import ReadyDaemon

SPEC = importlib.util.find_spec("sglang")
if SPEC is None:
    collect_ignore_glob = ["test_*.py"]

HOST_BYTES = 256 << 20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engines)
            item.add_marker(pytest.mark.timeout(300))  # the daemon may have kernels to compile
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", autouse=True)
def sources() -> Iterator[None]:
    """Packages that lead to the installed files without running their __init__."""
    assert SPEC is not None
    assert SPEC.origin is not None
    root = Path(SPEC.origin).parent
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    yield
    for name in [name for name in sys.modules if name == "sglang" or name.startswith("sglang.")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReadyDaemon]:
    folder = tmp_path_factory.mktemp("daemon")
    with ReadyDaemon(folder, host__capacity=HOST_BYTES, gpu__capacity=0, nvme__capacity="512MiB") as running:
        yield running


class HostPool:
    """A host pool as SGLang's are: K and V in one tensor, in the layouts `layer_first` and `page_first`."""

    layers, heads, dim, tokens, page_size = 3, 2, 16, 128, 16

    def __init__(self, layout: str = "layer_first", seed: int | None = None, dtype: str = "bfloat16") -> None:
        import torch

        self.layout, self.dtype = layout, getattr(torch, dtype)
        shape = (2, self.layers, self.tokens, self.heads, self.dim)
        if layout == "page_first":
            shape = (2, self.tokens, self.layers, self.heads, self.dim)
        self.kv_buffer = torch.zeros(shape, dtype=self.dtype)
        if seed is not None:
            self.kv_buffer.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        pointers = []
        for first in indices.tolist()[:: self.page_size]:
            for half in (self.kv_buffer[:, layer] for layer in range(self.layers)) if self.first else (self.kv_buffer,):
                pointers += [half[side, first].data_ptr() for side in (0, 1)]
        each = self.page_size * self.heads * self.dim * self.dtype.itemsize * (1 if self.first else self.layers)
        return pointers, [each] * len(pointers)

    @property
    def first(self) -> bool:
        return self.layout == "layer_first"

    def page(self, number: int) -> Any:
        rows = slice(number * self.page_size, (number + 1) * self.page_size)
        return self.kv_buffer[:, :, rows] if self.first else self.kv_buffer[:, rows]

    def get_dummy_flat_data_page(self) -> Any:
        import torch

        return torch.zeros(self.page(0).numel(), dtype=self.dtype)


class StatePool:
    """One page a token, in pieces of different sizes, as states of recurrent layers are."""

    page_size, layout, tokens = 1, "page_first", 32

    def __init__(self, seed: int | None = None) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed or 0)
        self.parts = [torch.zeros(self.tokens, size, dtype=torch.uint8) for size in (4000, 52)]
        for part in self.parts if seed is not None else ():
            part.random_(256, generator=generator)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        found = [part[index] for index in indices.tolist() for part in self.parts]
        return [row.data_ptr() for row in found], [row.numel() for row in found]


@pytest.fixture
def pools() -> types.SimpleNamespace:
    return types.SimpleNamespace(Host=HostPool, State=StatePool)


@pytest.fixture
def backend(daemon: ReadyDaemon) -> Iterator[Callable[..., Any]]:
    """Made by SGLang's factory, as `--hicache-storage-backend dynamic` does."""
    made = []

    def make(
        pool: Any, *, endpoint: str = "", kvtierd: dict[str, Any] | None = None, v1: int = 1, **fields: Any
    ) -> Any:
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
        from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

        extra = {
            "backend_name": "kvtierd",
            "module_path": "kvtierd.connectors.sglang",
            "class_name": "KvtierdHiCache",
            "interface_v1": v1,
            "kvtierd": {"endpoint": endpoint or daemon.endpoint, "lookup_timeout_ms": 20000, **(kvtierd or {})},
        }
        known = {
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            "is_mla_model": False,
            "enable_storage_metrics": False,
            "is_page_first_layout": False,
            "model_name": "m",
        }
        config = HiCacheStorageConfig(**{**known, **fields}, extra_config=extra)
        storage = StorageBackendFactory.create_backend("dynamic", config, pool)
        storage.register_mem_pool_host(pool)
        made.append(storage)
        return storage

    yield make
    for storage in made:
        storage.close()
