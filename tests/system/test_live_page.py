"""The live page in a real browser, on a daemon that works."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtierd import Client, Geometry, Namespace, block_keys
from kvtierd.daemon.embedded import EmbeddedDaemon

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

LISTEN = "127.0.0.1:19474"
SHAPE = Geometry(block_size=64, layers=8, kv_heads=2, k_dim=64, v_dim=64)
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1240,1000", "--virtual-time-budget=15000")


@pytest.fixture
def browser(tmp_path: Path):
    """Run the browser on the page with one more flag; what it prints."""
    command = next(filter(None, map(shutil.which, BROWSERS)), None)
    if command is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")

    def run(flag: str) -> str:
        words = [command, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", flag, f"http://{LISTEN}/"]
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout

    return run


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[None]:
    """A daemon with a client that stores and fetches."""
    settings = {"host__capacity": "64MiB", "host__chunk_bytes": "8MiB", "gpu__capacity": "16MiB"}
    settings |= {"nvme__capacity": "256MiB", "nvme__segment_bytes": "16MiB", "metrics__slow_ms": 0}
    with EmbeddedDaemon(tmp_path / "d", metrics__listen=LISTEN, **settings) as daemon:
        done = threading.Event()

        def work() -> None:
            blocks = np.random.default_rng(7).integers(0, 256, (16, SHAPE.block_bytes), np.uint8)
            with Client(daemon.endpoint, timeout_s=5, transfer_timeout_s=10) as client:
                model = client.register(Namespace(model="m", geometry=SHAPE))
                turn = 0
                while not done.wait(0.01):
                    keys = block_keys(model.digest, range(turn % 37 * 2000, turn % 37 * 2000 + 16 * 64), 64)
                    if client.lookup(model, keys).count < 16:
                        client.store(model, keys, blocks)
                    else:
                        client.fetch(model, keys)
                    turn += 1

        thread = threading.Thread(target=work)
        thread.start()
        yield
        done.set()
        thread.join()


@pytest.mark.usefixtures("busy")
def test_page_shows_tiers_flows_requests_and_namespaces(browser, tmp_path: Path) -> None:
    dom = browser("--dump-dom")
    text = re.sub(r"<script.*?</script>|<style.*?</style>", "", dom, flags=re.DOTALL)
    assert int(re.search(r'data-shown="(\d+)"', text)[1]) > 1, "the page asked once and no more"
    assert '<span id="status" class="">serving</span>' in text
    assert re.search(r'id="host">\d+ % of 64.0 MiB<', text)
    assert text.count("<polygon") >= 6
    assert len(re.findall(r"[\d.]+ (?:B|KiB|MiB|GiB)/s", text)) == 6
    for word in ("lookup", "reserve", "commit", "newest first"):
        assert word in text
    assert re.search(r"<td>[0-9a-f]{16}</td>", text)
    assert "no answer" not in text
    picture = tmp_path / "page.png"
    browser(f"--screenshot={picture}")
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 40_000, "the picture is empty"
