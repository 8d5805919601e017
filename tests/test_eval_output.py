"""`locks-sglang eval output`: errors against the fp64 truth and the product's own step.

The command itself is tested with `eval mass`, from the same served run.
"""

import dataclasses

import numpy as np
import pytest
import torch

from locks_sglang.config import LocksConfig
from locks_sglang.evaluation import output
from locks_sglang.evaluation.capture import LayerCapture
from locks_sglang.evaluation.mass import chosen_pages
from locks_sglang.ops import PageSummaries, dense_decode, locks_decode

from . import truth
from .test_eval_mass import DIM, GROUP, KV_HEADS, LATE, SCALE, make_layer

CONFIGS = [LocksConfig(budget_tokens=64), LocksConfig(budget_tokens=128)]


def relative_error(layer: LayerCapture, made: np.ndarray) -> np.ndarray:
    """[B, H] against fp64 attention over every token: |made - exact| / |exact|, mean over a KV head's query heads."""
    pages = truth.all_pages(layer.seq_lens, KV_HEADS)
    cache = layer.keys.flatten(0, 1), layer.values.flatten(0, 1), layer.page_table
    exact, _ = truth.attention(layer.queries, *cache, pages, layer.seq_lens, SCALE, layer.logit_cap)
    error = np.linalg.norm(made - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    return error.reshape(LATE, KV_HEADS, GROUP).mean(-1)


def methods_of(*names: str) -> list[output.Method]:
    found = [method for method in output.default_methods(DIM, DIM, seed=0) if method.name in names]
    assert len(found) == len(names)
    return found


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_errors_without_correction_are_those_of_exact_attention_over_the_chosen_pages(cap: float) -> None:
    layer = make_layer(211, cap=cap)
    method = methods_of("page-mean+off")
    measured = output.measure_layer(layer, method, CONFIGS)["page-mean+off"]
    for at, config in enumerate(CONFIGS):
        pages, counts = chosen_pages(layer, method[0].selector.page_lse(layer), config)
        listed = truth.listed_pages(pages, counts)
        cache = layer.keys.flatten(0, 1), layer.values.flatten(0, 1), layer.page_table
        made, _ = truth.attention(layer.queries, *cache, listed, layer.seq_lens, SCALE, cap)
        np.testing.assert_allclose(measured[at].numpy(), relative_error(layer, made), rtol=1e-3)


@pytest.mark.parametrize("correction", ["qmu", "flat", "off"])
@pytest.mark.parametrize("rank", [8, 4])
def test_locks_has_the_error_of_the_served_step(correction: str, rank: int) -> None:
    """The product's whole step with this setting, on the records that the server has or would have built."""
    layer = make_layer(211)
    name = f"locks-r{rank}+{correction}"
    measured = output.measure_layer(layer, methods_of(name), CONFIGS)[name]
    summaries = output.with_values(layer, rank)
    assert (summaries.record is layer.summaries.record) == (rank == 8)
    for at, config in enumerate(CONFIGS):
        made = locks_decode(
            layer.queries,
            layer.keys.flatten(0, 1),
            layer.values.flatten(0, 1),
            summaries,
            layer.page_table,
            layer.seq_lens,
            SCALE,
            dataclasses.replace(config, rank=rank, tail_correction=correction),
        )
        np.testing.assert_allclose(measured[at].numpy(), relative_error(layer, truth.f64(made)), rtol=1e-3)


def test_the_smaller_weight_is_the_smaller_of_both_page_by_page() -> None:
    layer = make_layer()
    weights, values = output.tail_weights(layer, 8)
    smaller = torch.minimum(weights["qmu"], weights["flat"])
    assert torch.equal(weights["smaller"], smaller)
    scored = torch.isfinite(smaller)
    assert (weights["qmu"] < weights["flat"])[scored].any()
    assert (weights["qmu"] > weights["flat"])[scored].any()
    assert values.shape == (LATE, KV_HEADS, layer.keys.shape[0], DIM)


def test_corrections_are_merged_from_the_records_that_they_name() -> None:
    """The oracle's pages with the served tail: by the truth's merge, from the weights and value means of rank 8."""
    layer = make_layer()
    name = "oracle+smaller"
    measured = output.measure_layer(layer, methods_of(name), CONFIGS)[name]
    weights, _ = output.tail_weights(layer, 8)
    s = layer.summaries
    factors = truth.Factors(truth.f64(s.mu), truth.f64(s.basis), truth.f64(s.coef), truth.f64(s.value_mean))
    for at, config in enumerate(CONFIGS):
        pages, counts = chosen_pages(layer, layer.exact_lse(), config)
        listed = truth.listed_pages(pages, counts)
        cache = layer.keys.flatten(0, 1), layer.values.flatten(0, 1), layer.page_table
        exact, lse = truth.attention(layer.queries, *cache, listed, layer.seq_lens, SCALE)
        made = truth.merge_tail(exact, lse, listed, truth.f64(weights["smaller"]), factors, layer.page_table)
        np.testing.assert_allclose(measured[at].numpy(), relative_error(layer, made), rtol=1e-3)


def test_a_budget_that_holds_every_page_leaves_no_error() -> None:
    layer = make_layer(205)
    methods = output.default_methods(DIM, DIM, seed=0)
    measured = output.measure_layer(layer, methods, [LocksConfig(budget_tokens=208), LocksConfig(budget_tokens=64)])
    assert list(measured) == [method.name for method in methods]
    for name, error in measured.items():
        assert error.shape == (2, LATE, KV_HEADS), name
        assert float(error[0].max()) < 1e-5, name
        assert float(error[1].min()) > 1e-4, name


def test_summaries_without_value_means_are_built_anew_for_the_correction() -> None:
    """A server without correction keeps none; what it would have kept is the same."""
    layer = make_layer()
    s = layer.summaries
    layout = dataclasses.replace(s.layout, value_mean=False)
    bare = dataclasses.replace(layer, summaries=PageSummaries(layout, s.valid, s.center, s.record))
    (with_means, _), (built, _) = output.tail_weights(layer, 8), output.tail_weights(bare, 8)
    torch.testing.assert_close(built["qmu"], with_means["qmu"])
    exact = dense_decode(
        bare.queries, bare.keys.flatten(0, 1), bare.values.flatten(0, 1), bare.page_table, bare.seq_lens, SCALE
    )
    torch.testing.assert_close(exact, bare.outputs, rtol=1e-4, atol=1e-5)


def test_bytes_with_correction() -> None:
    """Head dim 64: the record with its value mean; elsewhere a mean key and a mean value in int8 with their scales."""
    sizes = {method.name: method.bytes_per_page for method in output.default_methods(64, 64, seed=0)}
    assert (sizes["locks-r8+off"], sizes["locks-r8+qmu"], sizes["locks-r8+flat"]) == (512, 576, 576)
    assert (sizes["min-max+off"], sizes["min-max+qmu"]) == (256, 256 + 64 + 64 + 4)
    assert sizes["oracle+flat"] == 2048 + 576
    assert not any(name.startswith(("locks-r8-", "global-r60-int4-in")) for name in sizes)
    assert "min-max+flat" not in sizes


def made_up(change: float) -> output.OutputResult:
    """Two layers, two queries, one head; the correction changes the error of rank 8 by `change`, the same everywhere."""
    known = methods_of("locks-r8+off", "locks-r8+qmu")
    off = torch.tensor([[0.3, 0.2], [0.5, 0.1]]).double()[:, :, None, None].expand(2, 2, 2, 1)
    return output.OutputResult(known, (64, 128), (0, 1), {"locks-r8+off": off, "locks-r8+qmu": off + change})


def test_a_correction_that_does_harm_is_named() -> None:
    assert output.harm(made_up(-0.05)) == output.harm(made_up(0.001)) == []
    told = [f"at {budget} tokens locks r=8 + tail qmu has an error larger by 0.050 than without" for budget in (64, 128)]
    assert output.harm(made_up(0.05)) == told


def test_the_table_shows_the_means() -> None:
    lines = output.format_table(made_up(-0.05)).splitlines()
    assert len({len(line) for line in lines}) == 1, "columns are not aligned"
    assert lines[-2].split() == ["locks", "r=8", "24", "0.400", "0.150"]
    assert lines[-1].split() == ["locks", "r=8", "+", "tail", "qmu", "26", "0.350", "0.100"]
