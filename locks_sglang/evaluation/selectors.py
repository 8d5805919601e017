"""Ways to score pages for selection: the exact oracle, the page summaries, and what they are compared with.

A selector gives, for every page, an estimate of its log-sum-exp; the product's own `select_pages` chooses from it, so that
selectors differ in nothing but their estimate. Letters as in `locks_sglang.ops`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.build_page_summaries import PageFactors, PageSummaries, RecordLayout
from ..kernels.build_page_summaries.record import ALIGNMENT, quantize
from ..kernels.common import PAGE_SIZE, gqa_queries, soft_cap
from ..ops import build_page_summaries, page_lse
from . import WIDTHS
from .calibration import fit_basis
from .capture import LayerCapture, LayerKeys

BF16_BYTES = 2

LEAST_WEIGHT = 0.01
"""Of a channel, where the mean of a KV head's channels is 1."""

LOCKS = "locks"
GLOBAL = "global sketch"
NOTHING_STORED = ("oracle", "random")
IN_SAMPLE = "global sketch, in sample"
OTHERS = (GLOBAL, "page mean", "min/max", "copy of the keys", "channels")
"""Families that the page basis is compared with. Not `IN_SAMPLE`, whose basis was fitted to what it is tried on."""

RANKS = (8, 4, 2, 1)
OTHER_WIDTHS = ((4, 4), (8, 4), (8, 8), (16, 4), (16, 8))
"""Bits of basis and coefficients beside those of the served record, (4, 8). 16 is bf16."""


@dataclass(frozen=True)
class Selector:
    """One way to score pages.

    Args:
        name: short and stable, for files.
        label: for tables.
        family: methods that differ in size alone.
        bytes_per_page: what the estimate reads of one page and KV head, in bytes, as it would be stored beside a bf16
            cache, padded to 64 like a packed record.
        page_lse: fp32 [B, Hq, N] of a layer: -inf past a query's pages, +inf where there is no estimate, as `ops.page_lse`.
            Takes `LayerKeys`, or `LayerCapture` where the method needs more of the layer than its keys.
    """

    name: str
    label: str
    family: str
    bytes_per_page: int
    page_lse: Callable[[Any], torch.Tensor]

    @property
    def bytes_per_token(self) -> float:
        """Of one KV head."""
        return self.bytes_per_page / PAGE_SIZE


def default_selectors(head_dim: int, v_head_dim: int, seed: int) -> list[Selector]:
    """The methods of the table, the oracle first.

    Args:
        head_dim, v_head_dim: D and Dv.
        seed: of whatever a method draws by lot.
    """
    locks = [locks_selector(rank, head_dim, v_head_dim) for rank in RANKS]
    widths = [locks_widths(rank, *bits, head_dim) for rank in RANKS for bits in OTHER_WIDTHS]
    shared = [global_sketch(8, 8, "same rank", seed)]
    sizes = {page_basis.bytes_per_page: f"bytes of {page_basis.label}" for page_basis in reversed(locks)}
    for bits in (8, 4):
        for size in sorted(sizes, reverse=True):
            shared.append(global_sketch(sketch_rank(size, bits, head_dim), bits, sizes[size], seed))
    for size in sorted(sizes, reverse=True)[:2]:
        shared.append(global_sketch(sketch_rank(size, 4, head_dim), 4, sizes[size], seed, in_sample=True))
    quarter = head_dim // 4
    return [
        oracle(head_dim),
        *locks,
        other_centre(8, head_dim, v_head_dim),
        *(locks_refitted(rank, head_dim) for rank in RANKS[:2]),
        *(locks_refitted(rank, head_dim, weighted=True) for rank in RANKS),
        *widths,
        page_mean(head_dim),
        min_max_bound(head_dim),
        *shared,
        keys_int4(head_dim),
        keys_int2(head_dim),
        keys_int2_by_channel(head_dim),
        channel_subset(quarter, 16),
        channel_subset(quarter, 4),
        channel_subset(sketch_rank(locks[1].bytes_per_page, 4, head_dim), 4),
        random_pages(seed),
    ]


