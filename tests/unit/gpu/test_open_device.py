"""Which device the gpu tier gets, and what is said where it gets none."""

from __future__ import annotations

import errno
import mmap
from typing import Any

import pytest

from kvtierd.config.schema import POOL_MAX_BYTES, Gpu
from kvtierd.core.errors import ExitCode, StartupError
from kvtierd.core.units import PAGE_BYTES
from kvtierd.gpu import open_device
from kvtierd.index.lru import SLOTS_MAX


def test_memory_that_cannot_be_had_is_a_mistake_in_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(StartupError, match=r"gpu\.capacity: 4\.00 TiB of memory cannot be had") as caught:
        open_device(Gpu(capacity=POOL_MAX_BYTES))
    assert caught.value.exit_code == ExitCode.CONFIG


def test_the_largest_pool_has_slots_that_can_be_numbered() -> None:
    assert POOL_MAX_BYTES // PAGE_BYTES == SLOTS_MAX
