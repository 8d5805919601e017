"""Exact decode over listed pages, the tail correction, and the whole decode step against fp64."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import truth
from truth import (
    GROUPS,
    HEAD_DIMS,
    KEY_KINDS,
    LENGTHS,
    PAGE,
    Paged,
    all_pages,
    assert_close,
    assert_selection,
    cover,
    f64,
    generator,
    listed_pages,
    logit_size,
    make_paged,
    output_size,
)

from locks_sglang import LocksConfig
from locks_sglang.kernels.common import gather_pages
from locks_sglang.kernels.locks_decode import locks_decode_step
from locks_sglang.ops import (
    ArgumentError,
    PageSummaries,
    build_page_summaries,
    dense_decode,
    exact_page_lse,
    locks_decode,
    page_lse,
    sparse_decode,
)

TAILS = ("qmu", "flat", "off")
COMBINES = ("mass", "peak", "max")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def queries(kv: Paged, heads: int, gen: torch.Generator) -> torch.Tensor:
    """Normal queries fp32 [B, Hq, D], shortened where keys are long so that many tokens share the attention."""
    dim = kv.k_cache.shape[2]
    norms = kv.k_cache.float().norm(dim=-1)
    size = norms[norms.isfinite()].mean() / dim**0.5
    return torch.randn(len(kv.seq_lens), heads, dim, generator=gen) * min(1.0, 3.0 / float(size))


def choose(kv: Paged, most: int, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pages int32 [B, H, most], ascending, -1 padded, and counts [B]; now and then no page at all."""
    batch, kv_heads = len(kv.seq_lens), kv.k_cache.shape[1]
    pages = torch.full((batch, kv_heads, most), -1, dtype=torch.int32)
    counts = torch.zeros(batch, dtype=torch.int32)
    for b, held in enumerate(kv.num_pages.tolist()):
        counts[b] = int(torch.randint(min(held, most) + 1, (1,), generator=gen))
        for h in range(kv_heads):
            drawn = torch.randperm(held, generator=gen)[: counts[b]].sort().values
            pages[b, h, : counts[b]] = drawn.int()
    return pages, counts


def poison(kv: Paged, pages: torch.Tensor, counts: torch.Tensor, value: float = torch.nan) -> Paged:
    """A copy with `value` in every slot of a head that no request lists for that head."""
    keep = torch.zeros(kv.k_cache.shape[:2], dtype=torch.bool)
    for b, rows in enumerate(listed_pages(pages, counts)):
        for h, n in ((h, n) for h, row in enumerate(rows) for n in row):
            first = int(kv.page_table[b, n]) * PAGE
            keep[first : first + min(PAGE, int(kv.seq_lens[b]) - n * PAGE), h] = True
    caches = []
    for cache in (kv.k_cache, kv.v_cache):
        caches.append(torch.where(keep[..., None], cache.float(), value).to(cache.dtype))
    return kv._replace(k_cache=caches[0], v_cache=caches[1])


# --- exact attention over listed pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dim", "v_dim", "group", "kv_heads", "cache_dtype", "q_dtype", "cap"),
    cover(
        kind=KEY_KINDS,
        dim=HEAD_DIMS,
        v_dim=(64, 80, 128),
        group=GROUPS,
        kv_heads=(1, 2, 3),
        cache_dtype=(*FLOATS, *FP8),
        q_dtype=FLOATS,
        cap=(0.0, 8.0),
    ),
)
def test_sparse_decode(
    kind: str,
    dim: int,
    v_dim: int,
    group: int,
    kv_heads: int,
    cache_dtype: torch.dtype,
    q_dtype: torch.dtype,
    cap: float,
) -> None:
    """Every length in one batch, each head its own pages, NaN everywhere else."""
    gen = generator(dim + group + kv_heads)
    kv = make_paged(kind, [*LENGTHS, 0], kv_heads, dim, gen, v_dim, cache_dtype)
    pages, counts = choose(kv, 9, gen)
    kv = poison(kv, pages, counts)
    q = queries(kv, group * kv_heads, gen).to(q_dtype)
    scale, k_scale, v_scale = dim**-0.5, 0.75, 1.5
    out, lse = sparse_decode(
        q, kv.k_cache, kv.v_cache, kv.page_table, pages, counts, kv.seq_lens, scale,
        logit_cap=cap, k_scale=k_scale, v_scale=v_scale, return_lse=True,
    )  # fmt: skip
    only_out = sparse_decode(
        q, kv.k_cache, kv.v_cache, kv.page_table, pages, counts, kv.seq_lens, scale,
        logit_cap=cap, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip

    assert isinstance(only_out, torch.Tensor)
    assert torch.equal(out, only_out)
    assert out.dtype == q_dtype
    assert lse.dtype == torch.float32
    listed = listed_pages(pages, counts)
    expected, expected_lse = truth.attention(
        q, kv.k_cache, kv.v_cache, kv.page_table, listed, kv.seq_lens, scale, cap, k_scale, v_scale
    )
    logits = logit_size(q, kv.k_cache, scale * k_scale)
    assert_close(out, expected, size=v_scale * output_size(logits, kv.v_cache))
    assert_close(lse, expected_lse, size=logits)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("dtype", FLOATS)
def test_only_listed_tokens_are_read(value: float, dtype: torch.dtype) -> None:
    """Whatever lies in other pages, and past the end in the last page, the output has the same bits."""
    gen = generator(40)
    kv = make_paged("random", [*LENGTHS, 0], 2, 64, gen, dtype=dtype)
    pages, counts = choose(kv, 6, gen)
    for b, held in enumerate(kv.num_pages.tolist()):  # the last page is listed where any is: its tail is poisoned too
        if counts[b]:
            pages[b, :, counts[b] - 1] = held - 1
            pages[b, :, : counts[b]] = pages[b, :, : counts[b]].sort(-1).values
    clean = poison(kv, pages, counts, value=0.0)
    dirty = poison(kv, pages, counts, value=value)
    q = queries(clean, 8, gen)
    results = [
        sparse_decode(q, x.k_cache, x.v_cache, x.page_table, pages, counts, x.seq_lens, 0.125, return_lse=True)
        for x in (clean, dirty)
    ]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][0].isfinite().all()


