"""`kvtierctl bench demo`: time to first token of a real model from each tier, over its cold prefill.

The measuring lies with the demo itself (kvtierd.connectors), so that the bench and `make run` cannot disagree.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator

from kvtierd.bench.options import Options
from kvtierd.bench.rows import BenchError, Row

_NEEDED = ("torch", "transformers")


def rows(options: Options) -> Iterator[Row]:
    """Run the demo's measurement. Raises BenchError where the model's libraries are missing."""
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise BenchError(f"the demo needs {' and '.join(missing)}: pip install 'kvtierd[demo]'")
    demo = importlib.import_module("kvtierd.connectors.demo")  # wants torch: only now
    yield from demo.bench_rows(quick=options.quick, directory=options.directory)
