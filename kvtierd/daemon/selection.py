"""Which blocks an operator's request is about, from its query."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import TypeVar

from kvtierd.core.errors import RequestError
from kvtierd.protocol.messages import TIERS
from kvtierd.tiers.operator import Selection

T = TypeVar("T")

YEARS_S = 3.2e9
"""A hundred years: older than anything."""


def chosen(query: Mapping[str, str]) -> Selection:
    """The selection that a query names; ValueError for what is none."""
    tier = query.get("tier", "")
    if tier and tier not in TIERS:
        raise ValueError(f"tier is {tier!r}; there are {', '.join(TIERS)}")
    text = query.get("older_than_s", "0")
    try:
        older_s = float(text)
    except ValueError:
        older_s = -1.0
    if not 0 <= older_s <= YEARS_S:
        raise ValueError(f"older_than_s is {text!r}; seconds are wanted")
    return Selection(
        tenant=query.get("tenant", ""),
        namespace=query.get("namespace", ""),
        key=query.get("key", "").lower(),
        tier=tier or None,
        older_than_s=older_s,
    )


async def refusals(work: Awaitable[T]) -> T:
    """The result of work on blocks; what the tiers refuse is the operator's to read, as ValueError."""
    try:
        return await work
    except RequestError as error:
        raise ValueError(str(error)) from error
