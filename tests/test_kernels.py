"""Every Triton kernel, through the public operations, against fp64 truth.

`make test` runs this file under Triton's interpreter, on CPU tensors and in a process of its own (`TRITON_INTERPRET=1 pytest`):
Triton decides at import. On a machine with a GPU `pytest tests/test_kernels.py` runs the compiled kernels.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import truth
from truth import (
    PAGE,
    Factors,
    Paged,
    assert_close,
    assert_selection,
    cover,
    f64,
    fixed_point_error,
    generator,
    listed_pages,
    logit_size,
    output_size,
)

from locks_sglang import LocksConfig
from locks_sglang.kernels.build_page_summaries import (
    PageSummaries,
    RecordLayout,
    build,
    layer_offsets,
    pack,
    page_factors,
    unpack,
)
from locks_sglang.kernels.common import ArgumentError
from locks_sglang.kernels.common.capability import runs_kernels
from locks_sglang.kernels.decode_plan import DecodeBuffers, PageFlags, plan_decode
from locks_sglang.kernels.decode_plan.reference import plan as plan_reference
from locks_sglang.kernels.locks_decode import locks_decode_step
from locks_sglang.kernels.page_lse import kernel as scan_kernel
from locks_sglang.kernels.page_lse import scan
from locks_sglang.kernels.select_pages import kernel as select_kernel
from locks_sglang.kernels.select_pages import page_keys, top_pages
from locks_sglang.kernels.sparse_decode import kernel as attend_kernel
from locks_sglang.kernels.sparse_decode import sum_tail
from locks_sglang.kernels.sparse_decode import tail as tail_kernel
from locks_sglang.kernels.sparse_decode.flashinfer import pseudo_pages
from locks_sglang.kernels.sparse_decode.kernel import Parts
from locks_sglang.ops import build_page_summaries, page_lse, select_pages, sparse_decode

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# The interpreter multiplies bf16 matrices as if they were integers.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
LENGTHS = (1, 15, 16, 17, 0, 33, 1000)
"""Around page edges, none at all, and one that is spread over several items."""
SCAN_LENGTHS = (1, 16, 17, 0, 400)
"""The same for the scan alone, which the interpreter takes a quarter of a second a step for."""
SMALL_SELECT = {
    "BLOCK": 4,
    "KEY_WIDTH": 64,
    "WIDTH": 128,
    "RUN": 4,
    "FEW": 64,
    "PART_BLOCK": 4,
    "THREADS": 32,
}
SELECT_SIZES = {name: getattr(select_kernel, name) for name in SMALL_SELECT}
"""Those that serve."""
SHAPES = cover(dim=(64, 96, 128, 256), group=(1, 3, 7, 16), rank=(2, 4, 8, 15), tail=("qmu", "flat", "off"), cap=(0.0, 15.0))


def poisoned(x: torch.Tensor) -> torch.Tensor:
    """Memory that nobody wrote, as bad as it can be."""
    return x.fill_(torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)


def tail_error(fixed: float, tail: str) -> float:
    """How far the scan's rounding of the queries moves an output through the tail, in largest values.

    Twice as far as the logarithms of the weights, and those of "flat" are 1.5 times a log-sum-exp.
    """
    return {"off": 0.0, "qmu": 2.0 * fixed, "flat": 3.0 * fixed}[tail]


@pytest.fixture(autouse=True)
def small_pieces(request: pytest.FixtureRequest) -> Iterator[None]:
    """Few pages an item and few keys a block, so that small inputs take every path; few programs, which is faster here.

    Results and workspaces start as NaN.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "real_pieces" in request.keywords:
            yield
            return
        patch.setattr(scan_kernel, "MULTIPROCESSORS", 1)
        for module in (select_kernel, tail_kernel):
            patch.setattr(module, "TARGET", 5)
        for module in (scan_kernel, tail_kernel):
            patch.setattr(module, "WARPS", 2)
        patch.setattr(tail_kernel, "SLICES", 1)
        patch.setattr(tail_kernel, "LEAST_STEPS", 1)
        for module in (scan_kernel, select_kernel):
            patch.setattr(module, "N_BLOCK", 16)
        for name, small in SMALL_SELECT.items():
            patch.setattr(select_kernel, name, small)
        empty, empty_like = torch.empty, torch.empty_like
        patch.setattr(torch, "empty", lambda *args, **kwargs: poisoned(empty(*args, **kwargs)))
        patch.setattr(torch, "empty_like", lambda *args, **kwargs: poisoned(empty_like(*args, **kwargs)))
        patch.setattr(attend_kernel, "PROGRAMS", 24)
        yield


def make_paged(*args: Any, **kwargs: Any) -> Paged:
    """`truth.make_paged` on the device under test."""
    return Paged(*(x.to(DEVICE) for x in truth.make_paged(*args, **kwargs)))


def quantised(kv: Paged, rank: int, *, value_mean: bool = True) -> PageSummaries:
    """Packed summaries by the reference, around a centre; pages that are not whole hold NaN and so a NaN record."""
    keys, values = kv.pages
    dim = keys.shape[3]
    layout = RecordLayout(dim, values.shape[3], rank, value_mean)
    center = keys.nan_to_num().float().mean((0, 1))
    packed = pack(page_factors(keys, values, rank, center), layout)
    return PageSummaries(layout, torch.ones(len(keys), dtype=torch.bool, device=DEVICE), center, *packed)


def factors_of(s: PageSummaries) -> Factors:
    return Factors(f64(s.mu), f64(s.basis), f64(s.coef), f64(s.value_mean) if s.layout.value_mean else None)


def listed(x: torch.Tensor, kv: Paged) -> torch.Tensor:
    """Scores [B, Hq, Nmax] with -inf past the pages of each request, where a scan writes nothing."""
    return x.masked_fill(torch.arange(x.shape[2], device=x.device) >= kv.num_pages[:, None, None], -torch.inf)


def queries(kv: Paged, group: int, gen: torch.Generator) -> torch.Tensor:
    """Queries fp32 [B, Hq, D] that leave many tokens a share of the attention."""
    heads, dim = kv.k_cache.shape[1:]
    norms = kv.k_cache.float().norm(dim=-1)
    q = torch.randn(len(kv.seq_lens), heads * group, dim, generator=gen).to(DEVICE)
    return q * dim**0.5 / norms[norms.isfinite()].mean()


