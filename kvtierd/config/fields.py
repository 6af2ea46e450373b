"""The settings as a flat table: dotted key to type, range and default, derived from the schema."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from pathlib import Path
from typing import Any

import msgspec

from kvtierd.config.schema import TENANT_NAME, Settings
from kvtierd.core.units import parse_bytes

Value = bool | int | float | str

FOLDERS_SEPARATOR = ":"
"""Between the folders of a list, as in PATH; a YAML file may have a list."""
SEPARATORS = {"folders": FOLDERS_SEPARATOR, "keys": " "}
"""Of settings that may be written as a list, by their unit."""
TENANTS = "tenants"
"""The section whose keys are names: `tenants.NAME.LEAF`."""
_TENANT_KEY = re.compile(rf"{TENANTS}\.({TENANT_NAME})(?:\.(\w+))?")
_CURVE_KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
"""32 bytes as Z85 (ZeroMQ RFC 32)."""

_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def split_folders(text: str) -> list[str]:
    """The folders of a setting that may name several."""
    return text.split(FOLDERS_SEPARATOR) if text else []


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One setting. `unit` is `bytes`, `folder`, `folders`, `keys` or ""; bounds are inclusive unless `above` is set."""

    key: str
    kind: type
    default: Value
    choices: tuple[str, ...] = ()
    unit: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None
    multiple_of: int = 1
    power_of_two: bool = False
    min_length: int = 0
    pattern: str = ""
    examples: tuple[str, ...] = ()
    reload: bool = False
    """Whether a running daemon takes over a new value on SIGHUP."""

    def parse(self, text: str) -> Value:
        """Read a value from text. Raises ValueError that says what is wrong and what to write."""
        if self.choices:
            return self._choice(text)
        if self.kind is bool:
            return self._boolean(text)
        if self.kind is str:
            return self._text(text)
        return self._number(text)

    def _choice(self, text: str) -> str:
        if text in self.choices:
            return text
        nearest = difflib.get_close_matches(text, [choice for choice in self.choices if choice], 1, 0.4)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ValueError(f"{text!r} is not one of {', '.join(choice or repr('') for choice in self.choices)}{hint}")

    def _boolean(self, text: str) -> bool:
        value = _BOOLEANS.get(text.lower())
        if value is None:
            raise ValueError(f"{text!r} is neither true nor false; write one of them")
        return value

    def _text(self, text: str) -> str:
        if "\0" in text:
            raise ValueError(f"{text!r} holds a zero byte; remove it")
        if len(text) < self.min_length:
            raise ValueError("is empty; write a value")
        if self.pattern and not re.fullmatch(self.pattern, text):
            examples = f", like {' or '.join(self.examples)}" if self.examples else ""
            raise ValueError(f"{text!r} does not have the form {self.pattern}; write a value{examples}")
        if self.unit == "folder" and text and not Path(text).is_absolute():
            raise ValueError(f"{text!r} is a relative path; write an absolute one")
        if self.unit == "folders" and text:
            self._check_folders(text)
        if self.unit == "keys":
            _check_keys(text)
        return text

    def _check_folders(self, text: str) -> None:
        folders = split_folders(text)
        for folder in folders:
            if not Path(folder).is_absolute():
                raise ValueError(f"{folder!r} is a relative path; write an absolute one")
        if len({os.path.normpath(folder) for folder in folders}) < len(folders):
            raise ValueError(f"{text!r} names a folder twice; each is a device of its own")

    def _number(self, text: str) -> int | float:
        try:
            value = parse_bytes(text) if self.unit == "bytes" else self.kind(text)
        except (ValueError, OverflowError):
            raise ValueError(f"{text!r} is not {self._wanted()}") from None
        if not self._in_range(value):
            raise ValueError(f"{text} is out of range; write {self._wanted()}")
        if self.kind is int and value % self.multiple_of:
            raise ValueError(f"{text} is not a multiple of {self.multiple_of}; round it to one")
        if self.power_of_two and value.bit_count() != 1:
            raise ValueError(f"{text} is not a power of two; the nearest below is {_show(1 << value.bit_length() - 1)}")
        return value

    def _in_range(self, value: float) -> bool:
        low = self.low if self.low is not None else -math.inf
        high = self.high if self.high is not None else math.inf
        return low <= value <= high and (self.above is None or value > self.above) and math.isfinite(value)

    def _wanted(self) -> str:
        what = {"bytes": "a size like 64MiB"}.get(self.unit, "a whole number" if self.kind is int else "a number")
        show = _show if self.unit == "bytes" else str
        if self.above is not None:
            return f"{what} above {show(self.above)} and up to {show(self.high or math.inf)}"
        return what if self.low is None else f"{what} in {show(self.low)}..{show(self.high or math.inf)}"


