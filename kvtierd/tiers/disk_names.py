"""How the store tells the tenants' namespaces apart, whose fields may all be equal: by the salt that it gets to see.

Of the tenant `default` it is the client's own; of any other it begins with a mark and the tenant's name. No client may
begin one so. What a store of an earlier configuration holds belongs to whoever stored it, also when tenants come, go
or change places.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvtierd.core.errors import ErrorCode, RequestError
from kvtierd.core.namespace import MAX_TEXT_BYTES, Namespace

PLAIN: Final = "default"
"""The tenant whose namespaces are stored as they are."""
_MARK: Final = "\0tenant\0"
_END: Final = "\0"


def stored_as(tenant: str, namespace: Namespace) -> Namespace:
    """The namespace as the store knows it. RequestError `bad_argument` for a salt that it could not have."""
    salt = namespace.tenant_salt
    if salt.startswith("\0"):
        raise RequestError(ErrorCode.BAD_ARGUMENT, "tenant_salt begins with a zero byte; choose another one")
    if tenant == PLAIN:
        return namespace
    marked = f"{_MARK}{tenant}{_END}{salt}"
    over = len(marked.encode()) - MAX_TEXT_BYTES
    if over > 0:
        size = len(salt.encode())
        message = f"tenant_salt has {size} bytes; the limit for this tenant is {size - over}"
        raise RequestError(ErrorCode.BAD_ARGUMENT, message)
    return msgspec.structs.replace(namespace, tenant_salt=marked)


def read_as(stored: Namespace) -> tuple[str, Namespace]:
    """The tenant and the namespace that `stored_as` was given."""
    if not stored.tenant_salt.startswith(_MARK):
        return PLAIN, stored
    tenant, _, salt = stored.tenant_salt.removeprefix(_MARK).partition(_END)
    return tenant, msgspec.structs.replace(stored, tenant_salt=salt)
