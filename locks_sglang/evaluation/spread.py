"""Means over layers, heads and late queries, and how far such means may be trusted.

What is measured is fp64 [L, S, B, H]: layers, budgets, late queries, KV heads. The query heads of a KV head read the same pages
and are averaged beforehand.
"""

import torch

TIE = 0.002
"""Differences of mean mass up to this are ties: twice the largest standard error, over the late queries, of the difference
between neighbours in the order of `mass` (0.0009 from 128 tokens up: SmolLM2, 8,000 tokens, all layers, prose and code). Where
a budget captures nearly everything, good methods differ by less."""


def mean(x: torch.Tensor) -> torch.Tensor:
    """fp64 [S]."""
    return x.mean((0, 2, 3))


def by_layer(x: torch.Tensor) -> torch.Tensor:
    """fp64 [L, S]."""
    return x.mean((2, 3))


def standard_errors(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Standard errors [S] of the mean: over the late queries, each averaged over layers and heads, and over the layers' heads,
    each averaged over its queries. Infinite where there is one alone."""
    over_queries = x.mean((0, 3))
    over_heads = x.mean(2).transpose(0, 1).flatten(1)
    return _standard_error(over_queries), _standard_error(over_heads)


def _standard_error(x: torch.Tensor) -> torch.Tensor:
    count = x.shape[-1]
    return x.std(-1) / count**0.5 if count > 1 else torch.full_like(x[..., 0], torch.inf)


def clear_of(x: torch.Tensor) -> torch.Tensor:
    """bool [S]: whether the mean of a difference is positive beyond its spread, two of the larger standard errors and `TIE`."""
    spread = 2 * torch.maximum(*standard_errors(x))
    return mean(x) > spread.clamp_min(TIE)