def oracle(head_dim: int) -> Selector:
    """The ceiling of page selection: the exact log-sum-exp of every page, for which every key is read."""

    def score(layer: LayerKeys) -> torch.Tensor:
        return layer.exact_lse()

    return Selector("oracle", "exact-LSE oracle", "oracle", PAGE_SIZE * head_dim * BF16_BYTES, score)


def locks_selector(rank: int, head_dim: int, v_head_dim: int) -> Selector:
    """The page's own basis, in packed records: those that the server built, or, for other ranks, built with its centre.

    Bytes are those of a record without the value mean, which only the tail correction reads.
    """

    def score(layer: LayerCapture) -> torch.Tensor:
        return _summary_lse(layer, ranked_summaries(layer, rank))

    size = RecordLayout(head_dim, v_head_dim, rank, value_mean=False).summary_bytes
    return Selector(f"locks-r{rank}", f"locks r={rank}", LOCKS, size, score)


def ranked_summaries(layer: LayerCapture, rank: int) -> PageSummaries:
    """The records that the server built, or for another rank such as it would have built, value means included."""
    served = layer.summaries
    if served.layout.rank == rank:
        return served
    built = build_page_summaries(layer.keys, layer.values, rank, center=served.center, value_mean=served.layout.value_mean)
    return PageSummaries(built.layout, served.valid, built.center, record=built.record, values=built.values)


def other_centre(rank: int, head_dim: int, v_head_dim: int) -> Selector:
    """Records whose centre is the mean key of the calibration text, as on a server that saw that text first."""

    def score(layer: LayerCapture) -> torch.Tensor:
        center = layer.calibration.mean
        built = build_page_summaries(layer.keys, layer.values, rank, center=center, value_mean=False)
        return _summary_lse(layer, PageSummaries(built.layout, layer.summaries.valid, center, record=built.record))

    size = RecordLayout(head_dim, v_head_dim, rank, value_mean=False).summary_bytes
    return Selector(f"locks-r{rank}-centre", f"locks r={rank}, centre of other text", WIDTHS, size, score)


def locks_widths(rank: int, basis_bits: int, coef_bits: int, head_dim: int) -> Selector:
    """The page's own basis with other bits than the served record has, around the served centre; 16 stands for bf16."""

    def score(layer: LayerCapture) -> torch.Tensor:
        center = layer.summaries.center
        whole = build_page_summaries(layer.keys, layer.values, rank, quantize=False, center=center, value_mean=False)
        assert whole.factors is not None
        f = whole.factors
        basis = _rounded(f.basis.transpose(-1, -2), basis_bits).transpose(-1, -2)
        factors = PageFactors(_rounded(f.mean, 8), basis, _rounded(f.coef, coef_bits), None)
        return _summary_lse(layer, PageSummaries(whole.layout, layer.summaries.valid, center, factors=factors))

    told = {4: "int4", 8: "int8", 16: "bf16"}
    label = f"locks r={rank}, basis {told[basis_bits]}, coefficients {told[coef_bits]}"
    size = record_bytes(rank, basis_bits, coef_bits, head_dim)
    return Selector(f"locks-r{rank}-b{basis_bits}-c{coef_bits}", label, WIDTHS, size, score)


