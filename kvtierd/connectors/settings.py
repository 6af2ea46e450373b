"""Settings that an engine hands to its client as a plain mapping: checked by a msgspec struct, mistakes named."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

Milliseconds = Annotated[float, msgspec.Meta(ge=1, le=60_000)]
T = TypeVar("T", bound=msgspec.Struct)


def read_settings(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """The settings of this kind. Raises ValueError naming what is wrong in `where`, and the nearest key."""
    known = kind.__struct_fields__
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"{where} has no {name!r}: {hint}")
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from error
