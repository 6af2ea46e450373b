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


def _started(cache: Path, folder: Path) -> subprocess.Popen[str]:
    """A process that loads the folder of one module, whose import takes so long and is written down with its times."""
    code = f"""
import sys, time
sys.path.insert(0, {str(folder)!r})
import kvtierd.index.jit as jit
from pathlib import Path
jit.PACKAGE = Path({str(folder)!r}) / "kernels_of_a_test"
from kvtierd.daemon.kernels import choose_cache, is_compiled, load_kernels
choose_cache({str(cache)!r})
load_kernels(folders=["part"])
print(is_compiled("part"), flush=True)
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def _package(folder: Path, body: str) -> Path:
    part = folder / "kernels_of_a_test" / "part"
    part.mkdir(parents=True)
    (part / "__init__.py").touch()
    (part.parent / "__init__.py").touch()
    (part / "one.py").write_text(body)
    return part / "one.py"


def test_two_that_start_with_an_empty_cache_fill_it_one_after_the_other(tmp_path: Path) -> None:
    log = tmp_path / "log"
    _package(
        tmp_path,
        f"import os, time\nwith open({str(log)!r}, 'a') as f: f.write(f'begin {{os.getpid()}}\\n')\n"
        f"time.sleep(0.3)\nwith open({str(log)!r}, 'a') as f: f.write(f'end {{os.getpid()}}\\n')\n",
    )
    processes = [_started(tmp_path / "cache", tmp_path) for _ in range(3)]
    for process in processes:
        out, _ = process.communicate(timeout=100)
        assert (process.returncode, out) == (0, "True\n")
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len(lines) == 6
    alone = all(a == ["begin", b[1]] and b[0] == "end" for a, b in zip(lines[::2], lines[1::2], strict=True))
    filled = next(i for i, line in enumerate(lines) if line[0] == "end")
    assert filled == 1, "nobody begins while the first one fills the cache"
    assert alone or {line[0] for line in lines[2:]} == {"begin", "end"}


def test_what_another_installation_has_compiled_is_not_taken_for_ours(tmp_path: Path) -> None:
    """Numba's cache goes by where a source lies and when it was written; so must the mark that it is complete."""
    for place in ("one", "two"):
        _package(tmp_path / place, "X = 1\n")
    code = """
import sys
from pathlib import Path
import kvtierd.index.jit as jit
import kvtierd.daemon.kernels as kernels
kernels.choose_cache(sys.argv[1])
jit.PACKAGE = Path(sys.argv[2]) / "one" / "kernels_of_a_test"
kernels._mark("part").touch()
print(kernels.is_compiled("part"))
jit.PACKAGE = Path(sys.argv[2]) / "two" / "kernels_of_a_test"
print(kernels.is_compiled("part"))
jit.PACKAGE = Path(sys.argv[2]) / "one" / "kernels_of_a_test"
(jit.PACKAGE / "part" / "one.py").write_text("X = 2\\n# longer")
print(kernels.is_compiled("part"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "cache"), str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False", "False"]