# --- build ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dim", "rank", "dtype"),
    [
        ("rope", 64, 8, torch.float32),
        ("random", 128, 8, torch.float16),
        ("spike", 96, 4, torch.float32),
        ("low_rank", 256, 8, torch.float32),
        ("random", 64, 15, torch.float32),
        ("rope", 64, 1, torch.bfloat16),
    ],
)
def test_build(kind: str, dim: int, rank: int, dtype: torch.dtype) -> None:
    """Records by the kernel are the reference's, in place, for the listed pages alone, from a strided cache."""
    gen = generator(dim + rank)
    kv = make_paged(kind, [48], 2, dim, gen, dtype=dtype)
    wide_k, wide_v = torch.full((2, len(kv.k_cache), 4, dim), torch.nan, dtype=dtype, device=DEVICE)
    k_cache, v_cache = wide_k[:, 1:3], wide_v[:, ::2]
    k_cache.copy_(kv.k_cache)
    v_cache.copy_(kv.v_cache)
    pages = torch.tensor([*kv.page_table[0, :3].tolist(), -1], device=DEVICE)
    layout = RecordLayout(dim, dim, rank)
    center = kv.pages[0].nan_to_num().float().mean((0, 1))
    record, stored = layout.empty(5, 2, device=DEVICE)
    assert stored is not None
    for x in (record, stored):
        x.fill_(77)
        x[pages[:3]] = 0
    valid = torch.zeros(5, dtype=torch.bool, device=DEVICE)
    build(k_cache, v_cache, pages, center, record, stored, valid, layout)

    mine = pages[:3]
    assert valid.nonzero().flatten().tolist() == sorted(mine.tolist())
    others = [page for page in range(5) if page not in mine.tolist()]
    assert all((x[others] == 77).all() for x in (record, stored))
    keys, values = (x[mine] for x in kv.pages)
    exact = page_factors(keys, values, rank, center)
    got, want = unpack(record[mine], stored[mine], layout), unpack(*pack(exact, layout), layout)
    assert got.value_mean is not None
    assert want.value_mean is not None
    for ours, theirs, spread in ((got.mean, want.mean, exact.mean), (got.value_mean, want.value_mean, exact.value_mean)):
        assert spread is not None
        # A sum in another order may round to the neighbouring step, 1/127 of the largest entry.
        assert ((ours - theirs).abs() <= spread.abs().amax(-1, keepdim=True) / 126).all()
        assert (ours == theirs).float().mean() > 0.98

    def misfit(basis: np.ndarray, coef: np.ndarray) -> np.ndarray:
        """Distance of the described pages from the real ones, [N, H]."""
        centred = truth.centred_pages(keys)
        return np.asarray(np.linalg.norm(centred - coef @ basis.swapaxes(-1, -2), axis=(-1, -2)))

    _, sigma = truth.svd_factors(keys, values, rank)
    size = np.linalg.norm(sigma, axis=-1)
    best = np.sqrt((sigma[..., rank:] ** 2).sum(-1))
    theirs = misfit(f64(want.basis), f64(want.coef))
    ours = misfit(f64(got.basis), f64(got.coef))
    assert (ours <= 1.02 * theirs + 1e-4 * size).all(), (ours, theirs)
    # Whatever quantisation adds, it is what it adds to the exact factors: a few hundredths of the page.
    assert (ours <= best + 0.25 * size).all()


@pytest.mark.parametrize("value_mean", [True, False])
def test_build_of_all_layers_is_that_of_each(value_mean: bool) -> None:
    """In one launch, from caches that lie in no order, the same records as layer by layer."""
    gen = generator(5)
    layers, heads, dim = 3, 2, 64
    keys, values = (torch.randn(layers, 64, heads, dim, generator=gen).to(DEVICE) for _ in range(2))
    caches = [(keys[i], values[-i]) for i in (1, 0, 2)]
    center = torch.randn(layers, heads, dim, generator=gen).to(DEVICE)
    pages, layout = torch.tensor([3, -1, 1], device=DEVICE), RecordLayout(dim, dim, 8, value_mean)
    (ours, ours_means), (theirs, theirs_means) = (layout.empty(layers, 4, heads, device=DEVICE) for _ in range(2))
    for x in (ours, theirs, ours_means, theirs_means):
        if x is not None:
            x.fill_(77)
    valid, each_valid = (torch.zeros(layers, 4, dtype=torch.bool, device=DEVICE) for _ in range(2))
    build(*caches[0], pages, center, ours, ours_means, valid, layout, layer_offsets(caches))
    for i, (k, v) in enumerate(caches):
        means = None if theirs_means is None else theirs_means[i]
        build(k, v, pages, center[i], theirs[i], means, each_valid[i], layout)
    assert torch.equal(ours, theirs)
    assert (ours_means is None and theirs_means is None) or torch.equal(ours_means, theirs_means)
    assert torch.equal(valid, each_valid)
    assert valid.tolist() == [[False, True, False, True]] * layers


def test_layers_that_cannot_be_built_together() -> None:
    cache = torch.zeros(64, 2, 64)
    with pytest.raises(
        ArgumentError, match=r"like the first one's torch.float32 \[64, 2, 64\], got torch.float32 \[48, 2, 64\]$"
    ):
        layer_offsets([(cache, cache), (cache[:48], cache)])
    with pytest.raises(ArgumentError, match=r"a multiple of 64 bytes apart, got 4$"):
        layer_offsets([(cache.flatten()[:100], cache), (cache.flatten()[1:101], cache)])


@pytest.mark.parametrize("rank", [1, 6, 8, 11])
def test_build_over_what_was_there(rank: int) -> None:
    """A page built anew leaves nothing of its old record, not even in the scales of columns that there are not."""
    gen = generator(rank)
    kv = make_paged("random", [32], 1, 64, gen)
    layout, pages, total = RecordLayout(64, 64, rank), kv.page_table[0, :2].long(), len(kv.k_cache) // PAGE
    records, means = [], []
    for filled in (0, 255):
        record, stored = layout.empty(total, 1, device=DEVICE)
        assert stored is not None
        for x in (record, stored):
            x.view(torch.uint8).fill_(filled)
        valid = torch.zeros(total, dtype=torch.bool, device=DEVICE)
        build(kv.k_cache, kv.v_cache, pages, torch.zeros(1, 64, device=DEVICE), record, stored, valid, layout)
        records.append(record[pages])
        means.append(stored[pages])
    at, size = layout.sections["scales"]
    fresh, again = (x[..., at : at + size].view(torch.int16).view(2, 4, -1) for x in records)
    read = 8 if rank <= 8 else 10
    assert torch.equal(fresh[..., :read], again[..., :read])
    assert torch.equal(records[0][..., :at], records[1][..., :at])
    assert torch.equal(*means)


