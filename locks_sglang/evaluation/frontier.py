"""Quality against stored bytes: which methods nothing smaller beats, and where the page basis is behind others."""

from collections.abc import Mapping, Sequence

import torch

from .selectors import IN_SAMPLE, LOCKS, NOTHING_STORED, OTHERS, Selector
from .spread import clear_of, mean

NEAR = 0.005
"""Mass that the page basis may lack against the best method that takes no more bytes."""


def competing(selectors: Sequence[Selector]) -> list[Selector]:
    """Methods that store something and could be served, the smallest first."""
    kept = [selector for selector in selectors if selector.family not in (*NOTHING_STORED, IN_SAMPLE)]
    return sorted(kept, key=lambda selector: selector.bytes_per_page)


def beaten_by(selectors: Sequence[Selector], mass: Mapping[str, torch.Tensor]) -> dict[str, list[str | None]]:
    """For each competing method and budget, the best of the methods that beat it: those that take no more bytes and hold more
    mass beyond the spread, and those that take fewer and hold no less. None on the frontier.

    Args:
        mass: by name, fp64 [L, S, B, H].
    """
    found: dict[str, list[str | None]] = {}
    methods = competing(selectors)
    for method in methods:
        best: list[tuple[float, str | None]] = [(-1.0, None)] * mass[method.name].shape[1]
        for other in methods:
            if other is method or other.bytes_per_page > method.bytes_per_page:
                continue
            more = mass[other.name] - mass[method.name]
            wins = clear_of(more)
            if other.bytes_per_page < method.bytes_per_page:
                wins |= mean(more) >= 0.0
            leads = zip(wins.tolist(), mean(more).tolist(), strict=True)
            best = [(lead, other.name) if win and lead > had[0] else had for (win, lead), had in zip(leads, best, strict=True)]
        found[method.name] = [name for _, name in best]
    return found


def behind(selectors: Sequence[Selector], budgets: Sequence[int], mass: Mapping[str, torch.Tensor]) -> list[str]:
    """Where the page basis, as it is served, is not where it ought to be, a sentence each: a page mean or min/max bound that is
    not clear of it, and another method that holds more than `NEAR` more mass at no more bytes.

    Budgets that hold every page do not count.
    """
    found = []
    others = [selector for selector in selectors if selector.family in OTHERS]
    for page_basis in (selector for selector in selectors if selector.family == LOCKS):
        rows = [(other, mass[other.name] - mass[page_basis.name]) for other in others]
        for at, budget in enumerate(budgets):
            if float(mass[page_basis.name][:, at].min()) == 1.0:
                continue
            within = [(float(mean(more)[at]), other, more) for other, more in rows if _fits(other, page_basis)]
            for _, other, more in within:
                if other.family in ("page mean", "min/max") and not clear_of(-more)[at]:
                    found.append(f"at {budget} tokens {page_basis.label} is not clear of {other.label}")
            lead, best, more = max(within, key=lambda entry: entry[0], default=(0.0, None, None))
            if best is not None and more is not None and lead > NEAR:
                clear = "beyond" if clear_of(more)[at] else "within"
                sizes = page_basis.bytes_per_token, best.bytes_per_token
                found.append(
                    f"at {budget} tokens {page_basis.label} ({sizes[0]:g} bytes a token) holds {lead:.3f} less than "
                    f"{best.label} ({sizes[1]:g}), {clear} the spread"
                )
    return found


def _fits(other: Selector, page_basis: Selector) -> bool:
    return other.bytes_per_page <= page_basis.bytes_per_page
