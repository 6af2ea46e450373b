"""Sizes as people write them."""

from __future__ import annotations

import pytest

from kvtierd.core.units import align_up, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (4096, 4096),
        (0, 0),
        ("0", 0),
        ("4096", 4096),
        ("4096b", 4096),
        ("64KiB", 64 << 10),
        ("64 kb", 64 << 10),
        ("64k", 64 << 10),
        ("2G", 2 << 30),
        ("1.5 GiB", 3 << 29),
        (" 0.5T ", 1 << 39),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e9", "12 parsecs", "1.5.2", "0x10", "1 5", "5ib", "5i", True, -1, "1,5G"]
)
def test_what_is_no_size_is_named(text: str | int) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


def test_a_size_of_many_digits_is_exact() -> None:
    assert parse_bytes("1" + "0" * 400) == 10**400


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1000 << 10, "1000 KiB"),
        (64 << 20, "64.0 MiB"),
        (3 << 29, "1.50 GiB"),
        (256 << 20, "256 MiB"),
        (5 << 40, "5.00 TiB"),
        (5000 << 40, "5000 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_sizes_are_written_with_three_digits(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_rounding_up() -> None:
    assert [align_up(n) for n in (0, 1, 4095, 4096, 4097)] == [0, 4096, 4096, 4096, 8192]
    assert align_up(10, 8) == 16
