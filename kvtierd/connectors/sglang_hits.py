"""How far a prefix of SGLang's pages can be used, given which pages each of its pools has. No engine in here."""

from __future__ import annotations

import numpy as np

from kvtierd.connectors.objects import Flags


def ends_with_all_pages(there: Flags) -> Flags:
    """Which prefixes a pool can serve that needs every page: [n] bool, item i for the prefix of i + 1 pages."""
    return np.asarray(np.logical_and.accumulate(there))


def ends_with_trailing_pages(there: Flags, trailing: int) -> Flags:
    """The same for a pool that needs the last `trailing` pages of a prefix, or all of a shorter one."""
    missing = np.concatenate([[0], np.cumsum(~there)])
    ends = np.arange(1, there.size + 1)
    return np.asarray(missing[ends] == missing[np.maximum(0, ends - trailing)])


def longest(ends: Flags) -> int:
    """Pages of the longest prefix that can be served."""
    return int(np.flatnonzero(ends)[-1]) + 1 if ends.any() else 0