def test_build_contains_what_is_not_finite() -> None:
    """NaN or Inf in one head of one page: no estimate for that head of that page, nothing else is touched."""
    gen = generator(3)
    keys, values = torch.randn(2, 2, PAGE, 2, 64, generator=gen).to(DEVICE)
    clean = build_page_summaries(keys, values, 4)
    keys[0, 3, 1, 5], values[1, 7, 0, 2] = torch.inf, torch.nan
    s = build_page_summaries(keys, values, 4)
    assert torch.isnan(s.mu[0, 1]).all()
    assert (s.basis[0, 1] == 0).all()
    assert torch.isnan(s.value_mean[1, 0]).all()
    for ours, untouched in ((s.record, clean.record), (s.values, clean.values)):
        assert ours is not None
        assert untouched is not None
        assert torch.equal(ours[0, 0], untouched[0, 0])
        assert torch.equal(ours[1, 1], untouched[1, 1])
    assert torch.equal(s.mu[1], clean.mu[1])


@pytest.mark.parametrize("kind", ["orthonormal", "pairs", "circulant"])
def test_build_where_eigenvalues_coincide(kind: str) -> None:
    """Directions are then arbitrary, but must stay orthogonal: the record is as good as the reference's."""
    gen = generator(9)
    rows = torch.linalg.qr(torch.randn(64, 64, generator=gen))[0][:PAGE]
    if kind == "pairs":
        rows = torch.cat((rows[:8], rows[:8]))
    elif kind == "circulant":
        rows = torch.stack([torch.linspace(1, 0, PAGE).roll(t) for t in range(PAGE)]) @ rows
    keys = rows.view(1, PAGE, 1, 64).to(DEVICE)
    for rank in (8, 15):
        got = build_page_summaries(keys, keys, rank)
        layout = got.layout
        want = unpack(*pack(page_factors(keys, keys, rank, torch.zeros(1, 64, device=DEVICE)), layout), layout)
        centred = truth.centred_pages(keys)
        misfit = [
            np.linalg.norm(centred - f64(coef) @ f64(basis).swapaxes(-1, -2))
            for coef, basis in ((got.coef, got.basis), (want.coef, want.basis))
        ]
        assert misfit[0] <= 1.1 * misfit[1], (kind, rank, misfit)


def test_build_of_one_repeated_key_has_no_spread() -> None:
    keys = torch.ones(1, PAGE, 1, 64, device=DEVICE) * torch.arange(64.0, device=DEVICE)
    s = build_page_summaries(keys, keys, 8)
    assert torch.isfinite(s.basis).all()
    assert (s.coef == 0).all()
    assert torch.allclose(s.mu[0, 0], keys[0, 0, 0], atol=0.5)


# --- scan -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "group", "rank", "tail", "cap"), SHAPES)
def test_scan(dim: int, group: int, rank: int, tail: str, cap: float) -> None:
    """Every page's log-sum-exp and tail weight, for a mixed batch with one invalid page."""
    gen = generator(dim + group + rank)
    kv = make_paged("rope", SCAN_LENGTHS, 2, dim, gen)
    s = quantised(kv, rank)
    invalid = int(kv.page_table[-1, 12])
    s.valid[invalid] = False
    q, scale = queries(kv, group, gen), 0.125
    lens = kv.seq_lens
    got = scan(q, s, kv.page_table, kv.num_pages, scale, seq_lens=lens, logit_cap=cap, tail=tail)
    want = truth.page_scores(
        factors_of(s), q, kv.page_table, kv.num_pages, scale, seq_lens=lens, valid=s.valid.tolist(), cap=cap
    )
    size, fixed = logit_size(q, kv.k_cache, scale), fixed_point_error(q, kv.k_cache, scale)
    assert_close(listed(got.lse, kv), want.lse, size=size, extra=fixed)
    if tail == "off":
        op = page_lse(q, s, kv.page_table, kv.num_pages, scale, seq_lens=lens, logit_cap=cap)
        assert torch.equal(op, listed(got.lse, kv))
        return
    assert_close(listed(got.weight, kv), want.log_weight[tail], size=size, extra=tail_error(fixed, tail))


def test_scan_without_lengths_takes_every_page_as_whole() -> None:
    gen = generator(5)
    kv = make_paged("random", [64, 32], 1, 64, gen)
    s = quantised(kv, 4)
    q = queries(kv, 4, gen)
    lse = page_lse(q, s, kv.page_table, kv.num_pages, 0.125)
    want = truth.page_scores(factors_of(s), q, kv.page_table, kv.num_pages, 0.125)
    assert_close(lse, want.lse, size=logit_size(q, kv.k_cache, 0.125), extra=fixed_point_error(q, kv.k_cache, 0.125))


def test_scan_in_half_precision() -> None:
    """Queries become integers as the record's levels are: only their own rounding is in the result."""
    gen = generator(6)
    kv = make_paged("rope", [200, 31], 2, 128, gen)
    s = quantised(kv, 8)
    q = queries(kv, 8, gen).half()
    got = scan(q, s, kv.page_table, kv.num_pages, 0.1, seq_lens=kv.seq_lens, logit_cap=0.0, tail="qmu")
    want = truth.page_scores(factors_of(s), q, kv.page_table, kv.num_pages, 0.1, seq_lens=kv.seq_lens)
    size, fixed = logit_size(q, kv.k_cache, 0.1), fixed_point_error(q, kv.k_cache, 0.1)
    assert_close(listed(got.lse, kv), want.lse, size=size, extra=fixed)
    assert_close(listed(got.weight, kv), want.log_weight["qmu"], size=size, extra=fixed)


