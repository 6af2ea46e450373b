from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_serving_loads_no_kernel_that_the_start_has_not_loaded(tmp_path: Path) -> None:
    """Loading compiles: a module with kernels that is imported later would do so on a request."""
    code = f"""
import sys
from kvtierd.daemon.kernels import choose_cache, load_kernels
choose_cache({str(tmp_path)!r})
import kvtierd.index.jit as jit
import numba
made = []
numba.njit = lambda *_, **__: lambda function: function
jit.compiled = lambda *signatures: (made.append(signatures), lambda function: function)[1]
load_kernels()
print(len(made))
import kvtierd.tiers.manager
print(len(made))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, after_the_rest = map(int, done.stdout.split())
    assert loaded > 0
    assert after_the_rest == loaded


def test_attention_and_codec_are_loaded_at_start_only_until_the_cache_has_them(tmp_path: Path) -> None:
    code = f"""
import sys
from kvtierd.daemon.kernels import LATER, choose_cache, is_compiled, load_kernels
choose_cache({str(tmp_path)!r})
import kvtierd.index.jit as jit
import numba
jit.compiled = lambda *signatures: lambda function: function
numba.njit = lambda *_, **__: lambda function: function
assert not any(map(is_compiled, LATER))
print({{"load": load_kernels, "later": lambda: None}}[sys.argv[1]]())
if sys.argv[1] == "later":
    import kvtierd.daemon.kernels as kernels
    for folder in kernels.LATER:
        kernels._mark(folder).touch()
    load_kernels()
import kvtierd.tiers.manager
print("kvtierd.gpu.host_kernels.attention" in sys.modules, "kvtierd.gpu.host_kernels.codec" in sys.modules)
print(all(map(is_compiled, LATER)))
"""
    for how, loaded in (("load", "True True"), ("later", "False False")):
        done = subprocess.run(
            [sys.executable, "-c", code.replace(str(tmp_path), str(tmp_path / how)), how],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.splitlines()[1:] == [loaded, "True"]
