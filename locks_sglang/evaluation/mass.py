"""Attention mass that page selection captures on real keys, method by method: `locks-sglang eval mass`."""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from tqdm import tqdm

from ..config import LocksConfig, load_config
from ..kernels.build_page_summaries import RecordLayout
from ..kernels.common import PAGE_SIZE
from ..ops import select_pages
from .capture import LayerCapture, Run
from .selectors import BF16_BYTES, Selector, default_selectors
from .serving import serve_text

ORACLE = "oracle"
ACCEPTED = "locks-r8"
RANDOM = "random"
CHAIN = (ORACLE, "locks-r8", "locks-r4", "locks-r2")
"""Best first; every method of `SIMPLER` comes after the last of these."""
SIMPLER = ("page-mean", "min-max")

LEAST_RATIO = 0.97
"""Least share of the oracle's mass, both averaged over the layers, that r=8 must capture."""
LEAST_RATIO_FROM = 128
"""Smallest budget in tokens at which `LEAST_RATIO` is asked for."""

TIE = 0.002
"""Differences of mean mass up to this are ties when methods are put in order: twice the largest standard error, over the
late queries, of the difference between neighbours in `CHAIN` (0.0009 from 128 tokens up: SmolLM2, 8,000 tokens, all layers,
prose and code). Where a budget captures nearly everything, good methods differ by less."""

LARGEST_REPLAY_ERROR = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest relative difference between dense attention over what was captured and what the server returned, by the server's
type: a few roundings of that type. More means that queries, keys and positions do not belong together."""


@dataclass(frozen=True)
class MassResult:
    """Mass captured, by method, layer and budget.

    Args:
        selectors: the methods, in the order of the table.
        budgets: tokens a KV head may read, ascending.
        layers: indices of the layers measured.
        mass: by method name, fp64 [layers, budgets]; mean over query heads and late queries, 0 to 1.
        head_dim, v_head_dim: D and Dv.
    """

    selectors: Sequence[Selector]
    budgets: Sequence[int]
    layers: Sequence[int]
    mass: Mapping[str, torch.Tensor]
    head_dim: int
    v_head_dim: int

    def mean(self, name: str) -> list[float]:
        """Mean over the layers, for each budget."""
        return self.mass[name].mean(0).tolist()

    def ratio(self) -> list[float]:
        """Mean mass of locks r=8 over that of the oracle, for each budget."""
        return (self.mass[ACCEPTED].mean(0) / self.mass[ORACLE].mean(0)).tolist()

    def worst_layer(self) -> list[tuple[int, float]]:
        """The layer with the smallest ratio of locks r=8 to the oracle and that ratio, for each budget."""
        least, at = (self.mass[ACCEPTED] / self.mass[ORACLE]).min(0)
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


def measure_layer(layer: LayerCapture, selectors: Sequence[Selector], configs: Sequence[LocksConfig]) -> dict[str, list[float]]:
    """Mass captured in one layer, by method, for each configuration's budget: mean over queries and query heads.

    Args:
        configs: settings that differ in `budget_tokens`; sink pages, recent pages and combine are taken from them too.
    """
    exact = layer.exact_lse()
    page_mass = torch.softmax(exact.double(), -1)
    captured: dict[str, list[float]] = {}
    for selector in selectors:
        lse = selector.page_lse(layer)
        captured[selector.name] = []
        for config in configs:
            pages, _ = select_pages(
                lse,
                layer.num_pages,
                config.budget_pages,
                config.sink_pages,
                config.recent_pages,
                num_kv_heads=layer.num_kv_heads,
                combine=config.combine,
            )
            captured[selector.name].append(float(captured_mass(page_mass, pages).mean()))
    return captured


def failures(result: MassResult) -> list[str]:
    """What is wrong with a result, one sentence each; none if r=8 captures enough and the methods come in order.

    The order: oracle, r=8, r=4, r=2, then page mean and min/max bound, at every budget; the oracle best and random pages
    worst of all. Differences up to `TIE` do not count.
    """
    found = []
    for budget, ratio in zip(result.budgets, result.ratio(), strict=True):
        if budget >= LEAST_RATIO_FROM and not ratio >= LEAST_RATIO:
            found.append(
                f"at {budget} tokens locks r=8 captures {ratio:.4f} of the oracle's mass; at least {LEAST_RATIO} is required"
            )
    names = [selector.name for selector in result.selectors]
    pairs = list(pairwise(CHAIN))
    pairs += [(CHAIN[-1], name) for name in SIMPLER]
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
    head = f"{'':{width}}  {'bytes/page':>10}  {'of KV':>6}  " + "".join(f"{budget:>8}" for budget in result.budgets)
    rule = "-" * len(head)
    rows = [f"{'budget in tokens':>{len(head)}}", head, rule]
    for selector in result.selectors:
        size = f"{selector.bytes_per_page:>10}  {result.cache_share(selector):>6.1%}  "
        rows.append(f"{selector.label:{width}}  {size}" + "".join(f"{mass:>8.3f}" for mass in result.mean(selector.name)))
    label = len(head) - 8 * len(result.budgets)
    rows += [
        rule,
        f"{'locks r=8 / oracle':{label}}" + "".join(f"{ratio:>8.3f}" for ratio in result.ratio()),
        f"{'  the worst layer':{label}}" + "".join(f"{ratio:>8.3f}" for _, ratio in result.worst_layer()),
        f"{'  which is layer':{label}}" + "".join(f"{layer:>8}" for layer, _ in result.worst_layer()),
    ]
    return "\n".join(rows)


def measure(run: Run, every: int, budgets: Sequence[int], seed: int) -> tuple[MassResult, float]:
    """Measure every method in every `every`-th layer of a run.

    Returns:
        The result, and the largest replay error of the layers.
    """
    configs = [dataclasses.replace(run.config, budget_tokens=budget) for budget in budgets]
    layers = run.layer_ids[::every]
    first = run.layer(layers[0])
    head_dim, v_head_dim = first.keys.shape[-1], first.values.shape[-1]
    selectors = default_selectors(head_dim, v_head_dim, seed)
    rows, replay_error = [], 0.0
    with _one_thread():
        for layer_id in tqdm(layers, desc="measure", unit="layer", disable=None):
            layer = run.layer(layer_id)
            replay_error = max(replay_error, layer.replay_error())
            rows.append(measure_layer(layer, selectors, configs))
    mass = {s.name: torch.tensor([row[s.name] for row in rows], dtype=torch.float64) for s in selectors}
    return MassResult(selectors, budgets, layers, mass, head_dim, v_head_dim), replay_error


@contextmanager
def _one_thread() -> Iterator[None]:
    """A layer is many short operations on a CPU: further threads gain a little where cores are idle, and waiting for each
    other cost tenfold where they are not."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run(given: argparse.Namespace) -> int:
    """`locks-sglang eval mass`: measure, print the table, write the file. Options as `cli` parses them.

    Raises:
        ConfigError: a budget that the product would refuse. TextError, ModelError, CaptureError: see `serve_text`.
    """
    for budget in given.budgets:
        dataclasses.replace(load_config().config, budget_tokens=budget)
    started = time.monotonic()
    served, identity = serve_text(given)
    served_at = time.monotonic()
    result, replay_error = measure(served, given.layers, given.budgets, given.seed)
    wrong = failures(result)
    allowed = LARGEST_REPLAY_ERROR[served.dtype]
    if replay_error > allowed:
        wrong.insert(0, f"the capture does not reproduce the served attention: error {replay_error:.1e}, allowed {allowed:g}")
    seconds = {"serve": served_at - started, "measure": time.monotonic() - served_at}
    print(_report(result, identity, served.config, replay_error, seconds))
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        record = identity | {
            "settings": dataclasses.asdict(served.config),
            "page_tokens": PAGE_SIZE,
            "replay_error": replay_error,
            "seconds": seconds,
            **_as_json(result),
            "failures": wrong,
        }
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print()
    if wrong:
        print("\n".join(["FAILED", *(f"  {sentence}" for sentence in wrong)]))
        return 1
    judged = f"r=8 captures at least {LEAST_RATIO} of the oracle's mass"
    if result.budgets[-1] < LEAST_RATIO_FROM:
        judged = "no budget was large enough to judge what r=8 captures"
    print(f"PASSED: from {LEAST_RATIO_FROM} tokens up {judged}; methods in order")
    return 0


