"""Triton build: one program summarises one (page, KV head) in registers.

The leading left singular vectors of the centred page come from its 16 x 16 Gram matrix by Jacobi rotations in parallel
order: row i meets row i XOR m, so m = 1 .. 15 visits every pair once a sweep, eight disjoint rotations at a time.
"""

import torch
import triton
import triton.language as tl

from ..common.device import bf16_scale, round_half_even
from .record import RecordLayout

SWEEPS = 6
"""Jacobi sweeps. Convergence is quadratic; after 6 the worst off-diagonal of a 16 x 16 matrix is at fp32 rounding."""


@triton.jit
def _eigenvectors(gram, SWEEPS: tl.constexpr):
    """Eigenvectors (columns) of a symmetric fp32 [16, 16], largest eigenvalue first."""
    index = tl.arange(0, 16)
    row, col = index[:, None], index[None, :]
    same = row == col
    vectors = tl.where(same, 1.0, 0.0)
    for _ in range(SWEEPS):
        for m in tl.static_range(1, 16):
            partner_row, partner_col = row ^ m, col ^ m
            pair = col == partner_row
            own = tl.sum(tl.where(same, gram, 0.0), 1)
            other = tl.sum(tl.where(pair, tl.sum(tl.where(same, gram, 0.0), 0)[None, :], 0.0), 1)
            # Both triangles count, so that the two partners see the same number: each from its own, they would turn the same
            # way where the values nearly coincide and only rounding is left between them.
            off = 0.5 * (tl.sum(tl.where(pair, gram, 0.0), 1) + tl.sum(tl.where(pair, gram, 0.0), 0))
            cosine, sine = _rotation(own, other, off, (index ^ m) > index)
            swapped = tl.gather(gram, partner_row + tl.zeros_like(col), 0)
            gram = cosine[:, None] * gram + sine[:, None] * swapped
            swapped = tl.gather(gram, partner_col + tl.zeros_like(row), 1)
            gram = cosine[None, :] * gram + sine[None, :] * swapped
            swapped = tl.gather(vectors, partner_col + tl.zeros_like(row), 1)
            vectors = cosine[None, :] * vectors + sine[None, :] * swapped
    value_row = tl.sum(tl.where(same, gram, 0.0), 1)[:, None]
    value_col = tl.sum(tl.where(same, gram, 0.0), 0)[None, :]
    # Place of each eigenvalue in descending order, ties to the lower index; then its inverse, column by column.
    place = tl.sum(((value_col > value_row) | ((value_col == value_row) & (col < row))).to(tl.int32), 1)
    source = tl.sum(tl.where(place[:, None] == col, row, 0), 0)
    return tl.gather(vectors, source[None, :] + tl.zeros_like(row), 1)


@triton.jit
def _rotation(own, other, off, first):
    """Cosine and signed sine that zero `off` between an index and its partner; `first` marks the lower of the two."""
    sign = tl.where(first, 1.0, -1.0)
    usable = off != 0.0
    tau = sign * (other - own) / tl.where(usable, 2.0 * off, 1.0)
    tangent = tl.where(tau < 0, -1.0, 1.0) / (tl.abs(tau) + tl.sqrt(1.0 + tau * tau))
    tangent = tl.where(usable, tangent, 0.0)
    cosine = 1.0 / tl.sqrt(1.0 + tangent * tangent)
    return cosine, -sign * tangent * cosine


