"""Independent fp64 truth of every operation, key generators, and the tolerance policy of the numerical tests.

Written from the method's definition in plain loops over requests, heads and pages. Nothing here imports `locks_sglang`, so a
mistake in the package cannot be shared by its truth. Letters as in `locks_sglang.ops`; arrays are numpy float64.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

PAGE = 16
LENGTHS = (1, 15, 16, 17, 31, 33, 1000)
"""Lengths around page edges, and one that is no multiple of anything; most tests run them as one mixed batch."""
HEAD_DIMS = (64, 96, 128, 256)
GROUPS = (1, 3, 4, 7, 8, 16)
KEY_KINDS = ("random", "low_rank", "spike", "rope")

# --- tolerance policy -----------------------------------------------------------------------------------------------------

ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Unit roundoff u: half the spacing of numbers just above 1."""

STEPS = 8
"""Roundings allowed in a result, in units of fp32's u times the largest intermediate value behind it. In a sum of n products
each partial sum is rounded once, and none exceeds the product of the two lengths; for sums without a trend the n errors add up
to about one u of that. A result chains up to six such sums: mean, centre, projection, expansion, attention, merge. The largest
error that the suite meets is 2.5."""

EIGEN_STEPS = 128
"""The same for what comes from the eigenvectors of a page's 16 x 16 Gram matrix, relative to its largest entry: solvers promise
p(n) u with p a small multiple of the order n, here 8 n. The suite meets 47."""


def assert_close(actual: torch.Tensor, expected: np.ndarray, size: Any = 1.0, extra: Any = 0.0, steps: float = STEPS) -> None:
    """Compare a computed tensor with its fp64 truth.

    Args:
        actual: what the code under test returned.
        expected: float64, same shape.
        size: largest intermediate value behind each element (broadcastable): rounding is relative to it, not to the result,
            which may be small by cancellation.
        extra: error that the method itself allows (broadcastable), such as half a quantisation step.
        steps: fp32 roundings relative to `size`.

    Passes where NaN positions and infinities with their signs agree exactly, and everywhere else
    |actual - expected| <= 2 u(actual's dtype) |expected| + steps u(fp32) size + extra. The first term rounds the result itself.
    """
    got = f64(actual)
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected), "NaN positions differ")
    infinities = [np.where(np.isinf(x), x, 0.0) for x in (got, expected)]
    np.testing.assert_array_equal(*infinities, "infinities differ")
    finite = np.isfinite(expected)
    u = ROUNDOFF[actual.dtype]
    limit = 2 * u * np.abs(expected) + steps * min(u, ROUNDOFF[torch.float32]) * np.asarray(size) + np.asarray(extra)
    limit = np.broadcast_to(limit, expected.shape)[finite]
    error = np.abs(got[finite] - expected[finite])
    worst = int(np.argmax(error - limit)) if error.size else 0
    assert (error <= limit).all(), (
        f"{int((error > limit).sum())} of {error.size} values differ; worst: got {got[finite][worst]}, "
        f"expected {expected[finite][worst]}, error {error[worst]:.3g}, allowed {limit[worst]:.3g}"
    )


def logit_size(q: torch.Tensor, keys: torch.Tensor, sm_scale: float) -> float:
    """Largest |scale q.k| that rounding can act on, by Cauchy-Schwarz; rows with NaN or Inf do not count."""
    norms = np.linalg.norm(f64(keys), axis=-1)
    return float(sm_scale * np.linalg.norm(f64(q), axis=-1).max() * norms[np.isfinite(norms)].max(initial=0.0))


def fixed_point_error(q: torch.Tensor, keys: torch.Tensor, sm_scale: float) -> float:
    """Most that the scan's 16-bit queries move a logit: half a unit, 1 / 65024 of a query's largest entry, at every dim.

    A described key is taken as at most a tenth longer than a real one.
    """
    largest, norms = np.abs(f64(q)).max(), np.linalg.norm(f64(keys), axis=-1)
    return float(1.1 * sm_scale * largest / 65024 * np.sqrt(q.shape[-1]) * norms[np.isfinite(norms)].max(initial=0.0))