def _as_json(result: MassResult) -> dict[str, Any]:
    return {
        "budgets": list(result.budgets),
        "layers": list(result.layers),
        "methods": [
            {
                "name": selector.name,
                "label": selector.label,
                "bytes_per_page": selector.bytes_per_page,
                "cache_share": result.cache_share(selector),
                "mass": result.mean(selector.name),
                "mass_by_layer": result.mass[selector.name].tolist(),
            }
            for selector in result.selectors
        ],
        "ratio": result.ratio(),
        "worst_layer": [{"layer": layer, "ratio": ratio} for layer, ratio in result.worst_layer()],
    }


def _report(
    result: MassResult, identity: Mapping[str, Any], config: LocksConfig, replay_error: float, seconds: Mapping[str, float]
) -> str:
    model, text = identity["model"], identity["text"]
    with_values = RecordLayout(result.head_dim, result.v_head_dim, 8).summary_bytes
    lines = [
        f"Attention mass captured by the selected pages: {model['name']}, {text['tokens']:,} tokens of {text['name']}, "
        f"{len(result.layers)} of {model['layers']} layers",
        f"Mean over layers, query heads and the last {identity['late_queries']} positions. Inside every budget: "
        f"{config.sink_pages} sink and {config.recent_pages} recent page(s). Combine: {config.combine}.",
        "",
        format_table(result),
        "",
        f"Bytes: of one page of {PAGE_SIZE} tokens and one KV head, beside a bf16 cache; the oracle reads the keys themselves.",
        f"Value means, which the tail correction reads, come on top (r=8: {with_values} bytes in all).",
        "Global sketch: one basis a KV head for all pages, fitted over this prompt; its own bytes are not counted.",
        f"Check: the captured queries, keys and values reproduce the served attention to {replay_error:.0e}.",
        f"Time: start, prefill and decoding {seconds['serve']:.0f} s, measurement {seconds['measure']:.0f} s "
        f"({identity['device']}, SGLang {identity['versions']['sglang']}).",
    ]
    return "\n".join(lines)
