"""`PageSummaries`: the summaries of N pages, packed or as fp32 factors."""

from dataclasses import dataclass

import torch

from ..common import PAGE_SIZE, require
from .record import PageFactors, RecordLayout, unpack


@dataclass(frozen=True)
class PageSummaries:
    """Summaries of N pages x H KV heads of one layer.

    Args:
        layout: sizes of the record.
        valid: bool [N]; a page that is not valid has no summary and is attended, never scored.
        center: fp32 [H, D], subtracted from every key mean before it is stored.
        record: uint8 [N, H, record_bytes], packed; or None. values: int8 [N, H, Dv], the value means that go with it, if the
            layout has them.
        factors: fp32 factors [N, H, ...], not quantised; or None. Exactly one of `record` and `factors` is given.
    """

    layout: RecordLayout
    valid: torch.Tensor
    center: torch.Tensor
    record: torch.Tensor | None = None
    values: torch.Tensor | None = None
    factors: PageFactors | None = None

    def __post_init__(self) -> None:
        require((self.record is None) != (self.factors is None), "give either record or factors, not both or neither")
        stored = self.record is not None and self.layout.value_mean
        require((self.values is not None) == stored, "give values with a record whose layout has value means, and only then")

    @property
    def num_pages(self) -> int:
        """N."""
        return self.valid.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """H."""
        return self.center.shape[0]

    @property
    def bytes_per_page(self) -> int:
        """Bytes that the summaries of one page, all H heads, take in memory."""
        if self.record is not None:
            return self.num_kv_heads * self.layout.summary_bytes
        n = self.layout
        floats = n.head_dim * (1 + n.rank) + PAGE_SIZE * n.rank + (n.v_head_dim if n.value_mean else 0)
        return self.num_kv_heads * floats * 4

    def gather(self, pages: torch.Tensor) -> PageFactors:
        """fp32 factors of physical pages int64 [B, N], leading shape [B, H, N]: what each KV head scans lies together."""
        head = torch.arange(self.num_kv_heads, device=pages.device)[:, None]
        at = (pages.unsqueeze(1), head)
        if self.record is not None:
            return unpack(self.record[at], None if self.values is None else self.values[at], self.layout)
        assert self.factors is not None
        f = self.factors
        value_mean = None if f.value_mean is None else f.value_mean[at]
        return PageFactors(f.mean[at], f.basis[at], f.coef[at], value_mean)

    def _all(self) -> PageFactors:
        if self.record is not None:
            return unpack(self.record, self.values, self.layout)
        assert self.factors is not None
        return self.factors

    @property
    def mu(self) -> torch.Tensor:
        """fp32 [N, H, D]: mean key of each page, as stored, the centre added back."""
        return self._all().mean + self.center

    @property
    def basis(self) -> torch.Tensor:
        """fp32 [N, H, D, R]: V_r."""
        return self._all().basis

    @property
    def coef(self) -> torch.Tensor:
        """fp32 [N, H, P, R]: U_r S_r."""
        return self._all().coef

    @property
    def value_mean(self) -> torch.Tensor:
        """fp32 [N, H, Dv]; `ArgumentError` where the layout does not store it."""
        value_mean = self._all().value_mean
        require(value_mean is not None, "these summaries store no value mean; build them with value_mean=True")
        assert value_mean is not None
        return value_mean
