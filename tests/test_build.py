"""The summary build and the packed record against fp64."""

import dataclasses

import numpy as np
import pytest
import torch
from truth import (
    EIGEN_STEPS,
    HEAD_DIMS,
    KEY_KINDS,
    PAGE,
    ROUNDOFF,
    STEPS,
    assert_close,
    centred_pages,
    cover,
    decode_record,
    f64,
    generator,
    logit_size,
    make_keys,
    subspace_error,
    svd_factors,
)

from locks_sglang.kernels.build_page_summaries import PageFactors, PageSummaries, RecordLayout, pack
from locks_sglang.ops import ArgumentError, build_page_summaries, exact_page_lse, page_lse

U = ROUNDOFF[torch.float32]


def pages_of(kind: str, pages: int, kv_heads: int, dim: int, v_dim: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = generator(seed)
    keys = make_keys(kind, pages * PAGE, kv_heads, dim, gen).view(pages, PAGE, kv_heads, dim)
    return keys, torch.randn(pages, PAGE, kv_heads, v_dim, generator=gen) + 0.5


def record_of(s: PageSummaries) -> torch.Tensor:
    assert s.record is not None
    return s.record


# --- factors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dim", "rank", "kv_heads"), cover(kind=KEY_KINDS, dim=(*HEAD_DIMS, 8), rank=range(1, 9), kv_heads=(1, 2, 3))
)
def test_factors_up_to_rank_8(kind: str, dim: int, rank: int, kv_heads: int) -> None:
    check_factors(kind, dim, rank, kv_heads)


@pytest.mark.parametrize(
    ("kind", "dim", "rank", "kv_heads"), cover(kind=KEY_KINDS, dim=HEAD_DIMS, rank=range(9, 16), kv_heads=(1, 2, 3))
)
def test_factors_up_to_rank_15(kind: str, dim: int, rank: int, kv_heads: int) -> None:
    check_factors(kind, dim, rank, kv_heads)


def check_factors(kind: str, dim: int, rank: int, kv_heads: int) -> None:
    """The factors are a best rank-r fit: as small a residual as the SVD's, an orthonormal basis, coefficients by size."""
    k, v = pages_of(kind, 7, kv_heads, dim, dim + 2, seed=dim + rank)
    s = build_page_summaries(k, v, rank, quantize=False)

    assert s.valid.all()
    assert s.valid.shape == (7,)
    f, sigma = svd_factors(k, v, rank)
    longest = np.abs(f64(k)).max()
    assert_close(s.mu, f.mu, size=longest)
    assert_close(s.value_mean, f.value_mean, size=np.abs(f64(v)).max())
    basis, coef = f64(s.basis), f64(s.coef)
    assert basis.shape == (7, kv_heads, dim, rank)
    assert coef.shape == (7, kv_heads, PAGE, rank)

    # Eckart and Young: no rank-r matrix leaves less than the singular values past r. The eigenvectors of a Gram matrix with
    # errors of some u sigma_1^2 leave at most that much more, squared.
    residual = np.linalg.norm(centred_pages(k) - coef @ basis.swapaxes(-1, -2), axis=(-1, -2))
    least = np.sqrt((sigma[..., rank:] ** 2).sum(-1))
    rounding = EIGEN_STEPS * U * (sigma[..., 0] + longest)
    assert (residual <= np.sqrt((least + rounding) ** 2 + STEPS * U * sigma[..., 0] ** 2)).all()

    top, kept = sigma[..., :1], np.maximum(sigma[..., :rank], 1e-30)
    gram = basis.swapaxes(-1, -2) @ basis
    norms = np.diagonal(gram, axis1=-2, axis2=-1)
    assert ((np.abs(norms - 1.0) <= EIGEN_STEPS * U) | (norms == 0.0)).all()
    skew = np.abs(gram - norms[..., None] * np.eye(rank))
    assert (skew <= EIGEN_STEPS * U * top[..., None] ** 2 / (kept[..., None] * kept[..., None, :])).all()

    # An eigenvalue sigma^2 errs by some u sigma_1^2 too.
    lengths = np.linalg.norm(coef, axis=-2)
    assert (np.abs(lengths**2 - kept**2) <= EIGEN_STEPS * U * top**2).all()
    largest = np.take_along_axis(coef, np.abs(coef).argmax(-2, keepdims=True), -2)
    assert (largest >= 0).all()

    recon_error = np.linalg.norm(coef @ basis.swapaxes(-1, -2) - f.coef @ f.basis.swapaxes(-1, -2), axis=(-1, -2))
    assert (recon_error <= subspace_error(sigma, rank) + rounding).all()


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("length", [1.0, 30.0, 1e3, 1e5])
def test_rank_15_is_exact_beside_a_key_of_any_length(length: float, dim: int) -> None:
    """A centred page has rank 15: nothing is left over but rounding, relative to the longest key."""
    k, v = pages_of("random", 20, 2, dim, dim, seed=5)
    k[:, 5] *= length
    s = build_page_summaries(k, v, 15, quantize=False)
    rebuilt = f64(s.mu)[:, :, None] + f64(s.coef) @ f64(s.basis).swapaxes(-1, -2)
    keys = f64(k).transpose(0, 2, 1, 3)
    longest = np.linalg.norm(keys, axis=-1).max(-1)
    assert (np.linalg.norm(rebuilt - keys, axis=-1) <= EIGEN_STEPS * U * longest[..., None]).all()


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("value", [0.0, 3.0, 1e-30, 1e18])
def test_page_of_equal_keys(value: float, quantize: bool) -> None:
    """No direction to keep: the mean holds everything and nothing is NaN."""
    k = torch.full((3, PAGE, 2, 64), value)
    s = build_page_summaries(k, torch.full((3, PAGE, 2, 64), -value), 8, quantize=quantize)
    step = float(torch.tensor(value / 127).bfloat16()) if quantize else 0.0
    expected = np.full((3, 2, 64), value)
    assert_close(s.mu, expected, size=value, extra=step / 2)
    assert_close(s.value_mean, -expected, size=value, extra=step / 2)
    rest = f64(s.coef) @ f64(s.basis).swapaxes(-1, -2)
    assert (np.abs(rest) <= EIGEN_STEPS * U * value).all()


