"""Error of the attention output when few pages are read, method by method: `locks-sglang eval output`."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config import LocksConfig
from ..kernels.build_page_summaries import PageSummaries, RecordLayout
from ..kernels.common import PAGE_SIZE
from ..kernels.locks_decode.reference import merge_tail
from ..kernels.page_lse import page_scores
from ..ops import build_page_summaries, dense_decode, sparse_decode
from . import OUTPUT_ERROR, WIDTHS
from .capture import LayerCapture
from .mass import chosen_pages
from .measuring import Measured, Measurement, measure, rounded, write
from .selectors import BF16_BYTES, IN_SAMPLE, LOCKS, Selector, default_selectors
from .spread import by_layer, clear_of, mean, standard_errors

OFF, QMU, FLAT, SMALLER = "off", "qmu", "flat", "smaller"
WEIGHTS = {OFF: "", QMU: " + tail qmu", FLAT: " + tail flat", SMALLER: " + tail, smaller of both"}
"""Corrections. The last is an experiment of the evaluation: of each page the smaller of the two weights."""
TAIL_RANK = 8
"""Rank of the records from which methods without records of their own take weights and value means."""


@dataclass(frozen=True)
class Method:
    """A way to choose pages, and what is done about those that are not read.

    Args:
        selector: chooses. correction: a key of `WEIGHTS`. rank: of the records that weights and value means come from.
        bytes_per_page: stored for one page and KV head beside the cache, of both.
    """

    selector: Selector
    correction: str
    rank: int
    bytes_per_page: int

    @property
    def name(self) -> str:
        """For files."""
        return f"{self.selector.name}+{self.correction}"

    @property
    def label(self) -> str:
        """For tables."""
        return self.selector.label + WEIGHTS[self.correction]

    @property
    def bytes_per_token(self) -> float:
        """Of one KV head."""
        return self.bytes_per_page / PAGE_SIZE


def default_methods(head_dim: int, v_head_dim: int, seed: int) -> list[Method]:
    """The methods of the table: every method without correction and with the served weight; the page basis and the oracle with
    the other weights too.

    Args:
        head_dim, v_head_dim: D and Dv.
        seed: of whatever a method draws by lot.
    """
    found = []
    for selector in default_selectors(head_dim, v_head_dim, seed):
        if selector.family in (WIDTHS, IN_SAMPLE):
            continue
        page_basis = selector.family == LOCKS
        rank = int(selector.name.removeprefix("locks-r")) if page_basis else TAIL_RANK
        for correction in WEIGHTS if page_basis or selector.family == "oracle" else (OFF, QMU):
            record = RecordLayout(head_dim, v_head_dim, rank).summary_bytes
            if correction == OFF:
                size = selector.bytes_per_page
            elif page_basis:
                size = record
            elif correction == QMU:
                # A mean key and a mean value in int8, and a scale for each.
                size = selector.bytes_per_page + head_dim + v_head_dim + 2 * BF16_BYTES
            else:
                size = selector.bytes_per_page + record
            found.append(Method(selector, correction, rank, size))
    return found


@dataclass(frozen=True)
class OutputResult:
    """Relative errors, by method, layer and budget.

    Args:
        methods: in the order of the table. budgets: ascending, tokens. layers: indices of the layers measured.
        error: by method name, fp64 [layers, budgets, late queries, KV heads]; mean over a KV head's query heads.
    """

    methods: Sequence[Method]
    budgets: Sequence[int]
    layers: Sequence[int]
    error: Mapping[str, torch.Tensor]


def with_values(layer: LayerCapture, rank: int) -> PageSummaries:
    """Records of a layer with value means: the served ones, or such as the server would have built."""
    served = layer.summaries
    if served.layout.rank == rank and served.layout.value_mean:
        return served
    built = build_page_summaries(layer.keys, layer.values, rank, center=served.center)
    return PageSummaries(built.layout, served.valid, built.center, record=built.record, values=built.values)


def tail_weights(layer: LayerCapture, rank: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Natural log of every page's tail weight [B, Hq, N] by correction, as the product's scan computes it, and value means
    [B, H, N, Dv]."""
    found, values = {}, None
    summaries = with_values(layer, rank)
    for correction in (QMU, FLAT):
        scores = page_scores(
            layer.queries,
            summaries,
            layer.page_table,
            layer.num_pages,
            layer.sm_scale,
            seq_lens=layer.seq_lens,
            logit_cap=layer.logit_cap,
            tail=correction,
        )
        assert scores.tail is not None
        found[correction], values = scores.tail, scores.value_mean
    assert values is not None
    return found | {SMALLER: torch.minimum(found[QMU], found[FLAT])}, values