def locks_refitted(rank: int, head_dim: int, *, weighted: bool = False) -> Selector:
    """Served widths, but coefficients are fitted by least squares to the basis as it was rounded: no byte more, and nothing for
    the scan to do. An experiment of the evaluation.

    Args:
        weighted: also summarise k_i w_i instead of k_i, and multiply queries by 1 / w_i, with fixed weights for the channels of
            a KV head: what counts is the error of q.k, so channels in which queries are large deserve more of the rank and of
            the levels. w_i is the mean |q_i k_i| of the calibration text over the mean |k_i| of the prompt.
    """

    def score(layer: LayerCapture) -> torch.Tensor:
        center = layer.summaries.center
        weights = torch.ones_like(center)
        if weighted:
            tokens = layer.keys.flatten(0, 1)[: int(layer.seq_lens.max())]
            weights = layer.calibration.channels / tokens.abs().mean(0).clamp_min(torch.finfo(torch.float32).tiny)
            weights = weights / weights.mean(-1, keepdim=True)
            weights = weights.clamp_min(LEAST_WEIGHT)
        whole = build_page_summaries(
            layer.keys * weights, layer.values, rank, quantize=False, center=center * weights, value_mean=False
        )
        assert whole.factors is not None
        keys = (layer.keys * weights).transpose(1, 2)
        basis = _rounded(whole.factors.basis.transpose(-1, -2), 4).transpose(-1, -2)
        gram = basis.transpose(-1, -2) @ basis
        # A page of equal keys has columns that are zero: its coefficients stay zero.
        inverse = torch.linalg.pinv(gram, hermitian=True)
        coef = (keys - keys.mean(2, keepdim=True)) @ basis @ inverse
        # 1 / w_i goes to the factors here; a server would multiply each query by it once.
        mean = _rounded(whole.factors.mean, 8) / weights
        factors = PageFactors(mean, basis / weights.unsqueeze(-1), _rounded(coef, 8), None)
        return _summary_lse(layer, PageSummaries(whole.layout, layer.summaries.valid, center, factors=factors))

    size = record_bytes(rank, 4, 8, head_dim)
    if weighted:
        return Selector(f"locks-r{rank}-weighted", f"locks r={rank}, channels weighted by queries", WIDTHS, size, score)
    return Selector(f"locks-r{rank}-refitted", f"locks r={rank}, coefficients fitted to the rounded basis", WIDTHS, size, score)


def _rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x as it is read back from symmetric integers with one bf16 scale for the last dimension, or from bf16."""
    if bits == 16:
        return x.to(torch.bfloat16).float()
    integers, scale = quantize(x, -1, 2 ** (bits - 1) - 1)
    return integers * scale.float().unsqueeze(-1)


def record_bytes(rank: int, basis_bits: int, coef_bits: int, head_dim: int) -> int:
    """Bytes of a record like the packed one but for its bits: sections, scales and padding as there, no value mean."""
    layout = RecordLayout(head_dim, head_dim, rank, value_mean=False)
    scales = layout.sections["scales"][1]
    return _padded(rank * head_dim * basis_bits // 8 + PAGE_SIZE * (rank + rank % 2) * coef_bits // 8 + head_dim + scales)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _summary_lse(layer: LayerCapture, summaries: PageSummaries) -> torch.Tensor:
    return page_lse(
        layer.queries,
        summaries,
        layer.page_table,
        layer.num_pages,
        layer.sm_scale,
        seq_lens=layer.seq_lens,
        logit_cap=layer.logit_cap,
    )


def page_mean(head_dim: int) -> Selector:
    """One bf16 vector a page: as if every key were the mean of its page."""

    def score(layer: LayerKeys) -> torch.Tensor:
        mean = layer.keys.mean(1)
        logits = torch.einsum("bhgd,nhd->bhgn", _queries(layer), mean)
        return _as_page_lse(_logits(layer, logits) + math.log(PAGE_SIZE), layer)

    return Selector("page-mean", "page mean of keys", "page mean", head_dim * BF16_BYTES, score)


def min_max_bound(head_dim: int) -> Selector:
    """Quest: two bf16 vectors a page, the least and the greatest key in each dimension; a page scores the upper bound of
    its logits that they imply."""

    def score(layer: LayerKeys) -> torch.Tensor:
        return _as_page_lse(_logits(layer, logit_bound(_queries(layer), layer.keys)), layer)

    return Selector("min-max", "min/max bound (Quest)", "min/max", 2 * head_dim * BF16_BYTES, score)


def logit_bound(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Upper bound [B, H, G, N] of q.k over the tokens of each page: q [B, H, G, D], keys [N, P, H, D]."""
    least, greatest = keys.amin(1), keys.amax(1)
    return torch.einsum("bhgd,nhd->bhgn", queries.clamp_min(0.0), greatest) + torch.einsum(
        "bhgd,nhd->bhgn", queries.clamp_max(0.0), least
    )


