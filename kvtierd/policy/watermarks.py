"""When a tier makes room in the background, and how much."""

from __future__ import annotations

import math


def to_free(used: int, capacity: int, high: float, low: float, active: bool) -> tuple[int, bool]:
    """How many of `used` slots should be freed now, and whether freeing goes on.

    Freeing begins above `high` (share of capacity) and goes on until `low`, so that a tier near one mark does not
    start and stop with every block: after a stop, at least (high - low) * capacity slots must fill before it starts
    again. Pass the returned state back as `active` next time. Raises ValueError unless 0 <= low <= high <= 1 and
    0 <= used, 0 <= capacity.
    """
    if not 0 <= low <= high <= 1:
        raise ValueError(f"watermarks are low {low}, high {high}; they must be 0 <= low <= high <= 1")
    if used < 0 or capacity < 0:
        raise ValueError(f"used is {used} of capacity {capacity}; neither can be negative")
    # Rounded to whole slots once: where low and high fall on the same slot there is nothing to oscillate between.
    floor = math.floor(low * capacity)
    begins = used > math.floor(high * capacity)
    excess = used - floor
    if not (begins or active) or excess <= 0:
        return 0, False
    return excess, True
