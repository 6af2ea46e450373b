"""Twins of the memory primitives for Numba's simulator, in which a CUDA thread is a thread of the operating system.

They are stricter than a device: an access past the array or off its alignment is an IndexError that says where, and an
asynchronous copy lands only when `copy_wait` asks for it, so that a missing wait shows.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import cuda

__all__ = [
    "copy_async",
    "copy_commit",
    "copy_wait",
    "device_function",
    "load_pair",
    "load_u8",
    "load_u16",
    "load_word",
    "load_words",
    "set_shared_words",
    "shared_bytes",
    "shared_words",
    "store_pair",
    "store_u8",
    "store_u16",
    "store_word",
    "store_words",
]

Bytes = npt.NDArray[np.uint8]
Words = tuple[int, ...]

device_function: Callable[[Any], Any] = cuda.jit(device=True)


def thread() -> Any:
    """The simulated CUDA thread that runs this: it knows its number and its block's manager."""
    return threading.current_thread()


def shared_bytes(count: int) -> Bytes:
    """`count` bytes that the threads of the block share; told apart by the caller's source line."""
    caller = sys._getframe(1)
    line = (caller.f_code.co_filename, caller.f_lineno)
    # setdefault is atomic: all threads of the block get the array of the first one.
    kept: dict[Any, Bytes] = thread()._manager.__dict__.setdefault("kvtierd_shared", {})
    return kept.setdefault(line, np.full(count, 0xA5, np.uint8))  # on a device it holds whatever lay there


class Everywhere:
    """An array on a device whose offsets lead anywhere that the device can read, also to before its first byte.

    `find(address, count)` gives the memory at an address of the device, or raises IndexError where it can read none.
    """

    def __init__(self, base: int, find: Callable[[int, int], Bytes]) -> None:
        self.base, self.find = base, find


def _span(array: Any, byte: int, size: int) -> Bytes:
    """View of `size` bytes; IndexError where they are not all in the array, or not aligned."""
    if isinstance(array, Everywhere):
        if (array.base + int(byte)) % size:
            raise IndexError(f"{size} bytes at {array.base + int(byte):#x}: the address is no multiple of the size")
        return array.find(array.base + int(byte), size)
    item = getattr(array, "_item", array)
    plain: npt.NDArray[Any] = getattr(item, "_ary", item)
    whole = plain.reshape(-1).view(np.uint8)
    byte = int(byte)
    if not 0 <= byte <= whole.size - size:
        raise IndexError(f"{size} bytes at {byte} are not within the array's {whole.size}")
    if byte % size:
        raise IndexError(f"{size} bytes at {byte}: the address is no multiple of the size")
    return whole[byte : byte + size]


def _load(array: Any, byte: int, count: int) -> Words:
    return tuple(int(word) for word in _span(array, byte, 4 * count).view("<u4"))


def _store(array: Any, byte: int, *words: int) -> None:
    _span(array, byte, 4 * len(words)).view("<u4")[:] = [int(word) & 0xFFFFFFFF for word in words]


def load_words(array: Any, byte: int) -> Words:
    """16 bytes as four words."""
    return _load(array, byte, 4)


def load_pair(array: Any, byte: int) -> Words:
    """8 bytes as two words."""
    return _load(array, byte, 2)


def load_word(array: Any, byte: int) -> int:
    """4 bytes as a word."""
    return _load(array, byte, 1)[0]


def load_u16(array: Any, byte: int) -> int:
    """2 bytes as a word."""
    return int(_span(array, byte, 2).view("<u2")[0])


def load_u8(array: Any, byte: int) -> int:
    """A byte as a word."""
    return int(_span(array, byte, 1)[0])


def store_u16(array: Any, byte: int, word: int) -> None:
    """The lower half of a word."""
    _span(array, byte, 2).view("<u2")[0] = int(word) & 0xFFFF


def store_u8(array: Any, byte: int, word: int) -> None:
    """The lowest byte of a word."""
    _span(array, byte, 1)[0] = int(word) & 0xFF


shared_words = load_words
store_words = store_pair = store_word = set_shared_words = _store


def copy_async(shared: Any, byte: int, array: Any, at: int, valid: int) -> None:
    """Remember a copy of 16 bytes; its source is read when it lands, and its addresses are checked now."""
    target = _span(shared, byte, 16)
    source = _span(array, at, 16) if valid == 16 else _partial(array, at, int(valid))
    target[:] = 0xA5
    _groups()[-1].append((target, source))


def copy_commit() -> None:
    """Close the group of copies that this thread has under way."""
    _groups().append([])


def copy_wait(pending: int) -> None:
    """Let all but the last `pending` closed groups land."""
    groups = _groups()
    while len(groups) - 1 > pending:
        for target, source in groups.pop(0):
            target[: source.size] = source
            target[source.size :] = 0


def _partial(array: Any, at: int, valid: int) -> Bytes:
    # cp.async reads only the valid bytes, and none may lie past the array; the address itself must be aligned.
    if valid == 0:
        return np.empty(0, np.uint8)
    parts = [_span(array, at + index, 1) for index in range(valid)]
    return np.concatenate(parts)


def _groups() -> list[list[tuple[Bytes, Bytes]]]:
    groups: list[list[tuple[Bytes, Bytes]]] = thread().__dict__.setdefault("kvtierd_copies", [[]])
    return groups
