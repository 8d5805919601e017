"""Page log-sum-exp, estimated and exact, against fp64."""

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
    assert_close,
    cover,
    f64,
    generator,
    logit_size,
    make_paged,
)

from locks_sglang.kernels.page_lse import page_scores
from locks_sglang.ops import ArgumentError, build_page_summaries, exact_page_lse, page_lse


def queries(batch: int, heads: int, dim: int, gen: torch.Generator, kv: Paged) -> torch.Tensor:
    """Unit normal queries, shortened where the keys are long so that logits stay within a few tens."""
    norms = kv.k_cache.float().norm(dim=-1)
    size = norms[norms.isfinite()].mean() / dim**0.5
    return torch.randn(batch, heads, dim, generator=gen) * min(1.0, 3.0 / float(size))


# --- against the truth ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dim", "group", "rank", "kv_heads"),
    cover(kind=KEY_KINDS, dim=HEAD_DIMS, group=GROUPS, rank=range(1, 16), kv_heads=(1, 2, 3)),
)
def test_unquantised(kind: str, dim: int, group: int, rank: int, kv_heads: int) -> None:
    """Every length in one batch; pages shuffled; NaN in every slot that holds no token."""
    gen = generator(1000 * rank + dim + group)
    kv = make_paged(kind, LENGTHS, kv_heads, dim, gen)
    q = queries(len(LENGTHS), group * kv_heads, dim, gen, kv)
    scale = dim**-0.5
    s = build_page_summaries(*kv.pages, rank, quantize=False)
    lse = page_lse(q, s, kv.page_table, kv.num_pages, scale, seq_lens=kv.seq_lens)

    assert lse.dtype == torch.float32
    f, sigma = truth.svd_factors(*kv.pages, rank)
    expected = truth.page_scores(f, q, kv.page_table, kv.num_pages, scale, seq_lens=kv.seq_lens).lse
    # A log-sum-exp moves by no more than its logits do.
    moved = truth.subspace_error(sigma, rank)
    extra = np.zeros(expected.shape)
    for b, count in enumerate(kv.num_pages.tolist()):
        physical = kv.page_table[b, :count].long().numpy()
        lengths = np.linalg.norm(f64(q[b]), axis=-1).reshape(kv_heads, group, 1)
        extra[b, :, :count] = (scale * lengths * moved[physical].T[:, None]).reshape(-1, count)
    assert_close(lse, expected, size=logit_size(q, kv.k_cache, scale), extra=extra)


