"""What the README says, done."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from kvtierd.config.loader import load
from kvtierd.daemon.embedded import EmbeddedDaemon

ROOT = Path(__file__).resolve().parents[3]


def _blocks(language: str) -> str:
    """All blocks of a language, one behind the other: later ones go on where earlier ones ended.

    What wants an engine is tried beside that engine (tests/engines): it is not in this environment.
    """
    found = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found
    return "\n".join(block for block in found if "kvtierd.connectors" not in block)


def test_client_of_the_readme_works(tmp_path: Path) -> None:
    with EmbeddedDaemon(
        tmp_path, host__capacity="8MiB", host__chunk_bytes="4MiB", nvme__segment_bytes="4MiB"
    ) as daemon:
        environment = {**os.environ, "KVTIERD_ENDPOINT": daemon.endpoint}
        subprocess.run([sys.executable, "-c", _blocks("python")], cwd=ROOT, env=environment, check=True)


def test_configuration_of_the_readme_is_valid(tmp_path: Path) -> None:
    (tmp_path / "kvtierd.yaml").write_text(_blocks("yaml"))
    settings = load(config=tmp_path / "kvtierd.yaml", environment={}).settings
    assert (settings.kv_cache_config.block_size, settings.host.capacity) == (256, 8 << 30)


def test_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text())):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
