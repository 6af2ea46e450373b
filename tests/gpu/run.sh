#!/usr/bin/env bash
# On a machine with a GPU, in under 6 minutes: what the simulator checks of the kernels and of Attend over all tiers, on
# the device, then a table of times, for which Attend's answers are checked once more. Needs `make install`, torch
# (`pip install 'kvtierd[gpu]'`) and a driver; exit code 69 where there is none. None of this has run on a GPU yet.
# The twins' own tests stay with the simulator: a device raises no IndexError.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-.venv/bin/python}
if ! "$python" -c 'from numba import cuda; cuda.current_context()' 2>/dev/null; then
    echo "tests/gpu/run.sh: no CUDA device here; make test runs the same bodies in the simulator" >&2
    exit 69
fi
files=()
for file in tests/gpu/simulated/sim_*.py; do
    [ "$(basename "$file")" = sim_primitives.py ] || files+=("$file")
done
# Small launches and arrays on the host are slow and Numba warns of it; here only the bytes count.
timeout 180 "$python" -m pytest -q "${files[@]}" -p no:cacheprovider -W ignore "$@"
if "$python" -c 'import torch' 2>/dev/null; then
    timeout 90 "$python" -m tests.gpu.times
else
    echo "tests/gpu/run.sh: no torch, so no table of times: pip install 'kvtierd[gpu]'" >&2
fi
# GPUDirect Storage where nvme.io finds it, else its fallback, against fio's POSIX reads and writes.
timeout 60 "$(dirname "$python")/kvtierctl" bench nvme --quick ||
    echo "tests/gpu/run.sh: the nvme bench did not finish" >&2