def measure_layer(layer: LayerCapture, methods: Sequence[Method], configs: Sequence[LocksConfig]) -> dict[str, torch.Tensor]:
    """Relative error |approximate - exact| / |exact| of a layer's output, by method: fp64 [S, B, H] for each configuration's
    budget, mean over a KV head's query heads.

    Args:
        configs: settings that differ in `budget_tokens`; sink pages, recent pages and combine are taken from them too.
    """
    cache = layer.keys.flatten(0, 1), layer.values.flatten(0, 1), layer.page_table
    exact = dense_decode(layer.queries, *cache, layer.seq_lens, layer.sm_scale, logit_cap=layer.logit_cap)
    weights = {rank: tail_weights(layer, rank) for rank in dict.fromkeys(method.rank for method in methods)}
    by_selector: dict[str, list[Method]] = {}
    for method in methods:
        by_selector.setdefault(method.selector.name, []).append(method)
    found: dict[str, list[torch.Tensor]] = {method.name: [] for method in methods}
    for group in by_selector.values():
        lse = group[0].selector.page_lse(layer)
        for config in configs:
            pages, counts = chosen_pages(layer, lse, config)
            out, total = sparse_decode(
                layer.queries,
                *cache,
                pages[..., : lse.shape[-1]],  # counts never exceed the pages there are
                counts,
                layer.seq_lens,
                layer.sm_scale,
                logit_cap=layer.logit_cap,
                return_lse=True,
            )
            for method in group:
                made = out
                if method.correction != OFF:
                    tails, values = weights[method.rank]
                    made = merge_tail(out, total, pages, tails[method.correction], values)
                error = (made - exact).double().norm(dim=-1) / exact.double().norm(dim=-1)
                found[method.name].append(error.unflatten(1, (layer.num_kv_heads, -1)).mean(-1))
    return {name: torch.stack(rows) for name, rows in found.items()}


def harm(result: OutputResult) -> list[str]:
    """Where a correction raises the error beyond its spread, a sentence each: against the same pages without correction."""
    found = []
    for method in result.methods:
        if method.correction == OFF:
            continue
        without = result.error[f"{method.selector.name}+{OFF}"]
        more = result.error[method.name] - without
        for budget, clear, lead in zip(result.budgets, clear_of(more).tolist(), mean(more).tolist(), strict=True):
            if clear:
                found.append(f"at {budget} tokens {method.label} has an error larger by {lead:.3f} than without")
    return found


def format_table(result: OutputResult) -> str:
    """The result as plain text: a row a method, a column a budget."""
    width = max(len(method.label) for method in result.methods)
    head = f"{'':{width}}  {'bytes/token':>11}  " + "".join(f"{budget:>8}" for budget in result.budgets)
    rows = [f"{'budget in tokens':>{len(head)}}", head, "-" * len(head)]
    for method in result.methods:
        errors = "".join(f"{error:>8.3f}" for error in mean(result.error[method.name]).tolist())
        rows.append(f"{method.label:{width}}  {method.bytes_per_token:>11g}  {errors}")
    return "\n".join(rows)


def run(given: argparse.Namespace) -> int:
    """`locks-sglang eval output`: measure, print the table, write the file. Options as `cli` parses them.

    Raises:
        As `measuring.measure`.
    """
    methods: list[Method] = []

    def prepare(head_dim: int, v_head_dim: int) -> Measurement:
        methods.extend(default_methods(head_dim, v_head_dim, given.seed))
        return lambda layer, configs: measure_layer(layer, methods, configs)

    measured = measure(given, prepare)
    result = OutputResult(methods, measured.budgets, measured.layers, measured.values)
    worse = harm(result)
    wrong = measured.failures()
    print(_report(result, measured))
    if worse:
        print("\n".join(["", "Corrections that do harm:", *(f"  {sentence}" for sentence in worse)]))
    if given.json:
        write(given.json, measured.record(OUTPUT_ERROR, given.command) | _as_json(result) | {"harm": worse, "failures": wrong})
    if wrong:
        print("\n".join(["", "FAILED", *(f"  {sentence}" for sentence in wrong)]))
    return 1 if wrong else 0


def _as_json(result: OutputResult) -> dict[str, Any]:
    methods = []
    for method in result.methods:
        error = result.error[method.name]
        queries, heads = standard_errors(error)
        methods.append(
            {
                "name": method.name,
                "label": method.label,
                "selector": method.selector.name,
                "correction": method.correction,
                "bytes_per_page": method.bytes_per_page,
                "bytes_per_token": method.bytes_per_token,
                "error": rounded(mean(error)),
                "standard_error": {"queries": rounded(queries), "heads": rounded(heads)},
                "error_by_layer": rounded(by_layer(error)),
            }
        )
    return {"methods": methods}


def _report(result: OutputResult, measured: Measured) -> str:
    identity, config, seconds = measured.identity, measured.run.config, measured.seconds
    model, text, other = identity["model"], identity["text"], identity["calibration"]
    lines = [
        f"Relative error of the attention output: {model['name']}, {text['tokens']:,} tokens of {text['name']}, "
        f"{len(result.layers)} of {model['layers']} layers",
        f"Mean over layers, query heads and the last {identity['late_queries']} positions. Inside every budget: "
        f"{config.sink_pages} sink and {config.recent_pages} recent page(s). Combine: {config.combine}.",
        "",
        format_table(result),
        "",
        "Bytes: of one token and KV head, beside a bf16 cache, with the value means where there is a correction.",
        f"Corrections of methods without page records take weights and value means from records of rank {TAIL_RANK}; of these "
        "they store what the weight reads.",
        f"Global sketch and channels: fixed for all pages by {other['tokens']:,} tokens of {other['name']}.",
        f"Check: the captured queries, keys and values reproduce the served attention to {measured.replay_error:.0e}.",
        f"Time: start, prefill and decoding {seconds['serve']:.0f} s, measurement {seconds['measure']:.0f} s "
        f"({identity['device']}, SGLang {identity['versions']['sglang']}).",
    ]
    return "\n".join(lines)
