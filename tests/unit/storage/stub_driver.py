"""A CUDA driver without a device, built by the test: with it KvikIO moves host memory for real.

KvikIO refuses every transfer unless `libcuda.so.1` loads. This one has the functions that it looks up by name, and all
of them say "not initialised" (3) except the one for the driver's version. With `memory`, device memory is host memory
and copies are memcpy: enough to try the trial's own device code.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

COMPILER = shutil.which("cc")

LOOKED_UP = """
    cuCtxCreate_v4 cuCtxDestroy_v2 cuCtxGetCurrent cuCtxGetDevice cuCtxPopCurrent_v2 cuCtxPushCurrent_v2
    cuDeviceGetAttribute cuDeviceGetCount cuEventCreate cuEventDestroy_v2 cuEventQuery cuEventRecord
    cuEventSynchronize cuGetErrorName cuGetErrorString cuLaunchHostFunc cuMemFreeHost cuMemGetAddressRange_v2
    cuMemHostAlloc cuMemHostRegister_v2 cuMemHostUnregister cuMemcpyAsync cuMemcpyDtoHAsync_v2 cuMemcpyHtoDAsync_v2
    cuPointerGetAttribute cuPointerGetAttributes cuStreamCreate cuStreamDestroy_v2 cuStreamSynchronize
"""
CONTEXT = ("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2")
VERSION = "int cuDriverGetVersion(int *version) { *version = 12060; return 0; }\n"
HANGING = "#include <unistd.h>\nint cuDriverGetVersion(int *version) { for (;;) pause(); }\n"
CRASHING = "#include <stdlib.h>\nint cuDriverGetVersion(int *version) { abort(); }\n"
MEMORY = """
#include <stdlib.h>
#include <string.h>
typedef unsigned long long pointer;
int cuInit(unsigned flags) { return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuMemAlloc_v2(pointer *at, size_t size) { *at = (pointer)malloc(size); return 0; }
int cuMemFree_v2(pointer at) { free((void *)at); return 0; }
int cuMemcpyHtoD_v2(pointer to, const void *from, size_t size) { memcpy((void *)to, from, size); return 0; }
int cuMemcpyDtoH_v2(void *to, pointer from, size_t size) { memcpy(to, (void *)from, size); return 0; }
"""


def build(folder: Path, *, version: str = VERSION, memory: bool = False) -> Path:
    """Compile the library into `folder`, which then goes into LD_LIBRARY_PATH."""
    assert COMPILER is not None
    lines = [f"int {name}(void) {{ return 3; }}\n" for name in LOOKED_UP.split()]
    lines += [f"int {name}(void) {{ return {0 if memory else 3}; }}\n" for name in CONTEXT]
    source = folder / "stub.c"
    source.write_text("".join([*lines, version, MEMORY if memory else ""]))
    target = folder / "libcuda.so.1"
    command = [COMPILER, "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder
