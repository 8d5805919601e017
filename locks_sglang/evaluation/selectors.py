"""Ways to score pages for selection: the exact oracle, the page summaries, and what they are compared with.

A selector gives, for every page, an estimate of its log-sum-exp; the product's own `select_pages` chooses from it, so that
selectors differ in nothing but their estimate. Letters as in `locks_sglang.ops`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..kernels.build_page_summaries import PageSummaries, RecordLayout
from ..kernels.build_page_summaries.record import ALIGNMENT, quantize
from ..kernels.common import PAGE_SIZE, gqa_queries, soft_cap
from ..ops import build_page_summaries, page_lse
from .calibration import fit_basis
from .capture import LayerCapture

BF16_BYTES = 2


@dataclass(frozen=True)
class Selector:
    """One way to score pages.

    Args:
        name: short and stable, for files.
        label: for tables.
        bytes_per_page: what the estimate reads of one page and KV head, in bytes, as it would be stored beside a bf16
            cache.
        page_lse: fp32 [B, Hq, N] of a layer: -inf past a query's pages, +inf where there is no estimate, as `ops.page_lse`.
    """

    name: str
    label: str
    bytes_per_page: int
    page_lse: Callable[[LayerCapture], torch.Tensor]


def default_selectors(head_dim: int, v_head_dim: int, seed: int) -> list[Selector]:
    """The methods of the table, the oracle first.

    Args:
        head_dim, v_head_dim: D and Dv.
        seed: of whatever a method draws by lot.
    """
    locks = [locks_selector(rank, head_dim, v_head_dim) for rank in (8, 4, 2)]
    shared = [global_sketch(8, 8, "same rank", seed)]
    for page_basis in locks[:2]:
        rank = sketch_rank(page_basis.bytes_per_page, 4, head_dim)
        shared.append(global_sketch(rank, 4, f"bytes of {page_basis.label}", seed))
    return [oracle(head_dim), *locks, page_mean(head_dim), min_max_bound(head_dim), *shared, random_pages(seed)]


def oracle(head_dim: int) -> Selector:
    """The ceiling of page selection: the exact log-sum-exp of every page, for which every key is read."""

    def score(layer: LayerCapture) -> torch.Tensor:
        return layer.exact_lse()

    return Selector("oracle", "exact-LSE oracle", PAGE_SIZE * head_dim * BF16_BYTES, score)


def locks_selector(rank: int, head_dim: int, v_head_dim: int) -> Selector:
    """The page's own basis, in packed records: those that the server built, or, for other ranks, built with its centre.

    Bytes are those of a record without the value mean, which only the tail correction reads.
    """

    def score(layer: LayerCapture) -> torch.Tensor:
        summaries = layer.summaries
        if summaries.layout.rank != rank:
            built = build_page_summaries(layer.keys, layer.values, rank, center=summaries.center, value_mean=False)
            summaries = PageSummaries(built.layout, summaries.valid, built.center, record=built.record, values=built.values)
        return page_lse(
            layer.queries,
            summaries,
            layer.page_table,
            layer.num_pages,
            layer.sm_scale,
            seq_lens=layer.seq_lens,
            logit_cap=layer.logit_cap,
        )

    size = RecordLayout(head_dim, v_head_dim, rank, value_mean=False).summary_bytes
    return Selector(f"locks-r{rank}", f"locks r={rank}", size, score)


def page_mean(head_dim: int) -> Selector:
    """One bf16 vector a page: as if every key were the mean of its page."""

    def score(layer: LayerCapture) -> torch.Tensor:
        mean = layer.keys.mean(1)
        logits = torch.einsum("bhgd,nhd->bhgn", _queries(layer), mean)
        return _as_page_lse(_logits(layer, logits) + math.log(PAGE_SIZE), layer)

    return Selector("page-mean", "page mean of keys", head_dim * BF16_BYTES, score)


def min_max_bound(head_dim: int) -> Selector:
    """Quest: two bf16 vectors a page, the least and the greatest key in each dimension; a page scores the upper bound of
    its logits that they imply."""

    def score(layer: LayerCapture) -> torch.Tensor:
        return _as_page_lse(_logits(layer, logit_bound(_queries(layer), layer.keys)), layer)

    return Selector("min-max", "min/max bound (Quest)", 2 * head_dim * BF16_BYTES, score)


def logit_bound(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Upper bound [B, H, G, N] of q.k over the tokens of each page: q [B, H, G, D], keys [N, P, H, D]."""
    least, greatest = keys.amin(1), keys.amax(1)
    return torch.einsum("bhgd,nhd->bhgn", queries.clamp_min(0.0), greatest) + torch.einsum(
        "bhgd,nhd->bhgn", queries.clamp_max(0.0), least
    )


