"""Attention mass that page selection captures on real keys, method by method: `locks-sglang eval mass`."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ..config import LocksConfig
from ..kernels.build_page_summaries import RecordLayout
from ..kernels.common import PAGE_SIZE
from ..ops import select_pages
from . import ATTENTION_MASS
from .capture import LayerCapture
from .frontier import beaten_by, behind, competing
from .measuring import DIGITS, Measured, Measurement, measure, rounded, write
from .selectors import BF16_BYTES, LOCKS, Selector, default_selectors
from .spread import TIE, by_layer, mean, standard_errors

ORACLE = "oracle"
ACCEPTED = "locks-r8"
RANDOM = "random"
CHAIN = (ORACLE, "locks-r8", "locks-r4", "locks-r2", "locks-r1")
"""Best first."""
SIMPLER = (("locks-r2", "min-max"), ("locks-r2", "page-mean"), ("locks-r1", "page-mean"))
"""Ranks that must not be worse than a simpler method of no more bytes."""

LEAST_MEAN = 0.98
"""Least share of the oracle's mass, mean over the layers, that r=8 must capture."""
LEAST_MEAN_FROM, LEAST_MEAN_TO = 128, 2048
"""Budgets in tokens between which `LEAST_MEAN` is asked for."""
LEAST_LAYER = {512: 0.90, 2048: 0.97}
"""Least share of the oracle's mass that r=8 must capture in every layer, by budget in tokens."""


@dataclass(frozen=True)
class MassResult:
    """Mass captured, by method, layer and budget.

    Args:
        selectors: the methods, in the order of the table.
        budgets: tokens a KV head may read, ascending.
        layers: indices of the layers measured.
        mass: by method name, fp64 [layers, budgets, late queries, KV heads]; mean over a KV head's query heads, 0 to 1.
        head_dim, v_head_dim: D and Dv.
    """

    selectors: Sequence[Selector]
    budgets: Sequence[int]
    layers: Sequence[int]
    mass: Mapping[str, torch.Tensor]
    head_dim: int
    v_head_dim: int

    def mean(self, name: str) -> list[float]:
        """Mean over layers, heads and queries, for each budget."""
        return mean(self.mass[name]).tolist()

    def layer_ratio(self) -> torch.Tensor:
        """fp64 [layers, budgets]: mass of locks r=8 over that of the oracle in each layer."""
        return by_layer(self.mass[ACCEPTED]) / by_layer(self.mass[ORACLE])

    def ratio(self) -> list[float]:
        """Mean of `layer_ratio` over the layers, for each budget."""
        return self.layer_ratio().mean(0).tolist()

    def worst_layer(self) -> list[tuple[int, float]]:
        """The layer with the smallest ratio of locks r=8 to the oracle and that ratio, for each budget."""
        least, at = self.layer_ratio().min(0)
        return [(self.layers[i], ratio) for i, ratio in zip(at.tolist(), least.tolist(), strict=True)]

    def cache_share(self, selector: Selector) -> float:
        """Bytes that the method reads a page as a share of the page's bf16 keys and values."""
        return selector.bytes_per_page / (PAGE_SIZE * (self.head_dim + self.v_head_dim) * BF16_BYTES)


