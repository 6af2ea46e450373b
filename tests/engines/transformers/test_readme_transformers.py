"""What the README says of transformers, done."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtierd.daemon.embedded import EmbeddedDaemon

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
README = Path(__file__).resolve().parents[3] / "README.md"


def test_block_of_the_readme_generates(
    daemon: EmbeddedDaemon, folder: Path, text_ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "kvtierd.connectors.transformers" in block]
    monkeypatch.setenv("KVTIERD_ENDPOINT", daemon.endpoint)
    inputs = {"input_ids": text_ids, "attention_mask": torch.ones_like(text_ids), "max_new_tokens": 4}
    script = tmp_path / "readme.py"
    script.write_text(block)
    names: dict[str, Any] = runpy.run_path(str(script), {"NAME": folder, "inputs": inputs})
    assert names["past"].offloaded_tokens == []  # closed, so that the daemon holds nothing for it
    assert names["tokens"].shape[1] > text_ids.shape[1]