def test_entries_that_are_not_listed_stay_in_their_own_request() -> None:
    """They are looked up as well, and masked later: what they touch must belong to the request, whatever they say."""
    table = torch.tensor([[7, 3, 5], [9, 2**30, -5], [-5, -5, 2**30]], dtype=torch.int32)
    pages = torch.tensor([[0, 2, -1], [0, 2**30, -7], [1, 2, -1]], dtype=torch.int32)
    listed = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    assert gather_pages(table, pages, listed).tolist() == [[7, 5, 7], [9, 9, 9], [0, 0, 0]]


def test_no_listed_page_gives_zero_and_minus_infinity() -> None:
    kv = make_paged("random", [100, 33], 2, 64, generator(41))
    q = torch.ones(2, 6, 64)
    pages = torch.tensor([[[-1, -1]] * 2, [[0, 2]] * 2], dtype=torch.int32)
    counts = torch.tensor([0, 2], dtype=torch.int32)
    out, lse = sparse_decode(q, kv.k_cache, kv.v_cache, kv.page_table, pages, counts, kv.seq_lens, 0.125, return_lse=True)
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()
    assert lse[1].isfinite().all()
    # What stands past counts is no page, whatever the number says.
    pages[0] = 1
    again = sparse_decode(q, kv.k_cache, kv.v_cache, kv.page_table, pages, counts, kv.seq_lens, 0.125)
    assert torch.equal(again, out)
    none, lse = sparse_decode(
        q, kv.k_cache, kv.v_cache, kv.page_table, pages[..., :0], 0 * counts, kv.seq_lens, 0.125, return_lse=True
    )
    assert (none == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("length", LENGTHS)
def test_all_pages_listed_is_dense(length: int) -> None:
    gen = generator(length)
    kv = make_paged("rope", [length], 2, 96, gen, v_dim=64)
    q = queries(kv, 6, gen)
    every = torch.arange(int(kv.num_pages), dtype=torch.int32).expand(1, 2, -1)
    sparse = sparse_decode(q, kv.k_cache, kv.v_cache, kv.page_table, every, kv.num_pages, kv.seq_lens, 0.1)
    dense = dense_decode(q, kv.k_cache, kv.v_cache, kv.page_table, kv.seq_lens, 0.1)
    size = output_size(logit_size(q, kv.k_cache, 0.1), kv.v_cache)
    expected, _ = truth.attention(q, kv.k_cache, kv.v_cache, kv.page_table, all_pages(kv.seq_lens, 2), kv.seq_lens, 0.1)
    assert_close(sparse, expected, size=size)
    assert_close(dense, expected, size=size)


@pytest.mark.parametrize(
    ("kind", "dim", "group", "q_dtype", "cache_dtype", "cap"),
    cover(kind=KEY_KINDS, dim=HEAD_DIMS, group=GROUPS, q_dtype=(*FLOATS, torch.float64), cache_dtype=FLOATS, cap=(0.0, 8.0)),
)
def test_dense_decode(kind: str, dim: int, group: int, q_dtype: torch.dtype, cache_dtype: torch.dtype, cap: float) -> None:
    """fp32 whatever the inputs, fp64 where the query is."""
    gen = generator(dim + group)
    kv = make_paged(kind, [*LENGTHS, 0], 2, dim, gen, dim + 8, cache_dtype)
    q = queries(kv, 2 * group, gen).to(q_dtype)
    out = dense_decode(q, kv.k_cache, kv.v_cache, kv.page_table, kv.seq_lens, dim**-0.5, logit_cap=cap)
    assert out.dtype == (torch.float64 if q_dtype == torch.float64 else torch.float32)
    expected, _ = truth.attention(
        q, kv.k_cache, kv.v_cache, kv.page_table, all_pages(kv.seq_lens, 2), kv.seq_lens, dim**-0.5, cap
    )
    assert_close(out, expected, size=output_size(logit_size(q, kv.k_cache, dim**-0.5), kv.v_cache))


def test_strided_caches_and_queries() -> None:
    """Keys and values interleaved in one buffer, heads of a wider row: as SGLang's pools and fused projections hold them."""
    gen = generator(42)
    kv = make_paged("random", [100, 31, 48], 3, 64, gen, v_dim=96)
    pages, counts = choose(kv, 4, gen)
    q = torch.randn(3, 12, 64, generator=gen)
    slots = kv.k_cache.shape[0]
    both = torch.full((slots, 7, 2, 112), torch.nan)
    both[:, 1:7:2, 0, 8:72] = kv.k_cache
    both[:, 0:6:2, 1, 5:101] = kv.v_cache
    wide_q = torch.full((3, 40, 80), torch.nan)
    wide_q[:, 3:27:2, 7:71] = q
    wide_pages = torch.full((3, 3, 20), 2**30, dtype=torch.int32)
    wide_pages[..., 2:10:2] = pages
    wide_table = torch.full((3, 2 * kv.page_table.shape[1]), -9, dtype=torch.int32)
    wide_table[:, ::2] = kv.page_table
    views = (wide_q[:, 3:27:2, 7:71], both[:, 1:7:2, 0, 8:72], both[:, 0:6:2, 1, 5:101], wide_table[:, ::2])
    assert not any(x.is_contiguous() for x in views)
    strided = sparse_decode(*views, wide_pages[..., 2:10:2], counts.long(), kv.seq_lens.long(), 0.125)
    plain = sparse_decode(q, kv.k_cache, kv.v_cache, kv.page_table, pages, counts, kv.seq_lens, 0.125)
    assert torch.equal(strided, plain)

    s = build_page_summaries(*kv.pages, 8)
    config = LocksConfig(budget_tokens=48)
    strided = locks_decode(*views[:3], s, views[3], kv.seq_lens, 0.125, config)
    plain = locks_decode(q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, 0.125, config)
    assert torch.equal(strided, plain)


# --- the whole step -------------------------------------------------------------------------------------------------------


def summaries_and_factors(
    kv: Paged, rank: int, quantize: bool, center: torch.Tensor | None = None
) -> tuple[PageSummaries, truth.Factors]:
    """Summaries and what they say in fp64: the record decoded on its own, or the fp32 factors as they are."""
    s = build_page_summaries(*kv.pages, rank, quantize=quantize, center=center)
    if s.record is not None:
        dim, v_dim = kv.k_cache.shape[2], kv.v_cache.shape[2]
        return s, truth.decode_record(s.record, s.values, dim, v_dim, rank, s.center)[0]
    return s, truth.Factors(f64(s.mu), f64(s.basis), f64(s.coef), f64(s.value_mean))


@pytest.mark.parametrize(
    ("kind", "dim", "v_dim", "group", "kv_heads", "tail", "combine", "rank", "quantize", "budget", "kept", "q_dtype", "cap"),
    cover(
        kind=KEY_KINDS,
        dim=HEAD_DIMS,
        v_dim=(64, 80),
        group=GROUPS,
        kv_heads=(1, 2, 3),
        tail=TAILS,
        combine=COMBINES,
        rank=range(1, 16),
        quantize=(True, False),
        budget=(64, 112, 512),
        kept=((1, 1), (0, 1), (1, 2)),
        q_dtype=FLOATS,
        cap=(0.0, 8.0),
    ),
)
def test_locks_decode(
    kind: str,
    dim: int,
    v_dim: int,
    group: int,
    kv_heads: int,
    tail: str,
    combine: str,
    rank: int,
    quantize: bool,
    budget: int,
    kept: tuple[int, int],
    q_dtype: torch.dtype,
    cap: float,
) -> None:
    """Scores, selection and output, each against the truth on what the stage before it returned."""
    gen = generator(dim * rank + group + budget)
    kv = make_paged(kind, [*LENGTHS, 0, 512], kv_heads, dim, gen, v_dim)
    q = queries(kv, group * kv_heads, gen).to(q_dtype)
    center = kv.k_cache.nanmean(0)
    s, f = summaries_and_factors(kv, rank, quantize, center)
    sink, recent = kept
    config = LocksConfig(
        rank=rank, budget_tokens=budget, sink_pages=sink, recent_pages=recent, combine=combine, tail_correction=tail
    )
    scale = dim**-0.5
    step = locks_decode_step(q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, scale, config, logit_cap=cap)
    out = locks_decode(q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, scale, config, logit_cap=cap)

    logits = logit_size(q, kv.k_cache, scale) + 2 * logit_size(q, center, scale)
    expected = truth.page_scores(f, q, kv.page_table, kv.num_pages, scale, seq_lens=kv.seq_lens, cap=cap)
    assert_close(step.scores.lse, expected.lse, size=logits)
    assert_selection(
        step.pages, step.counts, step.scores.lse, kv.num_pages.tolist(), config.budget_pages, sink, recent, combine
    )
    listed = listed_pages(step.pages, step.counts)
    wanted, lse = truth.attention(q, kv.k_cache, kv.v_cache, kv.page_table, listed, kv.seq_lens, scale, cap)
    if tail != "off":
        wanted = truth.merge_tail(wanted, lse, listed, expected.log_weight[tail], f, kv.page_table)
    assert out.dtype == q_dtype
    assert torch.equal(out, step.out.to(q_dtype))
    assert_close(out, wanted, size=output_size(logits, kv.v_cache))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("quantize", [True, False])
def test_a_budget_that_holds_everything_is_dense(tail: str, quantize: bool) -> None:
    """Every length from 1 token to two pages past a small budget: dense up to the budget, sparse from the next token on."""
    budget, gen = 64, generator(43)
    lengths = list(range(1, budget + 2 * PAGE + 1))
    kv = make_paged("random", lengths, 2, 64, gen)
    q = 2 * torch.randn(len(lengths), 6, 64, generator=gen)
    s = build_page_summaries(*kv.pages, 2, quantize=quantize)
    config = LocksConfig(rank=2, budget_tokens=budget, tail_correction=tail)
    step = locks_decode_step(q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, 0.125, config)
    dense = dense_decode(q, kv.k_cache, kv.v_cache, kv.page_table, kv.seq_lens, 0.125)

    listed = listed_pages(step.pages, step.counts)
    for b, length in enumerate(lengths):
        assert (listed[b] == all_pages(kv.seq_lens, 2)[b]) == (length <= budget), length
    fits = torch.tensor(lengths) <= budget
    size = output_size(logit_size(q, kv.k_cache, 0.125), kv.v_cache)
    assert_close(step.out[fits], f64(dense[fits]), size=size)
    differs = (step.out - dense).abs().amax((1, 2)) > 1e-3
    assert differs[~fits].all()


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("length", LENGTHS)
def test_default_budget_is_dense_on_short_requests(tail: str, length: int) -> None:
    gen = generator(44)
    kv = make_paged("rope", [length], 1, 128, gen)
    q = queries(kv, 7, gen)
    config = LocksConfig(tail_correction=tail)
    s = build_page_summaries(*kv.pages, config.rank)
    out = locks_decode(q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, 0.09, config)
    dense = dense_decode(q, kv.k_cache, kv.v_cache, kv.page_table, kv.seq_lens, 0.09)
    assert_close(out, f64(dense), size=output_size(logit_size(q, kv.k_cache, 0.09), kv.v_cache))


@pytest.mark.parametrize("tail", ["qmu", "flat"])
def test_tail_is_exact_where_pages_are_constant(tail: str) -> None:
    """Pages of one key and one value each: their mass and mean are the truth, so reading few pages gives dense attention."""
    gen = generator(45)
    kv = make_paged("random", [1000, 400], 2, 64, gen)
    table, lengths = kv.page_table, kv.seq_lens.tolist()
    for b, length in enumerate(lengths):
        for n in range(length // PAGE):
            first = int(table[b, n]) * PAGE
            kv.k_cache[first : first + PAGE] = kv.k_cache[first].clone()
            kv.v_cache[first : first + PAGE] = kv.v_cache[first].clone()
    q = torch.randn(2, 8, 64, generator=gen)
    s = build_page_summaries(*kv.pages, 3, quantize=False)
    config = LocksConfig(rank=3, budget_tokens=64, tail_correction=tail)
    out = locks_decode(q, kv.k_cache, kv.v_cache, s, table, kv.seq_lens, 0.125, config)
    dense = dense_decode(q, kv.k_cache, kv.v_cache, table, kv.seq_lens, 0.125)
    uncorrected = locks_decode(
        q, kv.k_cache, kv.v_cache, s, table, kv.seq_lens, 0.125, LocksConfig(rank=3, budget_tokens=64, tail_correction="off")
    )
    assert_close(out, f64(dense), size=output_size(logit_size(q, kv.k_cache, 0.125), kv.v_cache))
    assert (uncorrected - dense).abs().max() > 0.1


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("quantize", [True, False])
def test_no_key_outside_the_selection_is_read(tail: str, value: float, quantize: bool) -> None:
    """Poison every other slot once the summaries are built: selection and output keep their bits."""
    gen = generator(46)
    kv = make_paged("rope", [*LENGTHS, 640], 2, 64, gen)
    q = queries(kv, 6, gen)
    s = build_page_summaries(*kv.pages, 8, quantize=quantize)
    config = LocksConfig(budget_tokens=80, tail_correction=tail)
    before = locks_decode_step(q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, 0.125, config)
    dirty = poison(kv, before.pages, before.counts, value)
    after = locks_decode_step(q, dirty.k_cache, dirty.v_cache, s, kv.page_table, kv.seq_lens, 0.125, config)
    assert torch.equal(after.pages, before.pages)
    assert torch.equal(after.out, before.out)
    assert after.out.isfinite().all()


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("where", ["keys", "values"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("quantize", [True, False])
def test_a_bad_page_of_one_request_leaves_the_others_alone(tail: str, where: str, value: float, quantize: bool) -> None:
    """NaN or Inf in one page: other requests keep their bits; its own selection stays well formed."""
    gen = generator(47)
    lengths = [500, 640, 333]
    kv = make_paged("random", lengths, 2, 64, gen)
    q = torch.randn(3, 6, 64, generator=gen)
    config = LocksConfig(budget_tokens=80, tail_correction=tail)

    def step(kv: Paged) -> Any:
        s = build_page_summaries(*kv.pages, 8, quantize=quantize)
        return locks_decode_step(q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, 0.125, config)

    clean = step(kv)
    for page in (0, 7, 39):  # sink, scored, most recent
        bad = kv._replace(k_cache=kv.k_cache.clone(), v_cache=kv.v_cache.clone())
        cache = bad.k_cache if where == "keys" else bad.v_cache
        cache[int(kv.page_table[1, page]) * PAGE + 3, 1, 5] = value
        result = step(bad)
        for b in (0, 2):
            assert torch.equal(result.out[b], clean.out[b])
            assert torch.equal(result.pages[b], clean.pages[b])
        assert torch.equal(result.out[1, :3], clean.out[1, :3])  # its other KV head
        assert_selection(result.pages, result.counts, result.scores.lse, kv.num_pages.tolist(), 5, 1, 1, "mass")
        if where == "keys" and page == 7:
            assert 7 not in result.pages[1, 1].tolist()  # no estimate that can be compared: never chosen by score
            assert result.out[1].isfinite().all()


@pytest.mark.parametrize("tail", TAILS)
def test_pages_without_a_summary_are_attended_and_not_estimated(tail: str) -> None:
    gen = generator(48)
    kv = make_paged("random", [320, 96], 2, 64, gen)
    q = torch.randn(2, 6, 64, generator=gen)
    s, f = summaries_and_factors(kv, 4, quantize=True)
    missing = [5, 6, 11, 13]
    s.valid[kv.page_table[0, missing].long()] = False
    assert s.record is not None
    assert s.values is not None
    s.record[kv.page_table[0, missing].long()] = 255
    s.values[kv.page_table[0, missing].long()] = 127
    config = LocksConfig(rank=4, budget_tokens=80, tail_correction=tail)
    step = locks_decode_step(q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, 0.125, config)
    assert step.pages[0].tolist() == [[0, 5, 6, 11, 19]] * 2  # page 13 is left: more such pages than the budget holds
    expected = truth.page_scores(f, q, kv.page_table, kv.num_pages, 0.125, seq_lens=kv.seq_lens, valid=s.valid.tolist())
    listed = listed_pages(step.pages, step.counts)
    wanted, lse = truth.attention(q, kv.k_cache, kv.v_cache, kv.page_table, listed, kv.seq_lens, 0.125)
    if tail != "off":
        wanted = truth.merge_tail(wanted, lse, listed, expected.log_weight[tail], f, kv.page_table)
    assert_close(step.out, wanted, size=output_size(logit_size(q, kv.k_cache, 0.125), kv.v_cache))


@pytest.mark.parametrize("tail", TAILS)
def test_newest_page_that_is_being_built(tail: str) -> None:
    """Full or not it is read and not scored, whatever its record and its flag say."""
    kv = make_paged("random", [320, 97, 33], 2, 64, generator(50))
    q = torch.randn(3, 6, 64, generator=generator(51))
    s, _ = summaries_and_factors(kv, 4, quantize=True)
    config = LocksConfig(rank=4, budget_tokens=80, tail_correction=tail)
    arguments = (q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, 0.125, config)
    truth.assert_newest_pages_are_not_scored(kv, s, lambda: locks_decode_step(*arguments, newest_unbuilt=True))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", FP8)
def test_scaled_fp8_cache(tail: str, dtype: torch.dtype) -> None:
    """Summaries describe keys and values as they are stored: the scales reach the scores and the value means too."""
    gen = generator(49)
    k_scale, v_scale, scale = 3.0, 0.25, 0.125
    kv = make_paged("random", [400, 333], 2, 64, gen, dtype=dtype)
    stored = kv._replace(k_cache=kv.k_cache.float(), v_cache=kv.v_cache.float())
    q = torch.randn(2, 6, 64, generator=gen)
    s, f = summaries_and_factors(stored, 8, quantize=True)
    config = LocksConfig(budget_tokens=80, tail_correction=tail)
    step = locks_decode_step(
        q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, scale, config, k_scale=k_scale, v_scale=v_scale
    )
    expected = truth.page_scores(f, q, kv.page_table, kv.num_pages, scale * k_scale, seq_lens=kv.seq_lens)
    logits = logit_size(q, kv.k_cache, scale * k_scale)
    assert_close(step.scores.lse, expected.lse, size=logits)
    listed = listed_pages(step.pages, step.counts)
    wanted, lse = truth.attention(q, kv.k_cache, kv.v_cache, kv.page_table, listed, kv.seq_lens, scale, 0.0, k_scale, v_scale)
    if tail != "off":
        wanted = truth.merge_tail(wanted, lse, listed, expected.log_weight[tail], f, kv.page_table, v_scale)
    assert_close(step.out, wanted, size=v_scale * output_size(logits, kv.v_cache))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("size", [1e-3, 1e2, 1e4])
def test_extreme_logits_do_not_overflow(tail: str, size: float) -> None:
    """Logits from a thousandth to tens of thousands: e^logit itself is never formed."""
    gen = generator(50)
    kv = make_paged("random", [400, 333], 2, 64, gen)
    q = size * torch.randn(2, 6, 64, generator=gen)
    s, f = summaries_and_factors(kv, 8, quantize=True)
    config = LocksConfig(budget_tokens=80, tail_correction=tail)
    step = locks_decode_step(q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, 0.125, config)
    expected = truth.page_scores(f, q, kv.page_table, kv.num_pages, 0.125, seq_lens=kv.seq_lens)
    listed = listed_pages(step.pages, step.counts)
    wanted, lse = truth.attention(q, kv.k_cache, kv.v_cache, kv.page_table, listed, kv.seq_lens, 0.125)
    if tail != "off":
        wanted = truth.merge_tail(wanted, lse, listed, expected.log_weight[tail], f, kv.page_table)
    assert_close(step.out, wanted, size=output_size(logit_size(q, kv.k_cache, 0.125), kv.v_cache))


@pytest.mark.parametrize("tail", TAILS)
def test_fp64_queries(tail: str) -> None:
    """Attention and merge in fp64, the scan in fp32: the output follows the query's type."""
    gen = generator(51)
    kv = make_paged("random", [400], 2, 64, gen)
    q = torch.randn(1, 6, 64, generator=gen)
    s = build_page_summaries(*kv.pages, 8)
    config = LocksConfig(budget_tokens=80, tail_correction=tail)
    out = locks_decode(q.double(), kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, 0.125, config)
    single = locks_decode(q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, 0.125, config)
    assert out.dtype == torch.float64
    assert_close(single, f64(out), size=output_size(logit_size(q, kv.k_cache, 0.125), kv.v_cache))


def test_without_tail_no_value_mean_is_needed() -> None:
    gen = generator(52)
    kv = make_paged("random", [400, 100], 2, 64, gen, v_dim=80)
    q = torch.randn(2, 6, 64, generator=gen)
    config = LocksConfig(budget_tokens=80, tail_correction="off")
    for quantize in (True, False):
        outputs = [
            locks_decode(
                q,
                kv.k_cache,
                kv.v_cache,
                build_page_summaries(*kv.pages, 8, value_mean=value_mean, quantize=quantize),
                kv.page_table,
                kv.seq_lens,
                0.125,
                config,
            )
            for value_mean in (True, False)
        ]
        assert torch.equal(*outputs)


def test_requests_do_not_depend_on_their_batch() -> None:
    """A request alone and among others: same pages, same output to rounding."""
    gen = generator(53)
    kv = make_paged("rope", LENGTHS, 2, 64, gen)
    q = queries(kv, 6, gen)
    s = build_page_summaries(*kv.pages, 8)
    config = LocksConfig(budget_tokens=64)
    together = locks_decode_step(q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, 0.125, config)
    size = output_size(logit_size(q, kv.k_cache, 0.125), kv.v_cache)
    for b in range(len(LENGTHS)):
        table = kv.page_table[b : b + 1, : int(kv.num_pages[b])]
        alone = locks_decode_step(q[b : b + 1], kv.k_cache, kv.v_cache, s, table, kv.seq_lens[b : b + 1], 0.125, config)
        # A narrower page table leaves room for fewer pages; what the wider one has beyond is padding.
        width = alone.pages.shape[2]
        assert torch.equal(alone.pages[0], together.pages[b, :, :width])
        assert (together.pages[b, :, width:] == -1).all()
        assert_close(alone.out[0], f64(together.out[b]), size=size)


@pytest.mark.parametrize("tail", ["qmu", "flat", "off"])
def test_page_table_without_columns(tail: str) -> None:
    """A batch in which no request has a page: output 0, log-sum-exp -inf."""
    kv = make_paged("random", [48], 2, 64, generator(54))
    q = torch.ones(3, 4, 64)
    none, lengths = torch.zeros(3, 0, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    s = build_page_summaries(*kv.pages, 4)
    assert page_lse(q, s, none, lengths, 0.125).shape == (3, 4, 0)
    out, lse = sparse_decode(
        q, kv.k_cache, kv.v_cache, none, torch.zeros(3, 2, 0, dtype=torch.int32), lengths, lengths, 0.125, return_lse=True
    )
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    config = LocksConfig(rank=4, tail_correction=tail)
    assert (locks_decode(q, kv.k_cache, kv.v_cache, s, none, lengths, 0.125, config) == 0).all()


@pytest.mark.parametrize("tail", ["qmu", "flat", "off"])
def test_empty_batch(tail: str) -> None:
    kv = make_paged("random", [48], 2, 64, generator(55))
    s, q = build_page_summaries(*kv.pages, 4), torch.zeros(0, 4, 64)
    table, lengths = kv.page_table[:0], kv.seq_lens[:0]
    assert page_lse(q, s, table, lengths, 0.125).shape == exact_page_lse(q, kv.k_cache, table, lengths, 0.125).shape
    assert dense_decode(q, kv.k_cache, kv.v_cache, table, lengths, 0.125).shape == (0, 4, 64)
    config = LocksConfig(rank=4, tail_correction=tail)
    assert locks_decode(q, kv.k_cache, kv.v_cache, s, table, lengths, 0.125, config).shape == (0, 4, 64)


# --- refusals -------------------------------------------------------------------------------------------------------------

KV = make_paged("random", [48, 32], 2, 64, generator(60), v_dim=32)
GIVEN: dict[str, Any] = {
    "q": torch.zeros(2, 4, 64),
    "k_cache": KV.k_cache,
    "v_cache": KV.v_cache,
    "page_table": KV.page_table,
    "seq_lens": KV.seq_lens,
    "sm_scale": 0.125,
}
SELECTED: dict[str, Any] = {
    "pages": torch.zeros(2, 2, 3, dtype=torch.int32),
    "counts": torch.ones(2, dtype=torch.int32),
}
WHOLE: dict[str, Any] = {"s": build_page_summaries(*KV.pages, 4), "config": LocksConfig(rank=4)}


def on_meta(s: PageSummaries) -> PageSummaries:
    """The same on a device that nothing else is on."""
    tensors = {name: each.to("meta") for name, each in vars(s).items() if isinstance(each, torch.Tensor)}
    return replace(s, **tensors)


OPERATIONS = {
    "sparse_decode": lambda **given: sparse_decode(**(GIVEN | SELECTED | given)),
    "dense_decode": lambda **given: dense_decode(**(GIVEN | given)),
    "locks_decode": lambda **given: locks_decode(**(GIVEN | WHOLE | given)),
    "exact_page_lse": lambda **given: exact_page_lse(**{k: v for k, v in (GIVEN | given).items() if k != "v_cache"}),
}
SHARED = [
    ({"q": GIVEN["q"][0]}, r"q must be a float \[B, Hq, D\], got torch.float32 \[4, 64\]"),
    ({"q": GIVEN["q"].int()}, r"q must be a float .*got torch.int32"),
    ({"q": GIVEN["q"][..., :32]}, r"k_cache must be a float \[slots, H, D=32\], got torch.float32 \[\d+, 2, 64\]"),
    ({"k_cache": KV.k_cache[0]}, r"k_cache must be a float \[slots, H, D=64\], got torch.float32 \[2, 64\]"),
    ({"k_cache": KV.k_cache.nan_to_num().int()}, r"k_cache must be a float .*got torch.int32"),
    ({"q": GIVEN["q"][:, :3]}, r"3 query heads cannot be grouped over 2 KV heads"),
    ({"page_table": KV.page_table.long()}, r"page_table must be int32 \[B=2, Nmax\], got torch.int64"),
    ({"page_table": KV.page_table[:1]}, r"page_table must be int32 \[B=2, Nmax\], got torch.int32 \[1, \d\]"),
    ({"seq_lens": KV.seq_lens[:1]}, r"seq_lens must be int32 or int64 \[B=2\], got torch.int32 \[1\]"),
    ({"seq_lens": KV.seq_lens.float()}, r"seq_lens must be int32 or int64 .*got torch.float32"),
    ({"seq_lens": KV.seq_lens.to("meta")}, r"page_table is on cpu but seq_lens on meta; move them to one device"),
    ({"q": GIVEN["q"].to("meta")}, r"q, k_cache.* and page_table must share a device, got meta(, cpu)+$"),
    ({"k_cache": KV.k_cache.to("meta")}, r"q, k_cache.* and page_table must share a device, got cpu, meta(, cpu)+$"),
    ({"logit_cap": -0.5}, r"logit_cap must be 0 \(off\) or positive, got -0.5"),
]
VALUES = [
    ({"v_cache": KV.v_cache[0]}, r"v_cache must be a float \[slots, H, Dv\] like k_cache .*got torch.float32 \[2, 32\]"),
    ({"v_cache": KV.v_cache[:-1]}, r"v_cache must be a float \[slots, H, Dv\] like k_cache \[\d+, 2, 64\], got"),
    ({"v_cache": KV.v_cache.nan_to_num().int()}, r"v_cache must be a float .*got torch.int32"),
    (
        {"v_cache": KV.v_cache.to("meta")},
        r"q, k_cache, v_cache and page_table must share a device, got cpu, cpu, meta, cpu",
    ),
]
OWN = [
    ("sparse_decode", {"pages": SELECTED["pages"][0]}, r"pages must be int32 \[B=2, H=2, S\], got torch.int32 \[2, 3\]"),
    ("sparse_decode", {"pages": SELECTED["pages"][:, :1]}, r"pages must be int32 \[B=2, H=2, S\], got torch.int32 \[2, 1, 3\]"),
    ("sparse_decode", {"pages": SELECTED["pages"].long()}, r"pages must be int32 .*got torch.int64"),
    ("sparse_decode", {"counts": SELECTED["counts"][:1]}, r"counts must be int32 or int64 \[B=2\], got torch.int32 \[1\]"),
    ("sparse_decode", {"counts": SELECTED["counts"].float()}, r"counts must be int32 or int64 .*got torch.float32"),
    (
        "sparse_decode",
        {"pages": SELECTED["pages"].to("meta")},
        r"q, pages and counts must share a device, got cpu, meta, cpu",
    ),
    (
        "sparse_decode",
        {"counts": SELECTED["counts"].to("meta")},
        r"q, pages and counts must share a device, got cpu, cpu, meta",
    ),
    ("locks_decode", {"s": on_meta(WHOLE["s"])}, r"q and the summaries must share a device, got cpu, meta"),
    (
        "locks_decode",
        {"s": build_page_summaries(torch.zeros(7, PAGE, 1, 64), torch.zeros(7, PAGE, 1, 32), 4)},
        r"the summaries hold H=1, D=64 but the cache H=2, D=64",
    ),
    (
        "locks_decode",
        {"s": build_page_summaries(torch.zeros(7, PAGE, 2, 32), torch.zeros(7, PAGE, 2, 32), 4)},
        r"the summaries hold H=2, D=32 but the cache H=2, D=64",
    ),
    (
        "locks_decode",
        {"s": build_page_summaries(torch.zeros(7, PAGE, 2, 64), torch.zeros(7, PAGE, 2, 64), 4)},
        r"the summaries hold value means of Dv=64 but v_cache has Dv=32",
    ),
    (
        "locks_decode",
        {"s": build_page_summaries(*KV.pages, 4, value_mean=False)},
        r"tail_correction 'qmu' needs summaries built with value_mean=True",
    ),
]


@pytest.mark.parametrize(
    ("operation", "arguments", "message"),
    [
        *[(operation, *case) for operation, case in itertools.product(OPERATIONS, SHARED)],
        *[(operation, *case) for operation, case in itertools.product(OPERATIONS, VALUES) if operation != "exact_page_lse"],
        *OWN,
    ],
)
def test_refusals(operation: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        OPERATIONS[operation](**arguments)


def test_unknown_tail_correction_is_refused() -> None:
    class Settings:
        budget_pages, sink_pages, recent_pages, combine, tail_correction = 4, 1, 1, "mass", "mean"

    with pytest.raises(ArgumentError, match="tail_correction must be one of qmu, flat, off, got 'mean'"):
        locks_decode(**(GIVEN | WHOLE | {"config": Settings()}))


def test_what_the_refusals_start_from_is_accepted() -> None:
    for operation in OPERATIONS.values():
        assert np.isfinite(f64(operation())[..., 0]).all()
