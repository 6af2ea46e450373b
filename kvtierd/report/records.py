"""What was measured, by which command, on which machine: lines of JSON that a report is made of.

A line is a record as `--save` writes it. Also taken are what `kvtierctl bench --json` and `kvtierctl stress --bench`
print (a row a line), and what `kvtierctl stress --json` prints (an object); of these only the stress says its command.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvtierd.bench.rows import Row
from kvtierd.core.errors import KvtierdError

UNKNOWN = "not recorded"


class RecordError(KvtierdError):
    """A file that is no recording: the file, the line and what is wrong are in the text."""


class Stress(msgspec.Struct, frozen=True, kw_only=True):
    """What the report takes of a run of the stress: `figures` are in bytes, seconds and bytes a second."""

    verdict: str
    what: str
    tokens: int
    context_bytes: int
    findings: list[str]
    figures: dict[str, float]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of one command. `svg` is a drawing that it made by itself."""

    command: str
    machine: str
    recorded: str = ""
    rows: list[Row] = []
    stress: Stress | None = None
    svg: str = ""
    failed: str = ""
    """Why it has no figures."""


def read_records(paths: Iterable[Path]) -> list[Record]:
    """All records of the files, in order. Raises RecordError naming file and line."""
    return [record for path in paths for record in _merged(_records(path))]


def latest(records: Sequence[Record]) -> list[Record]:
    """Of several runs of a command the last that has figures, at the place of the first; a failed one if all failed."""
    found: dict[str, Record] = {}
    for record in records:
        if UNKNOWN in (record.command, record.machine):
            found[f"{len(found)} {record.command}"] = record  # nobody knows whether these are runs of the same
        elif record.command not in found or not record.failed or found[record.command].failed:
            found[record.command] = record
    return list(found.values())


def as_line(record: Record) -> str:
    """A record as one line of JSON."""
    return msgspec.json.encode(record).decode()


def from_stress(told: dict[str, Any], machine: str = "", recorded: str = "") -> Record:
    """A record of what the stress printed as JSON. Raises msgspec.ValidationError for what it never prints."""
    return Record(
        command=str(told.get("command", UNKNOWN)),
        machine=machine or UNKNOWN,
        recorded=recorded,
        rows=msgspec.convert(told.get("rows", []), list[Row]),
        stress=msgspec.convert(told, Stress),
    )


def _records(path: Path) -> Iterator[Record]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield _one(json.loads(line))
        except (ValueError, msgspec.ValidationError) as error:
            raise RecordError(
                f"{path}:{number}: {error}; lines of JSON of bench, stress or --save are wanted"
            ) from error


def _one(told: Any) -> Record:
    if isinstance(told, dict) and "verdict" in told:
        return from_stress(told)
    if isinstance(told, dict) and "bench" in told:
        row = msgspec.convert(told, Row)
        command = "kvtierctl stress --bench" if row.bench == "stress" else f"kvtierctl bench {row.bench} --json"
        return Record(command=command, machine=UNKNOWN, rows=[row])
    return msgspec.convert(told, Record)


def _merged(records: Iterable[Record]) -> Iterator[Record]:
    """Rows that came one a line belong to one run."""
    last: Record | None = None
    for record in records:
        alike = last is not None and record.machine == UNKNOWN == last.machine and record.command == last.command
        if alike and last is not None and not (record.stress or last.stress):
            last = msgspec.structs.replace(last, rows=[*last.rows, *record.rows])
            continue
        if last is not None:
            yield last
        last = record
    if last is not None:
        yield last
