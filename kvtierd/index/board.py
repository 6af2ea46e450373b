"""One argument for compiled functions that work on many columns: a table of where these are.

An array argument costs a call some 50 ns, and what a request does needs forty. A board is one array of int64: for each
column its address and its length, at a place that `Place` numbers. Columns that are reserved once for the daemon's life
lie at fixed addresses, so they are written down once; the board keeps the arrays alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import intrinsic as _numba_intrinsic

from kvtierd.index.jit import Word, helper

Words64 = npt.NDArray[np.int64]
BOARD = types.int64[::1]
"""Numba's type of a board."""

_intrinsic: Callable[..., Any] = _numba_intrinsic
_carray: Any = getattr(numba, "carray")  # noqa: B009 - its stub does not name it


class Board:
    """A board of `places` columns and numbers. `words` is what compiled functions get."""

    def __init__(self, places: int) -> None:
        self.words: Words64 = np.zeros(2 * places, np.int64)
        self._arrays: dict[int, npt.NDArray[Any]] = {}

    def put(self, place: int, column: npt.NDArray[Any]) -> None:
        """Write a contiguous column down. Raises ValueError for one whose elements are not side by side."""
        if not column.flags.c_contiguous:
            raise ValueError(f"the column at place {place} is not contiguous")
        self._arrays[place] = column
        self.words[2 * place], self.words[2 * place + 1] = column.ctypes.data, len(column)

    def set(self, place: int, number: int) -> None:
        """Write a number down."""
        self.words[2 * place] = number


def _pointer_to(element: Any) -> Any:
    made: Any = types.CPointer
    pointer = made(element)

    def typed(_typing: Any, _address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return pointer(types.int64), codegen

    return _intrinsic(typed)


def column_of(element: Any) -> Callable[[Word, Word], Word]:
    """A compiled function `(board, place)` that answers the column there, [n] of this Numba type."""
    pointer = _pointer_to(element)

    @helper
    def column(board: Word, place: Word) -> Word:
        return _carray(pointer(board[2 * place]), (board[2 * place + 1],))

    return column


def table_of(element: Any, width: int) -> Callable[[Word, Word], Word]:
    """The same for a table, [n, width]."""
    pointer = _pointer_to(element)

    @helper
    def table(board: Word, place: Word) -> Word:
        return _carray(pointer(board[2 * place]), (board[2 * place + 1], width))

    return table


def tables_of(element: Any, height: int, width: int) -> Callable[[Word, Word], Word]:
    """The same for tables, [n, height, width]."""
    pointer = _pointer_to(element)

    @helper
    def tables(board: Word, place: Word) -> Word:
        return _carray(pointer(board[2 * place]), (board[2 * place + 1], height, width))

    return tables


_u64_pointer = _pointer_to(types.uint64)


@helper
def u64_at(address: Word, count: Word) -> Word:
    """`count` words of 64 bits at an address that a column holds."""
    return _carray(_u64_pointer(address), (count,))


@helper
def number_of(board: Word, place: Word) -> Word:
    """A number that was written down."""
    return board[2 * place]


column_u16 = column_of(types.uint16)
column_u32 = column_of(types.uint32)
column_u64 = column_of(types.uint64)
column_i32 = column_of(types.int32)
column_i64 = column_of(types.int64)
column_f64 = column_of(types.float64)
table_u64 = table_of(types.uint64, 8)
