"""What a decode step is planned into, and the reference of the plan, in torch on any device."""

from dataclasses import dataclass

import torch

from ..common import PAGE_SIZE


@dataclass(frozen=True)
class DecodeBuffers:
    """Private copy of what the layers of a decode step of B rows read; a CUDA graph keeps the addresses.

    Attributes:
        page_table: int32 [B, Nmax], logical to physical 16-token page; columns past a row's pages hold anything.
        seq_lens: int64 [B], tokens, the current one included.
        num_pages: int32 [B], pages of each row, the partial one included.
        filled: int64 [B], physical page that the current token completes, else -1.
        last_page_lens: int32 [B, H], tokens of the last page, once for every KV head.
    """

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    num_pages: torch.Tensor
    filled: torch.Tensor
    last_page_lens: torch.Tensor

    @classmethod
    def allocate(cls, batch: int, columns: int, heads: int, device: torch.device | str) -> "DecodeBuffers":
        """Buffers of `batch` rows of padding, which lie in page 0, with up to `columns` pages each."""
        return cls(
            page_table=torch.zeros(batch, columns, dtype=torch.int32, device=device),
            seq_lens=torch.ones(batch, dtype=torch.int64, device=device),
            num_pages=torch.ones(batch, dtype=torch.int32, device=device),
            filled=torch.full((batch,), -1, dtype=torch.int64, device=device),
            last_page_lens=torch.ones(batch, heads, dtype=torch.int32, device=device),
        )

    def rows(self, batch: int) -> "DecodeBuffers":
        """The first `batch` rows, as views."""
        return DecodeBuffers(
            self.page_table[:batch],
            self.seq_lens[:batch],
            self.num_pages[:batch],
            self.filled[:batch],
            self.last_page_lens[:batch],
        )


@dataclass(frozen=True)
class PageFlags:
    """What is known of every physical page, L layers and N pages.

    Attributes:
        valid: bool [L, N], whether the page has a summary.
        builds, reuses: int32 [N], builds and reuses since the page's first token was written.
        invalid: int64 [1], total of (layer, page) pairs that decode steps met without a summary.
    """

    valid: torch.Tensor
    builds: torch.Tensor
    reuses: torch.Tensor
    invalid: torch.Tensor


def plan(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    requests: int,
    out: DecodeBuffers,
    flags: PageFlags,
) -> None:
    """As `plan_decode`, without the checks."""
    batch, columns = out.page_table.shape
    column = torch.arange(columns, device=seq_lens.device)
    real = torch.arange(batch, device=seq_lens.device) < requests
    lens = torch.where(real, seq_lens.long(), 1)
    held = ((lens + PAGE_SIZE - 1) // PAGE_SIZE).clamp(max=columns)
    slots = req_to_token[:, : columns * PAGE_SIZE : PAGE_SIZE][torch.where(real, req_pool_indices.long(), 0)]
    pages = torch.where(real.unsqueeze(1), slots // PAGE_SIZE, 0)
    out.page_table.copy_(torch.where(column < held.unsqueeze(1), pages, out.page_table))
    out.seq_lens.copy_(lens)
    out.num_pages.copy_(held)
    out.last_page_lens.copy_(((lens - 1) % PAGE_SIZE + 1).unsqueeze(1))
    current = pages.long().gather(1, (held - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    fills = real & (lens % PAGE_SIZE == 0) & (lens > 0)
    out.filled.copy_(torch.where(fills, current, -1))

    begun = current[real & (lens % PAGE_SIZE == 1)]
    flags.valid[:, begun] = False
    flags.builds[begun] = 0
    flags.reuses[begun] = 0
    flags.builds[current[fills]] += 1
    # The layers of this very step summarise the page that it fills.
    complete = (lens // PAGE_SIZE - fills.long()).clamp(max=columns)
    scored = (column < complete.unsqueeze(1)) & real.unsqueeze(1)
    flags.invalid.add_((~flags.valid[:, pages[scored].long()]).sum())