@pytest.mark.parametrize(("kind", "dim", "group"), cover(kind=KEY_KINDS, dim=HEAD_DIMS, group=GROUPS))
def test_rank_15_unquantised_is_exact(kind: str, dim: int, group: int) -> None:
    gen = generator(dim + group)
    kv = make_paged(kind, LENGTHS, 2, dim, gen)
    q = queries(len(LENGTHS), 2 * group, dim, gen, kv)
    scale = dim**-0.5
    s = build_page_summaries(*kv.pages, 15, quantize=False)
    lse = page_lse(q, s, kv.page_table, kv.num_pages, scale, seq_lens=kv.seq_lens)
    exact = exact_page_lse(q, kv.k_cache, kv.page_table, kv.seq_lens, scale)

    expected = truth.exact_page_lse(q, kv.k_cache, kv.page_table, kv.seq_lens, scale)
    size = logit_size(q, kv.k_cache, scale)
    assert_close(exact, expected, size=size)
    for b, length in enumerate(LENGTHS):
        if length % PAGE:
            expected[b, :, length // PAGE] = np.inf
    assert_close(lse, expected, size=size)


@pytest.mark.parametrize(
    ("kind", "dim", "group", "rank", "centred"),
    cover(kind=KEY_KINDS, dim=HEAD_DIMS, group=GROUPS, rank=range(1, 16), centred=(True, False)),
)
def test_quantised(kind: str, dim: int, group: int, rank: int, centred: bool) -> None:
    """The record decides: its numbers, decoded on their own, give the log-sum-exp and both tail weights."""
    gen = generator(1000 * rank + dim + group)
    kv = make_paged(kind, LENGTHS, 2, dim, gen, v_dim=dim // 2)
    q = queries(len(LENGTHS), 2 * group, dim, gen, kv)
    scale, cap = dim**-0.5, 25.0 if rank % 2 else 0.0
    center = 3 * torch.randn(2, dim, generator=gen) if centred else torch.zeros(2, dim)
    s = build_page_summaries(*kv.pages, rank, center=center)
    lse = page_lse(q, s, kv.page_table, kv.num_pages, scale, seq_lens=kv.seq_lens, logit_cap=cap)
    tails = {
        gate: page_scores(q, s, kv.page_table, kv.num_pages, scale, seq_lens=kv.seq_lens, logit_cap=cap, tail=gate).tail
        for gate in ("qmu", "flat")
    }

    assert s.record is not None
    f, _ = truth.decode_record(s.record, s.values, dim, dim // 2, rank, center)
    expected = truth.page_scores(f, q, kv.page_table, kv.num_pages, scale, seq_lens=kv.seq_lens, cap=cap)
    size = logit_size(q, kv.k_cache, scale) + 2 * logit_size(q, center, scale)
    assert_close(lse, expected.lse, size=size)
    for gate, tail in tails.items():
        assert tail is not None
        assert_close(tail, expected.log_weight[gate], size=size)


@pytest.mark.parametrize("cap", [0.0, 2.0, 30.0])
@pytest.mark.parametrize("length", LENGTHS)
def test_exact_page_lse_of_one_request(length: int, cap: float) -> None:
    gen = generator(length)
    kv = make_paged("rope", [length], 3, 64, gen)
    q = queries(1, 12, 64, gen, kv)
    lse = exact_page_lse(q, kv.k_cache, kv.page_table, kv.seq_lens, 0.3, logit_cap=cap)
    double = exact_page_lse(q.double(), kv.k_cache, kv.page_table, kv.seq_lens, 0.3, logit_cap=cap)

    expected = truth.exact_page_lse(q, kv.k_cache, kv.page_table, kv.seq_lens, 0.3, cap)
    size = logit_size(q, kv.k_cache, 0.3)
    assert_close(lse, expected, size=size)
    assert double.dtype == torch.float64
    assert_close(double, expected, size=size)


@pytest.mark.parametrize("cap", [1.0, 5.0, 50.0])
@pytest.mark.parametrize("quantize", [True, False])
def test_logit_cap(cap: float, quantize: bool) -> None:
    """The cap acts on each reconstructed logit, the page mean included, after sm_scale."""
    gen = generator(int(cap))
    kv = make_paged("random", [128, 80], 2, 64, gen)
    q = 8 * torch.randn(2, 6, 64, generator=gen)
    s = build_page_summaries(*kv.pages, 15, quantize=quantize)
    lse = page_lse(q, s, kv.page_table, kv.num_pages, 0.25, logit_cap=cap)
    if quantize:
        assert s.record is not None
        f, _ = truth.decode_record(s.record, s.values, 64, 64, 15, torch.zeros(2, 64))
    else:
        f, _ = truth.svd_factors(*kv.pages, 15)
    expected = truth.page_scores(f, q, kv.page_table, kv.num_pages, 0.25, cap=cap).lse
    assert_close(lse, expected, size=logit_size(q, kv.k_cache, 0.25))
    assert expected[0, :, :8].max() <= cap + np.log(PAGE)


# --- contract -------------------------------------------------------------------------------------------------------------


def test_masks_of_a_mixed_batch() -> None:
    """-inf past the pages, +inf for the partial page and for pages without a summary; the rest is as without them."""
    gen = generator(20)
    lengths = [0, 1, 15, 16, 17, 48, 1000]
    kv = make_paged("random", lengths, 2, 64, gen)
    assert (kv.page_table < 0).any()
    assert (kv.page_table >= 2**30).any()
    q = torch.randn(7, 8, 64, generator=gen)
    s = build_page_summaries(*kv.pages, 8)
    full = page_lse(q, s, kv.page_table, kv.num_pages, 0.125, seq_lens=kv.seq_lens)
    s.valid[kv.page_table[5, 1]] = False  # in the middle of a request of whole pages
    s.valid[kv.page_table[6, 0]] = False
    s.valid[kv.page_table[6, 62]] = False  # the partial page once more
    lse = page_lse(q, s, kv.page_table, kv.num_pages, 0.125, seq_lens=kv.seq_lens)

    expected = full.clone()
    expected[5, :, 1] = torch.inf
    expected[6, :, 0] = torch.inf
    assert torch.equal(lse, expected)
    for b, length in enumerate(lengths):
        pages, whole = -(-length // PAGE), length // PAGE
        assert (full[b, :, pages:] == -torch.inf).all()
        assert (full[b, :, whole:pages] == torch.inf).all()
        assert full[b, :, :whole].isfinite().all()


def test_without_seq_lens_every_page_is_full() -> None:
    gen = generator(21)
    kv = make_paged("random", [48, 33, 16], 2, 64, gen)
    k, v = kv.pages
    k, v = k.nan_to_num(0.25), v.nan_to_num(0.25)
    q = torch.randn(3, 4, 64, generator=gen)
    s = build_page_summaries(k, v, 15, quantize=False)
    lse = page_lse(q, s, kv.page_table, kv.num_pages, 0.125)
    expected = truth.exact_page_lse(q, k.reshape(-1, 2, 64), kv.page_table, kv.num_pages * PAGE, 0.125)
    assert_close(lse, expected, size=logit_size(q, k, 0.125))


@pytest.mark.parametrize("quantize", [True, False])
def test_entries_past_the_pages_are_never_read(quantize: bool) -> None:
    """Whatever stands there, in range or not: the result has the same bits."""
    gen = generator(22)
    kv = make_paged("spike", [1, 0, 40, 100], 2, 64, gen)
    q = torch.randn(4, 6, 64, generator=gen)
    s = build_page_summaries(*kv.pages, 4, quantize=quantize)
    results = []
    for junk in (-1, -(2**31), 2**31 - 1, s.num_pages, 0, 3):
        table = kv.page_table.clone()
        for b, pages in enumerate(kv.num_pages.tolist()):
            table[b, pages:] = junk
        results.append(page_lse(q, s, table, kv.num_pages, 0.125, seq_lens=kv.seq_lens))
        exact = exact_page_lse(q, kv.k_cache, table, kv.seq_lens, 0.125)
        assert not exact.isnan().any()
    for other in results[1:]:
        assert torch.equal(other, results[0])


def test_an_invalid_page_may_hold_anything() -> None:
    """Records of pages that are not valid are arbitrary bytes; no NaN comes out of them."""
    gen = generator(23)
    kv = make_paged("random", [64, 64], 2, 64, gen)
    s = build_page_summaries(*kv.pages, 8)
    q = torch.randn(2, 4, 64, generator=gen)
    before = page_scores(q, s, kv.page_table, kv.num_pages, 0.125, seq_lens=kv.seq_lens, tail="qmu")
    assert s.record is not None
    assert before.tail is not None
    for junk in (0, 127, 255):
        page = kv.page_table[0, 2]
        s.valid[page] = False
        s.record[page] = junk
        for gate in ("qmu", "flat"):
            after = page_scores(q, s, kv.page_table, kv.num_pages, 0.125, seq_lens=kv.seq_lens, tail=gate)
            assert after.tail is not None
            assert (after.lse[0, :, 2] == torch.inf).all()
            assert (after.tail[0, :, 2] == -torch.inf).all()
            others = [n for n in range(4) if n != 2]
            assert torch.equal(after.lse[0][:, others], before.lse[0][:, others])
            assert torch.equal(after.lse[1], before.lse[1])


def test_tail_weights_of_unscored_pages_are_zero() -> None:
    """Partial, invalid and absent pages weigh nothing; both gates stay below the page's estimated mass."""
    gen = generator(24)
    kv = make_paged("rope", LENGTHS, 2, 64, gen)
    s = build_page_summaries(*kv.pages, 8)
    s.valid[kv.page_table[6, 10]] = False
    q = queries(7, 4, 64, gen, kv)
    for gate in ("qmu", "flat"):
        scores = page_scores(q, s, kv.page_table, kv.num_pages, 0.125, seq_lens=kv.seq_lens, tail=gate)
        assert scores.tail is not None
        weighs = scores.tail > -torch.inf
        assert torch.equal(weighs, scores.lse.isfinite())
        # Coefficients sum to zero but for their rounding to int8, which moves the mean logit by half a step at most.
        slack = 0.05 if gate == "qmu" else 1e-4
        assert (scores.tail[weighs] <= scores.lse[weighs] + slack).all()
    assert page_scores(q, s, kv.page_table, kv.num_pages, 0.125, seq_lens=kv.seq_lens).tail is None


@pytest.mark.parametrize("quantize", [True, False])
def test_bad_keys_leave_other_pages_alone(quantize: bool) -> None:
    gen = generator(25)
    kv = make_paged("random", [64, 64], 2, 64, gen)
    q = torch.randn(2, 4, 64, generator=gen)
    clean = page_lse(q, build_page_summaries(*kv.pages, 8, quantize=quantize), kv.page_table, kv.num_pages, 0.125)
    for bad in (torch.nan, torch.inf):
        keys, values = (x.clone() for x in kv.pages)
        keys[kv.page_table[0, 2], 3, 1, 5] = bad
        s = build_page_summaries(keys, values, 8, quantize=quantize)
        lse = page_lse(q, s, kv.page_table, kv.num_pages, 0.125)
        assert lse[0, 2:, 2].isnan().all()
        lse[0, 2:, 2] = clean[0, 2:, 2]
        assert torch.equal(lse, clean)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_queries_of_other_types_and_strides(dtype: torch.dtype) -> None:
    """A query is read as the number it holds; heads may lie inside a wider row, as q does beside k and v."""
    gen = generator(26)
    kv = make_paged("random", [100, 31, 48], 3, 96, gen)
    s = build_page_summaries(*kv.pages, 8)
    wide = torch.full((3, 2 * 12 + 5, 96 + 8), torch.nan, dtype=dtype)
    q = torch.randn(3, 12, 96, generator=gen).to(dtype)
    wide[:, 4:28:2, 3:99] = q
    lengths = kv.seq_lens.long()
    strided = page_lse(wide[:, 4:28:2, 3:99], s, kv.page_table, kv.num_pages.long(), 0.1, seq_lens=lengths)
    assert strided.dtype == torch.float32
    assert strided.shape == (3, 12, kv.page_table.shape[1])
    assert torch.equal(strided, page_lse(q.float(), s, kv.page_table, kv.num_pages, 0.1, seq_lens=kv.seq_lens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_exact_page_lse_of_other_cache_types(dtype: torch.dtype) -> None:
    gen = generator(27)
    kv = make_paged("random", [100, 31], 2, 64, gen, dtype=dtype)
    q = torch.randn(2, 8, 64, generator=gen)
    lse = exact_page_lse(q, kv.k_cache, kv.page_table, kv.seq_lens, 0.125)
    expected = truth.exact_page_lse(q, kv.k_cache, kv.page_table, kv.seq_lens, 0.125)
    assert lse.dtype == torch.float32
    assert_close(lse, expected, size=logit_size(q, kv.k_cache, 0.125))


# --- refusals -------------------------------------------------------------------------------------------------------------

Q = torch.zeros(2, 4, 64)
S = build_page_summaries(torch.zeros(6, PAGE, 2, 64), torch.zeros(6, PAGE, 2, 64), 8)
TABLE = torch.zeros(2, 3, dtype=torch.int32)
HELD = torch.tensor([3, 2], dtype=torch.int32)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"q": Q[0]}, r"q must be a float \[B, Hq, D=64\], got torch.float32 \[4, 64\]"),
    ({"q": Q.int()}, r"q must be a float .*got torch.int32"),
    ({"q": Q[..., :32]}, r"q must be a float \[B, Hq, D=64\], got torch.float32 \[2, 4, 32\]"),
    ({"q": Q[:, :3]}, r"3 query heads cannot be grouped over the summaries' 2 KV heads"),
    ({"page_table": TABLE.long()}, r"page_table must be int32 \[B=2, Nmax\], got torch.int64 \[2, 3\]"),
    ({"page_table": TABLE[:1]}, r"page_table must be int32 \[B=2, Nmax\], got torch.int32 \[1, 3\]"),
    ({"page_table": TABLE[0]}, r"page_table must be int32 .*got torch.int32 \[3\]"),
    ({"num_pages": HELD[:1]}, r"num_pages must be int32 or int64 \[B=2\], got torch.int32 \[1\]"),
    ({"num_pages": HELD.float()}, r"num_pages must be int32 or int64 .*got torch.float32"),
    ({"num_pages": HELD.to("meta")}, r"page_table is on cpu but num_pages on meta; move them to one device"),
    ({"q": Q.to("meta")}, r"q, page_table and the summaries must share a device, got meta, cpu, cpu"),
    ({"seq_lens": HELD[:1]}, r"seq_lens must be int32 or int64 \[B=2\], got torch.int32 \[1\]"),
    ({"seq_lens": HELD.half()}, r"seq_lens must be int32 or int64 .*got torch.float16"),
    ({"seq_lens": HELD.to("meta")}, r"page_table is on cpu but seq_lens on meta"),
    ({"logit_cap": -1.0}, r"logit_cap must be 0 \(off\) or positive, got -1.0"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    given = {"q": Q, "s": S, "page_table": TABLE, "num_pages": HELD, "sm_scale": 1.0} | arguments
    with pytest.raises(ArgumentError, match=message):
        page_lse(**given)
