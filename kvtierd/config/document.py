"""A YAML file as one layer of values, each with the line it stands on.

Only the parser's node graph is used, never its constructors: no tag can make an object, and every scalar keeps
its text, which the field that it belongs to reads.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from kvtierd.config.fields import SEPARATORS, Field, field_of, is_section, tenant_of, unknown_key
from kvtierd.config.origins import Layer, Problem, Written

MAX_FILE_BYTES = 1 << 20
_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "timestamp"))


def read_file(path: Path, problems: list[Problem]) -> Layer:
    """Read a file's values; whatever is wrong goes to `problems`, and what is right is still returned."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        problems.append(Problem(str(path), "", f"cannot be read: {error.strerror}; check the path and its permissions"))
        return {}
    if len(data) > MAX_FILE_BYTES:
        problems.append(Problem(str(path), "", f"is larger than {MAX_FILE_BYTES} bytes; this is no configuration file"))
        return {}
    return read_text(data, str(path), problems)


def read_text(data: bytes, name: str, problems: list[Problem]) -> Layer:
    """Read values from YAML text; `name` stands for the file in origins."""
    try:
        root = yaml.compose(data, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problems.append(Problem(f"{name}:{line}", "", f"is not YAML: {error.problem or error.context}"))
        return {}
    except (yaml.YAMLError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        problems.append(Problem(name, "", f"is not YAML: {first}"))
        return {}
    reader = _Reader(name, problems)
    if root is not None and not _is_null(root):
        reader.section(root, "")
    return reader.layer


def _is_null(node: yaml.Node) -> bool:
    return node.tag == "tag:yaml.org,2002:null"


class _Reader:
    """Walks nodes no deeper than the schema has sections, so a nest of aliases cannot blow it up."""

    def __init__(self, name: str, problems: list[Problem]) -> None:
        self.layer: Layer = {}
        self._name = name
        self._problems = problems
        self._lines: dict[str, int] = {}

    def section(self, node: yaml.Node, key: str) -> None:
        """Read a mapping whose keys lie below `key` ("" at the top)."""
        if _is_null(node):
            return
        if not isinstance(node, yaml.MappingNode):
            self._wrong(node, key, "is a section; write its keys below it, indented")
            return
        for name, value in node.value:
            self._entry(name, value, f"{key}." if key else "")

    def _entry(self, name: yaml.Node, value: yaml.Node, prefix: str) -> None:
        if not isinstance(name, yaml.ScalarNode):
            self._wrong(name, prefix.rstrip("."), "has a key that is not a plain word; write a name from the schema")
            return
        key = prefix + name.value
        line = name.start_mark.line + 1
        if key in self._lines:
            self._wrong(name, key, f"is written twice, first in line {self._lines[key]}; keep one of them")
            return
        self._lines[key] = line
        if is_section(key):
            if tenant_of(key):  # there is one, also with nothing below it
                self.layer[key] = Written("", f"{self._name}:{line}")
            self.section(value, key)
        elif (field := field_of(key)) is not None:
            self._value(name, value, key, field)
        else:
            self._wrong(name, key, unknown_key(key))

    def _value(self, name: yaml.Node, value: yaml.Node, key: str, field: Field) -> None:
        if isinstance(value, yaml.SequenceNode) and field.unit in SEPARATORS:
            self._list(name, value, key, field.unit)
        elif not isinstance(value, yaml.ScalarNode):
            self._wrong(name, key, "takes one value, not a list or a section")
        elif value.tag not in _PLAIN_TAGS:
            self._wrong(value, key, f"has the tag {value.tag}; write a plain value without a tag")
        elif _is_null(value):
            self._wrong(name, key, 'has no value; write one ("" for an empty text) or remove the key')
        else:
            self.layer[key] = Written(value.value, f"{self._name}:{name.start_mark.line + 1}")

    def _list(self, name: yaml.Node, value: yaml.SequenceNode, key: str, what: str) -> None:
        """A list is one value: the same text that an option or a variable has."""
        separator = SEPARATORS[what]
        texts = [item.value for item in value.value if isinstance(item, yaml.ScalarNode) and item.tag in _PLAIN_TAGS]
        if len(texts) < len(value.value) or any(not text or separator in text for text in texts):
            one = what.removesuffix("s").replace("folder", "path")
            self._wrong(name, key, f"is a list of {what}; write one {one} an item, without {separator!r}")
        else:
            self.layer[key] = Written(separator.join(texts), f"{self._name}:{name.start_mark.line + 1}")

    def _wrong(self, node: yaml.Node, key: str, text: str) -> None:
        self._problems.append(Problem(f"{self._name}:{node.start_mark.line + 1}", key, text))