def test_no_pages() -> None:
    s = build_page_summaries(torch.zeros(0, PAGE, 2, 64), torch.zeros(0, PAGE, 2, 64), 8)
    assert s.num_pages == 0
    assert s.basis.shape == (0, 2, 64, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantize", [True, False])
def test_half_precision_keys_are_read_as_they_are(dtype: torch.dtype, quantize: bool) -> None:
    k, v = (x.to(dtype) for x in pages_of("rope", 5, 3, 96, 64, seed=1))
    s = build_page_summaries(k, v, 7, quantize=quantize)
    same = build_page_summaries(k.float(), v.float(), 7, quantize=quantize)
    for name in ("mu", "basis", "coef", "value_mean"):
        assert getattr(s, name).dtype == torch.float32
        assert torch.equal(getattr(s, name), getattr(same, name)), name


def test_strided_pages() -> None:
    """Pages cut out of a wider cache, heads and dims not adjacent."""
    k, v = pages_of("random", 5, 3, 64, 96, seed=2)
    wide = torch.full((5, PAGE, 7, 200), torch.nan)
    wide[:, :, 1:7:2, 3:195:3] = k
    wide[:, :, 0:6:2, 4:196:2] = v
    strided = build_page_summaries(wide[:, :, 1:7:2, 3:195:3], wide[:, :, 0:6:2, 4:196:2], 8)
    assert record_of(strided).equal(record_of(build_page_summaries(k, v, 8)))


@pytest.mark.parametrize("kind", KEY_KINDS)
def test_a_page_has_one_record_whatever_is_built_beside_it(kind: str) -> None:
    """A rebuild, alone or in any batch, gives the same bytes: reuse may be checked by equality."""
    k, v = pages_of(kind, 24, 2, 64, 64, seed=3)
    together = record_of(build_page_summaries(k, v, 8))
    for at in (0, 7, 23):
        alone = build_page_summaries(k[at : at + 1].clone(), v[at : at + 1].clone(), 8)
        assert record_of(alone)[0].equal(together[at])
    order = torch.randperm(24, generator=generator(4))
    assert record_of(build_page_summaries(k[order], v[order], 8)).equal(together[order])


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_keys_spoil_their_own_page_and_head_only(bad: float, quantize: bool) -> None:
    k, v = pages_of("random", 6, 2, 64, 64, seed=6)
    clean = build_page_summaries(k, v, 8, quantize=quantize)
    k[2, 9, 1, 17] = bad
    s = build_page_summaries(k, v, 8, quantize=quantize)
    others = torch.ones(6, 2, dtype=torch.bool)
    others[2, 1] = False
    for name in ("mu", "basis", "coef", "value_mean"):
        assert torch.equal(getattr(s, name)[others], getattr(clean, name)[others]), name
    assert s.mu[2, 1].isnan().all()
    assert torch.equal(s.value_mean, clean.value_mean)


@pytest.mark.parametrize("quantize", [True, False])
def test_bad_values_spoil_their_own_value_mean_only(quantize: bool) -> None:
    k, v = pages_of("random", 6, 2, 64, 64, seed=6)
    clean = build_page_summaries(k, v, 8, quantize=quantize)
    v[2, 9, 1, 17] = torch.nan
    v[4, 0, 0, 3] = torch.inf
    s = build_page_summaries(k, v, 8, quantize=quantize)
    for name in ("mu", "basis", "coef"):
        assert torch.equal(getattr(s, name), getattr(clean, name)), name
    others = torch.ones(6, 2, dtype=torch.bool)
    others[2, 1] = others[4, 0] = False
    assert torch.equal(s.value_mean[others], clean.value_mean[others])
    assert not s.value_mean[2, 1].isfinite().all()
    assert not s.value_mean[4, 0].isfinite().all()


# --- packed record --------------------------------------------------------------------------------------------------------

STORED_SHARE = {
    (128, 8): (10.2, 11.7),
    (128, 4): (6.3, 7.8),
    (128, 2): (4.7, 6.2),
    (64, 8): (12.5, 14.1),
    (64, 4): (7.8, 9.4),
    (64, 2): (6.2, 7.8),
}
"""Per cent of the bf16 cache (K and V) that records take, without and with the value mean, as documented."""


@pytest.mark.parametrize(("dim", "rank"), STORED_SHARE)
@pytest.mark.parametrize("value_mean", [False, True])
def test_stored_share_is_the_documented_one(dim: int, rank: int, value_mean: bool) -> None:
    k, v = pages_of("random", 3, 2, dim, dim, seed=7)
    s = build_page_summaries(k, v, rank, value_mean=value_mean)
    share = 100 * s.bytes_per_page / (2 * PAGE * 2 * dim * 2)
    assert abs(share - STORED_SHARE[dim, rank][value_mean]) <= 0.05  # rounded to one digit, 6.25 either way


@pytest.mark.parametrize("dim", [8, *HEAD_DIMS])
@pytest.mark.parametrize("rank", [1, 2, 7, 8, 15])
@pytest.mark.parametrize("value_mean", [False, True])
def test_record_bytes(dim: int, rank: int, value_mean: bool) -> None:
    """The sum of the sections as documented, rounded up to 64 bytes; a byte a dimension for the value mean."""
    rank = min(rank, dim)
    v_dim = dim + 6
    layout = RecordLayout(dim, v_dim, rank, value_mean)
    scales = 4 * (8 if rank <= 8 else 16)
    used = rank * dim // 2 + PAGE * (rank + rank % 2) + dim + 2 * scales
    assert layout.record_bytes % 64 == 0
    assert 0 <= layout.record_bytes - used < 64

    k, v = pages_of("random", 4, 3, dim, v_dim, seed=8)
    s = build_page_summaries(k, v, rank, value_mean=value_mean)
    assert record_of(s).shape == (4, 3, layout.record_bytes)
    assert record_of(s).dtype == torch.uint8
    assert (None if s.values is None else (s.values.shape, s.values.dtype)) == (
        ((4, 3, v_dim), torch.int8) if value_mean else None
    )
    assert s.bytes_per_page == 3 * layout.summary_bytes == 3 * (layout.record_bytes + (v_dim if value_mean else 0))
    floats = build_page_summaries(k, v, rank, value_mean=value_mean, quantize=False)
    assert floats.bytes_per_page == 4 * 3 * (dim + dim * rank + PAGE * rank + (v_dim if value_mean else 0))


@pytest.mark.parametrize(
    ("kind", "dim", "rank", "value_mean"),
    [*cover(kind=KEY_KINDS, dim=(8, *HEAD_DIMS), rank=(1, 2, 3, 5, 8), value_mean=(True, False)), ("rope", 96, 15, True)],
)
def test_record_reads_back_by_its_layout(kind: str, dim: int, rank: int, value_mean: bool) -> None:
    """Bytes decoded independently give the very numbers that the views show, each within half a step of the factors."""
    v_dim = dim + 2
    k, v = pages_of(kind, 5, 2, dim, v_dim, seed=9)
    center = torch.randn(2, dim, generator=generator(10)) * 4
    s = build_page_summaries(k, v, rank, center=center, value_mean=value_mean)
    exact = build_page_summaries(k, v, rank, center=center, value_mean=value_mean, quantize=False)

    f, scales = decode_record(record_of(s), s.values, dim, v_dim, rank, center)
    assert np.array_equal(f64(s.basis), f.basis)
    assert np.array_equal(f64(s.coef), f.coef)
    assert_close(s.mu, f.mu, steps=0)  # one rounding: the centre is added
    assert exact.factors is not None
    sections = {
        "basis": (f64(exact.basis), f.basis, scales["basis"][..., None, :], 7, -2),
        "coef": (f64(exact.coef), f.coef, scales["coef"][..., None], 127, -1),
        "mean": (f64(exact.factors.mean), f.mu - f64(center), scales["mean"], 127, -1),
    }
    if value_mean:
        assert np.array_equal(f64(s.value_mean), f.value_mean)
        sections["value_mean"] = (f64(exact.value_mean), f.value_mean, scales["value_mean"], 127, -1)
    for name, (wanted, stored, scale, levels, axis) in sections.items():
        largest = np.abs(wanted).max(axis, keepdims=True)
        assert (np.abs(scale - largest / levels) <= ROUNDOFF[torch.bfloat16] * largest / levels + 1e-38).all(), name
        assert (np.abs(wanted - stored) <= scale * (0.5 + 1e-5)).all(), name
        steps = np.divide(stored, scale, where=scale > 0, out=np.zeros_like(stored))
        assert np.abs(steps).max() <= levels * (1 + 1e-6), name


# --- centre ---------------------------------------------------------------------------------------------------------------


def test_centre_keeps_large_constant_channels() -> None:
    """Constant channels that int8 with one scale cannot hold beside small ones: held with a centre, lost without."""
    gen = generator(12)
    k, v = pages_of("random", 12, 2, 64, 64, seed=12)
    constant = torch.zeros(2, 64)
    constant[0, 3], constant[1, 40], constant[1, 41] = 145.0, -120.0, 90.0
    k = k + constant
    center = k.mean((0, 1))
    q = torch.randn(1, 8, 64, generator=gen)
    table = torch.arange(12, dtype=torch.int32)[None]
    num_pages = torch.tensor([12], dtype=torch.int32)
    error = {}
    for name, c in (("with", center), ("without", None)):
        s = build_page_summaries(k, v, 8, center=c)
        error[name] = (s.mu - k.mean(1)).abs().max().item()
        lse = page_lse(q, s, table, num_pages, 0.125)
        floats = build_page_summaries(k, v, 8, center=c, quantize=False)
        error[name + ", lse"] = (lse - page_lse(q, floats, table, num_pages, 0.125)).abs().max().item()
    # Half a step: means of 16 normal keys stay below 1.2, the constant channel is 145.
    assert error["with"] <= 0.5 * 1.2 / 127 * 1.01
    assert error["without"] >= 0.4 * 145 / 127
    assert error["with, lse"] < 0.25 * error["without, lse"]


@pytest.mark.parametrize("kind", KEY_KINDS)
def test_centre_changes_nothing_but_rounding(kind: str) -> None:
    """mu is stored relative to the centre and added back; the query meets the centre once."""
    k, v = pages_of(kind, 6, 2, 96, 96, seed=13)
    center = 20 * torch.randn(2, 96, generator=generator(14))
    q = torch.randn(1, 6, 96, generator=generator(15))
    s = build_page_summaries(k, v, 15, center=center, quantize=False)
    assert_close(s.mu, f64(k).mean(1), size=np.abs(f64(k)).max() + 80)
    table = torch.arange(6, dtype=torch.int32)[None]
    lse = page_lse(q, s, table, torch.tensor([6], dtype=torch.int32), 0.1)
    exact = exact_page_lse(q.double(), k.view(-1, 2, 96).double(), table, torch.tensor([96]), 0.1)
    assert_close(lse, f64(exact), size=logit_size(q, k, 0.1) + logit_size(q, center, 0.1))


# --- refusals -------------------------------------------------------------------------------------------------------------

K = torch.zeros(2, PAGE, 3, 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": K[0]}, r"k must be fp32, bf16 or fp16 \[N, P=16, H, D\], got torch.float32 \[16, 3, 64\]"),
        ({"k": K[:, :15]}, r"k must be .*P=16.* got torch.float32 \[2, 15, 3, 64\]"),
        ({"k": K.double()}, r"k must be fp32, bf16 or fp16.*got torch.float64"),
        ({"v": K[..., 0]}, r"v must be a float \[N, P, H, Dv\] like k \[2, 16, 3, 64\].*got torch.float32 \[2, 16, 3\]"),
        ({"v": K[:1]}, r"v must be .* got torch.float32 \[1, 16, 3, 64\]"),
        ({"v": K.int()}, r"v must be .* got torch.int32"),
        ({"v": K.to("meta")}, r"v must be .* on cpu, got .* on meta"),
        ({"rank": 0}, r"rank must be a whole number from 1 to 15 \(min\(P - 1, D\)\), got 0"),
        ({"rank": 8.0}, r"rank must be a whole number from 1 to 15 .*got 8.0"),
        ({"rank": 16}, r"rank must be .* 1 to 15 .*got 16"),
        ({"k": K[..., :8], "rank": 9}, r"rank must be .* 1 to 8 .*got 9"),
        ({"k": K[..., :62]}, r"head_dim must be a multiple of 4 and v_head_dim even.*got 62 and 64"),
        ({"v": K[..., :63]}, r"head_dim must be a multiple of 4 and v_head_dim even.*got 64 and 63"),
        ({"center": torch.zeros(3, 63)}, r"center must be fp32 \[H=3, D=64\] on cpu, got torch.float32 \[3, 63\] on cpu"),
        ({"center": torch.zeros(3, 64).half()}, r"center must be fp32 .*got torch.float16"),
        ({"center": torch.zeros(3, 64, device="meta")}, r"center must be fp32 .*on meta"),
    ],
)
def test_refusals(arguments: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        build_page_summaries(**({"k": K, "v": K, "rank": 8} | arguments))


def test_value_mean_that_is_not_stored_is_refused() -> None:
    for quantize in (True, False):
        s = build_page_summaries(K, K, 8, value_mean=False, quantize=quantize)
        with pytest.raises(ArgumentError, match="no value mean; build them with value_mean=True"):
            _ = s.value_mean


def test_packing_without_the_value_mean_that_the_layout_stores_is_refused() -> None:
    factors = PageFactors(torch.zeros(1, 1, 64), torch.zeros(1, 1, 64, 8), torch.zeros(1, 1, PAGE, 8), None)
    with pytest.raises(ArgumentError, match="stores a value mean but none was given"):
        pack(factors, RecordLayout(64, 64, 8))


def test_summaries_are_packed_or_not() -> None:
    s = build_page_summaries(K, K, 8)
    with pytest.raises(ArgumentError, match="either record or factors"):
        dataclasses.replace(s, record=None)
    with pytest.raises(ArgumentError, match="give values with a record"):
        dataclasses.replace(s, values=None)
    with pytest.raises(ArgumentError, match="either record or factors"):
        dataclasses.replace(s, factors=build_page_summaries(K, K, 8, quantize=False).factors)