def _show(count: float) -> str:
    """Write a limit as people would type it; limits are whole multiples of their unit."""
    units = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)]
    return next(
        (f"{count // size:.0f}{unit}" for unit, size in units if count >= size and count % size == 0), str(count)
    )


def shown_limit(field: Field, limit: float | None) -> str:
    """A bound of a setting as people write it."""
    if limit is None:
        return "any"
    return _show(limit) if field.unit == "bytes" else str(limit)


def _check_keys(text: str) -> None:
    for key in text.split():
        if not _CURVE_KEY.fullmatch(key):
            raise ValueError(
                f"{key[:60]!r} is no CURVE public key, which has 40 characters; `kvtierctl keygen` makes keys"
            )


def _fields(info: Any, prefix: str) -> list[Field]:
    """Walk a msgspec.inspect.StructType; `Any` because its node types form an open union."""
    found = []
    for item in info.fields:
        key = f"{prefix}{item.encode_name}"
        if isinstance(item.type, msgspec.inspect.StructType):
            found += _fields(item.type, f"{key}.")
        elif isinstance(item.type, msgspec.inspect.DictType):
            found += _fields(item.type.value_type, f"{key}.NAME.")
        else:
            found.append(_field(key, item.type, item.default))
    return found


def _field(key: str, node: Any, default: Value) -> Field:
    extra, schema = {}, {}
    if isinstance(node, msgspec.inspect.Metadata):
        extra, schema, node = node.extra or {}, node.extra_json_schema or {}, node.type
    return Field(
        key,
        type(default),
        default,
        choices=tuple(getattr(node, "values", ())),
        unit=extra.get("unit", ""),
        low=getattr(node, "ge", None),
        high=getattr(node, "le", None),
        above=getattr(node, "gt", None),
        multiple_of=getattr(node, "multiple_of", None) or 1,
        power_of_two=extra.get("power_of_two", False),
        min_length=getattr(node, "min_length", None) or 0,
        pattern=getattr(node, "pattern", None) or "",
        examples=tuple(schema.get("examples", ())),
        reload=extra.get("reload", False),
    )


_ALL = {field.key: field for field in _fields(msgspec.inspect.type_info(Settings), "")}

FIELDS: dict[str, Field] = {key: field for key, field in _ALL.items() if not key.startswith(f"{TENANTS}.")}
"""Every setting by its dotted key, in the order of the schema, but those of single tenants."""

TENANT_FIELDS: dict[str, Field] = {key.rpartition(".")[2]: _ALL[key] for key in _ALL if key not in FIELDS}
"""Settings of a tenant by their last word; their keys have NAME for the tenant's."""

SECTIONS: frozenset[str] = frozenset(
    key.rsplit(".", depth)[0] for key in FIELDS for depth in range(1, key.count(".") + 1)
) | {TENANTS}
"""Dotted names of the sections, nested ones too."""


def field_of(key: str) -> Field | None:
    """The setting with this key, a tenant's too; None where there is none."""
    found = _TENANT_KEY.fullmatch(key)
    return FIELDS.get(key) if found is None else TENANT_FIELDS.get(found[2] or "")


def is_section(key: str) -> bool:
    """Whether keys lie below this one: a section, or a tenant."""
    found = _TENANT_KEY.fullmatch(key)
    return key in SECTIONS or (found is not None and found[2] is None)


def tenant_of(key: str) -> str:
    """The tenant whose setting this is, or which it names; "" for other keys."""
    found = _TENANT_KEY.fullmatch(key)
    return found[1] if found else ""


def tenant_key(name: str, leaf: str) -> str:
    """Key of a setting of a tenant."""
    return f"{TENANTS}.{name}.{leaf}"


def unknown_key(key: str) -> str:
    """Say that a key does not exist and which one is nearest: alike in its last word, better in the same section."""
    section, _, leaf = key.rpartition(".")
    if section == TENANTS:
        return f"is no name for a tenant; names have the form {TENANT_NAME}, like team-a"

    def likeness(name: str) -> float:
        its_section, _, its_leaf = name.rpartition(".")
        return _ratio(leaf, its_leaf) + 0.3 * _ratio(section, its_section) + 0.1 * (section == its_section)

    name = tenant_of(section)
    tenant = [tenant_key(name, leaf) for leaf in TENANT_FIELDS] if name else []
    return f"unknown key; the nearest is {max([*FIELDS, *sorted(SECTIONS), *tenant], key=likeness)}"


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio()
