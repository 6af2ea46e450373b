"""The effective configuration as YAML, with a comment of each value's origin (`--print-config`)."""

from __future__ import annotations

from typing import Any

import yaml

from kvtierd.config.loader import Loaded

_COMMENT_COLUMN = 44


def render(loaded: Loaded) -> str:
    """Write YAML that loads to the same settings; each line's comment says where the value came from."""
    lines: list[str] = []
    open_sections: list[str] = []
    for key in sorted(loaded.origins, key=lambda key: "." in key):
        *sections, leaf = key.split(".")
        while open_sections != sections[: len(open_sections)]:
            open_sections.pop()
        for section in sections[len(open_sections) :]:
            lines.append(f"{'  ' * len(open_sections)}{section}:")
            open_sections.append(section)
        entry = f"{'  ' * len(sections)}{leaf}: {_scalar(_value(loaded, key))}"
        lines.append(f"{entry.ljust(_COMMENT_COLUMN)} # {loaded.origins[key]}")
    return "\n".join(lines) + "\n"


def _value(loaded: Loaded, key: str) -> Any:
    node: Any = loaded.settings
    for name in key.split("."):
        node = node[name] if isinstance(node, dict) else getattr(node, name)
    return node


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("...\n").strip()
