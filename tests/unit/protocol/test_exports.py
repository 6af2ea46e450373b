"""What `import kvtierd` gives, and what it does not bring in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvtierd

NAMES = [
    "AsyncClient",
    "AsyncLease",
    "AsyncReservation",
    "AsyncSequence",
    "Attended",
    "Client",
    "CurveKeys",
    "ErrorCode",
    "Fetched",
    "Geometry",
    "Hit",
    "KeyPair",
    "KvtierdError",
    "Lease",
    "Namespace",
    "NamespaceHandle",
    "RequestError",
    "Reservation",
    "Sequence",
    "Stored",
    "Unavailable",
    "__version__",
    "block_keys",
    "foreign_key",
]
HEAVY = {"torch", "numba", "kvikio", "yaml", "aiofiles", "llvmlite"}
ROOT = Path(__file__).parents[3]


def test_the_exported_names_are_these() -> None:
    assert sorted(kvtierd.__all__) == NAMES
    assert dir(kvtierd) == NAMES
    for name in NAMES:
        assert getattr(kvtierd, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Clinet'"):
        kvtierd.Clinet  # type: ignore[attr-defined] # noqa: B018


def test_the_client_is_light() -> None:
    code = "import sys; from kvtierd import Client, AsyncClient; print(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert "kvtierd.protocol.client" in loaded
    assert not loaded & HEAVY
    assert not {name for name in loaded if name.startswith(("kvtierd.tiers", "kvtierd.daemon", "kvtierd.storage"))}


def test_importing_the_package_loads_nothing_else() -> None:
    code = "import sys, kvtierd; print(*sorted(name for name in sys.modules if 'kvtierd' in name or name == 'numpy'))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["kvtierd"]
