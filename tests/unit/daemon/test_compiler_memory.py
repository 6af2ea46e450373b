from __future__ import annotations

import subprocess
import sys

from kvtierd.daemon.compiler_memory import code_ranges

MAPS = """7f00c8400000-7f00c8765000 r--p 00000000 fe:00 531 /a b/llvmlite/binding/libllvmlite.so
7f00c8765000-7f00cd794000 r-xp 00365000 fe:00 531 /a b/llvmlite/binding/libllvmlite.so
7f00cd794000-7f00cd7a4000 rw-p 05394000 fe:00 531 /a b/llvmlite/binding/libllvmlite.so
7f00ce000000-7f00ce100000 r-xp 00000000 fe:00 532 /usr/lib/libm.so.6
7f00cf000000-7f00cf100000 r-xp 00000000 00:00 0
"""

LATER = """
from pathlib import Path
import numba
from kvtierd.daemon.compiler_memory import code_ranges, give_back_compiler

def resident_kib():
    begin = format(code_ranges(Path("/proc/self/maps").read_text())[0][0], "x")
    mappings = Path("/proc/self/smaps").read_text().splitlines()
    at = next(i for i, line in enumerate(mappings) if line.startswith(begin + "-"))
    return next(int(line.split()[1]) for line in mappings[at:] if line.startswith("Rss:"))

numba.njit("i8(i8)")(lambda number: number + 1)
before = resident_kib()
give_back_compiler()
assert resident_kib() < before // 2, (before, resident_kib())
print(numba.njit("i8(i8)")(lambda number: number * 3)(14))
"""


def test_only_the_executable_part_of_the_compiler_is_named() -> None:
    assert code_ranges(MAPS) == [(0x7F00C8765000, 0x7F00CD794000)]


def test_compiler_whose_code_was_given_back_still_compiles() -> None:
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
