#!/usr/bin/env bash
# On a machine with a GPU, in under 6 minutes: correctness (what the simulator checks of the kernels and of Attend over
# all tiers, on the device; every kernel of attention on random inputs, tests/gpu/matrix.py), then a table of times, for
# which Attend's answers are checked once more. None of this has run on a GPU yet.
#
# Needs `make install`, torch (`pip install 'kvtierd[gpu]'`) and a driver; exit code 69 where there is no device. With
# PYTHON another interpreter does, for a machine where nothing can be fetched: it wants this folder in PYTHONPATH, and
# beside torch, numba, numba-cuda, cuda-core, cuda-bindings, xxhash, aiofiles, PyYAML, hypothesis, pytest and
# pytest-timeout also pyzmq, msgspec and blake3, which images for machine learning often lack; and
# kvikio-cu13 with what it requires for GPUDirect Storage, without which the nvme bench measures the fallback. Wheels of
# them are carried there and unpacked by `pip install --no-index --no-deps --target`.
#
# A part that fails does not keep the others from running: the exit code says at the end whether all went well. The
# twins' own tests stay with the simulator: a device raises no IndexError.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-.venv/bin/python}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
for module in numba_cuda zmq msgspec blake3 xxhash aiofiles yaml hypothesis pytest pytest_timeout; do
    "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)" ||
        { echo "tests/gpu/run.sh: $python has no $module" >&2; exit 69; }
done
if ! why=$("$python" -c 'from numba import cuda; cuda.current_context()' 2>&1); then
    echo "$why" | tail -n 4 >&2
    echo "tests/gpu/run.sh: no CUDA device here; make test runs the same bodies in the simulator" >&2
    exit 69
fi
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
failed=()
# What the daemon's own kernels need is compiled once, before several processes want it.
timeout 120 "$python" -m kvtierd.cli.main precompile || failed+=(precompile)

# Most of this is compiling, one processor each, so it goes side by side. Small launches and arrays on the host are slow
# and Numba warns of it; here only the bytes count.
declare -A parts=()
for file in tests/gpu/simulated/sim_*.py; do
    name=$(basename "$file" .py)
    [ "$name" = sim_primitives ] && continue
    timeout 110 "$python" -m pytest -q "$file" -p no:cacheprovider -W ignore "$@" >"$logs/$name" 2>&1 &
    parts[$name]=$!
done
timeout 110 "$python" -m tests.gpu.matrix >"$logs/matrix" 2>&1 &
parts[matrix]=$!
for name in "${!parts[@]}"; do
    wait "${parts[$name]}" || failed+=("$name")
    echo "== $name"
    tail -n 40 "$logs/$name"
done

# Times are taken alone.
timeout 80 "$python" -m tests.gpu.times || failed+=(times)
# GPUDirect Storage where nvme.io finds it, else its fallback, against fio's POSIX reads and writes.
timeout 40 "$python" -m kvtierd.cli.main bench nvme --quick || failed+=(nvme)
if [ "${#failed[@]}" -ne 0 ]; then
    echo "tests/gpu/run.sh: failed or not finished in time: ${failed[*]}" >&2
    exit 1
fi
