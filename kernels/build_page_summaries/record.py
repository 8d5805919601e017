"""The packed summary: its layout, and packing and unpacking in torch.

One record describes one (page, KV head). Sections follow each other without gaps; the record is padded to 64 bytes so
that a GPU reads it in whole sectors:

    basis        uint8 [R, D/2]   int4, two's complement; byte j of a column holds dims j (low) and j + D/2 (high)
    coef         int8  [P/2, ceil(R/2), 2, 2]   of token t and column j at (t % 8, j // 2, t // 8, j % 2); zeros follow where R
                       is odd. A lane of a tensor core takes four of them, so they lie in one word
    mean         int8  [D]        key mean less the layer's centre
    scales       bf16  [4, 8]     [4, 16] where R > 8. Row c: of tokens 2c, 2c + 1, 2c + 8, 2c + 9, of columns 2c, 2c + 1,
                       of the mean and of the value mean, of columns 2c + 8, 2c + 9; zeros where there is nothing

Scales stand in the order in which four lanes want them, and come last, so that at the usual head dimensions every long section
starts on 16 bytes.

The value mean, int8 [Dv], lies in an array of its own, its scale in the record: the scan, which reads every record, meets no
gaps, and the tail correction, which reads every value mean and learns the scales from the scan, none either.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from ..common import PAGE_SIZE, require

ALIGNMENT = 64


@dataclass(frozen=True)
class RecordLayout:
    """Byte offsets of the sections of one packed record.

    Args:
        head_dim: D, a multiple of 4.
        v_head_dim: Dv, even.
        rank: R, 1 to min(15, D): a centred page of 16 tokens has rank 15 at most.
        value_mean: whether there is a value mean, which the tail correction needs.
    """

    head_dim: int
    v_head_dim: int
    rank: int
    value_mean: bool = True

    def __post_init__(self) -> None:
        require(
            self.head_dim % 4 == 0 and self.v_head_dim % 2 == 0,
            f"head_dim must be a multiple of 4 and v_head_dim even, which keeps every bf16 scale of the record on an even "
            f"byte; got {self.head_dim} and {self.v_head_dim}",
        )
        limit = min(PAGE_SIZE - 1, self.head_dim)
        require(
            isinstance(self.rank, int) and 1 <= self.rank <= limit,
            f"rank must be a whole number from 1 to {limit} (min(P - 1, D)), got {self.rank!r}",
        )

    @cached_property
    def sections(self) -> dict[str, tuple[int, int]]:
        """Offset and length in bytes of every section, in order."""
        sizes = {
            "basis": self.rank * self.head_dim // 2,
            "coef": PAGE_SIZE * (self.rank + self.rank % 2),
            "mean": self.head_dim,
        }
        sizes["scales"] = 8 * self.scales_each
        offsets, at = {}, 0
        for name, size in sizes.items():
            offsets[name] = (at, size)
            at += size
        return offsets

    @property
    def scales_each(self) -> int:
        """Scales in each of the four rows."""
        return 8 if self.rank <= 8 else 16

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of one record, padding included."""
        used = sum(size for _, size in self.sections.values())
        return -(-used // ALIGNMENT) * ALIGNMENT

    @property
    def value_bytes(self) -> int:
        """Bytes of one value mean; 0 where there is none."""
        return self.v_head_dim if self.value_mean else 0

    @property
    def summary_bytes(self) -> int:
        """Bytes of one page and KV head in all."""
        return self.record_bytes + self.value_bytes

    @cached_property
    def constants(self) -> dict[str, int]:
        """What a kernel that reads or writes records is compiled with: sizes, and byte offsets of the sections."""
        offsets = {name.upper(): offset for name, (offset, _) in self.sections.items()}
        return offsets | {"RECORD": self.record_bytes, "D": self.head_dim, "R": self.rank, "EACH": self.scales_each}

    def empty(self, *lead: int, device: torch.device | str) -> "tuple[torch.Tensor, torch.Tensor | None]":
        """Room for packed summaries, all zero: records uint8 [..., record_bytes], value means int8 [..., Dv] or None."""
        record = torch.zeros(*lead, self.record_bytes, dtype=torch.uint8, device=device)
        values = torch.zeros(*lead, self.v_head_dim, dtype=torch.int8, device=device) if self.value_mean else None
        return record, values


@dataclass(frozen=True)
class PageFactors:
    """Summaries of some pages as fp32 tensors, with any leading shape [...].

    mean [..., D] is relative to the layer's centre; basis [..., D, R]; coef [..., P, R]; value_mean [..., Dv] or None.
    """

    mean: torch.Tensor
    basis: torch.Tensor
    coef: torch.Tensor
    value_mean: torch.Tensor | None


def quantize(x: torch.Tensor, dim: int, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric rounding along `dim` with one bf16 scale.

    Returns integers in [-levels, levels] as fp32, shaped like x, and the bf16 scale with `dim` reduced. The scale is
    rounded to bf16 before the division, so that what is stored is what was divided by. A scale of 0 gives zeros;
    a slice with a NaN or an Inf gives a NaN scale, which marks the estimate of that page alone as unusable.
    """
    scale = (x.abs().amax(dim, keepdim=True) / levels).to(torch.bfloat16)
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale)).float()
    finite = torch.isfinite(scale)
    q = torch.where(finite, (x / divisor).round().clamp(-levels, levels), 0.0).nan_to_num(0.0)
    nan = torch.full_like(scale, float("nan"))
    return q, torch.where(finite, scale, nan).squeeze(dim)


def _by_lane(coef: torch.Tensor) -> torch.Tensor:
    """Coefficients [..., P, R] in the order of the record, [..., P * (R + R % 2)]."""
    even = torch.nn.functional.pad(coef, (0, coef.shape[-1] % 2))
    split = even.unflatten(-1, (-1, 2)).unflatten(-3, (2, PAGE_SIZE // 2))
    return split.movedim(-4, -2).flatten(-4)


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """A bf16 or int8 tensor [..., n] as uint8 [..., bytes]."""
    return x.contiguous().view(torch.uint8)


def pack(factors: PageFactors, layout: RecordLayout) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantise factors with leading shape [...] into records uint8 [..., record_bytes] and value means int8 [..., Dv], or
    None."""
    half = layout.head_dim // 2
    basis, basis_scale = quantize(factors.basis.transpose(-1, -2), -1, 7)
    nibbles = basis.to(torch.int8).view(torch.uint8) & 15
    coef, coef_scale = quantize(factors.coef, -1, 127)
    mean, mean_scale = quantize(factors.mean, -1, 127)
    parts = {
        "basis": (nibbles[..., :half] | (nibbles[..., half:] << 4)).flatten(-2),
        "coef": _bytes_of(_by_lane(coef.to(torch.int8))),
        "mean": _bytes_of(mean.to(torch.int8)),
    }
    if layout.value_mean:
        require(factors.value_mean is not None, "the layout stores a value mean but none was given")
        value, value_scale = quantize(factors.value_mean, -1, 127)
    lead = factors.mean.shape[:-1]
    columns = torch.nn.functional.pad(basis_scale, (0, layout.scales_each - layout.rank)).unflatten(-1, (-1, 4, 2))
    scales = torch.zeros(*lead, 4, layout.scales_each, dtype=torch.bfloat16, device=factors.mean.device)
    scales[..., :4] = coef_scale.unflatten(-1, (2, 4, 2)).transpose(-3, -2).flatten(-2)
    scales[..., 4:6] = columns[..., 0, :, :]
    scales[..., 6] = mean_scale.unsqueeze(-1)
    if layout.value_mean:
        scales[..., 7] = value_scale.unsqueeze(-1)
    if layout.rank > 8:
        scales[..., 8:10] = columns[..., 1, :, :]
    parts["scales"] = _bytes_of(scales).flatten(-2)
    record, values = layout.empty(*lead, device=factors.mean.device)
    for name, (offset, size) in layout.sections.items():
        record[..., offset : offset + size] = parts[name]
    if values is not None:
        values.copy_(value)
    return record, values


def unpack(record: torch.Tensor, values: torch.Tensor | None, layout: RecordLayout) -> PageFactors:
    """fp32 factors [...] of packed records uint8 [..., record_bytes] and value means int8 [..., Dv], or None."""

    def section(name: str) -> torch.Tensor:
        offset, size = layout.sections[name]
        return record[..., offset : offset + size].contiguous()

    def int8(name: str) -> torch.Tensor:
        return section(name).view(torch.int8).float()

    lead = record.shape[:-1]
    scales = section("scales").view(torch.bfloat16).float().view(*lead, 4, layout.scales_each)
    of_columns = torch.cat((scales[..., 4:6].flatten(-2), scales[..., 8:10].flatten(-2)), -1)[..., : layout.rank]
    of_tokens = scales[..., :4].unflatten(-1, (2, 2)).transpose(-3, -2).flatten(-3)
    packed = section("basis").view(*lead, layout.rank, layout.head_dim // 2)
    nibbles = torch.cat((packed & 15, packed >> 4), -1)
    columns = ((nibbles << 4).view(torch.int8) >> 4).float()
    basis = (columns * of_columns.unsqueeze(-1)).transpose(-1, -2)
    by_lane = int8("coef").view(*lead, PAGE_SIZE // 2, (layout.rank + 1) // 2, 2, 2)
    coef = by_lane.movedim(-2, -4).flatten(-4, -3).flatten(-2)[..., : layout.rank] * of_tokens.unsqueeze(-1)
    mean = int8("mean") * scales[..., 0, 6:7]
    value_mean = None if values is None else values.float() * scales[..., 0, 7:8]
    return PageFactors(mean, basis, coef, value_mean)
