"""The real calls, against stand-ins for torch and CUDA: each is made with the right GPU as current device."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.gpu.cuda_interface import CudaError, View
from kvtierd.gpu.cuda_runtime import TorchRuntime
from kvtierd.gpu.kernels.arguments import cells_of

_ERRORS = SimpleNamespace(cudaSuccess=SimpleNamespace(name="cudaSuccess"))


class Calls:
    """What was called, and on which current device."""

    def __init__(self) -> None:
        self.current = 0
        self.made: list[tuple[str, int]] = []
        self.results: dict[str, tuple[Any, ...]] = {}
        self.failing = ""

    @contextlib.contextmanager
    def device(self, gpu: int) -> Iterator[None]:
        before, self.current = self.current, gpu
        yield
        self.current = before

    def bindings(self) -> Any:
        constants = {
            "cudaError_t": _ERRORS,
            "cudaMemcpyKind": SimpleNamespace(cudaMemcpyDefault=4),
            "cudaHostRegisterPortable": 1,
            "cudaHostRegisterMapped": 2,
            "cudaIpcMemLazyEnablePeerAccess": 1,
            "cudaIpcMemHandle_t": lambda: SimpleNamespace(reserved=b""),
        }
        names = ("MemcpyAsync", "HostRegister", "HostGetDevicePointer", "HostUnregister")
        names += ("IpcGetMemHandle", "IpcOpenMemHandle", "IpcCloseMemHandle")
        functions = {f"cuda{name}": functools.partial(self._call, f"cuda{name}") for name in names}
        return SimpleNamespace(**constants, **functions)

    def _call(self, name: str, *_arguments: Any) -> tuple[Any, ...]:
        self.made.append((name, self.current))
        if name == self.failing:
            return (SimpleNamespace(name="cudaErrorUnknown"),)
        return (_ERRORS.cudaSuccess, *self.results.get(name, ()))

    def torch(self, *, available: bool = True) -> Any:
        cuda = SimpleNamespace(is_available=lambda: available, device=self.device, device_count=lambda: 2)
        return SimpleNamespace(cuda=cuda)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    modules = {"torch": made.torch(), "cuda.bindings.runtime": made.bindings()}
    monkeypatch.setattr(importlib, "import_module", modules.__getitem__)
    return made


def test_every_call_names_its_gpu(calls: Calls) -> None:
    calls.results = {
        "cudaHostGetDevicePointer": (4096,),
        "cudaIpcGetMemHandle": (SimpleNamespace(reserved=bytes(64)),),
        "cudaIpcOpenMemHandle": (8192,),
    }
    runtime = TorchRuntime("cuda:1")
    runtime.copy(1, 10, 20, 30, SimpleNamespace(cuda_stream=7))
    assert runtime.register(1, 4096, 4096) == 4096
    runtime.unregister(1, 4096)
    assert runtime.export_handle(1, 99) == bytes(64)
    assert runtime.open_handle(1, bytes(64)) == 8192
    runtime.close_handle(1, 8192)
    assert len(calls.made) == 7
    assert {gpu for _, gpu in calls.made} == {1}
    assert calls.current == 0


def test_an_error_names_the_call_and_what_cuda_says(calls: Calls) -> None:
    calls.failing = "cudaHostUnregister"
    with pytest.raises(CudaError, match="cudaHostUnregister: cudaErrorUnknown"):
        TorchRuntime("cuda:0").unregister(0, 4096)


def test_a_machine_without_a_gpu_or_without_torch_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Calls()
    modules = {"torch": made.torch(available=False), "cuda.bindings.runtime": made.bindings()}
    monkeypatch.setattr(importlib, "import_module", modules.__getitem__)
    with pytest.raises(StartupError, match="torch sees no GPU") as caught:
        TorchRuntime("cuda:0")
    assert caught.value.exit_code == ExitCode.NO_DEVICE

    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(StartupError, match=r"which needs torch: pip install 'kvtierd\[gpu\]'"):
        TorchRuntime("cuda:0")


class Driver:
    """The driver's calls: modules are images, kernels (image, name) pairs; what was launched, and on which device."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=SimpleNamespace(name="CUDA_SUCCESS"))

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.launched: list[Any] = []
        self.loaded: list[tuple[bytes, int]] = []
        self.failing = False

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, bytes]:  # noqa: N802 - CUDA's name
        self.loaded.append((image, self._calls.current))
        return self.CUresult.CUDA_SUCCESS, image

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, Any]:  # noqa: N802 - CUDA's name
        return self.CUresult.CUDA_SUCCESS, (module, name)

    def cuLaunchKernel(self, function: Any, *given: Any) -> tuple[Any]:  # noqa: N802 - CUDA's name
        pointers = ctypes.cast(given[8], ctypes.POINTER(ctypes.c_void_p))
        cells = [ctypes.c_uint64.from_address(pointers[i] or 0).value for i in range(9)]
        self.launched.append((self._calls.current, function, given[:8], cells))
        if self.failing:
            return (SimpleNamespace(name="CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),)
        return (self.CUresult.CUDA_SUCCESS,)


def test_a_kernel_is_loaded_once_and_gets_views_as_arrays_on_the_stream_and_the_gpu_of_the_device(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, compiled = Driver(calls), []

    def binary_of(kernel: Any, architecture: Any) -> Any:
        compiled.append((kernel.name, architecture))
        if kernel.name == "bad":
            raise ValueError("no such instruction")
        return SimpleNamespace(entry="entry", cubin=b"cubin")

    torch, bindings = calls.torch(), calls.bindings()
    torch.cuda.get_device_capability = lambda _gpu: (9, 0)
    bindings.cudaSetDevice = functools.partial(calls._call, "cudaSetDevice")
    modules = {"torch": torch, "cuda.bindings.runtime": bindings, "cuda.bindings.driver": driver}
    modules["kvtierd.gpu.kernels.binaries"] = SimpleNamespace(binary_of=binary_of)
    monkeypatch.setattr(importlib, "import_module", modules.__getitem__)
    kernel: Any = SimpleNamespace(name="k", threads=64)
    runtime, stream = TorchRuntime("cuda:1"), SimpleNamespace(cuda_stream=99)
    runtime.prepare(1, kernel)
    assert (compiled, driver.loaded) == ([("k", (9, 0))], [(b"cubin", 1)])
    runtime.launch(1, kernel, (2, 3), (View(4096, 5, "<f4"), -7, np.float32(1.5)), stream)
    assert len(compiled) == len(driver.loaded) == 1, "it was loaded before"
    ((current, function, given, cells),) = driver.launched
    assert (current, function, given) == (1, (b"cubin", b"entry"), (2, 3, 1, 64, 1, 1, 0, 99))
    assert cells == [0, 0, 5, 4, 4096, 5, 4, 2**64 - 7, 0x3FC00000]
    driver.failing = True
    with pytest.raises(CudaError, match="k: cuLaunchKernel: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        runtime.launch(1, kernel, (2, 3), (View(4096, 5, "<f4"), -7, np.float32(1.5)), stream)
    with pytest.raises(CudaError, match="bad cannot be compiled for sm_90: no such instruction"):
        runtime.prepare(1, SimpleNamespace(name="bad", threads=64))  # type: ignore[arg-type]


def test_kernels_are_compiled_apart_and_where_that_fails_the_log_says_so(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[Any] = []
    apart = SimpleNamespace(
        stopped=False, problem="", stop=lambda: setattr(apart, "stopped", True),
        fill=lambda kernels, architecture: asked.append((kernels, architecture)) or apart.problem,
    )  # fmt: skip
    torch = calls.torch()
    torch.cuda.get_device_capability = lambda _gpu: (10, 0)
    modules = {"torch": torch, "cuda.bindings.runtime": calls.bindings()}
    modules["kvtierd.gpu.kernels.compile_apart"] = SimpleNamespace(Apart=lambda: apart)
    monkeypatch.setattr(importlib, "import_module", modules.__getitem__)
    runtime, kernels = TorchRuntime("cuda:1"), cast(Any, ["k"])
    runtime.compile_apart(1, kernels)
    assert asked == [(["k"], (10, 0))]
    assert not caplog.records
    apart.problem = "the compiler's process was ended by signal 9"
    runtime.compile_apart(1, kernels)
    assert "answers late meanwhile: the compiler's process was ended by signal 9" in caplog.text
    runtime.stop_compiling()
    with pytest.raises(CudaError, match="not compiled any more"):
        runtime.compile_apart(1, kernels)


def test_a_kernel_takes_nothing_but_views_integers_and_floats() -> None:
    with pytest.raises(TypeError, match="not str"):
        cells_of(["x"])


@pytest.mark.usefixtures("calls")
def test_errors_of_torch_about_streams_and_events_are_those_of_cuda() -> None:
    def fail(*_given: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    runtime = TorchRuntime("cuda:1")
    made: Any = runtime._torch.cuda
    made.Event = lambda **_options: SimpleNamespace(record=lambda _stream: None, synchronize=fail)
    with pytest.raises(CudaError, match="what was in the stream failed: CUDA error: unspecified launch failure"):
        runtime.wait(1, "stream")
    made.Event = lambda **_options: SimpleNamespace(record=fail)
    with pytest.raises(CudaError, match="an event cannot be recorded"):
        runtime.record(1, "stream")
    with pytest.raises(CudaError, match="an event cannot be waited for"):
        runtime.follow(1, SimpleNamespace(wait_event=fail), "event")
