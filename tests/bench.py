"""A `LocksAttnBackend` on SGLang's real pools and attention layers, without a model."""

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from locks_sglang import LocksConfig
from locks_sglang.backend import LocksAttnBackend
from locks_sglang.kernels.common import PAGE_SIZE

LAYERS = 2
SLOTS = 4096


class Bench:
    """A backend over real pools, and sequences whose keys and values are known."""

    def __init__(
        self,
        *,
        page_size: int = 16,
        heads: int = 2,
        group: int = 3,
        head_dim: int = 64,
        dtype: torch.dtype = torch.float32,
        logit_cap: float = 0.0,
        budget_tokens: int = 8192,
        dense: type[TorchNativeAttnBackend] = TorchNativeAttnBackend,
        **settings: Any,
    ) -> None:
        self.page_size, self.heads, self.group, self.head_dim, self.dtype = page_size, heads, group, head_dim, dtype
        self.kv_pool = MHATokenToKVPool(
            SLOTS,
            page_size=page_size,
            dtype=dtype,
            head_num=heads,
            head_dim=head_dim,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.requests = ReqToTokenPool(size=8, max_context_len=2048, device="cpu", enable_memory_saver=False)
        self.layers = [
            RadixAttention(heads * group, head_dim, head_dim**-0.5, heads, layer_id=i, logit_cap=logit_cap)
            for i in range(LAYERS)
        ]
        runner = SimpleNamespace(
            token_to_kv_pool=self.kv_pool,
            req_to_token_pool=self.requests,
            device="cpu",
            dtype=dtype,
            model=torch.nn.ModuleList(self.layers),
        )
        self.config = LocksConfig(budget_tokens=budget_tokens, **settings)
        self.backend = LocksAttnBackend(runner, self.config, dense(runner))
        generator = torch.Generator().manual_seed(0)
        self.keys = torch.randn(8, LAYERS, 2048, heads, head_dim, generator=generator)
        self.values = torch.randn(8, LAYERS, 2048, heads, head_dim, generator=generator)
        self.queries = torch.randn(8, LAYERS, 2048, heads * group, head_dim, generator=generator)
        pages = torch.randperm(SLOTS // page_size - 1, generator=generator) + 1
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
        share = len(slots) // 8 // page_size * page_size
        for row in range(8):
            self.requests.req_to_token[row, :share] = slots[row * share : (row + 1) * share].int()

    def step(
        self,
        rows: list[int],
        prefixes: list[int],
        totals: list[int],
        mode: ForwardMode,
        requests: str | None = "request",
    ) -> list[torch.Tensor]:
        """Run tokens [prefix, total) of every row through every layer; outputs [tokens, Hq, D] by layer."""
        spans = [(r, p, t) for r, p, t in zip(rows, prefixes, totals, strict=True)]
        table = self.requests.req_to_token
        extend = [t - p for p, t in zip(prefixes, totals, strict=True)]
        batch = SimpleNamespace(
            forward_mode=mode,
            batch_size=len(rows),
            req_pool_indices=torch.tensor(rows),
            seq_lens=torch.tensor(totals),
            seq_lens_cpu=torch.tensor(totals),
            out_cache_loc=torch.cat([table[r, p:t] for r, p, t in spans]).long(),
            extend_prefix_lens=torch.tensor(prefixes),
            extend_seq_lens=torch.tensor(extend),
            extend_prefix_lens_cpu=prefixes,
            extend_seq_lens_cpu=extend,
            encoder_lens=None,
            rids=requests and [f"{requests} {r}" for r in rows],
        )
        self.backend.init_forward_metadata(batch)
        out = []
        for layer in self.layers:
            index = layer.layer_id
            q, k, v = (torch.cat([x[r, index, p:t] for r, p, t in spans]).to(self.dtype) for x in self.tensors)
            result = self.backend.forward(q.flatten(1), k, v, layer, batch)
            out.append(result.view(-1, self.heads * self.group, self.head_dim))
        return out

    def replay(self, rows: list[int], totals: list[int], size: int, *, in_capture: bool = False) -> list[torch.Tensor]:
        """Decode as SGLang's graph runner plans it, padded to `size` rows, with the table overwritten before the layers run."""
        padding, table = size - len(rows), self.requests.req_to_token
        slots = [table[r, t - 1] for r, t in zip(rows, totals, strict=True)]
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            num_padding=padding,
            req_pool_indices=torch.tensor(rows + [0] * padding),
            seq_lens=torch.tensor(totals + [self.backend.get_cuda_graph_seq_len_fill_value()] * padding),
            seq_lens_cpu=torch.tensor(totals + [1] * padding),
            out_cache_loc=torch.tensor([*slots, *[0] * padding]),
            encoder_lens=None,
        )
        self.backend.init_forward_metadata_out_graph(batch, in_capture=in_capture)
        self.backend.init_forward_metadata_in_graph(batch)
        kept = table.clone()
        table.fill_(7)
        out = []
        for layer in self.layers:
            q, k, v = (
                torch.stack([x[r, layer.layer_id, t - 1] for r, t in zip(rows, totals, strict=True)] or [x[0, 0, 0]])
                for x in self.tensors
            )
            q, k, v = (torch.cat((x, x[:1].expand(size, *x.shape[1:])))[:size].to(self.dtype) for x in (q, k, v))
            out.append(self.backend.forward(q.flatten(1), k, v, layer, batch).view(size, self.heads * self.group, -1))
        table.copy_(kept)
        return out

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.queries, self.keys, self.values

    def truth(self, row: int, position: int, layer: int) -> torch.Tensor:
        """Dense attention [Hq, D] of one token in fp64, from what the cache holds."""
        q, k, v = (x[row, layer].to(self.dtype).double() for x in self.tensors)
        keys = k[: position + 1].repeat_interleave(self.group, 1)
        values = v[: position + 1].repeat_interleave(self.group, 1)
        logits = torch.einsum("hd,thd->ht", q[position], keys) * self.head_dim**-0.5
        cap = self.layers[layer].logit_cap
        logits = cap * torch.tanh(logits / cap) if cap else logits
        return torch.einsum("ht,thd->hd", logits.softmax(-1), values)

    def complete_pages(self, row: int, tokens: int) -> torch.Tensor:
        """Physical pages of the complete pages of a row."""
        return self.requests.req_to_token[row, : tokens // PAGE_SIZE * PAGE_SIZE : PAGE_SIZE].long() // PAGE_SIZE
