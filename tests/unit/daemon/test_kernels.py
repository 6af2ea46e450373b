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
made = []
original = jit.compiled
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
