"""Waiting for something to become true, with a bound that only broken code reaches."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Poll until `condition` holds; AssertionError after `timeout_s`."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it never came true"
        time.sleep(0.02)
