"""From files, environment and options to `Settings`, with every mistake and the origin of every value.

Later sources win: defaults, profile, /etc/kvtierd/kvtierd.yaml, /etc/kvtierd/conf.d/*.yaml in the order of their
names (or, in place of both, the file given with --config), `KVTIERD__SECTION__KEY` variables, options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvtierd.config.check import contradictions
from kvtierd.config.document import read_file
from kvtierd.config.fields import (
    FIELDS,
    TENANT_FIELDS,
    Value,
    field_of,
    is_section,
    tenant_key,
    unknown_key,
)
from kvtierd.config.origins import DEFAULT, Layer, Problem, Written
from kvtierd.config.profiles import profile_layer
from kvtierd.config.schema import Settings
from kvtierd.core.errors import ExitCode, StartupError

ETC = Path("/etc/kvtierd")
ENVIRONMENT_PREFIX = "KVTIERD__"


class ConfigError(StartupError):
    """The configuration is wrong; `problems` are all of its mistakes, in the order of the sources."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(ExitCode.CONFIG, "\n".join(map(str, problems)))
        self.problems = list(problems)


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """Valid settings and, by dotted key, where each value came from."""

    settings: Settings
    origins: dict[str, str]


def load(
    *,
    config: Path | None = None,
    options: Sequence[tuple[str, str, str]] = (),
    environment: Mapping[str, str],
    etc: Path = ETC,
) -> Loaded:
    """Load settings from all sources.

    `options` are (dotted key, text, name of the option), later ones win. Raises ConfigError naming every mistake.
    """
    problems: list[Problem] = []
    files = _files(config, etc)
    layers = [read_file(path, problems) for path in files]
    layers.append(_environment_layer(environment, problems))
    layers += [_option_layer(option, problems) for option in options]
    written = _merge(layers)
    values = _parse(written, problems)
    problems += contradictions(values, {key: item.origin for key, item in written.items()})
    if problems:
        sources = [*map(str, files), *(f"${name}" for name in sorted(environment)), *(option[2] for option in options)]
        raise ConfigError(_in_reading_order(problems, sources))
    settings = build(values)
    keys = [*FIELDS, *(tenant_key(name, leaf) for name in settings.tenants for leaf in TENANT_FIELDS)]
    return Loaded(settings, {key: written[key].origin if key in written else DEFAULT for key in keys})


def build(values: Mapping[str, Value]) -> Settings:
    """Make `Settings` of parsed values by dotted key; keys that are not named keep their defaults.

    The key of a tenant alone, with any value, says that there is one.
    """
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        if is_section(key):
            node.setdefault(leaf, {})
        else:
            node[leaf] = value
    return msgspec.convert(tree, Settings)


def _in_reading_order(problems: Sequence[Problem], sources: Sequence[str]) -> list[Problem]:
    """Source by source, and by line within a file."""

    def place(problem: Problem) -> tuple[int, int]:
        name, _, line = problem.origin.rpartition(":")
        if not line.isdigit():
            name, line = problem.origin, "0"
        return (sources.index(name) if name in sources else len(sources), int(line))

    return sorted(problems, key=place)


def _files(config: Path | None, etc: Path) -> list[Path]:
    if config is not None:
        return [config]
    main = etc / "kvtierd.yaml"
    parts = sorted((etc / "conf.d").glob("*.yaml"), key=lambda path: path.name)
    return [main, *parts] if main.exists() else parts


def _environment_layer(environment: Mapping[str, str], problems: list[Problem]) -> Layer:
    layer: Layer = {}
    for name in sorted(environment):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
        layer.update(_single(key, environment[name], f"${name}", problems))
    return layer


def _option_layer(option: tuple[str, str, str], problems: list[Problem]) -> Layer:
    key, text, name = option
    return _single(key, text, name, problems)


def _single(key: str, text: str, origin: str, problems: list[Problem]) -> Layer:
    if field_of(key) is not None:
        return {key: Written(text, origin)}
    reason = "is a section; name one of its keys" if is_section(key) else unknown_key(key)
    problems.append(Problem(origin, key, reason))
    return {}


def _merge(layers: Sequence[Layer]) -> Layer:
    explicit: Layer = {}
    for layer in layers:
        explicit.update(layer)
    profile = explicit.get("profile")
    return explicit if profile is None else {**profile_layer(profile.text, profile.origin), **explicit}


def _parse(written: Layer, problems: list[Problem]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for key, item in written.items():
        try:
            field = field_of(key)
            values[key] = field.parse(item.text) if field is not None else item.text
        except ValueError as error:
            problems.append(Problem(item.origin, key, str(error)))
    return values
