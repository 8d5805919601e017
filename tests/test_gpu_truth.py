"""The kernels at real sizes against fp64 truth, on one CUDA GPU; needs no SGLang server and no FlashInfer:

    pytest -m gpu -n 8 --dist loadgroup tests/test_gpu_truth.py

Every case is one pool of pages in random order, its summaries built by the kernel, and a batch of requests in it. With
`loadgroup` all tests of a case run in the worker that made it, and the cases of many gigabytes one after the other; without it
every worker makes its own. The truth is computed in fp64 torch on the same GPU, a part of the pages at a time; on a small case
it is itself compared with `truth.py`.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import truth
from truth import PAGE, assert_close, f64

from locks_sglang import LocksConfig
from locks_sglang.kernels.build_page_summaries import PageFactors, PageSummaries, RecordLayout, build, pack, unpack
from locks_sglang.kernels.common.capability import runs_kernels
from locks_sglang.kernels.locks_decode import locks_decode_step
from locks_sglang.ops import locks_decode, page_lse, select_pages, sparse_decode

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
FP8 = torch.float8_e4m3fn
ELEMENTS = 1 << 22
"""Elements of a cache that the truth takes at a time: 34 MB in fp64."""
SAMPLE = 2048
"""(page, KV head) pairs whose records are compared with the singular value decomposition of their keys."""
OUTPUT_ERROR = {torch.bfloat16: 5e-3, torch.float16: 2e-3}
"""Largest error of an output row relative to its length. Probabilities and outputs are rounded to these types, which moves a
row by about a quarter of it."""
LSE_ERROR = 1e-3
"""Of the log-sum-exp of the attended tokens: products of half precision on tensor cores, summed in fp32."""


@dataclass(frozen=True)
class Case:
    """One pool and batch.

    Args:
        name: test id.
        dim, heads, group: D, H, G.
        lengths: tokens of each request; the first is the longest.
        dtype: of the queries, and of the caches without `k_scale`.
        k_scale: makes the caches fp8 e4m3 whose keys are multiplied by it, and their values by half.
        cap: logit cap.
        budget: tokens.
        tail: gate of the tail correction.
        rank: R.
        kind: of keys, see `truth.make_keys`.
        pages: pages of the pool where it is larger than the requests; theirs are its last ones.
    """

    name: str
    dim: int
    heads: int
    group: int
    lengths: tuple[int, ...] = (40_003, 2_048, 20_000, 17, 1, 16, 700)
    dtype: torch.dtype = torch.bfloat16
    k_scale: float | None = None
    cap: float = 0.0
    budget: int = 2048
    tail: str = "qmu"
    rank: int = 8
    kind: str = "rope"
    pages: int = 0


HALF = torch.float16
REGULAR = [
    Case("d64-h1-g1", 64, 1, 1, lengths=(131_072, 5_000, 1)),
    Case("d64-h2-g7", 64, 2, 7, budget=512, tail="flat"),
    Case("d64-h3-g3-fp16", 64, 3, 3, dtype=HALF, rank=4, kind="random"),
    Case("d64-h8-g16-cap30", 64, 8, 16, cap=30.0, kind="random"),
    Case("d64-h4-g4-fp8", 64, 4, 4, k_scale=0.5, cap=30.0),
    Case("d96-h8-g1-fp16", 96, 8, 1, dtype=HALF, cap=50.0),
    Case("d96-h2-g6", 96, 2, 6, kind="random", rank=2),
    Case("d96-h1-g16-fp8", 96, 1, 16, k_scale=1.0, tail="off"),
    Case("d128-h8-g4", 128, 8, 4),
    Case("d128-h4-g7", 128, 4, 7, kind="random", tail="flat"),
    Case("d128-h3-g2-fp16", 128, 3, 2, dtype=HALF, budget=512, kind="low_rank"),
    Case("d128-h1-g16", 128, 1, 16, lengths=(131_072, 3_000), kind="spike"),
    Case("d128-h4-g6-fp16-fp8", 128, 4, 6, dtype=HALF, k_scale=2.0, cap=50.0),
    Case("d128-h8-g3-fp8", 128, 8, 3, k_scale=1.0, kind="random"),
    Case("d256-h4-g2-cap50", 256, 4, 2, cap=50.0),
    Case("d256-h1-g8-fp16", 256, 1, 8, dtype=HALF, kind="random", rank=4),
    Case("d256-h2-g3-fp8", 256, 2, 3, k_scale=2.0, tail="flat"),
    Case("d256-h8-g1-fp8", 256, 8, 1, k_scale=0.5, budget=512, rank=2, lengths=(20_001, 1_000, 3)),
]
LARGE = [
    Case("million-tokens", 128, 4, 8, lengths=(1_048_576,)),
    Case("batch-64", 128, 2, 4, lengths=tuple(round(65_536 ** (1 - i / 63)) for i in range(64))),
    Case("far-cache", 128, 8, 4, lengths=(30_001, 3_000, 1), pages=140_000),
    Case("far-record", 256, 8, 1, lengths=(20_000, 1_000, 31), k_scale=1.0, pages=185_000),
]
SMALL = Case("small", 64, 2, 3, lengths=(1_000, 33, 1, 16), dtype=HALF, cap=30.0, budget=160)


def stored(x: torch.Tensor) -> torch.Tensor:
    """A cache as what can be indexed and filled on every device: fp8 as its bytes."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def unwritten(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """NaN of any kind, fp8 included."""
    if dtype == FP8:
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=DEVICE).view(FP8)
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(logits / cap) if cap else logits


class Scores(NamedTuple):
    """fp64 [B, Hq, Nmax]: log-sum-exp of every page from its record, and natural log of its tail weight, as `truth.Scores`."""

    lse: torch.Tensor
    weight: torch.Tensor


class Problem:
    """The tensors of one case, and their truth.

    k_cache, v_cache [slots, H, D] and page_table int32 [B, Nmax] are as in `truth.Paged`, but on the device. `ids`: physical
    pages of all requests, one after the other, the last ones of the pool from `first_page` on; `chains`: those of each request;
    `whole`: those of 16 tokens. `s`: the kernel's summaries; every page that is not whole has a poisoned record, and one whole
    page of the first request is marked as not valid. `size`, `fixed`: `truth.logit_size` and `truth.fixed_point_error`.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        gen = torch.Generator(DEVICE).manual_seed(sum(map(ord, case.name)))
        heads, dim = case.heads, case.dim
        held = [-(-n // PAGE) for n in case.lengths]
        used, total = sum(held), max(sum(held) + 2, case.pages)
        self.first_page = total - used
        self.ids = torch.randperm(used, generator=gen, device=DEVICE) + self.first_page
        self.chains = list(self.ids.split(held))
        self.page_table = torch.tensor([-5, 2**30], dtype=torch.int32, device=DEVICE).repeat(len(held), max(held) // 2 + 1)
        for row, chain in enumerate(self.chains):
            self.page_table[row, : len(chain)] = chain
        self.seq_lens = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
        self.num_pages = torch.tensor(held, dtype=torch.int32, device=DEVICE)

        dtype = case.dtype if case.k_scale is None else FP8
        self.k_scale, self.v_scale = (1.0, 1.0) if case.k_scale is None else (case.k_scale, case.k_scale / 2)
        self.sm_scale = dim**-0.5
        self.k_cache, self.v_cache = (unwritten(total * PAGE, heads, dim, dtype=dtype) for _ in range(2))
        longest, lengths = torch.zeros(1, dim, device=DEVICE), []
        for part in self.ids.split(self.pages_at_a_time):
            with DEVICE:
                keys = truth.make_keys(case.kind, len(part) * PAGE, heads, dim, gen).contiguous()
                # What a page's values have in common is what its mean can say of them.
                values = torch.randn(len(part), PAGE, heads, dim, generator=gen)
                values += torch.randn(len(part), 1, heads, dim, generator=gen)
            for cache, made in ((self.k_cache, keys.view_as(values)), (self.v_cache, values)):
                self.own(self.paged(cache))[part - self.first_page] = stored(made.to(dtype))
            rows = keys.view(-1, dim)
            norms = rows.norm(dim=-1)
            lengths.append(norms.mean())
            if norms.max() > longest.norm():
                longest = rows[norms.argmax()][None]
        for length, chain in zip(case.lengths, self.chains, strict=True):
            for cache in (self.k_cache, self.v_cache):
                if length % PAGE:
                    self.paged(cache)[int(chain[-1]), length % PAGE :] = stored(unwritten(1, dtype=dtype))

        # Logits of 2.5 in the mean, or of a size that the cap bends.
        spread = 10.0 if case.cap else 2.5
        q = torch.randn(len(held), heads * case.group, dim, generator=gen, device=DEVICE)
        q *= spread / (self.sm_scale * self.k_scale * torch.stack(lengths).mean())
        self.q = q.to(case.dtype)
        scale = self.sm_scale * self.k_scale
        # The longest key as it was before it was rounded, by a sixteenth at most.
        self.size = 1.07 * truth.logit_size(self.q, longest, scale)
        self.fixed = 1.07 * truth.fixed_point_error(self.q, longest, scale)

        self.whole = torch.cat([chain[: n // PAGE] for n, chain in zip(case.lengths, self.chains, strict=True)])
        layout = RecordLayout(dim, dim, case.rank)
        center = self.rows(self.k_cache, self.whole[:32]).mean((0, 1)).float()
        record, means = layout.empty(total, heads, device=DEVICE)
        assert means is not None
        for x in (record, means.view(torch.uint8)):
            x.fill_(0xFF)
            self.own(x)[self.whole - self.first_page] = 0
        valid = torch.zeros(total, dtype=torch.bool, device=DEVICE)
        assert runs_kernels(self.q, dim, dim, case.group)
        build(self.k_cache, self.v_cache, self.whole, center, record, means, valid, layout)
        assert torch.equal(valid.nonzero().flatten(), self.whole.sort().values)
        valid[self.chains[0][case.lengths[0] // PAGE // 2]] = False
        self.s = PageSummaries(layout, valid, center, record, means)

    @property
    def pages_at_a_time(self) -> int:
        return max(1, ELEMENTS // (PAGE * self.case.heads * self.case.dim))

    def paged(self, cache: torch.Tensor) -> torch.Tensor:
        """A cache as pages [N, P, H, D], fp8 as bytes."""
        return stored(cache).view(-1, PAGE, self.case.heads, self.case.dim)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """What the requests have of x [N, ...]: far into it, torch then indexes no further than they reach."""
        return x[self.first_page :]

    def rows(self, cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """fp64 [n, P, H, D] of physical pages int64 [n]."""
        return self.own(self.paged(cache))[pages - self.first_page].view(cache.dtype).float().double()

    def packed(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Records uint8 [n, H, bytes] and value means int8 [n, H, Dv] of physical pages int64 [n]."""
        assert self.s.record is not None
        assert self.s.values is not None
        record, means = (self.own(x)[pages - self.first_page] for x in (self.s.record, self.s.values))
        return record, means

    @property
    def groups(self) -> Iterator[tuple[int, int, slice]]:
        """Every request and KV head, and the latter's query heads."""
        for b in range(len(self.case.lengths)):
            for h in range(self.case.heads):
                yield b, h, slice(h * self.case.group, (h + 1) * self.case.group)

    def step_arguments(self) -> tuple[Any, ...]:
        """Those without a name."""
        return self.q, self.k_cache, self.v_cache, self.s, self.page_table, self.seq_lens, self.sm_scale

    @property
    def scales(self) -> dict[str, float]:
        return {"logit_cap": self.case.cap, "k_scale": self.k_scale, "v_scale": self.v_scale}

    def page_lse(self) -> torch.Tensor:
        """By the kernel."""
        return page_lse(
            self.q,
            self.s,
            self.page_table,
            self.num_pages,
            self.sm_scale * self.k_scale,
            seq_lens=self.seq_lens,
            logit_cap=self.case.cap,
        )

    @cached_property
    def scores(self) -> Scores:
        """Truth of the scan: the records, which `unpack` reads exactly, in fp64."""
        case, scale = self.case, self.sm_scale * self.k_scale
        lse = torch.full((*self.q.shape[:2], self.page_table.shape[1]), -torch.inf, dtype=torch.float64, device=DEVICE)
        weight = lse.clone()
        for b, chain in enumerate(self.chains):
            q = self.q[b].double().view(case.heads, case.group, case.dim)
            for at in range(0, len(chain), self.pages_at_a_time):
                pages = chain[at : at + self.pages_at_a_time]
                f = unpack(*self.packed(pages), self.s.layout)
                centre = torch.einsum("nhd,hgd->hgn", f.mean.double() + self.s.center.double(), q)
                along = torch.einsum("nhdr,hgd->hgnr", f.basis.double(), q)
                logits = capped(scale * (centre[..., None] + torch.einsum("nhtr,hgnr->hgnt", f.coef.double(), along)), case.cap)
                sums = torch.logsumexp(logits, -1)
                if case.tail == "flat":
                    flat = torch.exp(logits - logits.amax(-1, keepdim=True)).mean(-1)
                    tail = sums + 0.5 * torch.log(flat)
                else:
                    tail = math.log(PAGE) + capped(scale * centre, case.cap)
                index = torch.arange(at, at + len(pages), device=DEVICE)
                known = self.s.valid[pages] & ((index + 1) * PAGE <= case.lengths[b])
                part = slice(at, at + len(pages))
                lse[b, :, part] = torch.where(known, sums, torch.inf).flatten(0, 1)
                weight[b, :, part] = torch.where(known, tail, -torch.inf).flatten(0, 1)
        return Scores(lse, weight)

    def attention(self, b: int, h: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact attention of one group to logical pages int64 [n]: fp64 output [G, Dv], values as stored, and lse [G]."""
        case = self.case
        q = self.q[b, h * case.group : (h + 1) * case.group].double()
        outs, sums = [], []
        for part in pages.split(ELEMENTS // (PAGE * case.dim)):
            own = self.chains[b][part] - self.first_page
            keys, values = (
                self.own(self.paged(x))[:, :, h][own].view(x.dtype).float().double().flatten(0, 1)
                for x in (self.k_cache, self.v_cache)
            )
            position = (part[:, None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten()
            live = position < case.lengths[b]
            logits = capped(self.sm_scale * self.k_scale * (q @ keys[live].T), case.cap)
            sums.append(torch.logsumexp(logits, -1))
            outs.append(torch.exp(logits - sums[-1][:, None]) @ values[live])
        lse = torch.logsumexp(torch.stack(sums), 0)
        shares = torch.exp(torch.stack(sums) - lse)
        return (shares[..., None] * torch.stack(outs)).sum(0), lse

    def decoded(self, pages: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Truth of a step that attended to these pages [B, H, S]: fp64 [B, Hq, Dv]."""
        case, want = self.case, torch.empty(*self.q.shape[:2], self.case.dim, dtype=torch.float64, device=DEVICE)
        for b, h, group in self.groups:
            chain, chosen = self.chains[b], pages[b, h, : int(counts[b])].long()
            out, lse = self.attention(b, h, chosen)
            if case.tail != "off":
                weight = self.scores.weight[b, group, : len(chain)].index_fill(1, chosen, -torch.inf)
                peak = torch.maximum(lse, weight.amax(1))
                share, weight = torch.exp(lse - peak), torch.exp(weight - peak[:, None])
                out = share[:, None] * out
                for at in range(0, len(chain), self.pages_at_a_time):
                    part = slice(at, at + self.pages_at_a_time)
                    means = unpack(*(x[:, h] for x in self.packed(chain[part])), self.s.layout).value_mean
                    assert means is not None
                    # A page that is not whole has no weight, and a record that says nothing.
                    out += weight[:, part] @ means.double().nan_to_num()
                out = out / (share + weight.sum(1))[:, None]
            want[b, group] = self.v_scale * out
        return want

    def some_pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Random ascending pages of every (request, KV head), the last one among them, as `select_pages` returns them."""
        gen, most = truth.generator(1), self.case.budget // PAGE
        counts = self.num_pages.clamp(max=most)
        pages = torch.full((len(self.chains), self.case.heads, most), -1, dtype=torch.int32)
        for b, h, _ in self.groups:
            last, count = len(self.chains[b]) - 1, int(counts[b])
            pages[b, h, : count - 1] = torch.randperm(last, generator=gen)[: count - 1].sort().values.int()
            pages[b, h, count - 1] = last
        return pages.to(DEVICE), counts

    def assert_top_pages(self, pages: torch.Tensor, counts: torch.Tensor, lse: torch.Tensor, budget: int, error: float) -> None:
        """The pages are the best ones by their mass in fp64, but for scores that differ by no more than rounding.

        Args:
            pages, counts: as `select_pages` returns them, for one sink and one recent page.
            lse: [B, Hq, Nmax], what they are chosen by.
            error: how far each log-sum-exp may be off: scores are relative to the sum over pages, so they are by twice that.
        """
        assert pages.shape == (len(self.chains), self.case.heads, budget)
        assert counts.tolist() == [min(budget, len(chain)) for chain in self.chains]
        for b, h, group in self.groups:
            n, count = len(self.chains[b]), int(counts[b])
            row, values = pages[b, h].long(), lse[b, group, :n].double()
            assert (row[count:] == -1).all()
            assert (row[1:count] > row[: count - 1]).all()
            assert row[0] >= 0
            assert row[count - 1] == n - 1
            first = torch.isposinf(values).any(0)
            first[[0, -1]] = True
            chosen = torch.zeros(n, dtype=torch.bool, device=DEVICE).index_fill(0, row[:count], True)
            assert chosen[first].all(), "a page that must be read is not selected"
            known = torch.where(torch.isfinite(values), values, -torch.inf)
            score = (known - torch.logsumexp(known, 1, keepdim=True)).exp().nan_to_num().sum(0)
            if chosen.all() or first[chosen].all():
                continue
            worst, best = score[chosen & ~first].min(), score[~chosen].max()
            assert worst >= best * math.exp(-4.0 * error) - 1e-30, (
                f"request {b}, head {h}: {int((score[chosen & ~first] < best).sum())} selected pages score less than one that "
                f"is not, {float(worst)} < {float(best)}"
            )

    def assert_outputs(self, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """Rows [B, Hq, Dv], each by its error relative to its length."""
        assert got.dtype == self.case.dtype
        error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
        print(f"{self.case.name} {name}: largest relative error {float(error.max()):.2e}")
        # Not finite fails too.
        assert (error < OUTPUT_ERROR[self.case.dtype]).all(), f"{name}: {error.max()} in row {int(error.argmax())} of [B, Hq]"


@pytest.fixture(
    scope="module",
    params=[
        # The large ones first, since they take longest; those of many gigabytes one after the other.
        pytest.param(case, id=case.name, marks=pytest.mark.xdist_group("far" if case.pages else case.name))
        for case in [*LARGE, SMALL, *REGULAR]
    ],
)
def problem(request: pytest.FixtureRequest) -> Problem:
    # What the case before held goes back to the GPU, which other workers use too.
    torch.cuda.empty_cache()
    return Problem(request.param)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """New memory holds NaN and largest integers: what a kernel did not write cannot be right by chance."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_every_size_occurs() -> None:
    """What these tests are to show at least once."""
    cases = [*REGULAR, *LARGE]
    assert {case.dim for case in cases} == {64, 96, 128, 256}
    assert {case.group for case in cases} == {1, 2, 3, 4, 6, 7, 8, 16}
    assert {case.heads for case in cases} == {1, 2, 3, 4, 8}
    assert {case.cap for case in cases} == {0.0, 30.0, 50.0}
    assert {case.k_scale for case in cases} == {None, 0.5, 1.0, 2.0}
    assert {(case.dtype, case.k_scale is None) for case in cases} == {(x, y) for x in OUTPUT_ERROR for y in (True, False)}
    assert max(max(case.lengths) for case in cases) == 1_048_576
    assert max(len(case.lengths) for case in cases) == 64
    cache, record = (next(case for case in cases if case.name == name) for name in ("far-cache", "far-record"))
    assert cache.pages * PAGE * cache.heads * cache.dim > 2**31
    assert record.pages * record.heads * RecordLayout(record.dim, record.dim, record.rank).record_bytes > 2**31


def test_truth_is_that_of_small_tests() -> None:
    """The fp64 truth here, a part of the pages at a time, against the loops of `truth.py`."""
    p = Problem(SMALL)
    f = truth.Factors(f64(p.s.mu), f64(p.s.basis), f64(p.s.coef), f64(p.s.value_mean))
    for tail in ("qmu", "flat"):
        p.case = dataclasses.replace(SMALL, tail=tail)
        p.__dict__.pop("scores", None)
        want = truth.page_scores(
            f, p.q, p.page_table, p.num_pages, p.sm_scale, seq_lens=p.seq_lens, valid=p.s.valid.tolist(), cap=SMALL.cap
        )
        np.testing.assert_allclose(f64(p.scores.lse), want.lse, atol=1e-4)
        np.testing.assert_allclose(f64(p.scores.weight), want.log_weight[tail], atol=1e-4)
        pages, counts = p.some_pages()
        chosen = truth.listed_pages(pages, counts)
        out, lse = truth.attention(p.q, p.k_cache, p.v_cache, p.page_table, chosen, p.seq_lens, p.sm_scale, SMALL.cap)
        merged = truth.merge_tail(out, lse, chosen, want.log_weight[tail], f, p.page_table)
        np.testing.assert_allclose(f64(p.decoded(pages, counts)), merged, atol=1e-4)


def test_build(problem: Problem) -> None:
    """Records of a sample of pages against the singular value decomposition of their keys in fp64.

    A stored factor is at most half a step from where it was before it was rounded. So what it has outside the exact rank-r
    space is bounded by its steps and by how far rounding turns that space. Where the rank-r part of a page is hardly apart from
    the rest any space between them is as good, and only what it loses of the page is held to a limit.
    """
    p, case, layout = problem, problem.case, problem.s.layout
    order = torch.randperm(len(p.whole), generator=truth.generator(2))[: SAMPLE // case.heads]
    sample = p.whole[order.to(DEVICE)]
    keys, values = (p.rows(cache, sample).cpu() for cache in (p.k_cache, p.v_cache))
    record, means = (x.cpu() for x in p.packed(sample))
    described, scales = truth.decode_record(record, means, case.dim, case.dim, case.rank, p.s.center)
    read = unpack(record, means, layout)
    assert read.value_mean is not None
    for ours, theirs in ((read.basis, described.basis), (read.coef, described.coef), (read.value_mean, described.value_mean)):
        assert np.array_equal(f64(ours), theirs)

    exact, sigma = truth.svd_factors(keys, values, case.rank)
    centred, u = truth.centred_pages(keys), truth.ROUNDOFF[torch.float32]
    size, best = np.linalg.norm(sigma, axis=-1), np.sqrt((sigma[..., case.rank :] ** 2).sum(-1))
    # A scale is rounded to bf16, and the largest level then cut to fit.
    half = 0.5 * (1 + 2.0**-8) + 2.0**-8
    for name, got, want in (("mean", described.mu, exact.mu), ("value_mean", described.value_mean, exact.value_mean)):
        limit = half * scales[name] + truth.STEPS * u * np.abs(f64(keys if name == "mean" else values)).max()
        assert (np.abs(got - want) <= limit).all(), name

    def outside(x: np.ndarray, space: np.ndarray) -> np.ndarray:
        """Length of what the columns of x [..., n, R] have outside the span of orthonormal ones."""
        return np.asarray(np.linalg.norm(x - space @ (space.swapaxes(-1, -2) @ x), axis=(-1, -2)))

    kept = sigma[..., : case.rank]
    apart = kept[..., -1] - sigma[..., case.rank] > 0.02 * kept[..., -1]
    turned = truth.subspace_error(sigma, case.rank)
    left = exact.coef / np.maximum(kept, 1e-30)[..., None, :]
    rounded = half * np.sqrt(case.rank) * np.linalg.norm(scales["coef"], axis=-1)
    excess = outside(described.coef, left) / (rounded + turned)
    rounded_basis = half * np.sqrt(case.dim) * np.linalg.norm(scales["basis"] * kept, axis=-1)
    excess_basis = outside(described.basis * kept[..., None, :], exact.basis) / (rounded_basis + turned)
    print(
        f"{case.name} subspace: outside the exact one at most {excess[apart].max(initial=0.0):.2f} (coefficients) and "
        f"{excess_basis[apart].max(initial=0.0):.2f} (basis) of what rounding allows"
    )
    assert (excess[apart] <= 1).all()
    assert (excess_basis[apart] <= 1).all()

    # The space that the coefficients span loses at most 2 % more of a page than the best one of rank r, beside rounding.
    span = np.linalg.qr(described.coef)[0]
    lost = outside(centred, span) / (1.02 * np.hypot(best, rounded) + 1e-4 * size)
    # So does the whole record beside the exact factors stored the same way.
    factors = PageFactors(*(torch.from_numpy(x).float() for x in (exact.mu, exact.basis, exact.coef, exact.value_mean)))
    stored_best = unpack(*pack(factors, layout), layout)
    weight = 1 / np.maximum(size, 1e-30)[..., None, None]
    theirs, ours = (
        float(np.linalg.norm(weight * (centred - f64(f.coef) @ f64(f.basis).swapaxes(-1, -2)))) for f in (stored_best, read)
    )
    print(f"{case.name} reconstruction: {lost.max():.3f} of what is allowed, record {ours / theirs:.4f} of the best one's")
    assert (lost <= 1).all()
    assert ours <= 1.02 * theirs


def test_page_lse(problem: Problem) -> None:
    p = problem
    got = p.page_lse()
    assert_close(got, f64(p.scores.lse), size=p.size, extra=p.fixed)


def test_select(problem: Problem) -> None:
    """From the kernel's own log-sum-exp, which the scores are then worked out of in fp64."""
    p, budget = problem, problem.case.budget // PAGE
    lse = p.page_lse()
    pages, counts = select_pages(lse, p.num_pages, budget, num_kv_heads=p.case.heads)
    largest = float(lse.masked_fill(~torch.isfinite(lse), 0.0).abs().max())
    error = truth.STEPS * truth.ROUNDOFF[torch.float32] * (1.0 + largest)
    p.assert_top_pages(pages, counts, lse, budget, error)


def test_attend(problem: Problem) -> None:
    """Pages that differ from head to head."""
    p = problem
    pages, counts = p.some_pages()
    out, lse = sparse_decode(
        p.q, p.k_cache, p.v_cache, p.page_table, pages, counts, p.seq_lens, p.sm_scale, **p.scales, return_lse=True
    )
    want, want_lse = torch.empty(out.shape, dtype=torch.float64, device=DEVICE), torch.empty_like(lse, dtype=torch.float64)
    for b, h, group in p.groups:
        want[b, group], want_lse[b, group] = p.attention(b, h, pages[b, h, : int(counts[b])].long())
    p.assert_outputs("attend", out, p.v_scale * want)
    assert (lse.double() - want_lse).abs().max() < LSE_ERROR


def test_step(problem: Problem) -> None:
    """Scores and selection against those of the records, the output against the same method in fp64 over the same pages."""
    p, case = problem, problem.case
    config = LocksConfig(budget_tokens=case.budget, tail_correction=case.tail)
    got = locks_decode_step(*p.step_arguments(), config, **p.scales)
    assert torch.equal(locks_decode(*p.step_arguments(), config, **p.scales), got.out)
    listed = torch.arange(p.page_table.shape[1], device=DEVICE) < p.num_pages[:, None, None]
    lse, weight = p.scores
    assert_close(got.scores.lse.masked_fill(~listed, -torch.inf), f64(lse), size=p.size, extra=p.fixed)
    p.assert_top_pages(got.pages, got.counts, lse, case.budget // PAGE, p.fixed + truth.STEPS * 2.0**-24 * p.size)
    if case.tail != "off":
        assert got.scores.tail is not None
        left = listed.repeat(1, p.q.shape[1], 1)
        for b, h, group in p.groups:
            left[b, group] = left[b, group].index_fill(1, got.pages[b, h, : int(got.counts[b])].long(), False)
        # The weight of gate "flat" is 1.5 times a log-sum-exp less half of the largest logit.
        extra = {"qmu": 1.0, "flat": 2.0}[case.tail] * p.fixed
        ours, theirs = (x.masked_fill(~left, -torch.inf) for x in (got.scores.tail, weight))
        assert_close(ours, f64(theirs), size=2 * p.size, extra=extra)
    p.assert_outputs("step", got.out, p.decoded(got.pages, got.counts))


def test_step_within_the_budget_is_dense(problem: Problem) -> None:
    """A budget above every length: exact attention to all tokens, whatever the summaries say."""
    p, case = problem, problem.case
    config = LocksConfig(budget_tokens=max(3 * PAGE, max(map(len, p.chains)) * PAGE), tail_correction=case.tail)
    got = locks_decode(*p.step_arguments(), config, **p.scales)
    want = torch.empty(got.shape, dtype=torch.float64, device=DEVICE)
    for b, h, group in p.groups:
        want[b, group] = p.v_scale * p.attention(b, h, torch.arange(len(p.chains[b]), device=DEVICE))[0]
    p.assert_outputs("dense", got, want)
