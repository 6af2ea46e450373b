"""How far work in threads has come: what a watchdog wants to know of a pool or a disk."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class Progress:
    """Jobs handed to threads and jobs that came back, since the start; counted on the loop."""

    begun: int = 0
    ended: int = 0

    @property
    def pending(self) -> int:
        """Jobs that wait or run."""
        return self.begun - self.ended
