"""fio as a reference: found, run, and its report read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvtierd.bench.fio import (
    BLOCK_BYTES,
    ENGINES,
    PSYNC,
    Engine,
    find_fio,
    parse_rate,
    remove_files,
    run_fio,
    usable_engines,
)
from kvtierd.bench.rows import BenchError

REPORT = json.dumps({"jobs": [{"read": {"bw_bytes": 0}, "write": {"bw_bytes": 123456}}]})


def test_the_rate_is_read_after_fios_notes() -> None:
    assert parse_rate("fio: this platform does not support ...\n" + REPORT, "write") == 123456.0


@pytest.mark.parametrize("output", ["", "no json", "{", "{}", '{"jobs": []}', '{"jobs": [{"write": {}}]}'])
def test_a_report_that_cannot_be_read_is_an_error(output: str) -> None:
    with pytest.raises(BenchError, match="cannot be read"):
        parse_rate(output, "write")


def test_a_rate_of_nothing_is_an_error() -> None:
    with pytest.raises(BenchError, match="read rate of 0"):
        parse_rate(REPORT, "read")


def test_a_missing_fio_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(BenchError, match="apt-get install fio"):
        find_fio()


def test_an_amount_that_jobs_cannot_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no multiple"):
        run_fio(tmp_path, 3 * BLOCK_BYTES, "write")


def test_a_failed_fio_is_an_error_with_its_words(tmp_path: Path) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    with pytest.raises(BenchError, match=r"fio failed with \d+: .*missing"):
        run_fio(tmp_path / "missing", PSYNC.jobs * BLOCK_BYTES, "write")


def test_fio_writes_and_reads_where_it_is_told_with_every_engine(tmp_path: Path) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    engines = usable_engines(tmp_path)
    assert PSYNC in engines
    for engine in engines:
        amount = engine.jobs * BLOCK_BYTES
        assert run_fio(tmp_path, amount, "write", engine=engine) > 0
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) == amount
        assert run_fio(tmp_path, amount, "read", engine=engine) > 0
        remove_files(tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_engine_that_does_not_work_here_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    missing = Engine("no-such-engine", 1, 1)
    monkeypatch.setattr("kvtierd.bench.fio.ENGINES", (PSYNC, missing))
    assert usable_engines(tmp_path) == [PSYNC]
    monkeypatch.setattr("kvtierd.bench.fio.ENGINES", (missing,))
    with pytest.raises(BenchError, match="fio failed"):
        usable_engines(tmp_path)
    assert len(ENGINES) == 2