def test_scan_keeps_small_shares_of_the_tail_in_half_precision() -> None:
    """One page far above all others must not round the value means of the rest away."""
    gen = generator(8)
    kv = make_paged("rope", [640], 1, 64, gen, dtype=torch.float16)
    first = int(kv.page_table[0, 0]) * PAGE
    q = queries(kv, 1, gen).half()
    kv.k_cache[first : first + PAGE] += 14.0 * q[:, :1] / q.float().norm() / 0.125 / q.float().norm()
    kv.v_cache.mul_(0.05)
    kv.v_cache[first : first + PAGE] = 0.0
    s = quantised(kv, 8)
    config = LocksConfig(budget_tokens=48)
    got = locks_decode_step(q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, 0.125, config)
    want = truth.page_scores(factors_of(s), q, kv.page_table, kv.num_pages, 0.125, seq_lens=kv.seq_lens)
    chosen = listed_pages(got.pages, got.counts)
    out, lse = truth.attention(q, kv.k_cache, kv.v_cache, kv.page_table, chosen, kv.seq_lens, 0.125)
    exact = out.copy()
    out = truth.merge_tail(out, lse, chosen, want.log_weight["qmu"], factors_of(s), kv.page_table)
    assert np.abs(out - exact).max() > 10 * np.abs(f64(got.out) - out).max()
    assert_close(got.out, out, size=output_size(logit_size(q, kv.k_cache, 0.125), kv.v_cache), extra=2e-3 * np.abs(out).max())


# --- select -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("combine", "group", "budget"), cover(combine=("mass", "peak", "max"), group=(1, 3, 4, 8, 16), budget=(4, 7, 40))
)
def test_select(combine: str, group: int, budget: int) -> None:
    """Exact top pages, over several blocks of keys, with pages that have no estimate, NaN and equal scores."""
    gen = generator(budget + group)
    held = torch.tensor([0, 1, 5, 39, 41, 130], dtype=torch.int32, device=DEVICE)
    lse = torch.randn(len(held), 2 * group, 130, generator=gen).to(DEVICE) * 3
    lse[3:, :, 7] = torch.inf
    lse[4:, 0, 11:20] = torch.nan
    lse[5, :, 60:80] = lse[5, :, 60:61]
    pages, counts = select_pages(lse, held, budget, 2, 1, num_kv_heads=2, combine=combine)
    assert_selection(pages, counts, lse, held.tolist(), budget, 2, 1, combine)


def test_select_keeps_the_order_of_preference() -> None:
    lse, held = torch.zeros(1, 1, 100, device=DEVICE), torch.tensor([100], dtype=torch.int32, device=DEVICE)
    lse[0, 0, 50:60] = torch.inf
    lse[0, 0, 30] = 5.0
    pages, _ = select_pages(lse, held, 9, 2, 3, num_kv_heads=1)
    assert pages.tolist() == [[[0, 1, 50, 51, 52, 53, 97, 98, 99]]]
    pages, _ = select_pages(lse, held, 20, 2, 3, num_kv_heads=1)
    assert pages.tolist() == [[[0, 1, 2, 3, 4, 5, 30, *range(50, 60), 97, 98, 99]]]


@pytest.mark.parametrize(("combine", "budget"), [("mass", 30), ("max", 5)])
def test_select_ties_across_blocks(combine: str, budget: int) -> None:
    """Scores that are equal from one block to the next: the lower page wins, whatever the tie is between."""
    n = 150
    same, steps = torch.zeros(n), torch.arange(n) // 37
    lse = torch.stack((same, same + torch.nan, same + torch.inf, same - torch.inf, steps)).unsqueeze(1).to(DEVICE)
    held = torch.full((5,), n, dtype=torch.int32, device=DEVICE)
    pages, counts = select_pages(lse, held, budget, 1, 2, num_kv_heads=1, combine=combine)
    assert_selection(pages, counts, lse, held.tolist(), budget, 1, 2, combine)
    lowest = [*range(budget - 2), n - 2, n - 1]
    # The last step is two pages that are taken anyway; the one before it begins at page 111.
    top = [0, *range(111, 111 + budget - 3), n - 2, n - 1]
    assert pages.squeeze(1).tolist() == [lowest] * 4 + [top]


@pytest.mark.parametrize("budget", [6, 50, 300])
def test_select_writes_what_flashinfer_reads(budget: int) -> None:
    """Rows without gaps by request and head, ascending logical pages through a shuffled table, the tail page last."""
    gen = generator(budget)
    held = torch.tensor([70, 0, 5, 141, 6], dtype=torch.int32, device=DEVICE)
    heads, group, n_max = 3, 2, 141
    lse = torch.randn(len(held), heads * group, n_max, generator=gen).to(DEVICE)
    table = torch.stack([torch.randperm(900, generator=gen)[:n_max] + 1 for _ in held]).to(DEVICE, torch.int32)
    for b, n in enumerate(held.tolist()):
        table[b, max(n - 1, 0)] = 0
    indices = torch.full((heads * sum(min(budget, n) for n in held.tolist()) + 9,), -7, dtype=torch.int32, device=DEVICE)
    ranked = page_keys(lse, None, held, 1, 1, heads, "mass")
    pages, counts = top_pages(ranked, budget, page_table=table, indices=indices)
    alone, _ = top_pages(ranked, budget)
    assert torch.equal(pages, alone)
    want = []
    for b, rows in enumerate(listed_pages(pages, counts)):
        for h, row in enumerate(rows):
            assert row == sorted(row)
            assert not row or row[-1] == int(held[b]) - 1
            want += [int(table[b, page]) * PAGE * heads + h for page in row]
    assert indices.tolist() == want + [-7] * 9