def output_size(logits: float, values: torch.Tensor) -> float:
    """`size` of an attention output: an error e of the logits moves the weights, hence the output, by 2 e max|v|."""
    v = f64(values)
    return float((1.0 + 2.0 * logits) * np.abs(v[np.isfinite(v)]).max(initial=0.0))


# --- inputs ---------------------------------------------------------------------------------------------------------------


def f64(x: torch.Tensor) -> np.ndarray:
    """Any tensor, fp8 included, as float64 numpy."""
    return x.detach().cpu().to(torch.float64).numpy()


def generator(seed: int) -> torch.Generator:
    """Random numbers of one test."""
    return torch.Generator().manual_seed(seed)


def cover(**factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few combinations in which every pair of values of any two factors occurs, in a fixed order (greedy)."""
    values = [list(f) for f in factors.values()]
    pairs = list(itertools.combinations(range(len(values)), 2))
    missing = {(i, a, j, b) for i, j in pairs for a in range(len(values[i])) for b in range(len(values[j]))}
    chosen = []
    while missing:
        i, a, j, b = min(missing)
        row = {i: a, j: b}
        for k in range(len(values)):
            if k not in row:
                gains = [
                    sum((min((i, a), (k, c)) + max((i, a), (k, c))) in missing for i, a in row.items())
                    for c in range(len(values[k]))
                ]
                row[k] = gains.index(max(gains))
        missing -= {(i, row[i], j, row[j]) for i, j in pairs}
        chosen.append(tuple(values[k][row[k]] for k in range(len(values))))
    return chosen


def make_keys(kind: str, tokens: int, kv_heads: int, dim: int, gen: torch.Generator) -> torch.Tensor:
    """Keys fp32 [tokens, H, D] of consecutive tokens.

    "random": no structure. "low_rank": rank 3 in all, so that most singular values of a page vanish. "spike": one key of every
    page is 30 times as long as the rest. "rope": constant channels, a few directions and noise, rotated at their positions.
    """
    keys = torch.randn(tokens, kv_heads, dim, generator=gen)
    if kind == "low_rank":
        mix = torch.randn(kv_heads, 3, dim, generator=gen)
        return torch.einsum("thr,hrd->thd", keys[..., :3], mix)
    if kind == "spike":
        at = torch.arange(0, tokens, PAGE) + torch.randint(PAGE, (-(-tokens // PAGE),), generator=gen)
        keys[at[at < tokens]] *= 30.0
    if kind == "rope":
        few = torch.einsum("thr,hrd->thd", keys[..., :4], torch.randn(kv_heads, 4, dim, generator=gen))
        base = 5.0 * torch.randn(kv_heads, dim, generator=gen) + few + 0.1 * keys
        angle = torch.arange(tokens)[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = base[..., : dim // 2], base[..., dim // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return keys


class Paged(NamedTuple):
    """Token caches and the requests that lie in them.

    k_cache [slots, H, D], v_cache [slots, H, Dv]: every slot that belongs to no token holds NaN.
    page_table int32 [B, Nmax]: physical pages in random order, the smallest of each request last; entries past a request's
    pages are negative or huge. seq_lens, num_pages int32 [B].
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    num_pages: torch.Tensor

    @property
    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as pages [N, P, H, D] and [N, P, H, Dv]."""
        k, v = (cache.view(-1, PAGE, *cache.shape[1:]) for cache in (self.k_cache, self.v_cache))
        return k, v


def make_paged(
    kind: str,
    lengths: Sequence[int],
    kv_heads: int,
    dim: int,
    gen: torch.Generator,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Paged:
    """Lay requests of these lengths (tokens) into a cache with two spare pages."""
    v_dim = dim if v_dim is None else v_dim
    counts = [-(-n // PAGE) for n in lengths]
    total = sum(counts) + 2
    k_cache = torch.full((total * PAGE, kv_heads, dim), torch.nan)
    v_cache = torch.full((total * PAGE, kv_heads, v_dim), torch.nan)
    table = torch.tensor([-5, 2**30], dtype=torch.int32).repeat(len(lengths), max(counts) // 2 + 1)
    free = torch.randperm(total, generator=gen).tolist()
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own, free = free[:count], free[count:]
        own = sorted(own, key=min(own, default=0).__eq__)
        table[row, :count] = torch.tensor(own, dtype=torch.int32)
        slots = torch.tensor([page * PAGE + t for page in own for t in range(PAGE)][:length], dtype=torch.long)
        k_cache[slots] = make_keys(kind, length, kv_heads, dim, gen)
        v_cache[slots] = torch.randn(length, kv_heads, v_dim, generator=gen) + 0.5
    held = torch.tensor(counts, dtype=torch.int32)
    return Paged(k_cache.to(dtype), v_cache.to(dtype), table, torch.tensor(lengths, dtype=torch.int32), held)


# --- summaries ------------------------------------------------------------------------------------------------------------


class Factors(NamedTuple):
    """Summaries of N pages: mu [N, H, D] (centre included), basis [N, H, D, R], coef [N, H, P, R], value_mean [N, H, Dv]."""

    mu: np.ndarray
    basis: np.ndarray
    coef: np.ndarray
    value_mean: np.ndarray | None


def centred_pages(k: torch.Tensor) -> np.ndarray:
    """Keys [N, P, H, D] less their page mean, [N, H, P, D]."""
    keys = f64(k).transpose(0, 2, 1, 3)
    return keys - keys.mean(2, keepdims=True)


def svd_factors(k: torch.Tensor, v: torch.Tensor, rank: int) -> tuple[Factors, np.ndarray]:
    """mean, K - mu = U S V^T cut at `rank`, and the singular values [N, H, min(P, D)]. Pages with NaN get NaN throughout."""
    centred = centred_pages(k)
    usable = np.isfinite(centred).all((-1, -2), keepdims=True)
    left, sigma, right = torch.linalg.svd(torch.from_numpy(np.where(usable, centred, 0.0)), full_matrices=False)
    coef = np.where(usable, (left * sigma.unsqueeze(-2))[..., :rank].numpy(), np.nan)
    basis = np.where(usable, right[..., :rank, :].transpose(-1, -2).numpy(), np.nan)
    return Factors(f64(k).mean(1), basis, coef, f64(v).mean(1)), sigma.numpy()


def subspace_error(sigma: np.ndarray, rank: int) -> np.ndarray:
    """How far rounding may move the rank-r part of a page, per page and head: [N, H].

    The factors come from the Gram matrix, whose entries err by some u sigma_1^2. To first order that turns direction i of the
    kept ones by u sigma_1^2 / (sigma_i^2 - sigma_j^2) towards a dropped direction j, which moves the keys by
    u sigma_1^2 / (sigma_i - sigma_j). Where values nearly coincide the choice between them is arbitrary, and either is as good:
    at most 2 sigma_i then.
    """
    following = sigma[..., rank : rank + 1] if rank < sigma.shape[-1] else np.zeros_like(sigma[..., :1])
    kept = sigma[..., :rank]
    gap = np.maximum(kept - following, np.finfo(np.float64).tiny)
    turned = EIGEN_STEPS * ROUNDOFF[torch.float32] * sigma[..., :1] ** 2 / gap
    return np.minimum(turned, 2.0 * kept).sum(-1)


def decode_record(
    record: torch.Tensor, means: torch.Tensor | None, dim: int, v_dim: int, rank: int, center: torch.Tensor
) -> tuple[Factors, dict[str, np.ndarray]]:
    """Read packed records uint8 [N, H, bytes] and value means int8 [N, H, Dv] by the documented layout; also the scales, by
    section."""
    data = record.cpu().numpy()
    at = 0

    def take(size: int) -> np.ndarray:
        nonlocal at
        at += size
        return data[..., at - size : at].copy()

    def bf16(count: int) -> np.ndarray:
        raw = take(2 * count).astype(np.uint32)
        return ((raw[..., 0::2] << 16) | (raw[..., 1::2] << 24)).view(np.float32).astype(np.float64)

    def int8(count: int) -> np.ndarray:
        raw = take(count).astype(np.float64)
        return np.where(raw >= 128, raw - 256, raw)

    nibbles = take(rank * dim // 2).reshape(*data.shape[:2], rank, dim // 2)
    basis = np.empty((*data.shape[:2], dim, rank))
    for column in range(rank):
        for j in range(dim // 2):
            basis[..., j, column] = (nibbles[..., column, j] % 16 + 8) % 16 - 8.0
            basis[..., j + dim // 2, column] = (nibbles[..., column, j] // 16 + 8) % 16 - 8.0
    even = rank + rank % 2
    stored = int8(PAGE * even).reshape(*data.shape[:2], PAGE * even)
    coef = np.empty((*data.shape[:2], PAGE, even))
    for token in range(PAGE):
        for column in range(even):
            coef[..., token, column] = stored[..., token % 8 * 2 * even + column // 2 * 4 + token // 8 * 2 + column % 2]
    assert not coef[..., rank:].any(), "padding is not zero"
    coef = coef[..., :rank]
    mean = int8(dim)
    values = None if means is None else f64(means)
    assert values is None or values.shape == (*data.shape[:2], v_dim)
    each = 8 if rank <= 8 else 16
    stored = bf16(4 * each)
    scales = {"coef": np.empty((*data.shape[:2], PAGE)), "basis": np.empty((*data.shape[:2], rank))}
    used = np.zeros(4 * each, dtype=bool)

    def scale(row: int, place: int) -> np.ndarray:
        used[row * each + place] = True
        return stored[..., row * each + place]

    for token in range(PAGE):
        scales["coef"][..., token] = scale(token % 8 // 2, token // 8 * 2 + token % 2)
    for column in range(rank):
        scales["basis"][..., column] = scale(column % 8 // 2, (4 if column < 8 else 8) + column % 2)
    for row in range(4):
        scales["mean"] = scale(row, 6)[..., None]
        if values is not None:
            scales["value_mean"] = scale(row, 7)[..., None]
    assert not stored[..., ~used].any(), "padding is not zero"
    mu = mean * scales["mean"] + f64(center)
    if values is not None:
        values = values * scales["value_mean"]
    assert not data[..., at:].any(), "padding is not zero"
    return Factors(mu, basis * scales["basis"][..., None, :], coef * scales["coef"][..., None], values), scales


# --- page log-sum-exp and tail weight -------------------------------------------------------------------------------------


def cap_logits(x: Any, cap: float) -> Any:
    """Soft cap."""
    return cap * np.tanh(x / cap) if cap else x


def logsumexp(x: np.ndarray) -> float:
    """Natural log of sum exp; -inf for nothing at all."""
    if np.isnan(x).any():
        return math.nan
    top = x.max(initial=-np.inf)
    return float(top if np.isinf(top) else top + np.log(np.exp(x - top).sum()))


class Scores(NamedTuple):
    """lse [B, Hq, Nmax]; tail weights as natural logs by gate, -inf where a page has none."""

    lse: np.ndarray
    log_weight: dict[str, np.ndarray]


def page_scores(
    f: Factors,
    q: torch.Tensor,
    page_table: torch.Tensor,
    num_pages: torch.Tensor,
    sm_scale: float,
    *,
    seq_lens: torch.Tensor | None = None,
    valid: Sequence[bool] | None = None,
    cap: float = 0.0,
) -> Scores:
    """Estimated log-sum-exp of every page from its factors, and the tail weights of both gates."""
    batch, heads, _ = q.shape
    queries, table = f64(q), page_table.tolist()
    group = heads // f.mu.shape[1]
    lse = np.full((batch, heads, page_table.shape[1]), -np.inf)
    weight = {gate: lse.copy() for gate in ("qmu", "flat")}
    for b, h in itertools.product(range(batch), range(heads)):
        for n in range(int(num_pages[b])):
            page, kv = table[b][n], h // group
            partial = seq_lens is not None and (n + 1) * PAGE > int(seq_lens[b])
            if partial or not (valid is None or valid[page]):
                lse[b, h, n] = np.inf
                continue
            centre = f.mu[page, kv] @ queries[b, h]
            logits = centre + f.coef[page, kv] @ (f.basis[page, kv].T @ queries[b, h])
            logits = cap_logits(sm_scale * logits, cap)
            lse[b, h, n] = logsumexp(logits)
            if np.isfinite(lse[b, h, n]):
                flat = np.exp(logits - logits.max()).mean()
                weight["qmu"][b, h, n] = math.log(PAGE) + cap_logits(sm_scale * centre, cap)
                weight["flat"][b, h, n] = lse[b, h, n] + math.log(math.sqrt(flat))
    return Scores(lse, weight)


def exact_page_lse(
    q: torch.Tensor, k_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, sm_scale: float, cap: float = 0.0
) -> np.ndarray:
    """Log-sum-exp of every page from its keys, the partial page included: [B, Hq, Nmax]."""
    batch, heads, _ = q.shape
    queries, keys, table = f64(q), f64(k_cache), page_table.tolist()
    group = heads // k_cache.shape[1]
    lse = np.full((batch, heads, page_table.shape[1]), -np.inf)
    for b, h in itertools.product(range(batch), range(heads)):
        length = int(seq_lens[b])
        for n in range(-(-length // PAGE)):
            first = table[b][n] * PAGE
            rows = keys[first : first + min(PAGE, length - n * PAGE), h // group]
            lse[b, h, n] = logsumexp(cap_logits(sm_scale * (rows @ queries[b, h]), cap))
    return lse


# --- selection ------------------------------------------------------------------------------------------------------------


def combined_score(lse: np.ndarray, combine: str) -> np.ndarray:
    """Score [N] of the pages from lse [G, N] of one group; only finite entries vote."""
    total = np.full(lse.shape[1], -np.inf) if combine == "max" else np.zeros(lse.shape[1])
    for row in lse:
        finite = np.isfinite(row)
        if not finite.any():
            continue
        if combine == "max":
            total[finite] = np.maximum(total[finite], row[finite])
            continue
        weight = np.exp(row[finite] - row[finite].max())
        total[finite] += weight / weight.sum() if combine == "mass" else weight
    return total


def select(
    lse: torch.Tensor, num_pages: Sequence[int], budget: int, sink: int, recent: int, kv_heads: int, combine: str
) -> tuple[list[list[list[int]]], np.ndarray]:
    """Selected pages [B][H], ascending, and the scores [B, H, N] that decided.

    Order of preference: recent, sink, +inf, score, lower index.
    """
    batch, heads, n_max = lse.shape
    values = f64(lse).reshape(batch, kv_heads, heads // kv_heads, n_max)
    chosen: list[list[list[int]]] = []
    scores = np.zeros((batch, kv_heads, n_max))
    for b in range(batch):
        n = int(num_pages[b])
        chosen.append([])
        for h in range(kv_heads):
            rows = values[b, h, :, :n]
            scores[b, h, :n] = score = combined_score(rows, combine)
            no_estimate = (rows == np.inf).any(0)

            def preference(page: int, n: int = n, score: np.ndarray = score, no: np.ndarray = no_estimate) -> tuple:
                kind = 0 if page >= n - recent else 1 if page < sink else 2 if no[page] else 3
                return kind, -score[page] if kind == 3 else 0.0, page

            chosen[b].append(sorted(sorted(range(n), key=preference)[:budget]))
    return chosen, scores


def assert_selection(
    pages: torch.Tensor,
    counts: torch.Tensor,
    lse: torch.Tensor,
    num_pages: Sequence[int],
    budget: int,
    sink: int,
    recent: int,
    combine: str,
) -> None:
    """Compare a selection with the truth: counts, order and padding exactly; the pages exactly but for scores that tie.

    Scores are sums of at most 16 fp32 exponentials: two that differ by less than `STEPS` roundings may be taken either way.
    """
    batch, kv_heads = pages.shape[:2]
    assert pages.dtype == counts.dtype == torch.int32
    assert pages.shape == (batch, kv_heads, budget)
    assert counts.tolist() == [min(budget, int(n)) for n in num_pages]
    expected, scores = select(lse, num_pages, budget, sink, recent, kv_heads, combine)
    for b, h in itertools.product(range(batch), range(kv_heads)):
        row, count = pages[b, h].tolist(), int(counts[b])
        assert row[count:] == [-1] * (budget - count), f"request {b}, head {h}: padding {row}"
        assert all(0 <= x < y for x, y in itertools.pairwise([*row[:count], int(num_pages[b])])), f"not ascending: {row}"
        extra, absent = set(row[:count]) - set(expected[b][h]), set(expected[b][h]) - set(row)
        if not extra:
            continue
        lost = [scores[b, h, page] for page in sorted(extra | absent)]
        # Logits round before they are compared where the votes are log-sum-exps themselves; shares are relative to 1.
        tie = STEPS * ROUNDOFF[torch.float32] * max(1.0, *(abs(x) for x in lost))
        message = f"request {b}, head {h}: selected {sorted(extra)} instead of {sorted(absent)}, scores {lost}"
        assert np.isfinite(lost).all(), message
        assert max(lost) - min(lost) <= tie, message


# --- attention and the whole step -----------------------------------------------------------------------------------------


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    pages: Sequence[Sequence[Sequence[int]]],
    seq_lens: torch.Tensor,
    sm_scale: float,
    cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Exact attention of every query head to the tokens of its listed pages [B][H]: output [B, Hq, Dv], lse [B, Hq]."""
    batch, heads, _ = q.shape
    queries, keys, values, table = f64(q), f64(k_cache) * k_scale, f64(v_cache) * v_scale, page_table.tolist()
    out = np.zeros((batch, heads, v_cache.shape[2]))
    lse = np.full((batch, heads), -np.inf)
    for b, h in itertools.product(range(batch), range(heads)):
        kv = h // (heads // k_cache.shape[1])
        positions = [n * PAGE + t for n in pages[b][kv] for t in range(PAGE) if n * PAGE + t < int(seq_lens[b])]
        if not positions:
            continue
        slots = [table[b][p // PAGE] * PAGE + p % PAGE for p in positions]
        logits = cap_logits(sm_scale * (keys[slots, kv] @ queries[b, h]), cap)
        lse[b, h] = logsumexp(logits)
        out[b, h] = np.exp(logits - lse[b, h]) @ values[slots, kv]
    return out, lse


def all_pages(seq_lens: torch.Tensor, kv_heads: int) -> list[list[list[int]]]:
    """Every page of every request: what dense attention lists."""
    return [[list(range(-(-n // PAGE)))] * kv_heads for n in seq_lens.tolist()]


def listed_pages(pages: torch.Tensor, counts: torch.Tensor) -> list[list[list[int]]]:
    """int32 [B, H, S] with counts [B] as lists."""
    return [[row[:count] for row in rows] for rows, count in zip(pages.tolist(), counts.tolist(), strict=True)]


def merge_tail(
    out: np.ndarray,
    lse: np.ndarray,
    pages: Sequence[Sequence[Sequence[int]]],
    log_weight: np.ndarray,
    f: Factors,
    page_table: torch.Tensor,
    v_scale: float = 1.0,
) -> np.ndarray:
    """out = (A out + sum_unselected w vbar) / (A + sum_unselected w) with A = exp(lse)."""
    assert f.value_mean is not None
    batch, heads, n_max = log_weight.shape
    group = heads // len(pages[0])
    merged = np.zeros_like(out)
    for b, h in itertools.product(range(batch), range(heads)):
        kv = h // group
        tail = [n for n in range(n_max) if log_weight[b, h, n] > -np.inf and n not in pages[b][kv]]
        peak = max([lse[b, h], *(log_weight[b, h, n] for n in tail)])
        if peak == -np.inf:
            continue
        weights = [math.exp(lse[b, h] - peak)] + [math.exp(log_weight[b, h, n] - peak) for n in tail]
        rows = [out[b, h]] + [v_scale * f.value_mean[int(page_table[b, n]), kv] for n in tail]
        merged[b, h] = sum(w * row for w, row in zip(weights, rows, strict=True)) / sum(weights)
    return merged


def assert_newest_pages_are_not_scored(kv: Paged, s: Any, step: Callable[[], Any]) -> None:
    """A step while the page of the newest token is being built: the same bits whatever its record and its flag in `s` say."""
    assert s.record is not None
    newest = kv.page_table[range(len(kv.seq_lens)), (kv.seq_lens - 1) // PAGE].long()
    steps = []
    for record, valid in ((0, False), (0, True), (255, True)):
        s.record[newest], s.valid[newest] = record, valid
        steps.append(step())
    for made in steps:
        assert torch.equal(made.out, steps[0].out)
        assert torch.equal(made.pages, steps[0].pages)
        assert [float(made.scores.lse[b, 0, n - 1]) for b, n in enumerate(kv.num_pages)] == [torch.inf] * len(newest)
