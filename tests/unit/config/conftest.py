from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import pytest

from kvtierd.config.loader import ConfigError, Loaded, load
from kvtierd.config.origins import Problem


class Load(Protocol):
    def __call__(
        self, text: str | None = None, environment: Mapping[str, str] = ..., options: list[tuple[str, str, str]] = ...
    ) -> Loaded: ...


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvtierd.yaml"


@pytest.fixture
def load_text(file: Path, tmp_path: Path) -> Load:
    """Load with a file of this text; without one, from an empty /etc."""

    def run(
        text: str | None = None,
        environment: Mapping[str, str] | None = None,
        options: list[tuple[str, str, str]] | None = None,
    ) -> Loaded:
        if text is not None:
            file.write_text(text)
        config = file if text is not None else None
        return load(config=config, environment=environment or {}, options=options or [], etc=tmp_path / "etc")

    return run


@pytest.fixture
def mistakes(load_text: Load) -> Callable[..., list[Problem]]:
    """The mistakes of a configuration that must have some."""

    def run(*args: object, **kwargs: object) -> list[Problem]:
        with pytest.raises(ConfigError) as caught:
            load_text(*args, **kwargs)  # type: ignore[arg-type]
        assert caught.value.exit_code == 78
        return caught.value.problems

    return run
