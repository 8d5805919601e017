"""Triton build: one warp summarises one (page, KV head) in registers, so that no step of it waits at a barrier (four at
head dimension 256).

The leading left singular vectors of the centred page come from its 16 x 16 Gram matrix A by Jacobi rotations in parallel
order: column i meets column i XOR m, so m = 1 .. 15 visits every pair once a sweep, eight disjoint rotations at a time. The
rotations act on V and on A V. Entries of V^T A V, which they are to make diagonal, are inner products of columns of the two;
so only columns are ever turned, and they lie across the lanes of the warp.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..common.checks import require
from ..common.device import bf16_scale, round_half_even
from .record import RecordLayout

SWEEPS = 8
"""Most Jacobi sweeps. Five or six are usual, eight the most that 10,000 pages of seven kinds needed."""
SMALL = 1e-4
"""A sweep that met no larger entry beside the diagonal of a matrix of trace 1 is the last: what it leaves is the square of
that, over the distance of the eigenvalues. Where those nearly coincide either direction is as good."""


@triton.jit
def _eigenvectors(gram, R_BLOCK: tl.constexpr, SWEEPS: tl.constexpr, SMALL: tl.constexpr):
    """Eigenvectors (columns) of the R_BLOCK largest eigenvalues of a symmetric fp32 [16, 16], largest first."""
    index = tl.arange(0, 16)
    row, col = index[:, None], index[None, :]
    vectors = tl.where(row == col, 1.0, 0.0)
    images = gram
    sweep = 0
    largest = tl.full([], float("inf"), tl.float32)
    while (sweep < SWEEPS) & (largest > SMALL):
        met = tl.zeros([16], tl.float32)
        for m in tl.static_range(1, 16):
            partner = index ^ m
            partners = partner[None, :] + tl.zeros_like(row)
            others = tl.gather(images, partners, 1)
            own = tl.sum(vectors * images, 0)
            off = tl.sum(vectors * others, 0)
            met = tl.maximum(met, tl.abs(off))
            tangent = _tangent(own, tl.gather(own, partner, 0), off)
            # Both columns of a pair turn by what the lower one found: each by its own, they would turn the same way where the
            # values nearly coincide and only rounding is left between them.
            tangent = tl.gather(tangent, tl.minimum(index, partner), 0)
            cosine = 1.0 / tl.sqrt(1.0 + tangent * tangent)
            sine = tl.where(partner > index, -tangent, tangent) * cosine
            images = cosine[None, :] * images + sine[None, :] * others
            vectors = cosine[None, :] * vectors + sine[None, :] * tl.gather(vectors, partners, 1)
        largest = tl.max(met, 0)
        sweep += 1
    value = tl.sum(vectors * images, 0)
    value_row = tl.sum(tl.where(row == col, value[None, :], 0.0), 1)[:, None]
    value_col = value[None, :]
    # Place of each eigenvalue in descending order, ties to the lower index; then its inverse, column by column.
    place = tl.sum(((value_col > value_row) | ((value_col == value_row) & (col < row))).to(tl.int32), 1)
    source = tl.sum(tl.where(place[:, None] == tl.arange(0, R_BLOCK)[None, :], row, 0), 0)
    return tl.gather(vectors, source[None, :] + tl.zeros_like(row), 1)


@triton.jit
def _tangent(own, other, off):
    """Tangent of the smaller angle that zeroes `off` between a column with `own` on the diagonal and one with `other`."""
    usable = off != 0.0
    tau = (other - own) / tl.where(usable, 2.0 * off, 1.0)
    tangent = tl.where(tau < 0, -1.0, 1.0) / (tl.abs(tau) + tl.sqrt(1.0 + tau * tau))
    return tl.where(usable, tangent, 0.0)


@triton.jit
def _column_scale(column, EACH: tl.constexpr):
    """Where the scale of a column of the basis stands among the scales of a record."""
    return column % 8 // 2 * EACH + tl.where(column < 8, 4, 8) + column % 2


@triton.jit(do_not_specialize=["num_pages"])
def _build_pages(
    k_ptr,
    v_ptr,
    pages_ptr,
    center_ptr,
    record_ptr,
    value_ptr,
    valid_ptr,
    offset_ptr,
    num_pages,
    k_slot,
    k_head,
    v_slot,
    v_head,
    LAYERED: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    RECORD: tl.constexpr,
    D: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    R: tl.constexpr,
    R_BLOCK: tl.constexpr,
    BASIS: tl.constexpr,
    COEF: tl.constexpr,
    MEAN: tl.constexpr,
    VALUES: tl.constexpr,
    SCALES: tl.constexpr,
    EACH: tl.constexpr,
    SWEEPS: tl.constexpr,
    SMALL: tl.constexpr,
):
    page = tl.load(pages_ptr + tl.program_id(0)).to(tl.int64)
    if page < 0:
        return
    head = tl.program_id(1)
    if LAYERED:
        layer = tl.program_id(2).to(tl.int64)
        k_ptr += tl.multiple_of(tl.load(offset_ptr + 2 * layer), 16)
        v_ptr += tl.multiple_of(tl.load(offset_ptr + 2 * layer + 1), 16)
        center_ptr += layer * NUM_HEADS * D
        record_ptr += layer * num_pages * NUM_HEADS * RECORD
        value_ptr += layer * num_pages * NUM_HEADS * DV
        valid_ptr += layer * num_pages
    token = tl.arange(0, 16)
    half = tl.arange(0, HALF_BLOCK)
    inside = half < D // 2
    slots = page * 16 + token
    out = record_ptr + (page * NUM_HEADS + head) * RECORD
    scales = out.to(tl.pointer_type(tl.int16)) + SCALES // 2
    lane = tl.arange(0, 4)

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
    left = _eigenvectors(gram, R_BLOCK, SWEEPS, SMALL)
    # The largest entry of a column is made positive: the same page gives the same record.
    size = tl.abs(left)
    first = tl.min(tl.where(size == tl.max(size, 0)[None, :], token[:, None], 16), 0)
    lead = tl.sum(tl.where(token[:, None] == first[None, :], left, 0.0), 0)
    left *= tl.where(lead < 0, -1.0, 1.0)[None, :]

    basis_low = tl.dot(tl.trans(left), low, input_precision="ieee")
    basis_high = tl.dot(tl.trans(left), high, input_precision="ieee")
    norm = tl.sqrt(tl.sum(basis_low * basis_low, 1) + tl.sum(basis_high * basis_high, 1))
    inverse = 1.0 / tl.maximum(norm, 1.1754944e-38)
    basis_low *= inverse[:, None]
    basis_high *= inverse[:, None]
    column = tl.arange(0, R_BLOCK)
    kept = column < R
    largest = tl.maximum(tl.max(tl.abs(basis_low), 1), tl.max(tl.abs(basis_high), 1))
    bits, divisor, _ = bf16_scale(largest, largest >= 0.0, 7)
    tl.store(scales + _column_scale(column, EACH), bits, mask=kept)
    # The scan multiplies what stands behind the last column by coefficients of 0, so it must be finite.
    behind = tl.arange(0, 8 if EACH == 8 else 16)
    tl.store(scales + _column_scale(behind, EACH), 0, mask=behind >= R)
    inverse = 1.0 / divisor
    low_level = round_half_even(basis_low * inverse[:, None])
    high_level = round_half_even(basis_high * inverse[:, None])
    low_level = tl.minimum(tl.maximum(low_level, -7.0), 7.0).to(tl.int32)
    high_level = tl.minimum(tl.maximum(high_level, -7.0), 7.0).to(tl.int32)
    tl.store(
        out + BASIS + column[:, None] * (D // 2) + half[None, :],
        ((low_level & 15) | ((high_level & 15) << 4)).to(tl.uint8),
        mask=kept[:, None] & inside[None, :],
    )

    coef = tl.where(kept[None, :], left * norm[None, :], 0.0)
    largest = tl.max(tl.abs(coef), 1)
    bits, divisor, _ = bf16_scale(largest, largest >= 0.0, 127)
    tl.store(scales + token % 8 // 2 * EACH + token // 8 * 2 + token % 2, bits)
    level = round_half_even(tl.div_rn(coef, divisor[:, None] + tl.zeros_like(coef)))
    level = tl.minimum(tl.maximum(level, -127.0), 127.0).to(tl.int8)
    even = (R + 1) // 2 * 2  # coefficients of the column behind an odd last one are 0
    at = (token % 8 * (even * 2) + token // 8 * 2)[:, None] + (column // 2 * 4 + column % 2)[None, :]
    tl.store(out.to(tl.pointer_type(tl.int8)) + COEF + at, level, mask=(column < even)[None, :])

    center = center_ptr + head * D + half
    mean_low -= tl.load(center, mask=inside, other=0.0)
    mean_high -= tl.load(center + D // 2, mask=inside, other=0.0)
    largest = tl.maximum(tl.max(tl.abs(mean_low), 0), tl.max(tl.abs(mean_high), 0))
    bits, divisor, usable = bf16_scale(largest, finite & (largest >= 0.0), 127)
    tl.store(scales + lane * EACH + 6, bits)
    mean = out.to(tl.pointer_type(tl.int8)) + MEAN + half
    _store_levels(mean, mean_low, divisor, usable, inside)
    _store_levels(mean + D // 2, mean_high, divisor, usable, inside)

    if VALUES:
        dim = tl.arange(0, DV_BLOCK)
        within = dim < DV
        values = tl.load(v_ptr + slots[:, None] * v_slot + head * v_head + dim[None, :], mask=within[None, :], other=0.0)
        value = tl.sum(values.to(tl.float32), 0) / 16.0
        usable = tl.sum((tl.abs(value) < float("inf")).to(tl.int32), 0) == DV_BLOCK
        bits, divisor, usable = bf16_scale(tl.max(tl.abs(value), 0), usable, 127)
        tl.store(scales + lane * EACH + 7, bits)
        _store_levels(value_ptr + (page * NUM_HEADS + head) * DV + dim, value, divisor, usable, within)
    if head == 0:
        tl.store(valid_ptr + page, 1)


@triton.jit
def _store_levels(at, x, divisor, usable, mask):
    """Store x / divisor as int8, zeros where it cannot be used."""
    level = round_half_even(tl.div_rn(tl.where(usable, x, 0.0), divisor + tl.zeros_like(x)))
    level = tl.minimum(tl.maximum(level, -127.0), 127.0)
    tl.store(at, level.to(tl.int8), mask=mask)


def layer_offsets(caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Where keys and values of several layers begin, in elements from those of the first one: int64 [L, 2], on their device.

    Args:
        caches: (k_cache, v_cache) of every layer, alike in dtype, shape and strides.

    Raises:
        ArgumentError: they are not alike, or do not begin a multiple of 16 elements apart.
    """
    offsets = []
    for layer in caches:
        for cache, first in zip(layer, caches[0], strict=True):
            require(
                (cache.dtype, cache.shape, cache.stride()) == (first.dtype, first.shape, first.stride()),
                f"caches of all layers must be like the first one's {first.dtype} {list(first.shape)}, "
                f"got {cache.dtype} {list(cache.shape)}",
            )
            apart = cache.data_ptr() - first.data_ptr()
            require(
                apart % (16 * first.element_size()) == 0,
                f"caches of layers must begin a multiple of {16 * first.element_size()} bytes apart, got {apart}",
            )
            offsets.append(apart // first.element_size())
    return torch.tensor(offsets, dtype=torch.int64, device=caches[0][0].device).view(-1, 2)


def build(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages: torch.Tensor,
    center: torch.Tensor,
    record: torch.Tensor,
    values: torch.Tensor | None,
    valid: torch.Tensor,
    layout: RecordLayout,
    offsets: torch.Tensor | None = None,
) -> None:
    """Write the summaries of physical pages, in one launch and without waiting for the device.

    Args:
        k_cache: float [slots, H, D]; v_cache: float [slots, H, Dv], innermost dimension contiguous.
        pages: int32 or int64 [n], physical pages; -1 for nothing to do.
        center: fp32 [H, D]. record: uint8 [N, H, record_bytes], contiguous. values: int8 [N, H, Dv], contiguous; None where the
            layout has none. valid: bool [N], contiguous, set for these pages.
        offsets: int64 [L, 2] for L layers at once, as `layer_offsets` makes them; then the caches are those of the first one,
            and `center`, `record`, `values` and `valid` are [L, ...].
    """
    heads = k_cache.shape[1]
    if pages.numel() == 0:
        return
    half = triton.next_power_of_2(layout.head_dim // 2)
    _build_pages[(pages.numel(), heads, 1 if offsets is None else len(offsets))](
        k_cache,
        v_cache,
        pages,
        center,
        record,
        record if values is None else values,
        valid.view(torch.uint8),
        pages if offsets is None else offsets,
        valid.shape[-1],
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        LAYERED=offsets is not None,
        NUM_HEADS=heads,
        HALF_BLOCK=max(16, half),
        DV=layout.v_head_dim,
        DV_BLOCK=triton.next_power_of_2(layout.v_head_dim),
        VALUES=values is not None,
        R_BLOCK=max(2, triton.next_power_of_2(layout.rank)),
        SWEEPS=SWEEPS,
        SMALL=SMALL,
        **layout.constants,
        num_warps=1 if half <= 64 else 4,  # one warp cannot hold a page of 256 dimensions
        maxnreg=255,  # left alone, the assembler aims for 168 registers and spills a few bytes
    )
