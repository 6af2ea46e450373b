"""What kernels use beyond plain arithmetic: inline PTX on a device, twins in Python in the simulator.

One list of names, two implementations. Addresses are (array, byte): a contiguous array of any dtype and an offset in
bytes from its first element. Words are 32 bits; the first element of a pair lies in the lower half.

| name | what |
|---|---|
| `device_function` | decorator of a helper that kernels call; always inlined |
| `shared_bytes(count)` | uint8 array in shared memory, aligned to 128; one call a source line |
| `load_words(array, byte)` | 16 bytes of global memory that no thread writes: 4 words |
| `load_pair(array, byte)`, `load_word(array, byte)` | 8 or 4 bytes of the same: 2 words, 1 word |
| `load_u16(array, byte)`, `load_u8(array, byte)` | 2 bytes or 1 of the same, as a word |
| `store_words(array, byte, w0, w1, w2, w3)` | 16 bytes to global memory |
| `store_pair(array, byte, w0, w1)`, `store_word(array, byte, w)` | 8 or 4 bytes to global memory |
| `store_u16(array, byte, w)`, `store_u8(array, byte, w)` | the lowest 2 bytes or 1 of a word to global memory |
| `shared_words(array, byte)`, `set_shared_words(array, byte, w0, w1, w2, w3)` | 16 bytes of shared memory |
| `copy_async(shared, byte, array, at, valid)` | 16 bytes global → shared; of these `valid` are read, the rest is zero |
| `copy_commit()`, `copy_wait(n)` | close a group of copies; wait until all but the last n (literal) groups are there |
| `ldmatrix(shared, byte)`, `ldmatrix_transposed(shared, byte)` | four matrices of 8 by 8 of 16 bits: 4 words a lane |
| `mma_bf16(a, b, c)`, `mma_f16(a, b, c)` | m16n8k16 of tuples: a 4 words, b 2 words, c 4 floats; returns 4 floats |
| `exchange_f32(value, mask)`, `exchange_u32(value, mask)` | the value of the lane whose number differs by `mask` |
| `broadcast_f32(value, lane)`, `broadcast_u32(value, lane)` | the value of that lane |
| `sync_warp()` | all 32 lanes, and their shared memory |
| `exp2(x)` | 2ˣ in float32, about 2 ulp |
| `product(x, y)` | of two float32, rounded before anything is added to it: `x * y + z` may become one instruction |
| `bits_of(x)`, `float_of(word)` | a float32 and its bits |
| `bf16_pair(lo, hi)`, `f16_pair(lo, hi)` | two float32, rounded to nearest even, as a word |
| `floats_of_bf16(word)`, `floats_of_f16(word)` | the two float32 in a word |
| `e4m3_word(f0, f1, f2, f3)` | four float32 as codes, as `codec` defines them (saturating; NaN keeps its sign) |
| `f16_of_e4m3(word)` | four codes as two words of two f16 each, exact |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba.core import config

if TYPE_CHECKING or not config.ENABLE_CUDASIM:
    from kvtierd.gpu.kernels.ptx import *  # noqa: F403 - the list of names is that of the table above
    from kvtierd.gpu.kernels.ptx_formats import *  # noqa: F403
    from kvtierd.gpu.kernels.ptx_memory import *  # noqa: F403
else:
    from kvtierd.gpu.kernels.twins import *  # noqa: F403
    from kvtierd.gpu.kernels.twins_formats import *  # noqa: F403
    from kvtierd.gpu.kernels.twins_warp import *  # noqa: F403