def captured_mass(page_mass: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Mass [B, Hq] of selected pages.

    Args:
        page_mass: [B, Hq, N], each page's share of the attention, 1 in all.
        pages: int32 [B, H, S], selected pages, -1 padded.
    """
    batch, heads, n = page_mass.shape
    selected = torch.zeros(batch, pages.shape[1], n + 1, dtype=torch.bool, device=pages.device)
    selected.scatter_(2, torch.where(pages < 0, n, pages).long(), True)
    per_head = selected[..., :n].repeat_interleave(heads // pages.shape[1], 1)
    return torch.where(per_head, page_mass, 0.0).sum(-1)


def measure_layer(
    layer: LayerCapture, selectors: Sequence[Selector], configs: Sequence[LocksConfig]
) -> dict[str, torch.Tensor]:
    """Mass captured in one layer, by method: fp64 [S, B, H] for each configuration's budget, mean over a KV head's query heads.

    Args:
        configs: settings that differ in `budget_tokens`; sink pages, recent pages and combine are taken from them too.
    """
    exact = layer.exact_lse()
    page_mass = torch.softmax(exact.double(), -1)
    captured: dict[str, torch.Tensor] = {}
    for selector in selectors:
        lse = selector.page_lse(layer)
        rows = []
        for config in configs:
            pages, _ = chosen_pages(layer, lse, config)
            rows.append(captured_mass(page_mass, pages).unflatten(1, (layer.num_kv_heads, -1)).mean(-1))
        captured[selector.name] = torch.stack(rows)
    return captured


def chosen_pages(layer: LayerCapture, lse: torch.Tensor, config: LocksConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages and counts that the product's selection takes from estimates [B, Hq, N] of a layer."""
    return select_pages(
        lse,
        layer.num_pages,
        config.budget_pages,
        config.sink_pages,
        config.recent_pages,
        num_kv_heads=layer.num_kv_heads,
        combine=config.combine,
    )


def failures(result: MassResult) -> list[str]:
    """What is wrong with a result, one sentence each; none if r=8 captures enough and the methods come in order.

    Enough: `LEAST_MEAN` and `LEAST_LAYER`. The order: `CHAIN` and `SIMPLER`, at every budget; the oracle best and random pages
    worst of all. Differences up to `TIE` do not count.
    """
    found = []
    for budget, ratio, (layer, least) in zip(result.budgets, result.ratio(), result.worst_layer(), strict=True):
        if LEAST_MEAN_FROM <= budget <= LEAST_MEAN_TO and not ratio >= LEAST_MEAN:
            found.append(
                f"at {budget} tokens locks r=8 captures {ratio:.4f} of the oracle's mass, mean over the layers; at least "
                f"{LEAST_MEAN} is required"
            )
        if budget in LEAST_LAYER and not least >= LEAST_LAYER[budget]:
            found.append(
                f"at {budget} tokens locks r=8 captures {least:.4f} of the oracle's mass in layer {layer}; at least "
                f"{LEAST_LAYER[budget]} is required in every layer"
            )
    names = [selector.name for selector in result.selectors]
    pairs = [*pairwise(CHAIN), *SIMPLER]
    pairs += [(ORACLE, name) for name in names if name not in CHAIN]
    pairs += [(name, RANDOM) for name in names if name not in (ORACLE, RANDOM)]
    labels = {selector.name: selector.label for selector in result.selectors}
    for better, worse in pairs:
        for budget, high, low in zip(result.budgets, result.mean(better), result.mean(worse), strict=True):
            if not high >= low - TIE:
                found.append(
                    f"at {budget} tokens {labels[better]} captures {high:.4f}, less than {labels[worse]} with {low:.4f}"
                )
    return found


def format_table(result: MassResult) -> str:
    """The result as plain text: a row a method, a column a budget, then r=8 against the oracle."""
    width = max(len(selector.label) for selector in result.selectors)
    head = f"{'':{width}}  {'bytes/token':>11}  {'of KV':>6}  " + "".join(f"{budget:>8}" for budget in result.budgets)
    rule = "-" * len(head)
    rows = [f"{'budget in tokens':>{len(head)}}", head, rule]
    for selector in result.selectors:
        size = f"{selector.bytes_per_token:>11g}  {result.cache_share(selector):>6.1%}  "
        rows.append(f"{selector.label:{width}}  {size}" + "".join(f"{mass:>8.3f}" for mass in result.mean(selector.name)))
    label = len(head) - 8 * len(result.budgets)
    rows += [
        rule,
        f"{'locks r=8 / oracle':{label}}" + "".join(f"{ratio:>8.3f}" for ratio in result.ratio()),
        f"{'  the worst layer':{label}}" + "".join(f"{ratio:>8.3f}" for _, ratio in result.worst_layer()),
        f"{'  which is layer':{label}}" + "".join(f"{layer:>8}" for layer, _ in result.worst_layer()),
    ]
    return "\n".join(rows)


def format_frontier(result: MassResult) -> str:
    """Quality against bytes as plain text: the methods that are on the frontier at some budget and the page basis as it is
    served, the smallest first; a star on the frontier."""
    beaten = beaten_by(result.selectors, result.mass)
    shown = [s for s in competing(result.selectors) if s.family == LOCKS or None in beaten[s.name]]
    width = max(len(selector.label) for selector in shown)
    head = f"{'frontier (*)':{width}}  {'bytes/token':>11}  " + "".join(f"{budget:>8}" for budget in result.budgets)
    rows = [head, "-" * len(head)]
    for selector in shown:
        marks = zip(result.mean(selector.name), beaten[selector.name], strict=True)
        cells = "".join(f"{mass:>7.3f}{' ' if name else '*'}" for mass, name in marks)
        rows.append(f"{selector.label:{width}}  {selector.bytes_per_token:>11g}  {cells}")
    return "\n".join(rows)


def run(given: argparse.Namespace) -> int:
    """`locks-sglang eval mass`: measure, print the tables, write the file. Options as `cli` parses them.

    Raises:
        As `measuring.measure`.
    """
    selectors: list[Selector] = []

    def prepare(head_dim: int, v_head_dim: int) -> Measurement:
        selectors.extend(default_selectors(head_dim, v_head_dim, given.seed))
        return lambda layer, configs: measure_layer(layer, selectors, configs)

    measured = measure(given, prepare)
    result = MassResult(selectors, measured.budgets, measured.layers, measured.values, *measured.dims)
    wrong = measured.failures() + failures(result)
    print(_report(result, measured))
    lacking = behind(selectors, result.budgets, result.mass)
    if lacking:
        print("\n".join(["", "The page basis is behind:", *(f"  {sentence}" for sentence in lacking)]))
    if given.json:
        write(
            given.json,
            measured.record(ATTENTION_MASS, given.command) | _as_json(result) | {"failures": wrong, "behind": lacking},
        )
    print()
    if wrong:
        print("\n".join(["FAILED", *(f"  {sentence}" for sentence in wrong)]))
        return 1
    judged = f"r=8 captures at least {LEAST_MEAN} of the oracle's mass"
    if result.budgets[-1] < LEAST_MEAN_FROM:
        judged = "no budget was large enough to judge what r=8 captures"
    print(f"PASSED: from {LEAST_MEAN_FROM} tokens up {judged}; methods in order")
    return 0


def _as_json(result: MassResult) -> dict[str, Any]:
    beaten = beaten_by(result.selectors, result.mass)
    methods = []
    for selector in result.selectors:
        mass = result.mass[selector.name]
        queries, heads = standard_errors(mass)
        methods.append(
            {
                "name": selector.name,
                "label": selector.label,
                "family": selector.family,
                "bytes_per_page": selector.bytes_per_page,
                "bytes_per_token": selector.bytes_per_token,
                "cache_share": result.cache_share(selector),
                "mass": rounded(mean(mass)),
                "standard_error": {"queries": rounded(queries), "heads": rounded(heads)},
                "mass_by_layer": rounded(by_layer(mass)),
                "beaten_by": beaten.get(selector.name),
            }
        )
    return {
        "methods": methods,
        "ratio": [round(ratio, DIGITS) for ratio in result.ratio()],
        "worst_layer": [{"layer": layer, "ratio": round(ratio, DIGITS)} for layer, ratio in result.worst_layer()],
    }


def _report(result: MassResult, measured: Measured) -> str:
    identity, config, seconds = measured.identity, measured.run.config, measured.seconds
    model, text, other = identity["model"], identity["text"], identity["calibration"]
    with_values = RecordLayout(result.head_dim, result.v_head_dim, 8).summary_bytes
    widest = max(float(error.max()) for name in result.mass for error in standard_errors(result.mass[name]))
    lines = [
        f"Attention mass captured by the selected pages: {model['name']}, {text['tokens']:,} tokens of {text['name']}, "
        f"{len(result.layers)} of {model['layers']} layers",
        f"Mean over layers, query heads and the last {identity['late_queries']} positions. Inside every budget: "
        f"{config.sink_pages} sink and {config.recent_pages} recent page(s). Combine: {config.combine}.",
        "",
        format_table(result),
        "",
        f"Bytes: of one token and KV head, beside a bf16 cache, pages of {PAGE_SIZE} tokens padded to 64 bytes; the oracle "
        "reads the keys themselves.",
        f"Value means, which the tail correction reads, come on top (r=8: {with_values} bytes a page in all).",
        f"Global sketch and channels: fixed for all pages by {other['tokens']:,} tokens of {other['name']}; the bytes of what "
        "is fixed are not counted.",
        f"Standard errors, over late queries and over heads, are at most {widest:.3f}; differences are judged by their own.",
        "",
        format_frontier(result),
        "",
        f"Check: the captured queries, keys and values reproduce the served attention to {measured.replay_error:.0e}.",
        f"Time: start, prefill and decoding {seconds['serve']:.0f} s, measurement {seconds['measure']:.0f} s "
        f"({identity['device']}, SGLang {identity['versions']['sglang']}).",
    ]
    return "\n".join(lines)
