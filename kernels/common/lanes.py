"""Warp-level building blocks for kernels that place every value on a lane themselves.

All take and return tensors [T] with one element a thread, T = 32 * num_warps, so that element i lies on lane i % 32 of warp
i // 32. A lane is written as r = lane // 4 (0 to 7) and c = lane % 4. Operands lie as `mma.sync` wants them (PTX ISA manual).
With NATIVE they are one instruction; without, for Triton's interpreter, the same in plain Triton. (What follows a `return` in
an `if` is compiled all the same: hence every `else`.) That element i lies on thread i is what the compiler makes of loads of
four that it can vectorise; tests/test_kernel_builds.py holds it to that.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from .capability import interpreted
from .device import round_half_even


def helper(function: Callable[..., Any]) -> Any:
    """`triton.jit` for what kernels call many times; under the interpreter the function itself, since a call from one jitted
    function to another takes a millisecond there."""
    return function if interpreted() else triton.jit(function)


@helper
def _shuffle(x, source, ASM: tl.constexpr):
    """A 32-bit value through the shuffle instruction ASM."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.inline_asm_elementwise(ASM, "=r,r,r", [bits, source], dtype=tl.int32, is_pure=True, pack=1)
    return bits.to(x.dtype, bitcast=True)


@helper
def pick(x, source, NATIVE: tl.constexpr):
    """x (32 bits) of lane `source` (int32 [T], 0 to 31) of the same warp."""
    if NATIVE:
        return _shuffle(x, source, "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;")
    else:
        return tl.gather(x, (tl.arange(0, x.shape[0]) & -32) | source, 0)


@helper
def exchange(x, MASK: tl.constexpr, NATIVE: tl.constexpr):
    """x (32 bits) of the lane whose number differs in the bits of MASK."""
    if NATIVE:
        return _shuffle(x, tl.full([x.shape[0]], MASK, tl.int32), "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;")
    else:
        return tl.gather(x, tl.arange(0, x.shape[0]) ^ MASK, 0)


@helper
def row_max(x, NATIVE: tl.constexpr):
    """Largest x of the four lanes of a row, known to all of them."""
    x = tl.maximum(x, exchange(x, 1, NATIVE))
    return tl.maximum(x, exchange(x, 2, NATIVE))


@helper
def row_sum(x, NATIVE: tl.constexpr):
    """Sum of x over the four lanes of a row, known to all of them."""
    x += exchange(x, 1, NATIVE)
    return x + exchange(x, 2, NATIVE)


