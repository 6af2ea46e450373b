"""Names of folders that both the daemon and its clients know."""

from __future__ import annotations

from typing import Final

ADMIN_FOLDER: Final = "admin"
"""Below the runtime folder, beside those of the tenants: the operators' socket, for the daemon's user and root."""
