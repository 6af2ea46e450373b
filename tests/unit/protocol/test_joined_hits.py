"""A lookup in pieces is answered as one."""

from __future__ import annotations

import numpy as np
import pytest

from kvtierd.protocol.queries import _joined
from kvtierd.protocol.results import Hit


def hit(count: int, load: int | None = None, load_ns: int = 0) -> Hit:
    return Hit(count, np.full(count, 2, np.uint8), load, load_ns)


@pytest.mark.parametrize(
    ("pieces", "load", "load_ns"),
    [
        ([hit(4), hit(3)], None, 0),
        ([hit(4, 4, 40), hit(3, 2, 20)], 6, 60),
        ([hit(4, 3, 30), hit(3, 3, 30)], 3, 30),
        ([hit(4, 0, 0), hit(3, 3, 30)], 0, 0),
        ([hit(4, 4, 40), hit(4, 4, 40), hit(0, 0, 0)], 8, 80),
    ],
)
def test_loading_ends_in_the_first_piece_of_which_not_all_is_worth_it(pieces, load, load_ns):
    found = _joined(pieces)
    assert found.count == found.tiers.size == sum(piece.count for piece in pieces)
    assert (found.load, found.load_ns) == (load, load_ns)
