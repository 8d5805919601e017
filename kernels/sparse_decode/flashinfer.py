"""FlashInfer's paged decode over the selected pages of each (request, KV head).

A cache [slots, H, D] is seen as overlapping pages of one KV head: page `physical * 16 * H + h` holds the keys of head h in 16
consecutive slots. Every (request, KV head) is then a row of its own with G query heads and its own list of pages. FlashInfer
plans on the host from how many pages a row reads; which ones they are is read on the device when the kernel runs, so a
selection inside the same CUDA graph may write them.
"""

from typing import Any

import torch

from ..common import PAGE_SIZE
from .kernel import Parts


def pseudo_pages(cache: torch.Tensor) -> torch.Tensor:
    """View a contiguous cache [slots, H, D] as [slots * H - (P - 1) * H, P, 1, D] pages of one KV head."""
    slots, heads, dim = cache.shape
    return cache.as_strided(((slots - PAGE_SIZE + 1) * heads, PAGE_SIZE, 1, dim), (dim, heads * dim, dim, 1))


class FlashInferDecode:
    """Plans and runs of FlashInfer, for batches of up to `batch` rows. Addresses stay the same for good.

    Building one compiles FlashInfer's kernel where no compiled one is found.

    Args:
        batch: most rows of a step.
        heads, group, head_dim: H, G and D, the latter of keys and values alike.
        budget_pages: most pages of one (request, KV head).
        dtype: of queries and caches, bf16 or fp16.

    Attributes:
        indices: int32 [batch * H * budget_pages], pseudo pages; the selection of a step writes those of row (b, h) from
            H * (counts[0] + ... + counts[b - 1]) + h * counts[b] on, the partial page last.
        last_page_lens: int32 [batch, H], tokens of each row's last page; written after `plan`, before the step runs.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        group: int,
        head_dim: int,
        budget_pages: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.batch, self._heads = batch, heads
        rows = batch * heads
        self.indices = torch.zeros(rows * budget_pages, dtype=torch.int32, device=device)
        self.last_page_lens = torch.ones(batch, heads, dtype=torch.int32, device=device)
        self._indptr = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        # One scale for all layers; `run` multiplies it by the layer's own.
        self._shape: dict[str, Any] = {
            "num_qo_heads": group,
            "num_kv_heads": 1,
            "head_dim": head_dim,
            "page_size": PAGE_SIZE,
            "q_data_type": dtype,
            "kv_data_type": dtype,
            "sm_scale": 1.0,
        }
        self._workspaces = (torch.zeros(1 << 20, dtype=torch.uint8, device=device),) * 2
        needed = self._wrapper(batch).workspace_size(*self._lists((budget_pages,) * batch), **self._shape)
        self._workspaces = tuple(torch.zeros(max(size, 1 << 10), dtype=torch.uint8, device=device) for size in needed)
        self._wrappers: dict[int, Any] = {}
        self._counts: tuple[int, ...] = ()
        self._copied = torch.cuda.Event()
        self.plan((1,) * batch)

    def _wrapper(self, batch: int) -> Any:
        """A wrapper of FlashInfer for exactly `batch` rows. All of them share their buffers, since one is planned at a time."""
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._workspaces[0],
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=self._indptr[: batch * self._heads + 1],
            paged_kv_indices_buffer=self.indices,
            paged_kv_last_page_len_buffer=self.last_page_lens[:batch].view(-1),
            backend="fa2",
        )
        wrapper.reset_workspace_buffer(*self._workspaces)
        return wrapper

    def _lists(self, counts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Page lists as FlashInfer takes them: starts and lengths on the host, where it plans; the ids are not looked at."""
        each = torch.tensor(counts, dtype=torch.int32).repeat_interleave(self._heads)
        starts = torch.zeros(len(each) + 1, dtype=torch.int32)
        torch.cumsum(each, 0, dtype=torch.int32, out=starts[1:])
        return starts, self.indices[:0], torch.full_like(each, PAGE_SIZE)

    def plan(self, counts: tuple[int, ...]) -> None:
        """Plan a step whose rows read `counts` pages for each KV head; nothing to do where the last step had the same ones.

        Overwrites `last_page_lens`. Work of the host and copies to the device: outside a CUDA graph, on the step's stream.
        """
        if counts == self._counts:
            return
        wrapper = self._wrappers.get(len(counts))
        if wrapper is None:
            wrapper = self._wrappers[len(counts)] = self._wrapper(len(counts))
        # FlashInfer copies a plan from pinned memory that its next plan overwrites. That copy stands before the step that
        # it was made for, which the host is at most one ahead of: there is nothing to wait for in practice.
        self._copied.synchronize()
        self._counts = ()  # should planning fail half way, nothing is planned
        wrapper.plan(*self._lists(counts), **self._shape)
        self._copied.record()
        self._counts = counts

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sm_scale: float) -> Parts:
        """Attend to the pages in `indices` as planned.

        Args:
            q: [B, Hq, D], contiguous. k_cache, v_cache: [slots, H, D], contiguous. All of the planned dtype.
            sm_scale: factor on q.k.
        """
        batch, query_heads, dim = q.shape
        heads = self._heads
        # FlashInfer reads the lists' starts and lengths before it waits for the kernel in front of it.
        out, lse = self._wrappers[batch].run(
            q.view(batch * heads, query_heads // heads, dim),
            (pseudo_pages(k_cache), pseudo_pages(v_cache)),
            q_scale=sm_scale,
            return_lse=True,
            enable_pdl=False,
        )
        return Parts(lse.view(batch, heads, 1, -1), None, out.view(batch, heads, 1, query_heads // heads, dim), 1)