@triton.jit
def _build_pages(
    k_ptr,
    v_ptr,
    pages_ptr,
    center_ptr,
    record_ptr,
    valid_ptr,
    k_slot,
    k_head,
    v_slot,
    v_head,
    NUM_HEADS: tl.constexpr,
    RECORD: tl.constexpr,
    D: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BASIS: tl.constexpr,
    BASIS_SCALE: tl.constexpr,
    COEF: tl.constexpr,
    COEF_SCALE: tl.constexpr,
    MEAN: tl.constexpr,
    MEAN_SCALE: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    SWEEPS: tl.constexpr,
):
    page = tl.load(pages_ptr + tl.program_id(0)).to(tl.int64)
    if page < 0:
        return
    head = tl.program_id(1)
    token = tl.arange(0, 16)
    half = tl.arange(0, HALF_BLOCK)
    inside = half < D // 2
    slots = page * 16 + token
    out = record_ptr + (page * NUM_HEADS + head) * RECORD
    scales = out.to(tl.pointer_type(tl.int16))

    at = k_ptr + slots[:, None] * k_slot + head * k_head + half[None, :]
    low = tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32)
    high = tl.load(at + D // 2, mask=inside[None, :], other=0.0).to(tl.float32)
    mean_low, mean_high = tl.sum(low, 0) / 16.0, tl.sum(high, 0) / 16.0
    low -= mean_low[None, :]
    high -= mean_high[None, :]
    gram = tl.dot(low, tl.trans(low), input_precision="ieee")
    gram = tl.dot(high, tl.trans(high), gram, input_precision="ieee")
    # A page with NaN, Inf or overflowing keys is stored as "no estimate": zero factors and a NaN mean.
    finite = tl.sum(tl.sum((tl.abs(gram) < float("inf")).to(tl.int32), 1), 0) == 256
    low, high = tl.where(finite, low, 0.0), tl.where(finite, high, 0.0)
    gram = tl.where(finite, gram, 0.0)
    # The vector of ones spans the null space of a centred page; moved from 0 to -trace it stays clear of short keys.
    index = token
    trace = tl.sum(tl.sum(tl.where(index[:, None] == index[None, :], gram, 0.0), 1), 0)
    gram = (gram - trace / 16.0) / tl.maximum(trace, 1e-37)
    left = _eigenvectors(gram, SWEEPS)
    # The largest entry of a column is made positive: the same page gives the same record.
    size = tl.abs(left)
    first = tl.min(tl.where(size == tl.max(size, 0)[None, :], token[:, None], 16), 0)
    lead = tl.sum(tl.where(token[:, None] == first[None, :], left, 0.0), 0)
    left *= tl.where(lead < 0, -1.0, 1.0)[None, :]

    basis_low = tl.dot(tl.trans(left), low, input_precision="ieee")
    basis_high = tl.dot(tl.trans(left), high, input_precision="ieee")
    norm = tl.sqrt(tl.sum(basis_low * basis_low, 1) + tl.sum(basis_high * basis_high, 1))
    used = tl.maximum(norm, 1.1754944e-38)
    basis_low = tl.div_rn(basis_low, used[:, None] + tl.zeros_like(basis_low))
    basis_high = tl.div_rn(basis_high, used[:, None] + tl.zeros_like(basis_high))
    column = tl.arange(0, 16)
    kept = column < R
    largest = tl.maximum(tl.max(tl.abs(basis_low), 1), tl.max(tl.abs(basis_high), 1))
    bits, divisor, _ = bf16_scale(largest, largest >= 0.0, 7)
    tl.store(scales + BASIS_SCALE // 2 + column, bits, mask=kept)
    low_level = round_half_even(tl.div_rn(basis_low, divisor[:, None] + tl.zeros_like(basis_low)))
    high_level = round_half_even(tl.div_rn(basis_high, divisor[:, None] + tl.zeros_like(basis_high)))
    low_level = tl.minimum(tl.maximum(low_level, -7.0), 7.0).to(tl.int32) + 8
    high_level = tl.minimum(tl.maximum(high_level, -7.0), 7.0).to(tl.int32) + 8
    tl.store(
        out + BASIS + column[:, None] * (D // 2) + half[None, :],
        (low_level | (high_level << 4)).to(tl.uint8),
        mask=kept[:, None] & inside[None, :],
    )

    coef = tl.where(kept[None, :], left * norm[None, :], 0.0)
    largest = tl.max(tl.abs(coef), 1)
    bits, divisor, _ = bf16_scale(largest, largest >= 0.0, 127)
    tl.store(scales + COEF_SCALE // 2 + token, bits)
    level = round_half_even(tl.div_rn(coef, divisor[:, None] + tl.zeros_like(coef)))
    level = tl.minimum(tl.maximum(level, -127.0), 127.0).to(tl.int8)
    tl.store(out.to(tl.pointer_type(tl.int8)) + COEF + column[None, :] * 16 + token[:, None], level, mask=kept[None, :])

    center = center_ptr + head * D + half
    mean_low -= tl.load(center, mask=inside, other=0.0)
    mean_high -= tl.load(center + D // 2, mask=inside, other=0.0)
    largest = tl.maximum(tl.max(tl.abs(mean_low), 0), tl.max(tl.abs(mean_high), 0))
    bits, divisor, usable = bf16_scale(largest, finite & (largest >= 0.0), 127)
    tl.store(scales + MEAN_SCALE // 2, bits)
    _store_levels(out + MEAN + half, mean_low, divisor, usable, inside)
    _store_levels(out + MEAN + D // 2 + half, mean_high, divisor, usable, inside)

    if VALUE >= 0:
        dim = tl.arange(0, DV_BLOCK)
        within = dim < DV
        values = tl.load(v_ptr + slots[:, None] * v_slot + head * v_head + dim[None, :], mask=within[None, :], other=0.0)
        value = tl.sum(values.to(tl.float32), 0) / 16.0
        usable = tl.sum((tl.abs(value) < float("inf")).to(tl.int32), 0) == DV_BLOCK
        bits, divisor, usable = bf16_scale(tl.max(tl.abs(value), 0), usable, 127)
        tl.store(scales + VALUE_SCALE // 2, bits)
        _store_levels(out + VALUE + dim, value, divisor, usable, within)
    if head == 0:
        tl.store(valid_ptr + page, 1)


@triton.jit
def _store_levels(at, x, divisor, usable, mask):
    """Store x / divisor as int8, zeros where it cannot be used."""
    level = round_half_even(tl.div_rn(tl.where(usable, x, 0.0), divisor + tl.zeros_like(x)))
    level = tl.minimum(tl.maximum(level, -127.0), 127.0)
    tl.store(at.to(tl.pointer_type(tl.int8)), level.to(tl.int8), mask=mask)


def build(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages: torch.Tensor,
    center: torch.Tensor,
    record: torch.Tensor,
    valid: torch.Tensor,
    layout: RecordLayout,
) -> None:
    """Summarise physical pages into their records, in one launch and without waiting for the device.

    Args:
        k_cache: float [slots, H, D]; v_cache: float [slots, H, Dv], innermost dimension contiguous.
        pages: int32 or int64 [n], physical pages; -1 for nothing to do.
        center: fp32 [H, D]. record: uint8 [N, H, record_bytes], contiguous. valid: bool [N], set for these pages.
    """
    heads = k_cache.shape[1]
    if pages.numel() == 0:
        return
    half = triton.next_power_of_2(layout.head_dim // 2)
    _build_pages[(pages.numel(), heads)](
        k_cache,
        v_cache,
        pages,
        center,
        record,
        valid.view(torch.uint8),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        NUM_HEADS=heads,
        HALF_BLOCK=max(16, half),
        DV_BLOCK=triton.next_power_of_2(layout.v_head_dim),
        SWEEPS=SWEEPS,
        **layout.constants,
        num_warps=2 if half <= 64 else 8,
        maxnreg=255,  # left alone, the assembler aims for 168 registers and spills a few bytes
    )
