#!/usr/bin/env bash
# On a machine with a GPU: what the simulator checks of the kernels, on the device. Needs `make install` and a driver;
# exit code 69 where there is none. The twins' own tests stay with the simulator: a device raises no IndexError.
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
exec "$python" -m pytest -q "${files[@]}" -p no:cacheprovider -W ignore "$@"
