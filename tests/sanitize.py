"""Every kernel once on small inputs, for NVIDIA's sanitizer on a machine with a CUDA GPU:

    compute-sanitizer --tool memcheck python3 tests/sanitize.py
    compute-sanitizer --tool racecheck python3 tests/sanitize.py

Plan, build, scan, selection, attention, tail sums and merge of a batch of three requests, one of them a single token. Results
are compared with fp64 truth, so that a wrong run fails without the sanitizer too; add `--error-exitcode 1` for its own findings
to fail the command. Tensors come straight from the CUDA allocator: in a pool an access behind one would hit another. SGLang is
not imported.
"""

import os
import sys
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
# The checkout of this file, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import truth
from truth import PAGE, assert_close, f64

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
from locks_sglang.kernels.common.capability import runs_kernels
from locks_sglang.kernels.decode_plan import DecodeBuffers, PageFlags, plan_decode
from locks_sglang.kernels.decode_plan.reference import plan as plan_reference
from locks_sglang.kernels.locks_decode import locks_decode_step

LENGTHS = (700, 1, 32)
"""Tokens. The last request fills a page in this step."""
HEADS = 2
BUDGET = 12
CASES = ((64, 4, torch.bfloat16, None), (128, 7, torch.bfloat16, None), (128, 4, torch.float16, torch.float8_e4m3fn))
"""Head dimension, group, type of the queries, and of the caches where it is another."""


def planned(paged: truth.Paged, device: torch.device) -> DecodeBuffers:
    """The kernel's plan of a step over the requests' token slots, compared with the reference's, bit for bit."""
    columns = paged.page_table.shape[1]
    held = torch.arange(columns) < paged.num_pages[:, None]
    table = torch.where(held, paged.page_table, 0)
    req_to_token = (table[:, :, None] * PAGE + torch.arange(PAGE, dtype=torch.int32)).flatten(1).to(device)
    requests, lens = torch.arange(len(LENGTHS), device=device), paged.seq_lens.long().to(device)
    pages = len(paged.k_cache) // PAGE
    results = []
    for step in (plan_decode, plan_reference):
        out = DecodeBuffers.allocate(len(LENGTHS), columns, HEADS, device)
        valid = torch.ones(1, pages, dtype=torch.bool, device=device)
        counts = torch.zeros(2, pages, dtype=torch.int32, device=device)
        flags = PageFlags(valid, *counts, torch.zeros(1, dtype=torch.int64, device=device))
        step(req_to_token, requests, lens, len(LENGTHS), out, flags)
        results.append((out, [*vars(out).values(), *vars(flags).values()]))
    (made, ours), (_, theirs) = results
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b), "the plan differs from the reference's"
    return made


def check(dim: int, group: int, dtype: torch.dtype, stored: torch.dtype | None, device: torch.device) -> None:
    """One step from its plan to its output."""
    gen = truth.generator(dim + group)
    kv = truth.make_paged("rope", LENGTHS, HEADS, dim, gen, dtype=stored or dtype)
    out = planned(kv, device)
    assert out.filled.tolist() == [-1, -1, int(kv.page_table[2, 1])]
    k_cache, v_cache = kv.k_cache.to(device), kv.v_cache.to(device)

    layout = RecordLayout(dim, dim, 8)
    complete = torch.cat([row[: n // PAGE] for row, n in zip(kv.page_table, LENGTHS, strict=True)]).long().to(device)
    keys, values = (x.view(-1, PAGE, HEADS, dim)[complete.cpu()].to(device) for x in (kv.k_cache.float(), kv.v_cache.float()))
    center = keys.mean((0, 1))
    record, stored_means = layout.empty(len(k_cache) // PAGE, HEADS, device=device)
    valid = torch.zeros(len(record), dtype=torch.bool, device=device)
    build(k_cache, v_cache, torch.cat((complete, complete.new_tensor([-1]))), center, record, stored_means, valid, layout)
    assert torch.equal(valid.nonzero().flatten(), complete.sort().values)
    layers, caches = 2, [(k_cache, v_cache), (k_cache.clone(), v_cache.clone())]
    offsets = layer_offsets(caches)
    both, both_means = layout.empty(layers, len(record), HEADS, device=device)
    both_valid = torch.zeros(layers, len(record), dtype=torch.bool, device=device)
    build(k_cache, v_cache, complete, center.expand(layers, -1, -1).contiguous(), both, both_means, both_valid, layout, offsets)
    assert all(torch.equal(x[complete], record[complete]) for x in both)
    centred = truth.centred_pages(keys)
    ours, theirs = (
        float(((torch.from_numpy(centred) - torch.from_numpy(f64(f.coef) @ f64(f.basis).swapaxes(-1, -2))) ** 2).sum()) ** 0.5
        for f in (
            unpack(record[complete], stored_means[complete], layout),
            unpack(*pack(page_factors(keys, values, 8, center), layout), layout),
        )
    )
    assert ours <= 1.02 * theirs, f"the records miss the keys by {ours}, the reference's by {theirs}"

    s = PageSummaries(layout, valid, center, record, stored_means)
    q = torch.randn(len(LENGTHS), HEADS * group, dim, generator=gen)
    q = (2.5 * dim**0.5 / kv.k_cache.float().nan_to_num().norm(dim=-1).max() * q).to(device, dtype)
    assert runs_kernels(q, dim, dim, group)
    scale = dim**-0.5
    config = LocksConfig(budget_tokens=BUDGET * PAGE, tail_correction="qmu")
    got = locks_decode_step(
        q, k_cache, v_cache, s, out.page_table, out.seq_lens, scale, config, k_scale=0.5, v_scale=2.0, num_pages=out.num_pages
    )
    # The largest logit by Cauchy-Schwarz, and how far the scan's fixed-point queries move one.
    size = truth.logit_size(q, kv.k_cache, 0.5 * scale)
    fixed = truth.fixed_point_error(q, kv.k_cache, 0.5 * scale)
    factors = truth.Factors(f64(s.mu), f64(s.basis), f64(s.coef), f64(s.value_mean))
    want = truth.page_scores(factors, q, kv.page_table, kv.num_pages, 0.5 * scale, seq_lens=kv.seq_lens, valid=s.valid.tolist())
    columns = torch.arange(kv.page_table.shape[1], device=device)
    lse = got.scores.lse.masked_fill(columns >= out.num_pages[:, None, None], -torch.inf)
    assert_close(lse, want.lse, size=size, extra=fixed)
    truth.assert_selection(got.pages[..., :BUDGET], got.counts, got.scores.lse, kv.num_pages.tolist(), BUDGET, 1, 1, "mass")
    chosen = truth.listed_pages(got.pages, got.counts)
    exact, exact_lse = truth.attention(
        q, kv.k_cache, kv.v_cache, kv.page_table, chosen, kv.seq_lens, scale, k_scale=0.5, v_scale=2.0
    )
    merged = truth.merge_tail(exact, exact_lse, chosen, want.log_weight["qmu"], factors, kv.page_table, v_scale=2.0)
    error = torch.from_numpy(f64(got.out) - merged).norm(dim=-1) / torch.from_numpy(merged).norm(dim=-1)
    assert (error < 5e-3).all(), f"outputs are off by {float(error.max())} of their length"
    print(f"D {dim}, G {group}, {dtype}, caches {stored or dtype}: largest relative error {float(error.max()):.2e}", flush=True)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("a CUDA GPU is needed")
    for dim, group, dtype, stored in CASES:
        check(dim, group, dtype, stored, torch.device("cuda", 0))
    torch.cuda.synchronize()
    assert "sglang" not in sys.modules


if __name__ == "__main__":
    main()