def global_sketch(rank: int, bits: int, note: str, seed: int = 0, *, in_sample: bool = False) -> Selector:
    """One fixed basis a KV head, shared by all pages and fitted over the calibration text; coefficients a token.

    Coefficients take `bits` each and one bf16 scale a token. The basis and the mean of all keys are kept whole and, being
    shared by all pages, count no bytes.

    Args:
        note: what the label says of the size.
        seed: of the rotation that spreads each token evenly over its coefficients. Along principal directions the first
            few would set the scale, and four bits would lose the rest: on SmolLM2 the rotation gains up to 0.003 of mass.
        in_sample: fit the basis over the measured prompt itself instead, which no fixed basis can be.
    """

    def score(layer: LayerCapture) -> torch.Tensor:
        if in_sample:
            mean, basis = fit_basis(layer.keys.flatten(0, 1)[: int(layer.seq_lens.max())], rank)
        else:
            mean, basis = layer.calibration.mean, layer.calibration.directions[..., :rank]
        basis = basis @ _rotation(rank, seed).to(basis.device)
        coef = _rounded(torch.einsum("nphd,hdr->nphr", layer.keys - mean, basis), bits)
        queries = _queries(layer)
        projected = torch.einsum("bhgd,hdr->bhgr", queries, basis)
        return _token_lse(layer, projected, coef, _with_centre(queries, mean))

    label = f"global sketch r={rank} int{bits}, {note}"
    name, family = f"global-r{rank}-int{bits}", GLOBAL
    if in_sample:
        label, name, family = f"{label}, fitted in sample", f"{name}-in-sample", IN_SAMPLE
    return Selector(name, label, family, sketch_bytes(rank, bits), score)


def _rotation(size: int, seed: int) -> torch.Tensor:
    """A random orthogonal matrix fp32 [size, size]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=generator)).Q


def sketch_bytes(rank: int, bits: int) -> int:
    """Bytes of one page and KV head of a global sketch, padded as the packed records are."""
    return _padded(PAGE_SIZE * (rank * bits // 8 + BF16_BYTES))


def sketch_rank(size: int, bits: int, head_dim: int) -> int:
    """The largest rank, in whole bytes a token and at most D, of a global sketch that takes at most `size` bytes a page."""
    step = 8 // bits
    fitting = [rank for rank in range(step, head_dim + 1, step) if sketch_bytes(rank, bits) <= size]
    return fitting[-1]


def keys_int4(head_dim: int) -> Selector:
    """All keys in symmetric int4 with one bf16 scale a token, relative to the centre of the page records."""

    def score(layer: LayerCapture) -> torch.Tensor:
        queries, center = _queries(layer), layer.summaries.center
        return _token_lse(layer, queries, _rounded(layer.keys - center, 4), _with_centre(queries, center))

    size = _padded(PAGE_SIZE * (head_dim // 2 + BF16_BYTES))
    return Selector("keys-int4", "keys int4, a scale a token", "copy of the keys", size, score)


def keys_int2(head_dim: int) -> Selector:
    """All keys in asymmetric int2 with one bf16 scale and least value a token, relative to the centre of the page records."""

    def score(layer: LayerCapture) -> torch.Tensor:
        queries, center = _queries(layer), layer.summaries.center
        return _token_lse(layer, queries, _two_bits(layer.keys - center, -1), _with_centre(queries, center))

    size = _padded(PAGE_SIZE * (head_dim // 4 + 2 * BF16_BYTES))
    return Selector("keys-int2", "keys int2, scale and minimum a token", "copy of the keys", size, score)


def keys_int2_by_channel(head_dim: int) -> Selector:
    """All keys in asymmetric int2 with one bf16 scale and least value a channel of each page, as KIVI stores keys."""

    def score(layer: LayerCapture) -> torch.Tensor:
        queries = _queries(layer)
        return _token_lse(layer, queries, _two_bits(layer.keys, 1), torch.zeros_like(queries[..., 0]))

    size = _padded(PAGE_SIZE * head_dim // 4 + 2 * BF16_BYTES * head_dim)
    return Selector("keys-int2-channel", "keys int2, scale and minimum a channel of a page", "copy of the keys", size, score)


def _two_bits(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x as it is read back from four levels between the least and the greatest value along `dim`, both stored in bf16."""
    least = x.amin(dim, keepdim=True).to(torch.bfloat16).float()
    step = ((x.amax(dim, keepdim=True) - least) / 3).to(torch.bfloat16).float()
    levels = ((x - least) / torch.where(step > 0, step, 1.0)).round().clamp(0, 3)
    return least + levels * step


