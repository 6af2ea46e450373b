"""How far a torture has come, kept in a file so that it goes on where it was ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class OtherRunError(ValueError):
    """The file is about a run with other options; the text says which."""


class State:
    """Units that are done, by part, and what was found. Every change is on the disk before the next unit begins."""

    def __init__(self, path: Path, seed: int, totals: dict[str, int]) -> None:
        """Take up the run in `path`, or begin one. Raises OtherRunError where it has another seed or other totals."""
        self._path = path
        self._run: dict[str, Any] = {"seed": seed, "totals": totals}
        self.done: dict[str, int] = dict.fromkeys(totals, 0)
        self.findings: list[str] = []
        if path.exists():
            self._load(json.loads(path.read_text()))

    def _load(self, kept: dict[str, Any]) -> None:
        for name, wanted in self._run.items():
            if kept[name] != wanted:
                raise OtherRunError(
                    f"{self._path} is of a run with {name} {kept[name]}, and this one has {wanted}; "
                    "give the same options, or --fresh to begin anew"
                )
        self.done |= kept["done"]
        self.findings = kept["findings"]

    def finish_unit(self, part: str, findings: list[str]) -> None:
        """Note that a part's next unit is done."""
        self.done[part] += 1
        self.findings += findings
        self._save()

    def remove(self) -> None:
        """Forget the run: it is over."""
        self._path.unlink(missing_ok=True)

    def _save(self) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps({**self._run, "done": self.done, "findings": self.findings}))
        fresh.replace(self._path)