@helper
def pack_bf16(low, high, NATIVE: tl.constexpr):
    """Two fp32, rounded to nearest even, as the lower and upper half of an int32."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        # Times 2^16 + 1 and back leaves eight bits, rounded.
        low, high = low * 65537.0 - (low * 65537.0 - low), high * 65537.0 - (high * 65537.0 - high)
        return (high.to(tl.int32, bitcast=True) & -65536) | ((low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)


@helper
def split_bf16(low, high, NATIVE: tl.constexpr):
    """Two fp32 as `pack_bf16` packs them, and what that leaves of them packed as well: 16 bits of each in all."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            .reg .f32 x, y;
            cvt.rn.bf16x2.f32 $0, $3, $2;
            shl.b32 low, $0, 16;
            and.b32 high, $0, 0xffff0000;
            mov.b32 x, low;
            mov.b32 y, high;
            sub.f32 x, $2, x;
            sub.f32 y, $3, y;
            cvt.rn.bf16x2.f32 $1, y, x;
            }""",
            "=&r,=r,f,f",
            [low, high],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        near = pack_bf16(low, high, NATIVE)
        return near, pack_bf16(low - low_bf16(near), high - high_bf16(near), NATIVE)


@helper
def bytes_bf16(x, y, BYTE: tl.constexpr, NATIVE: tl.constexpr):
    """Byte BYTE of two int32, each byte a whole number plus 128, as `pack_bf16` packs the numbers: exact."""
    if NATIVE:
        # Behind 0x4B0000, the upper bytes of 2^23 in fp32, a byte counts ones. Eight bits fit a bf16, so the rest is cut off.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            .reg .f32 a, b;
            prmt.b32 low, $1, 0x4B000000, $3;
            prmt.b32 high, $2, 0x4B000000, $3;
            mov.b32 a, low;
            mov.b32 b, high;
            sub.f32 a, a, 0f4B000080;
            sub.f32 b, b, 0f4B000080;
            mov.b32 low, a;
            mov.b32 high, b;
            prmt.b32 $0, low, high, 0x7632;
            }""",
            "=r,r,r,r",
            [x, y, tl.full([x.shape[0]], 0x7440 + BYTE, tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        low, high = (((word >> (8 * BYTE)) & 255).to(tl.float32) - 128.0 for word in (x, y))
        return pack_bf16(low, high, NATIVE)


@helper
def low_bf16(x):
    """fp32 value of the lower half of an int32."""
    return (x << 16).to(tl.float32, bitcast=True)


@helper
def high_bf16(x):
    """fp32 value of the upper half of an int32."""
    return (x & -65536).to(tl.float32, bitcast=True)


@helper
def _products(a, b):
    """Rows of a times rows of b, both fp32 [W, 8, K], as a lane holds them: (r, 2c) and (r, 2c + 1)."""
    product = tl.dot(a, tl.permute(b, [0, 2, 1]), input_precision="ieee")
    even, odd = tl.split(tl.reshape(product, [a.shape[0], 8, 4, 2]))
    return tl.reshape(even, [a.shape[0] * 32]), tl.reshape(odd, [a.shape[0] * 32])


@helper
def _byte_rows(x, y):
    """Signed bytes of two int32 [T] as rows fp32 [W, 8, 32]: row r holds those of its four lanes, in one order for all."""
    byte = (tl.join(x, y)[:, :, None] << (24 - 8 * tl.arange(0, 4))[None, None, :]) >> 24
    return tl.reshape(byte.to(tl.float32), [x.shape[0] // 32, 8, 32])


@helper
def _half_rows(x):
    """bf16 halves of an int32 [T] as rows fp32 [W, 8, 8]."""
    return tl.reshape(tl.join(low_bf16(x), high_bf16(x)), [x.shape[0] // 32, 8, 8])


@helper
def dot_s8(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, NATIVE: tl.constexpr):
    """c + A B of int8 A [16, 32] and B [32, 8], int32 c [16, 8] (m16n8k32).

    a0, a2: bytes 4c to 4c + 3 and 16 + 4c on of row r; a1, a3: of row r + 8. b0, b1: the same of column r.
    c0, c1: (r, 2c) and (r, 2c + 1); c2, c3: (r + 8, ...).
    """
    if NATIVE:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        columns_of_b = _byte_rows(b0, b1)
        d0, d1 = _products(_byte_rows(a0, a2), columns_of_b)
        d2, d3 = _products(_byte_rows(a1, a3), columns_of_b)
        return c0 + d0.to(tl.int32), c1 + d1.to(tl.int32), c2 + d2.to(tl.int32), c3 + d3.to(tl.int32)


@helper
def dot_bf16_k8(a0, a1, b0, c0, c1, c2, c3, NATIVE: tl.constexpr):
    """c + A B of bf16 A [16, 8] and B [8, 8], fp32 c [16, 8] (m16n8k8).

    a0: halves 2c and 2c + 1 of row r; a1: of row r + 8. b0: of column r. c as in `dot_s8`.
    """
    if NATIVE:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5}, {$6}, {$7,$8,$9,$10};",
            "=f,=f,=f,=f,r,r,r,f,f,f,f",
            [a0, a1, b0, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        right = _half_rows(b0)
        d0, d1 = _products(_half_rows(a0), right)
        d2, d3 = _products(_half_rows(a1), right)
        return c0 + d0, c1 + d1, c2 + d2, c3 + d3


@helper
def dot_bf16_k16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, NATIVE: tl.constexpr):
    """c + A B of bf16 A [16, 16] and B [16, 8], fp32 c [16, 8] (m16n8k16): a0, a1, b0 as in `dot_bf16_k8`, a2, a3, b1 the same
    eight columns on."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        c0, c1, c2, c3 = dot_bf16_k8(a0, a1, b0, c0, c1, c2, c3, NATIVE)
        return dot_bf16_k8(a2, a3, b1, c0, c1, c2, c3, NATIVE)


@helper
def columns(x):
    """The four columns of x [T, 4]."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], 2, 2]))
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    return c0, c1, c2, c3


@helper
def fixed_point(x, inverse):
    """Four fp32 [T] over a unit, whole numbers below 2^15 in size once rounded, in two bytes: words of the upper and of the
    lower bytes, int32 [T]. inverse [T] is 1 / unit."""
    uppers, lowers = tl.zeros_like(x[0]).to(tl.int32), tl.zeros_like(x[0]).to(tl.int32)
    for i in tl.static_range(4):
        whole = round_half_even(x[i] * inverse)
        # Ties go up, so that the lower byte is never 128.
        upper = round_half_even((whole + 0.25) * 0.00390625)
        lower = whole - 256.0 * upper
        uppers |= (upper.to(tl.int32) & 255) << (8 * i)
        lowers |= (lower.to(tl.int32) & 255) << (8 * i)
    return uppers, lowers


@helper
def load_words(at, COUNT: tl.constexpr):
    """COUNT int32 behind each pointer of `at` [T], as a tuple of [T]; four at a time where they are aligned to that."""
    words = ()
    if COUNT % 4 == 0:
        for i in tl.static_range(COUNT // 4):
            words = words + columns(tl.load(at[:, None] + (4 * i + tl.arange(0, 4))[None, :]))
    elif COUNT == 2:
        words = words + tl.split(tl.load(at[:, None] + tl.arange(0, 2)[None, :]))
    else:
        for i in tl.static_range(COUNT):
            words = words + (tl.load(at + i),)
    return words


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x without gaps, from a multiple of 16 bytes on.

    Lanes count on it: from what loads of four are vectorised by, the compiler decides which thread holds what.
    """
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