@pytest.mark.parametrize("best", ["apart", "together", "equal"])
def test_select_by_heaps_of_blocks(best: str) -> None:
    """More blocks than are counted together. Where the best pages lie in few heaps, or all are alike, a threshold over the best
    of each heap leaves more blocks than there is room for."""
    block, heaps, n, budget = SMALL_SELECT["BLOCK"], SMALL_SELECT["FEW"], 1201, 6
    score = torch.randn(n, generator=generator(3))
    if best == "together":
        score[torch.arange(n) // block % heaps < budget - 1] += 10
    elif best == "equal":
        score[:] = 1.0
    blocks = torch.nn.functional.pad(score, (0, -n % block), value=-torch.inf).view(-1, block).amax(1)
    heap = torch.nn.functional.pad(blocks, (0, -len(blocks) % heaps), value=-torch.inf).view(-1, heaps).amax(0)
    reach = int((blocks >= heap.sort(descending=True).values[budget - 1]).sum())
    assert (reach > 2 * budget) == (best != "apart")
    lse, held = score.view(1, 1, n).to(DEVICE), torch.tensor([n], dtype=torch.int32, device=DEVICE)
    pages, counts = select_pages(lse, held, budget, num_kv_heads=1, combine="max")
    assert_selection(pages, counts, lse, [n], budget, 1, 1, "max")


@pytest.mark.parametrize("distinct", [True, False], ids=["distinct", "few values"])
def test_select_with_the_constants_that_serve(monkeypatch: pytest.MonkeyPatch, distinct: bool) -> None:
    """More blocks than are counted together, and more keys of them. With few values thresholds tie and more pages are left than
    are compared with each other; with distinct ones that is how the last are chosen."""
    for name, size in SELECT_SIZES.items():
        monkeypatch.setattr(select_kernel, name, size)
    gen = generator(14)
    n = 40_000
    held = torch.tensor([n, 3000], dtype=torch.int32, device=DEVICE)
    lse = torch.randn(2, 1, n, generator=gen).to(DEVICE)
    if not distinct:
        lse = lse.mul(20).round().div(20)
    for budget in (128, 200):
        pages, counts = select_pages(lse, held, budget, num_kv_heads=1, combine="max")
        assert counts.tolist() == [budget, budget]
        for b, length in enumerate(held.tolist()):
            score = lse[b, 0, :length].cpu()
            score[0] = score[-1] = torch.inf
            best = torch.argsort(score, descending=True, stable=True)[:budget]
            assert torch.equal(pages[b, 0].cpu().long(), best.sort().values)


# --- items ------------------------------------------------------------------------------------------------------------


@triton.jit
def _store_layout(held_ptr, length_ptr, count_ptr, batch, TARGET: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, 64)
    _, length, count, _ = scan_kernel.item_layout(held_ptr, batch, TARGET, HEADS, 64, BLOCK)
    tl.store(length_ptr, length)
    tl.store(count_ptr + row, count, mask=row < batch)


def items_of(held: torch.Tensor, heads: int, target: int, block: int) -> tuple[int, list[int]]:
    """Pages an item, and items of each request and head, as `item_layout` cuts so many pages int32 [B]."""
    length, count = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.zeros_like(held)
    _store_layout[(1,)](held, length, count, len(held), target, heads, block)
    return int(length), count.tolist()


@pytest.mark.parametrize(
    ("pages", "heads"),
    [([65536], 4), ([8192] * 8, 4), ([2048] * 16, 8), ([1024] * 64, 8), ([16384] + [64] * 31, 8), ([0, 1], 2)],
    ids=["one", "eight", "sixteen", "many", "one long", "tiny"],
)
def test_items_are_spread_evenly(pages: list[int], heads: int) -> None:
    """Programs that take the items in turn end together: none has much more than its share of the pages."""
    target, block = 396, 32
    each, counts = items_of(torch.tensor(pages, dtype=torch.int32, device=DEVICE), heads, target, block)
    assert counts == [-(-n // each) for n in pages]
    items = sum(counts) * heads
    assert items <= scan_kernel.most_items(target, len(pages), heads)
    share = sum(pages) * heads / target
    rounds = -(-items // target)
    assert rounds * (each - block) <= 1.3 * share, f"{rounds} rounds of {each} pages, a program's share is {share:.0f}"


# --- attend -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "group"), cover(dim=(64, 96, 128, 256), group=(1, 3, 8, 16)))
def test_tail_sums(dim: int, group: int) -> None:
    """Weights and weighed value means of the pages that are left, item by item; nothing of those that were read or are none."""
    gen = generator(dim + group)
    kv = make_paged("rope", LENGTHS, 2, dim, gen)
    s = quantised(kv, 2)
    weight = 4.0 * torch.randn(len(LENGTHS), 2 * group, kv.page_table.shape[1], generator=gen)
    weight[:, :, 1:12:3] = -torch.inf
    weight[4] = -torch.inf
    # A page that is not whole has no weight, and here a record that says nothing.
    for request, length in enumerate(LENGTHS):
        weight[request, :, length // PAGE : -(-length // PAGE)] = -torch.inf
    weight = torch.where(torch.arange(weight.shape[2]) < kv.num_pages.cpu()[:, None, None], weight, torch.nan).to(DEVICE)
    assert s.record is not None
    at = s.layout.sections["scales"][0] + 14
    scale = s.record[..., at : at + 2].contiguous().view(torch.bfloat16)[..., 0].float()
    listed = torch.arange(kv.page_table.shape[1], device=DEVICE) < kv.num_pages[:, None]
    value_scale = scale[torch.where(listed, kv.page_table, 0).long()].transpose(1, 2).contiguous()
    got = sum_tail(weight, value_scale, s, kv.page_table, kv.num_pages)
    # The longest request is the last one: its items lie behind those of all others, those of its first head together.
    length, items = items_of(kv.num_pages, 2, tail_kernel.TARGET, got.unit)
    assert items[-1] > 1
    values = factors_of(s).value_mean
    assert values is not None
    for head in range(2):
        for number in range(items[-1]):
            item = 2 * sum(items[:-1]) + head * items[-1] + number
            pages = slice(number * length, min((number + 1) * length, int(kv.num_pages[-1])))
            logs = f64(weight)[-1, head * group : (head + 1) * group, pages]
            peak = logs.max(1)
            assert_close(got.peak[item], peak)
            shares = np.exp(logs - peak[:, None])
            assert_close(got.total[item], shares.sum(1), size=shares.sum(1))
            means = np.nan_to_num(values)[kv.page_table[-1].cpu().numpy()[pages], head]
            size = shares @ np.abs(means)
            assert_close(got.value[item], shares @ means, size=size, extra=2.0**-16 * size)
    assert (got.total[: 2 * sum(items)] >= 0).all()


@pytest.mark.parametrize(("dim", "group", "cap"), cover(dim=(64, 96, 128, 256), group=(1, 3, 7, 16), cap=(0.0, 15.0)))
def test_attend(dim: int, group: int, cap: float) -> None:
    """Exact attention over listed pages alone: every other slot holds NaN."""
    gen = generator(dim + group)
    kv = make_paged("rope", LENGTHS, 2, dim, gen, v_dim=64)
    q = queries(kv, group, gen)
    scores = torch.randn(len(LENGTHS), 2 * group, kv.page_table.shape[1], generator=gen).to(DEVICE)
    pages, counts = select_pages(scores, kv.num_pages, 6, num_kv_heads=2)
    chosen = listed_pages(pages, counts)
    k_cache, v_cache = torch.full_like(kv.k_cache, torch.nan), torch.full_like(kv.v_cache, torch.nan)
    for b, heads in enumerate(chosen):
        for h, row in enumerate(heads):
            for page in row:
                slots = slice(int(kv.page_table[b, page]) * PAGE, (int(kv.page_table[b, page]) + 1) * PAGE)
                k_cache[slots, h], v_cache[slots, h] = kv.k_cache[slots, h], kv.v_cache[slots, h]
    arguments = (k_cache, v_cache, kv.page_table, pages, counts, kv.seq_lens, 0.125)
    out, lse = sparse_decode(q, *arguments, logit_cap=cap, k_scale=0.5, v_scale=2.0, return_lse=True)
    want, want_lse = truth.attention(
        q, kv.k_cache, kv.v_cache, kv.page_table, chosen, kv.seq_lens, 0.0625, cap=cap, v_scale=2.0
    )
    size = logit_size(q, kv.k_cache, 0.0625)
    assert_close(out, want, size=2.0 * output_size(size, kv.v_cache))
    assert_close(lse, want_lse, size=size)


# --- the whole step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tail", "combine", "budget", "dtype"),
    cover(tail=("qmu", "flat", "off"), combine=("mass", "peak", "max"), budget=(48, 160, 2048), dtype=DTYPES),
)
def test_step(tail: str, combine: str, budget: int, dtype: torch.dtype) -> None:
    """Scan, selection, attention and tail against fp64, each on what the step before it produced."""
    gen = generator(budget)
    kv = make_paged("rope", LENGTHS, 2, 64, gen, dtype=dtype)
    s = quantised(kv, 8)
    q = queries(kv, 3, gen).to(dtype)
    config = LocksConfig(budget_tokens=budget, tail_correction=tail, combine=combine)
    got = locks_decode_step(q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, 0.125, config)
    want = truth.page_scores(factors_of(s), q, kv.page_table, kv.num_pages, 0.125, seq_lens=kv.seq_lens)
    size, fixed = logit_size(q, kv.k_cache, 0.125), fixed_point_error(q, kv.k_cache, 0.125)
    assert_close(listed(got.scores.lse, kv), want.lse, size=size, extra=fixed)
    width = got.pages.shape[2]
    assert_selection(got.pages, got.counts, got.scores.lse, kv.num_pages.tolist(), width, 1, 1, combine)
    chosen = listed_pages(got.pages, got.counts)
    out, lse = truth.attention(q, kv.k_cache, kv.v_cache, kv.page_table, chosen, kv.seq_lens, 0.125)
    if tail != "off":
        out = truth.merge_tail(out, lse, chosen, want.log_weight[tail], factors_of(s), kv.page_table)
    # Probabilities are rounded to the cache's precision before they meet the values.
    slack = 4 * truth.ROUNDOFF[dtype] if dtype != torch.float32 else 0.0
    slack = (slack + tail_error(fixed, tail)) * float(kv.v_cache.nan_to_num().abs().max())
    assert_close(got.out, out, size=output_size(size, kv.v_cache), extra=slack)


@pytest.mark.parametrize("excess", [10.0, 40.0])
def test_estimates_far_above_what_pages_weigh(excess: float) -> None:
    """Summaries of other keys, whose estimates are `excess` nats too high, on pages that are read: no trace in the output."""
    gen = generator(16)
    kv = make_paged("random", [320], 1, 64, gen)
    q = queries(kv, 1, gen)
    high = kv.k_cache.clone()
    for page in (4, 9, 13):
        first = int(kv.page_table[0, page]) * PAGE
        high[first : first + PAGE] += excess * q[:, :1] / q.square().sum() / 0.125
    s = quantised(kv._replace(k_cache=high), 8)
    got = locks_decode_step(q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, 0.125, LocksConfig(budget_tokens=96))
    chosen = listed_pages(got.pages, got.counts)
    assert {4, 9, 13} <= set(chosen[0][0])
    want = truth.page_scores(factors_of(s), q, kv.page_table, kv.num_pages, 0.125, seq_lens=kv.seq_lens)
    out, lse = truth.attention(q, kv.k_cache, kv.v_cache, kv.page_table, chosen, kv.seq_lens, 0.125)
    out = truth.merge_tail(out, lse, chosen, want.log_weight["qmu"], factors_of(s), kv.page_table)
    slack = tail_error(fixed_point_error(q, high, 0.125), "qmu") * float(kv.v_cache.nan_to_num().abs().max())
    assert slack < 0.02
    assert_close(got.out, out, size=output_size(logit_size(q, high, 0.125), kv.v_cache), extra=slack)


@pytest.mark.parametrize("tail", ["off", "qmu"])
def test_newest_page_that_is_being_built(tail: str) -> None:
    """Full or not it is read and not scored: the bits of a step do not change with its record and its flag."""
    gen = generator(15)
    kv = make_paged("rope", [320, 97, 33], 2, 64, gen)
    s, q = quantised(kv, 4), queries(kv, 3, gen)
    config = LocksConfig(budget_tokens=80, tail_correction=tail)
    arguments = (q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, 0.125, config)
    truth.assert_newest_pages_are_not_scored(kv, s, lambda: locks_decode_step(*arguments, newest_unbuilt=True))


def test_strided_inputs() -> None:
    """Every argument but the caches as a view with gaps: same bits as packed ones."""
    gen = generator(10)
    kv = make_paged("rope", [100, 40], 2, 64, gen)
    s, q, config = quantised(kv, 4), queries(kv, 2, gen), LocksConfig(budget_tokens=48)

    def spread(x: torch.Tensor) -> torch.Tensor:
        return torch.stack((x, torch.zeros_like(x)), -1)[..., 0]

    table, held, lens = (spread(x) for x in (kv.page_table, kv.num_pages, kv.seq_lens))
    loose = PageSummaries(s.layout, *(spread(x) for x in (s.valid, s.center, s.record, s.values)))  # type: ignore[arg-type]
    packed = page_lse(q, s, kv.page_table, kv.num_pages, 0.1, seq_lens=kv.seq_lens)
    assert torch.equal(page_lse(spread(q), loose, table, held, 0.1, seq_lens=lens), packed)
    pages, counts = select_pages(packed, kv.num_pages, 3, num_kv_heads=2)
    again = select_pages(spread(packed), held, 3, num_kv_heads=2)
    assert torch.equal(again[0], pages)
    out = sparse_decode(q, kv.k_cache, kv.v_cache, kv.page_table, pages, counts, kv.seq_lens, 0.1)
    caches = spread(kv.k_cache), spread(kv.v_cache)
    strided = sparse_decode(spread(q), kv.k_cache, kv.v_cache, table, spread(pages), spread(counts), lens, 0.1)
    assert torch.equal(strided, out)
    assert torch.allclose(sparse_decode(q, *caches, kv.page_table, pages, counts, kv.seq_lens, 0.1), out, atol=1e-5)
    whole = locks_decode_step(q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, 0.1, config).out
    assert torch.equal(locks_decode_step(spread(q), kv.k_cache, kv.v_cache, loose, table, lens, 0.1, config).out, whole)


def test_more_pages_than_the_table_lists() -> None:
    """Taken as many as it lists; nothing is written past a row."""
    gen = generator(11)
    kv = make_paged("rope", [64, 64], 1, 64, gen)
    s, q = quantised(kv, 4), queries(kv, 2, gen)
    table = kv.page_table[:, :4].contiguous()
    want = page_lse(q, s, table, kv.num_pages, 0.1)
    assert torch.equal(page_lse(q, s, table, kv.num_pages + 7, 0.1), want)
    config = LocksConfig(budget_tokens=48)
    got = locks_decode_step(q, kv.k_cache, kv.v_cache, s, table, kv.seq_lens + 100, 0.1, config)
    assert got.counts.tolist() == [3, 3]
    assert torch.isfinite(got.out).all()


def test_empty_batch() -> None:
    gen = generator(12)
    kv = make_paged("rope", [64], 2, 64, gen)
    s, q = quantised(kv, 4), torch.zeros(0, 4, 64, device=DEVICE)
    table, lens = kv.page_table[:0], kv.seq_lens[:0]
    assert page_lse(q, s, table, lens, 0.1).shape == (0, 4, table.shape[1])
    pages, counts = select_pages(torch.zeros(0, 4, 5, device=DEVICE), lens, 4, num_kv_heads=2)
    assert sparse_decode(q, kv.k_cache, kv.v_cache, table, pages, counts, lens, 0.1).shape == (0, 4, 64)
    assert locks_decode_step(q, kv.k_cache, kv.v_cache, s, table, lens, 0.1, LocksConfig()).out.shape == (0, 4, 64)


@pytest.mark.real_pieces
def test_step_with_the_constants_that_serve() -> None:
    gen = generator(13)
    kv = make_paged("rope", [3000, 17], 1, 64, gen)
    s, q, config = quantised(kv, 8), queries(kv, 4, gen), LocksConfig(budget_tokens=256)
    got = locks_decode_step(q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, 0.125, config)
    want = truth.page_scores(factors_of(s), q, kv.page_table, kv.num_pages, 0.125, seq_lens=kv.seq_lens)
    size, fixed = logit_size(q, kv.k_cache, 0.125), fixed_point_error(q, kv.k_cache, 0.125)
    assert_close(listed(got.scores.lse, kv), want.lse, size=size, extra=fixed)
    assert_selection(got.pages, got.counts, got.scores.lse, kv.num_pages.tolist(), 16, 1, 1, "mass")
    chosen = listed_pages(got.pages, got.counts)
    out, lse = truth.attention(q, kv.k_cache, kv.v_cache, kv.page_table, chosen, kv.seq_lens, 0.125)
    out = truth.merge_tail(out, lse, chosen, want.log_weight["qmu"], factors_of(s), kv.page_table)
    slack = tail_error(fixed, "qmu") * float(kv.v_cache.nan_to_num().abs().max())
    assert_close(got.out, out, size=output_size(size, kv.v_cache), extra=slack)


def test_everything_here_runs_on_kernels() -> None:
    assert runs_kernels(torch.zeros(1, 1, 64, device=DEVICE), 64, 64, 16)
    assert not runs_kernels(torch.zeros(1, 1, 64, device=DEVICE, dtype=torch.float64), 64, 64, 16)
    assert not runs_kernels(torch.zeros(1, 1, 64, device=DEVICE), 80, 64, 16)
    assert not runs_kernels(torch.zeros(1, 1, 64, device=DEVICE), 64, 64, 17)


# --- plan of a decode step --------------------------------------------------------------------------------------------

PLAN_LENGTHS = [
    pytest.param([1, 16, 17, 15, 33, 32, 5000, 4999, 1000, 48], 7, id="mixed"),
    pytest.param([1], 0, id="one token"),
    pytest.param([16], 3, id="first page filled"),
    pytest.param([2048, 2049], 0, id="page borders"),
    pytest.param([], 5, id="padding alone"),
]


def plan_inputs(lengths: list[int], padding: int, layers: int = 3, heads: int = 2) -> tuple[Any, ...]:
    """A shuffled table of more requests than the batch has, flags that say something of every page, poisoned buffers."""
    gen = generator(len(lengths) + padding)
    held = [-(-n // PAGE) for n in lengths]
    pages = torch.randperm(sum(held) + 3, generator=gen) + 1
    width = max([*held, 4]) + 2
    req_to_token = torch.full((len(lengths) + 3, width * PAGE), 7 * PAGE + 5, dtype=torch.int32)
    rows = torch.randperm(len(lengths) + 2, generator=gen)[: len(lengths)] + 1
    chains = [chain.tolist() for chain in pages[: sum(held)].split(held)] if held else []
    for row, chain in zip(rows.tolist(), chains, strict=True):
        slots = (torch.tensor(chain)[:, None] * PAGE + torch.arange(PAGE)).flatten()
        req_to_token[row, : len(slots)] = slots.int()
    # Padded rows may hold anything that can be read.
    requests = torch.cat((rows, torch.randint(0, len(req_to_token), (padding,), generator=gen))).to(DEVICE)
    lens = torch.cat((torch.tensor(lengths, dtype=torch.int64), torch.full((padding,), 32))).to(DEVICE)
    buffers = DecodeBuffers(
        poisoned(torch.zeros(len(lens), width, dtype=torch.int32)).to(DEVICE),
        *(poisoned(torch.zeros(len(lens), dtype=kind)).to(DEVICE) for kind in (torch.int64, torch.int32, torch.int64)),
        poisoned(torch.zeros(len(lens), heads, dtype=torch.int32)).to(DEVICE),
    )
    total = len(pages) + 1
    valid = (torch.rand(layers, total, generator=gen) < 0.9).to(DEVICE)
    counts = [torch.randint(1, 9, (total,), generator=gen).int().to(DEVICE) for _ in range(2)]
    flags = PageFlags(valid, *counts, torch.tensor([40], device=DEVICE))
    return req_to_token.to(DEVICE), requests, lens, buffers, flags, chains


@pytest.mark.parametrize(("lengths", "padding"), PLAN_LENGTHS)
def test_plan_decode(lengths: list[int], padding: int) -> None:
    """Tables, lengths and flags, row by row; padding lies in page 0 and marks nothing."""
    req_to_token, requests, lens, buffers, flags, chains = plan_inputs(lengths, padding)
    valid, builds, reuses = (x.clone() for x in (flags.valid, flags.builds, flags.reuses))
    untouched = int(buffers.page_table.max()) if buffers.page_table.numel() else 0
    plan_decode(req_to_token, requests, lens, len(lengths), buffers, flags)
    invalid = 40
    for row, (length, chain) in enumerate(zip([*lengths, *[1] * padding], [*chains, *[[0]] * padding], strict=True)):
        assert buffers.page_table[row, : len(chain)].tolist() == chain
        assert (buffers.page_table[row, len(chain) :] == untouched).all()
        assert buffers.seq_lens[row] == length
        assert buffers.num_pages[row] == len(chain)
        assert buffers.last_page_lens[row].tolist() == [(length - 1) % PAGE + 1] * 2
        fills = row < len(lengths) and length % PAGE == 0
        assert buffers.filled[row] == (chain[-1] if fills else -1)
        if row >= len(lengths):
            continue
        if length % PAGE == 1:
            valid[:, chain[-1]], builds[chain[-1]], reuses[chain[-1]] = False, 0, 0
        builds[chain[-1]] += fills
        complete = chain[: length // PAGE - fills]
        invalid += int((~valid[:, complete]).sum())
    assert torch.equal(flags.valid, valid)
    assert torch.equal(flags.builds, builds)
    assert torch.equal(flags.reuses, reuses)
    assert flags.invalid.item() == invalid


@pytest.mark.parametrize(("lengths", "padding"), PLAN_LENGTHS)
def test_plan_decode_is_the_reference(lengths: list[int], padding: int) -> None:
    """Both forms leave the same bits everywhere, in views of larger buffers too."""
    results = []
    for step in (plan_reference, plan_decode):
        req_to_token, requests, lens, buffers, flags, _ = plan_inputs(lengths, padding)
        room = len(lens) + 2
        wide = DecodeBuffers.allocate(room, buffers.page_table.shape[1], 2, DEVICE)
        step(req_to_token, requests, lens, len(lengths), wide.rows(len(lens)), flags)
        results.append([*vars(wide).values(), *vars(flags).values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- attention by FlashInfer ------------------------------------------------------------------------------------------


class PagedDecode:
    """What `FlashInferDecode` promises, in torch: pages by id in lists, planned by their counts; log-sum-exp in base 2."""

    def __init__(self, counts: list[int], last_page_lens: torch.Tensor, heads: int, budget: int) -> None:
        self.indices = poisoned(torch.zeros(sum(counts) * heads + budget, dtype=torch.int32)).to(DEVICE)
        self.counts, self.last_page_lens, self.heads = counts, last_page_lens, heads

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sm_scale: float) -> Parts:
        keys, values = pseudo_pages(k_cache), pseudo_pages(v_cache)
        batch, heads, dim = len(self.counts), self.heads, q.shape[2]
        outs, sizes, start = [], [], 0
        for row, query in enumerate(q.view(batch * heads, -1, dim)):
            count = self.counts[row // heads]
            ids = self.indices[start : start + count].long()
            start += count
            length = max(count - 1, 0) * PAGE + int(self.last_page_lens[row // heads]) * (count > 0)
            k, v = (x[ids].reshape(-1, dim)[:length].float() for x in (keys, values))
            logits = query.float() @ k.T * sm_scale
            outs.append(logits.softmax(-1) @ v)
            sizes.append(logits.logsumexp(-1) / np.log(2.0))
        group = q.shape[1] // heads
        out, lse = torch.stack(outs).to(q.dtype), torch.stack(sizes)
        return Parts(lse.view(batch, heads, 1, group), None, out.view(batch, heads, 1, group, dim), 1)


@pytest.mark.parametrize(("tail", "group", "budget"), cover(tail=("qmu", "off"), group=(1, 3, 8), budget=(48, 2048)))
def test_step_over_pseudo_pages(tail: str, group: int, budget: int) -> None:
    """The selection writes lists of pseudo pages, and one normalised part merges to what the split kernel gives."""
    gen = generator(budget + group)
    kv = make_paged("rope", [1, 33, 700, 48, 16], 2, 64, gen)
    s, q = quantised(kv, 8), queries(kv, group, gen)
    config = LocksConfig(budget_tokens=budget, tail_correction=tail)
    arguments = (q, kv.k_cache, kv.v_cache, s, kv.page_table, kv.seq_lens, 0.125, config)
    want = locks_decode_step(*arguments)
    counts = want.counts.tolist()
    attend = PagedDecode(counts, (kv.seq_lens - 1) % PAGE + 1, 2, budget // PAGE)
    got = locks_decode_step(*arguments, num_pages=kv.num_pages, attend=attend)  # type: ignore[arg-type]
    assert torch.equal(got.pages, want.pages)
    assert torch.equal(got.counts, want.counts)
    assert (attend.indices[2 * sum(counts) :] == torch.iinfo(torch.int32).max).all()
    size = output_size(logit_size(q, kv.k_cache, 0.125), kv.v_cache)
    assert_close(got.out, f64(want.out), size=size)


def test_flashinfer_is_refused_where_it_cannot_attend() -> None:
    gen = generator(14)
    kv = make_paged("rope", [33], 2, 64, gen)
    attend = PagedDecode([3], torch.ones(1), 2, 0)
    arguments = (quantised(kv, 8), kv.page_table, kv.seq_lens, 0.125, LocksConfig())
    with pytest.raises(ArgumentError, match="without a soft cap"):
        locks_decode_step(
            queries(kv, 1, gen),
            kv.k_cache,
            kv.v_cache,
            *arguments,
            logit_cap=5.0,
            attend=attend,  # type: ignore[arg-type]
        )
