"""The reference configuration: every setting with its meaning, range and default, as a YAML file of comments.

The meanings are the docstrings in kvtierd.config.schema, so there is one place to keep true. After a change of the
schema: `python -m kvtierd.config.reference >systemd/kvtierd.yaml`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap

from kvtierd.config import schema
from kvtierd.config.fields import FIELDS, SECTIONS, TENANT_FIELDS, TENANTS, Field, shown_limit
from kvtierd.config.schema import Settings

WIDTH = 110

HEAD = """\
kvtierd: every setting with its meaning and its default. What is commented out has that default; take the mark
away to change it. Files of conf.d/*.yaml come after this one, then KVTIERD__SECTION__KEY variables, then options.
`kvtierd --check-config` reports every mistake, `kvtierd --print-config` where each value came from. Those marked
"reload" are taken over by `systemctl reload kvtierd`; the others by a restart."""


def reference() -> str:
    """The text of the reference configuration."""
    lines = _comment(HEAD.replace("\n", " "), 0)
    open_sections: list[str] = []
    for key in sorted(FIELDS, key=lambda key: "." in key):
        *sections, leaf = key.split(".")
        while open_sections != sections[: len(open_sections)]:
            open_sections.pop()
        for depth, section in enumerate(sections[len(open_sections) :], len(open_sections)):
            open_sections.append(section)
            indent = "  " * depth
            lines += ["", *_comment(meaning(".".join(open_sections)), depth), f"{indent}{section}:"]
        depth = len(sections)
        field = FIELDS[key]
        lines += [
            "",
            *_comment(f"{meaning(key)} {describe(field)}", depth),
            f"{'  ' * depth}#{leaf}: {default_text(field)}",
        ]
    return "\n".join([*lines, *_tenants()]) + "\n"


def _tenants() -> list[str]:
    """The section whose keys are names, with an example: no tenant is there because it was shown."""
    lines = ["", *_comment(meaning(TENANTS), 0), f"{TENANTS}:", "", "  # team-a:"]
    for leaf, field in TENANT_FIELDS.items():
        text = f"{meaning(field.key)} {describe(field)}".strip()
        marked = textwrap.wrap(text, WIDTH, initial_indent="  #   # ", subsequent_indent="  #   # ")
        lines += [*marked, f"  #   {leaf}: {default_text(field)}"]
    return lines


def meaning(key: str) -> str:
    """What a setting or a section is for: its docstring in the schema, on one line."""
    return " ".join(_docstrings()[key].split())


def describe(field: Field) -> str:
    """Range or choices of a setting, and whether a running daemon takes over a new value."""
    parts = []
    if field.choices:
        parts.append(", ".join(choice or '""' for choice in field.choices))
    elif field.kind is bool:
        parts.append("true, false")
    elif field.kind in {int, float}:
        low = f"above {shown_limit(field, field.above)}" if field.above is not None else shown_limit(field, field.low)
        parts.append(f"{low} to {shown_limit(field, field.high)}")
    if field.reload:
        parts.append("reload")
    return f"({'; '.join(parts)})" if parts else ""


def default_text(field: Field) -> str:
    """The default of a setting as a file would say it."""
    if field.unit == "bytes":
        return shown_limit(field, int(field.default))
    if field.kind is bool:
        return str(field.default).lower()
    return str(field.default) or '""'


def _comment(text: str, depth: int) -> list[str]:
    indent = "  " * depth
    return textwrap.wrap(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


@functools.cache
def _docstrings() -> dict[str, str]:
    """Docstring of every setting and section by dotted key: those that stand below a field in the schema's source."""
    classes = {node.name: node for node in ast.parse(inspect.getsource(schema)).body if isinstance(node, ast.ClassDef)}
    found: dict[str, str] = {}
    _collect(Settings.__name__, "", classes, found)
    assert found.keys() >= FIELDS.keys() | SECTIONS
    return found


def _collect(name: str, prefix: str, classes: dict[str, ast.ClassDef], found: dict[str, str]) -> None:
    body = classes[name].body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        key = f"{prefix}{node.target.id}"
        section = _section_of(node.annotation)
        if section in classes:
            found[key] = ast.get_docstring(classes[section]) or ""
            _collect(section, f"{key}.NAME." if key == TENANTS else f"{key}.", classes, found)
        elif isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[key] = str(after.value.value)


def _section_of(annotation: ast.expr) -> str:
    """Name of the class of a section, or of the tenants' sections; "" for a setting."""
    match annotation:
        case ast.Name(id=name):
            return name
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, ast.Name(id=name)])):
            return name
        case _:
            return ""


if __name__ == "__main__":
    sys.stdout.write(reference())
