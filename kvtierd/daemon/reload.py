"""SIGHUP: read the configuration again, take over what may change, name what needs a restart, keep the rest.

A configuration with a mistake changes nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from kvtierd.config.check import contradictions
from kvtierd.config.fields import FIELDS, TENANT_FIELDS, Field, Value, tenant_key
from kvtierd.config.loader import ConfigError, Loaded, build
from kvtierd.config.schema import Settings, Tenant
from kvtierd.core.units import format_bytes
from kvtierd.telemetry import log as log_lines
from kvtierd.telemetry.notify import notify, notify_reloading

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """`settings` to run with from now on; what changes, and what would change with a restart, each as one phrase."""

    settings: Settings
    changed: list[str]
    waiting: list[str]

    def __str__(self) -> str:
        parts = ["; ".join(self.changed) or "nothing changes"]
        if self.waiting:
            parts.append(f"after a restart: {'; '.join(self.waiting)}")
        return ". ".join(parts)


def plan(running: Settings, written: Settings) -> Plan:
    """What a running daemon takes over of newly written settings.

    Raises ValueError when what is taken over contradicts what stays.
    """
    values, changed, waiting = dict[str, Value](), list[str](), list[str]()
    for key, field in _fields_of(running).items():
        old, new = _value(running, key), _value(written, key)
        values[key] = new if field.reload else old
        if old != new:
            (changed if field.reload else waiting).append(f"{key} {_show(field, old)} -> {_show(field, new)}")
    values |= dict.fromkeys((f"tenants.{name}" for name in running.tenants), "")
    waiting += [f"tenants.{name} is new" for name in written.tenants if name not in running.tenants]
    waiting += [f"tenants.{name} goes" for name in running.tenants if name not in written.tenants]
    if problems := contradictions(values, dict.fromkeys(values, "with what stays until a restart")):
        raise ValueError("; ".join(map(str, problems)))
    return Plan(build(values), changed, waiting)


class Reloader:
    """Reloads when asked, one after another, once `serve` runs; a request that came before waits for it."""

    def __init__(self, running: Settings, load: Callable[[], Loaded]) -> None:
        self.running = running
        self._load = load
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Have the configuration read again soon."""
        self._asked.set()

    async def serve(self, apply: Callable[[Settings], None], status: Callable[[], str]) -> None:
        """Reload whenever asked, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            notify_reloading()
            outcome = await self._reload(apply)
            notify(f"READY=1\nSTATUS={status()}; {outcome}")

    async def _reload(self, apply: Callable[[Settings], None]) -> str:
        try:
            written = (await asyncio.to_thread(self._load)).settings
            found = plan(self.running, written)
        except (ConfigError, ValueError) as error:
            for line in str(error).splitlines():
                log.error("reload: %s", line)
            log.error("reload: the configuration has mistakes; all settings stay as they were")
            return "the last reload failed, all settings stay as they were"
        apply(found.settings)
        self.running = found.settings
        log_lines.configure(found.settings.log.level, found.settings.log.format)
        log.info("reloaded: %s", found)
        return f"reloaded, {len(found.changed)} settings changed, {len(found.waiting)} wait for a restart"


def _fields_of(settings: Settings) -> dict[str, Field]:
    """Every setting by key, those of its tenants too."""
    own = {tenant_key(name, leaf): field for name in settings.tenants for leaf, field in TENANT_FIELDS.items()}
    return FIELDS | own


def _value(settings: Settings, key: str) -> Any:
    """The value of a setting; of a tenant that is not there any more, which nobody may use, the defaults."""
    node: Any = settings
    for name in key.split("."):
        node = node.get(name, Tenant()) if isinstance(node, dict) else getattr(node, name)
    return node


def _show(field: Field, value: Any) -> str:
    return format_bytes(value) if field.unit == "bytes" else repr(value) if value == "" else str(value)