def global_sketch(rank: int, bits: int, note: str, seed: int = 0) -> Selector:
    """One basis a KV head, shared by all pages and fitted over all keys of the prompt; coefficients a token.

    Coefficients take `bits` each and one bf16 scale a token. The basis and the mean of all keys are kept whole and, being
    shared by all pages, count no bytes.

    Args:
        note: what the label says of the size.
        seed: of the rotation that spreads each token evenly over its coefficients. Along principal directions the first
            few would set the scale, and four bits would lose the rest: on SmolLM2 the rotation gains up to 0.003 of mass.
    """

    def score(layer: LayerCapture) -> torch.Tensor:
        tokens = layer.keys.flatten(0, 1)[: int(layer.seq_lens.max())]
        mean, basis = fit_basis(tokens, rank)
        basis = basis @ _rotation(rank, seed).to(basis.device)
        coef = torch.einsum("nphd,hdr->nphr", layer.keys - mean, basis)
        integers, scale = quantize(coef, -1, 2 ** (bits - 1) - 1)
        coef = integers * scale.float().unsqueeze(-1)
        queries = _queries(layer)
        projected = torch.einsum("bhgd,hdr->bhgr", queries, basis)
        logits = torch.einsum("bhgr,nphr->bhgnp", projected, coef)
        logits = logits + torch.einsum("bhgd,hd->bhg", queries, mean)[..., None, None]
        return _as_page_lse(torch.logsumexp(_logits(layer, logits), -1), layer)

    label = f"global sketch r={rank}, {note}"
    return Selector(f"global-r{rank}-int{bits}", label, sketch_bytes(rank, bits), score)


def _rotation(size: int, seed: int) -> torch.Tensor:
    """A random orthogonal matrix fp32 [size, size]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=generator)).Q


def sketch_bytes(rank: int, bits: int) -> int:
    """Bytes of one page and KV head of a global sketch, padded as the packed records are."""
    used = PAGE_SIZE * (rank * bits // 8 + BF16_BYTES)
    return -(-used // ALIGNMENT) * ALIGNMENT


def sketch_rank(size: int, bits: int, head_dim: int) -> int:
    """The largest rank, in whole bytes a token and at most D, of a global sketch that takes at most `size` bytes a page."""
    step = 8 // bits
    fitting = [rank for rank in range(step, head_dim + 1, step) if sketch_bytes(rank, bits) <= size]
    return fitting[-1]


def random_pages(seed: int) -> Selector:
    """Pages by lot, drawn for each layer, query and head; the same ones for the same seed."""

    def score(layer: LayerCapture) -> torch.Tensor:
        batch, heads, _ = layer.queries.shape
        generator = torch.Generator().manual_seed(seed * 1000 + layer.layer_id)
        lot = torch.rand(batch, heads, layer.keys.shape[0], generator=generator)
        return _as_page_lse(lot.to(layer.keys.device), layer)

    return Selector("random", "random pages", 0, score)


def _queries(layer: LayerCapture) -> torch.Tensor:
    return gqa_queries(layer.queries, layer.num_kv_heads, torch.float32)


def _logits(layer: LayerCapture, products: torch.Tensor) -> torch.Tensor:
    return soft_cap(layer.sm_scale * products, layer.logit_cap)


def _as_page_lse(estimate: torch.Tensor, layer: LayerCapture) -> torch.Tensor:
    """Estimates [B, H, G, N] or [B, Hq, N] with the marks of `ops.page_lse` at partial pages and past the request."""
    batch, heads, _ = layer.queries.shape
    estimate = estimate.reshape(batch, heads, -1)
    index = torch.arange(estimate.shape[-1], device=estimate.device)
    complete = (index < (layer.seq_lens // PAGE_SIZE).unsqueeze(1)).unsqueeze(1)
    listed = (index < layer.num_pages.unsqueeze(1)).unsqueeze(1)
    return torch.where(complete, estimate, torch.where(listed, torch.inf, -torch.inf))