def channel_subset(count: int, bits: int) -> Selector:
    """Double Sparsity: `count` channels of every key, those of its KV head with the largest mean |q_i k_i| on the calibration
    text; in bf16, or in int4 with one bf16 scale a token and relative to the centre of the page records.

    Double Sparsity chooses tokens by these products; here a page's score is the log-sum-exp over its tokens.
    """

    def score(layer: LayerCapture) -> torch.Tensor:
        chosen = layer.calibration.channels.topk(count, -1).indices
        queries = _queries(layer)
        queries = queries.gather(-1, chosen[None, :, None].expand(*queries.shape[:3], count))
        keys = layer.keys.gather(-1, chosen.expand(*layer.keys.shape[:3], count))
        center = torch.zeros_like(keys[0, 0]) if bits == 16 else layer.summaries.center.gather(-1, chosen)
        return _token_lse(layer, queries, _rounded(keys - center, bits), _with_centre(queries, center))

    told = "bf16" if bits == 16 else f"int{bits}"
    size = _padded(PAGE_SIZE * (count * bits // 8 + (BF16_BYTES if bits < 16 else 0)))
    label = f"{count} channels {told} (Double Sparsity), chosen on other text"
    return Selector(f"channels-{count}-{told}", label, "channels", size, score)


def random_pages(seed: int) -> Selector:
    """Pages by lot, drawn for each layer, query and head; the same ones for the same seed."""

    def score(layer: LayerKeys) -> torch.Tensor:
        batch, heads, _ = layer.queries.shape
        generator = torch.Generator().manual_seed(seed * 1000 + layer.layer_id)
        lot = torch.rand(batch, heads, layer.keys.shape[0], generator=generator)
        return _as_page_lse(lot.to(layer.keys.device), layer)

    return Selector("random", "random pages", "random", 0, score)


def _token_lse(layer: LayerCapture, queries: torch.Tensor, tokens: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Marked estimates [B, Hq, N] from one estimated product a token: queries [B, H, G, C] with what a token keeps, tokens
    [N, P, H, C], and offset [B, H, G], which all tokens share."""
    products = torch.einsum("bhgc,nphc->bhgnp", queries, tokens) + offset[..., None, None]
    return _as_page_lse(torch.logsumexp(_logits(layer, products), -1), layer)


def _with_centre(queries: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
    """Products [B, H, G] of queries [B, H, G, C] with a centre [H, C]."""
    return torch.einsum("bhgc,hc->bhg", queries, center)


def _queries(layer: LayerKeys) -> torch.Tensor:
    return gqa_queries(layer.queries, layer.num_kv_heads, torch.float32)


def _logits(layer: LayerKeys, products: torch.Tensor) -> torch.Tensor:
    return soft_cap(layer.sm_scale * products, layer.logit_cap)


def _as_page_lse(estimate: torch.Tensor, layer: LayerKeys) -> torch.Tensor:
    """Estimates [B, H, G, N] or [B, Hq, N] with the marks of `ops.page_lse` at partial pages and past the request."""
    batch, heads, _ = layer.queries.shape
    estimate = estimate.reshape(batch, heads, -1)
    index = torch.arange(estimate.shape[-1], device=estimate.device)
    complete = (index < (layer.seq_lens // PAGE_SIZE).unsqueeze(1)).unsqueeze(1)
    listed = (index < layer.num_pages.unsqueeze(1)).unsqueeze(1)
    return torch.where(complete, estimate, torch.where(listed, torch.inf, -torch.inf))
