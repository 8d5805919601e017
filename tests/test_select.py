"""Page selection against a plain sort in fp64."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from truth import GROUPS, PAGE, assert_selection, cover, generator

from locks_sglang.ops import ArgumentError, select_pages

NAN, INF = float("nan"), float("inf")
COMBINES = ("mass", "peak", "max")


def one(values: list[float] | list[list[float]], budget: int, **settings: Any) -> list[int]:
    """Selection of one request with one KV head, from the log-sum-exp of its pages (a row for each query head)."""
    rows = values if isinstance(values[0], list) else [values]
    lse = torch.tensor([rows], dtype=torch.float32)
    num_pages = torch.tensor([lse.shape[2]], dtype=torch.int32)
    pages, counts = select_pages(lse, num_pages, budget, **({"num_kv_heads": 1} | settings))
    assert int(counts) == min(budget, lse.shape[2])
    return pages[0, 0].tolist()


# --- order of preference --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", COMBINES)
def test_best_scores_fill_what_sink_and_recent_leave(combine: str) -> None:
    assert one([0.0, 3.0, 1.0, 5.0, 4.0, 2.0, 0.0], 4, combine=combine) == [0, 3, 4, 6]
    assert one([9.0, 3.0, 1.0, 5.0, 4.0, 2.0, 9.0], 4, combine=combine) == [0, 3, 4, 6]


def test_sink_and_recent_count_inside_the_budget() -> None:
    """Budget 5 with 2 + 2 kept pages leaves one for the best score."""
    values = [-9.0, -9.0, 1.0, 5.0, 4.0, 2.0, -9.0, -9.0]
    assert one(values, 5, sink_pages=2, recent_pages=2) == [0, 1, 3, 6, 7]
    assert one(values, 3, sink_pages=0, recent_pages=1) == [3, 4, 7]


def test_pages_without_estimate_come_before_scores_and_after_sink_and_recent() -> None:
    assert one([-5.0, 9.0, INF, 8.0, INF, 7.0, -5.0], 4) == [0, 2, 4, 6]
    assert one([-5.0, 9.0, INF, 8.0, INF, 7.0, -5.0], 3) == [0, 2, 6]


def test_more_pages_without_estimate_than_budget() -> None:
    """The lower ones are taken, never more than the budget; the recent page is kept though scored last."""
    assert one([INF] * 20, 6) == [0, 1, 2, 3, 4, 19]
    assert one([-5.0, *[INF] * 18, -5.0], 6, sink_pages=2, recent_pages=3) == [0, 1, 2, 17, 18, 19]


def test_one_head_without_estimate_is_enough() -> None:
    assert one([[0.0, 0.0, 0.0, 9.0, 0.0], [0.0, 0.0, INF, 9.0, 0.0]], 3) == [0, 2, 4]


def test_sink_and_recent_may_meet() -> None:
    """A request shorter than sink + recent: each page once."""
    assert one([1.0, 2.0, 3.0], 6, sink_pages=2, recent_pages=2) == [0, 1, 2, -1, -1, -1]
    assert one([1.0], 3) == [0, -1, -1]


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("pages", [5, 9, 40, 300])
def test_ties_go_to_the_lower_page(combine: str, pages: int) -> None:
    """Also far beyond the widths at which sort algorithms change."""
    assert one([2.0] * pages, 4, combine=combine) == [0, 1, 2, pages - 1]
    two = [2.0 if n % 2 else 1.0 for n in range(pages)]
    assert one([two] * 3, 4, combine=combine) == [0, 1, 3, pages - 1]


@pytest.mark.parametrize("combine", COMBINES)
def test_nan_counts_as_minus_infinity(combine: str) -> None:
    """A NaN neither wins nor spoils the vote of its head; -inf and NaN tie by index."""
    assert one([0.0, NAN, 1.0, NAN, 3.0, 2.0, 0.0], 4, combine=combine) == [0, 4, 5, 6]
    assert one([0.0, NAN, -INF, NAN, 3.0, 0.0], 4, combine=combine) == [0, 1, 4, 5]
    assert one([0.0, -INF, NAN, NAN, 3.0, 0.0], 4, combine=combine) == [0, 1, 4, 5]
    assert one([NAN] * 6, 4, combine=combine) == [0, 1, 2, 5]
    assert one([[0.0, NAN, 1.0, 5.0, 0.0], [NAN] * 5], 3, combine=combine) == [0, 3, 4]


def test_values_past_the_pages_do_not_vote() -> None:
    """Whatever stands past num_pages, the selection has the same bits."""
    lse = torch.tensor([[[0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0]]])
    num_pages = torch.tensor([5], dtype=torch.int32)
    for junk in (0.0, 99.0, INF, -INF, NAN):
        lse[..., 5:] = junk
        pages, counts = select_pages(lse, num_pages, 4, num_kv_heads=1)
        assert pages.tolist() == [[[0, 2, 3, 4]]]
        assert counts.tolist() == [4]


def test_no_pages() -> None:
    pages, counts = select_pages(torch.zeros(2, 4, 3), torch.tensor([0, 3], dtype=torch.int32), 3, num_kv_heads=2)
    assert counts.tolist() == [0, 3]
    assert pages.tolist() == [[[-1] * 3] * 2, [[0, 1, 2]] * 2]


# --- how the heads of a group vote ----------------------------------------------------------------------------------------


def test_mass_is_a_share_of_each_head() -> None:
    """A head that is sure outvotes one that spreads its mass; how large its logits are does not matter.

    Head 0 gives page 2 a share of 1/2 among two; head 1 gives pages 3, 4 and 5 a third each, on logits 50 higher.
    """
    first = [-30.0, -30.0, 4.0, -30.0, -30.0, -30.0, 4.0]
    second = [-30.0, -30.0, -30.0, 54.0, 54.0, 54.0, -30.0]
    assert one([first, second], 3, combine="mass") == [0, 2, 6]
    assert one([first, second], 3, combine="peak") == [0, 2, 6]
    assert one([first, second], 3, combine="max") == [0, 3, 6]


def test_combines_differ_where_they_should() -> None:
    """Page 1: both heads' second choice. Pages 2 and 3: one head's only choice. Peak counts shares of the best page."""
    wide = [-30.0, 0.9, 1.0, -30.0, 1.0, 1.0, 1.0, 1.0, 1.0, -30.0]
    sharp = [-30.0, -2.0, -30.0, 1.0, -30.0, -30.0, -30.0, -30.0, -30.0, -30.0]
    assert one([wide, sharp], 3, combine="mass") == [0, 3, 9]
    assert one([wide, sharp], 3, combine="peak") == [0, 2, 9]
    assert one([wide, sharp, [-40.0] * 10], 3, combine="max") == [0, 2, 9]


def test_mass_counts_only_finite_pages() -> None:
    """Partial and invalid pages take no share: head 0 is as sure of page 2 as if they were not there."""
    first = [INF, -30.0, 1.0, -30.0, -30.0, INF]
    second = [INF, -30.0, -30.0, 1.0, 0.9, INF]
    assert one([first, second], 3) == [0, 2, 5]


# --- against the truth ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "kv_heads", "combine", "budget", "sink", "recent"),
    [
        c
        for c in cover(
            group=GROUPS, kv_heads=(1, 2, 3), combine=COMBINES, budget=(3, 4, 8, 33, 70), sink=(0, 1, 2), recent=(1, 2, 5)
        )
        if c[3] >= c[4] + c[5] + 1
    ],
)
def test_random_batches(group: int, kv_heads: int, combine: str, budget: int, sink: int, recent: int) -> None:
    """Mixed lengths; NaN, +inf and -inf strewn in; a row stride wider than the pages."""
    gen = generator(group * budget + kv_heads)
    held = [0, 1, 2, 3, 5, 8, 33, 63]
    lse = 4 * torch.randn(8, group * kv_heads, 80, generator=gen)
    luck = torch.rand(lse.shape, generator=gen)
    lse[luck < 0.02] = torch.nan
    lse[luck > 0.99] = -torch.inf
    lse.transpose(1, 2)[torch.rand(8, 80, generator=gen) < 0.05] = torch.inf
    num_pages = torch.tensor(held, dtype=torch.int32)
    pages, counts = select_pages(
        lse[..., 3:66], num_pages, budget, sink, recent, num_kv_heads=kv_heads, combine=combine
    )  # a view, not contiguous
    assert_selection(pages, counts, lse[..., 3:66], held, budget, sink, recent, combine)


VALUES = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0, INF, -INF, NAN])


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """A small batch, rich in ties."""
    batch, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    group, n_max = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    size = batch * kv_heads * group * n_max
    sink, recent = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    return {
        "lse": torch.tensor(draw(st.lists(VALUES, min_size=size, max_size=size))).view(batch, -1, n_max),
        "num_pages": draw(st.lists(st.integers(0, n_max), min_size=batch, max_size=batch)),
        "kv_heads": kv_heads,
        "sink": sink,
        "recent": recent,
        "budget": sink + recent + 1 + draw(st.integers(0, 8)),
        "combine": draw(st.sampled_from(COMBINES)),
    }


@settings(max_examples=400)
@given(problems())
@example(
    {
        "lse": torch.full((1, 1, 9), INF),
        "num_pages": [9],
        "kv_heads": 1,
        "sink": 3,
        "recent": 3,
        "budget": 7,
        "combine": "mass",
    }
)
def test_any_small_batch(p: dict[str, Any]) -> None:
    num_pages = torch.tensor(p["num_pages"], dtype=torch.int32)
    pages, counts = select_pages(
        p["lse"], num_pages, p["budget"], p["sink"], p["recent"], num_kv_heads=p["kv_heads"], combine=p["combine"]
    )
    assert_selection(pages, counts, p["lse"], p["num_pages"], p["budget"], p["sink"], p["recent"], p["combine"])


@settings(max_examples=100)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=60), st.integers(3, 12))
def test_one_head_takes_its_best_pages(values: list[float], budget: int) -> None:
    """With one head every combine orders pages by log-sum-exp alone, so "max" decides exactly."""
    n = len(values)
    chosen = [page for page in one(values, budget, combine="max") if page >= 0]
    kept = {0, n - 1}
    rest = sorted((page for page in range(n) if page not in kept), key=lambda page: (-values[page], page))
    assert chosen == sorted([*kept, *rest[: max(0, min(budget, n) - len(kept))]])


@pytest.mark.parametrize("combine", COMBINES)
def test_everything_is_selected_while_it_fits(combine: str) -> None:
    """Every length from 1 token to two pages past the budget: the first length that leaves a page out is budget + 1."""
    budget, gen = 5, generator(30)
    lengths = torch.arange(1, (budget + 2) * PAGE + 1)
    num_pages = ((lengths + PAGE - 1) // PAGE).int()
    lse = torch.randn(len(lengths), 6, budget + 4, generator=gen)
    for b, length in enumerate(lengths.tolist()):
        if length % PAGE:
            lse[b, :, length // PAGE] = torch.inf
    pages, counts = select_pages(lse, num_pages, budget, num_kv_heads=2, combine=combine)
    for b, length in enumerate(lengths.tolist()):
        held = int(num_pages[b])
        assert int(counts[b]) == min(held, budget)
        if length <= budget * PAGE:
            assert pages[b].tolist() == [[*range(held), *[-1] * (budget - held)]] * 2
        else:
            assert (pages[b, :, 0] == 0).all()
            assert (pages[b, :, -1] == held - 1).all()
    assert_selection(pages, counts, lse, num_pages.tolist(), budget, 1, 1, combine)


def test_heads_of_one_group_choose_together_and_groups_apart() -> None:
    """Query heads 0 to 2 belong to KV head 0, 3 to 5 to KV head 1."""
    lse = torch.full((1, 6, 8), -20.0)
    lse[0, :3, 2] = 0.0
    lse[0, 3:, 5] = 0.0
    pages, _ = select_pages(lse, torch.tensor([8], dtype=torch.int32), 3, num_kv_heads=2)
    assert pages.tolist() == [[[0, 2, 7], [0, 5, 7]]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types(dtype: torch.dtype) -> None:
    lse = torch.tensor([[[0.0, 1.0, 3.0, 2.0, 0.0]]], dtype=dtype)
    pages, counts = select_pages(lse, torch.tensor([5]), 3, num_kv_heads=1)
    assert pages.tolist() == [[[0, 2, 4]]]
    assert pages.dtype == counts.dtype == torch.int32


# --- refusals -------------------------------------------------------------------------------------------------------------

LSE = torch.zeros(2, 6, 4)
HELD = torch.tensor([4, 3], dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lse": LSE[0]}, r"lse must be a float \[B, Hq, Nmax\], got torch.float32 \[6, 4\]"),
        ({"lse": LSE.int()}, r"lse must be a float .*got torch.int32"),
        ({"num_pages": HELD[:1]}, r"num_pages must be int32 or int64 \[B=2\], got torch.int32 \[1\]"),
        ({"num_pages": HELD.float()}, r"num_pages must be int32 or int64 .*got torch.float32"),
        ({"num_kv_heads": None}, r"num_kv_heads is required"),
        ({"num_kv_heads": 4}, r"6 query heads cannot be grouped over 4 KV heads"),
        ({"num_kv_heads": 0}, r"6 query heads cannot be grouped over 0 KV heads"),
        ({"recent_pages": 0}, r"recent_pages must be at least 1 .*got 0"),
        ({"sink_pages": -1}, r"sink_pages must be 0 or more, got -1"),
        ({"budget_pages": 2}, r"budget_pages must be at least sink \+ recent \+ 1 = 3, got 2; raise the budget"),
        ({"budget_pages": 7, "sink_pages": 3, "recent_pages": 4}, r"at least sink \+ recent \+ 1 = 8, got 7"),
        ({"num_pages": HELD.to("meta")}, r"lse and num_pages must share a device, got cpu, meta"),
        ({"combine": "mean"}, r"combine must be one of mass, peak, max, got 'mean'"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    given_arguments = {"lse": LSE, "num_pages": HELD, "budget_pages": 4, "num_kv_heads": 2} | arguments
    with pytest.raises(ArgumentError, match=message):
        select_pages(**given_arguments)


def test_no_pages_at_all() -> None:
    """A page table without columns: nothing to select."""
    pages, counts = select_pages(torch.zeros(2, 6, 0), torch.zeros(2, dtype=torch.int32), 4, num_kv_heads=2)
    assert (pages.shape, pages.dtype) == ((2, 2, 4), torch.int32)
    assert (pages == -1).all()
    assert counts.tolist() == [0, 0]


def test_more_pages_than_listed_are_taken_as_all() -> None:
    lse = torch.tensor([[[0.0, 3.0, 1.0, 2.0, 0.0]]])
    for held in (5, 6, 99):
        pages, counts = select_pages(lse, torch.tensor([held], dtype=torch.int32), 3, num_kv_heads=1)
        assert (pages.tolist(), counts.tolist()) == ([[[0, 1, 4]]], [3])
    pages, counts = select_pages(lse, torch.tensor([9], dtype=torch.int32), 8, num_kv_heads=1)
    assert (pages.tolist(), counts.tolist()) == ([[[0, 1, 2, 3, 4, -1, -1, -1]]], [5])


def test_refusals_are_value_errors() -> None:
    assert issubclass(ArgumentError, ValueError)
