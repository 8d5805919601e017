"""`LocksAttnBackend` on SGLang's real pools, allocator and attention layers, without a model: every cell of page size, head
dimension, group size, cache dtype and soft cap against dense attention in fp64."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import LAYERS, Bench
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from locks_sglang import LocksConfig
from locks_sglang.backend import attends_with
from locks_sglang.kernels.common import PAGE_SIZE
from locks_sglang.summary_pool import VERIFY_SLACK
from locks_sglang.support import FLASHINFER_ROWS, AttendPath

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest error relative to the largest output: a few units of the dtype in which the output is rounded (2^-24, 2^-11,
2^-8)."""


def check_all_fit(bench: Bench) -> None:
    """Prefill and decode over page borders with a budget that holds everything: outputs equal dense, summaries are fresh."""
    rows, lengths = [0, 2, 5], [1, 31, 200]
    bench.step(rows, [0, 0, 0], lengths, ForwardMode.EXTEND)
    for _ in range(18):
        lengths = [n + 1 for n in lengths]
        out = bench.step(rows, [n - 1 for n in lengths], lengths, ForwardMode.DECODE)
        for layer in range(LAYERS):
            for i, row in enumerate(rows):
                truth = bench.truth(row, lengths[i] - 1, layer)
                error = (out[layer][i].double() - truth).abs().max() / truth.abs().max()
                assert error <= TOLERANCE[bench.dtype]
    pages = torch.cat([bench.complete_pages(row, n) for row, n in zip(rows, lengths, strict=True)])
    assert bench.backend.summaries.verify(pages) == []
    counts = bench.backend.counters.snapshot()
    assert counts["invalid_pages"] == 0
    assert counts["sparse_rows"] == 3 * 18
    assert counts["pages_read"] == counts["pages_held"]
    assert counts["summaries_built"] == {str(layer): len(pages) for layer in range(LAYERS)}


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_page_sizes(page_size: int) -> None:
    check_all_fit(Bench(page_size=page_size))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_cache_dtypes(dtype: torch.dtype) -> None:
    check_all_fit(Bench(dtype=dtype))


@pytest.mark.parametrize(("head_dim", "heads", "group"), [(64, 1, 1), (96, 2, 7), (128, 4, 8), (256, 3, 4), (64, 1, 16)])
def test_head_shapes(head_dim: int, heads: int, group: int) -> None:
    check_all_fit(Bench(head_dim=head_dim, heads=heads, group=group))


def test_chunks_that_end_inside_pages() -> None:
    """Chunk borders at 10, 35, 36, 64, 150: each page is built once, when it is complete, and counts no reuse."""
    bench = Bench()
    borders = [0, 10, 35, 36, 64, 150]
    for begin, end in itertools.pairwise(borders):
        bench.step([3], [begin], [end], ForwardMode.EXTEND)
        pages = bench.complete_pages(3, end)
        assert bench.backend.summaries.verify(pages) == []
        assert bench.backend.summaries.builds[pages].tolist() == [1] * len(pages)
    assert bench.backend.counters.reused == 0


def test_prefix_of_another_request_is_reused() -> None:
    """A request that starts with 64 cached tokens builds nothing for them and counts four reused pages."""
    bench = Bench()
    bench.step([0], [0], [80], ForwardMode.EXTEND)
    bench.requests.req_to_token[1, :64] = bench.requests.req_to_token[0, :64]
    shared = bench.complete_pages(0, 64)
    before = bench.backend.summaries.record[:, shared].clone()
    bench.step([1], [64], [100], ForwardMode.EXTEND)
    assert torch.equal(bench.backend.summaries.record[:, shared], before)
    assert bench.backend.counters.reused == 4
    assert bench.backend.counters.built[0] == 5 + 2
    assert bench.backend.summaries.reuses[shared].tolist() == [1] * 4


def test_first_write_clears_a_page() -> None:
    """A page that another request owned is invalid from the first token on, in a prefill chunk and in decode."""
    bench = Bench()
    bench.step([0], [0], [64], ForwardMode.EXTEND)
    old = bench.complete_pages(0, 64)
    bench.requests.req_to_token[4, :64] = bench.requests.req_to_token[0, :64]
    bench.step([4], [0], [20], ForwardMode.EXTEND)
    valid = bench.backend.summaries.valid
    assert valid[:, old].tolist() == [[True, False, True, True]] * LAYERS
    for length in range(21, 34):
        bench.step([4], [length - 1], [length], ForwardMode.DECODE)
    assert valid[:, old].tolist() == [[True, True, False, True]] * LAYERS
    assert bench.backend.summaries.verify(old[:2]) == []


def test_page_table_is_a_snapshot() -> None:
    """SGLang may rewrite its table while the layers of a step run: the output does not change (USERS A37)."""
    bench = Bench(budget_tokens=64)
    bench.step([0], [0], [300], ForwardMode.EXTEND)
    expected = bench.step([0], [300], [301], ForwardMode.DECODE)
    plan = bench.backend.init_forward_metadata

    def plan_then_overwrite(batch: Any) -> None:
        plan(batch)
        bench.requests.req_to_token.fill_(7)

    bench.backend.init_forward_metadata = plan_then_overwrite  # type: ignore[method-assign]
    kept = bench.requests.req_to_token.clone()
    changed = bench.step([0], [300], [301], ForwardMode.DECODE)
    bench.requests.req_to_token.copy_(kept)
    assert all(torch.equal(a, b) for a, b in zip(expected, changed, strict=True))


@pytest.mark.parametrize("slack", [0.0, VERIFY_SLACK])
@pytest.mark.parametrize("change", ["zero", "negate", "other page"])
def test_verify_sees_wrong_value_means(change: str, slack: float) -> None:
    """The tail correction reads them, and rank 8 leaves keys a far larger error."""
    bench = Bench()
    bench.step([0], [0], [160], ForwardMode.EXTEND)
    pages = bench.complete_pages(0, 160)
    summaries = bench.backend.summaries
    assert summaries.verify(pages, slack) == []
    assert summaries.values is not None
    means = summaries.values[1]
    if change == "zero":
        means[pages[2]] = 0
    elif change == "negate":
        means[pages[2]] = -means[pages[2]]
    else:
        means[pages[2]] = means[pages[5]]
    assert summaries.verify(pages, slack) == [(1, int(pages[2]))]


@pytest.mark.parametrize("arrival", ["HiCache load", "copy from host memory"])
def test_dirty_pages_are_rebuilt_before_they_are_scored(arrival: str) -> None:
    """KV moved in behind the backend's back: the hook marks it, and the next step rebuilds exactly these pages."""
    from locks_sglang.patches.kv_arrival import after_load, after_load_cpu_copy

    bench = Bench(budget_tokens=64)
    bench.step([0], [0], [320], ForwardMode.EXTEND)
    pages = bench.complete_pages(0, 320)
    moved = pages[3:9]
    slots = (moved[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()
    generator = torch.Generator().manual_seed(5)
    for layer in range(LAYERS):
        for buffer in (bench.kv_pool.k_buffer[layer], bench.kv_pool.v_buffer[layer]):
            buffer[slots] = torch.randn(buffer[slots].shape, generator=generator) * 3
    assert {page for _, page in bench.backend.summaries.verify(pages)} == set(moved.tolist())
    if arrival == "HiCache load":
        after_load(None, SimpleNamespace(mem_pool_device=bench.kv_pool))
        after_load(slots, SimpleNamespace(mem_pool_device=bench.kv_pool))
    else:
        after_load_cpu_copy(None, bench.kv_pool, None, slots)
    bench.step([0], [320], [321], ForwardMode.DECODE)
    assert bench.backend.summaries.verify(pages) == []
    assert bench.backend.counters.rebuilt == len(moved)
    assert bench.backend.counters.snapshot()["invalid_pages"] == 0


def test_a_load_that_starts_after_a_step_is_marked_again() -> None:
    """HiCache queued it for a request that was not let in: a step of others uses the mark up before the KV is there."""
    from locks_sglang.patches.kv_arrival import after_load, start_loading

    bench = Bench(budget_tokens=64)
    bench.step([0, 1], [0, 0], [320, 100], ForwardMode.EXTEND)
    pages = bench.complete_pages(0, 320)
    slots = (pages[3:9, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()
    controller = SimpleNamespace(mem_pool_device=bench.kv_pool, load_queue=[SimpleNamespace(device_indices=slots)])

    def transfer(controller: Any) -> int:
        for layer in range(LAYERS):
            bench.kv_pool.k_buffer[layer][slots] *= -3
        return 0

    after_load(slots, controller)
    bench.step([1], [100], [101], ForwardMode.DECODE)
    assert start_loading(transfer, controller) == 0
    bench.step([0], [320], [321], ForwardMode.DECODE)
    assert bench.backend.summaries.verify(pages) == []
    assert bench.backend.counters.snapshot()["invalid_pages"] == 0


def test_invalid_pages_are_attended_and_counted() -> None:
    """A page without a summary is read although its budget would not have chosen it, and shows up in the counter."""
    bench = Bench(budget_tokens=64, tail_correction="off")
    bench.step([0], [0], [320], ForwardMode.EXTEND)
    pages = bench.complete_pages(0, 320)
    plain = bench.step([0], [320], [321], ForwardMode.DECODE)[0]
    bench.backend.summaries.valid[:, pages[7]] = False
    forced = bench.step([0], [320], [321], ForwardMode.DECODE)[0]
    assert not torch.equal(plain, forced)
    assert bench.backend.counters.snapshot()["invalid_pages"] == LAYERS


def test_nan_keys_stay_in_their_request() -> None:
    """A request with NaN keys gets NaN; the others of the batch are untouched, then and later."""
    bench = Bench(budget_tokens=64)
    bench.step([0, 1], [0, 0], [200, 200], ForwardMode.EXTEND)
    clean = bench.step([0, 1], [200, 200], [201, 201], ForwardMode.DECODE)
    bench.keys[1, :, 100] = float("nan")
    bench.step([1], [0], [200], ForwardMode.EXTEND)
    mixed = bench.step([0, 1], [200, 200], [201, 201], ForwardMode.DECODE)
    for before, after in zip(clean, mixed, strict=True):
        assert torch.equal(before[0], after[0])


def test_broken_keys_in_the_first_batch_do_not_enter_the_centre() -> None:
    """NaN in one request and an overflow in another of the very first batch: later pages and the healthy one stay right."""
    bench = Bench(budget_tokens=64)
    bench.keys[1, :, 100] = float("nan")
    bench.keys[2, :, 40] = 1e30
    bench.step([0, 1, 2], [0, 0, 0], [200, 200, 200], ForwardMode.EXTEND)
    bench.step([3], [0], [100], ForwardMode.EXTEND)
    pages = torch.cat([bench.complete_pages(0, 200), bench.complete_pages(3, 100)])
    summaries = bench.backend.summaries
    assert summaries.verify(pages) == []
    assert summaries.center.abs().max() < 1
    stored = summaries.layer(0).mu[pages]
    slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()
    truth = bench.kv_pool.get_key_buffer(0)[slots].view(len(pages), PAGE_SIZE, bench.heads, -1).mean(1)
    assert (stored - truth).abs().max() < 0.02


def test_gpu_backends_are_refused_on_cpu() -> None:
    from locks_sglang.backend import dense_backend_name

    runner = SimpleNamespace(device="cpu")
    with pytest.raises(ValueError, match="--locks-dense-backend triton needs a GPU"):
        dense_backend_name(runner, LocksConfig(dense_backend="triton"))
    assert dense_backend_name(runner, LocksConfig()) == "torch_native"


def test_constants_of_the_configuration_are_those_of_the_kernels() -> None:
    """The configuration repeats them so that it can be read without torch."""
    from locks_sglang import config, support
    from locks_sglang.kernels.locks_decode import TAIL_CORRECTIONS
    from locks_sglang.kernels.select_pages import COMBINES

    assert (config.PAGE_SIZE, config.COMBINES, config.TAIL_CORRECTIONS) == (PAGE_SIZE, COMBINES, TAIL_CORRECTIONS)
    assert ("auto", *support.DENSE_BACKENDS) == config.DENSE_BACKENDS


def test_sinks_and_windows_are_refused_at_the_layer() -> None:
    bench = Bench()
    windowed = RadixAttention(6, 64, 0.125, 2, layer_id=7, sliding_window_size=128)
    bench.step([0], [0], [20], ForwardMode.EXTEND)
    q = torch.randn(1, 6 * 64)
    with pytest.raises(ValueError, match=r"layer 7: window of 128"):
        bench.backend.forward_decode(q, None, None, windowed, None)
    with pytest.raises(ValueError, match=r"sinks.*layer 0"):
        bench.backend.forward_decode(q, None, None, bench.layers[0], None, sinks=torch.zeros(6))


def test_warm_up_batches_leave_no_trace() -> None:
    """SGLang warms up and captures with batches of no request (no request ids): nothing is built, counted or centred."""
    bench = Bench()
    for mode, prefix, total in ((ForwardMode.EXTEND, 0, 40), (ForwardMode.DECODE, 40, 41)):
        bench.step([0], [prefix], [total], mode, requests=None)
    summaries = bench.backend.summaries
    assert not summaries.valid.any()
    assert not summaries.center.any()
    assert sum(summaries.counters.built.values()) == 0
    assert summaries.counters.sparse_rows == 0
    assert not summaries.counters.dense_rows


class GraphNative(TorchNativeAttnBackend):
    """Runs in graphs as SGLang's GPU backends do: copies the table in its plan. Notes what it is asked for."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.asked: list[str] = []
        self.table = self.req_to_token_pool.req_to_token

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.asked.append("state")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.asked.append("capture" if in_capture else "replay")
        self.req_to_token_pool = SimpleNamespace(req_to_token=self.table.clone())

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.asked.append("in graph")

    def on_after_cuda_graph_warmup(self) -> None:
        self.asked.append("warm-up")


def graph_bench(max_bs: int, **settings: Any) -> Bench:
    """A bench whose graph buffers are allocated, as if the kernels took its CPU tensors."""
    bench = Bench(budget_tokens=64, **settings)
    bench.backend._kernels = True
    bench.backend.init_cuda_graph_state(max_bs, max_bs)
    return bench


def test_padded_replays_are_eager_steps() -> None:
    """Over page borders: outputs, summaries and counters of padded steps from graph buffers are those of eager ones."""
    graph, eager = graph_bench(8), Bench(budget_tokens=64)
    rows, lengths = [1, 4, 6], [30, 200, 47]
    for bench in (graph, eager):
        bench.step(rows, [0, 0, 0], lengths, ForwardMode.EXTEND)
    buffers = graph.backend._graph_buffers
    assert buffers is not None
    pointers = [x.data_ptr() for x in vars(buffers).values()]
    for _ in range(20):
        lengths = [n + 1 for n in lengths]
        expected = eager.step(rows, [n - 1 for n in lengths], lengths, ForwardMode.DECODE)
        for a, b in zip(graph.replay(rows, lengths, 5), expected, strict=True):
            # Other shapes of the same sums.
            assert (a[:3] - b).abs().max() <= 1e-5
    assert [x.data_ptr() for x in vars(buffers).values()] == pointers
    for a, b in zip(*(vars(x.backend.summaries.flags).values() for x in (graph, eager)), strict=True):
        assert torch.equal(a, b)
    for name in ("record", "values"):
        assert torch.equal(getattr(graph.backend.summaries, name), getattr(eager.backend.summaries, name))
    assert graph.backend.counters.snapshot() == eager.backend.counters.snapshot()
    assert not graph.backend.summaries.valid[:, 0].any()


@pytest.mark.parametrize("dense", [False, True])
def test_capture_leaves_no_trace(dense: bool) -> None:
    """A graph is captured over rows of padding: nothing is built, counted or centred, and nothing but page 0 is written."""
    bench = graph_bench(4, min_context_tokens=100 * dense, dense=GraphNative)
    bench.backend.captures_dense = dense
    before = [bench.kv_pool.get_key_buffer(layer).clone() for layer in range(LAYERS)]
    for size in (4, 2, 1):
        bench.replay([], [], size, in_capture=True)
    summaries = bench.backend.summaries
    assert not summaries.valid.any()
    assert not summaries.centred
    assert not summaries.builds.any()
    assert summaries.counters.snapshot() == Bench().backend.counters.snapshot()
    for layer in range(LAYERS):
        assert torch.equal(bench.kv_pool.get_key_buffer(layer)[PAGE_SIZE:], before[layer][PAGE_SIZE:])
    bench.backend.on_after_cuda_graph_warmup()
    inner = bench.backend.dense
    assert isinstance(inner, GraphNative)
    assert inner.asked == (["state", *["capture", "in graph"] * 3, "warm-up"] if dense else [])


def test_first_page_of_a_server_that_decode_fills() -> None:
    """No layer has a centre before it: the page is read without a summary, then built, centred, by the next step's plan."""
    bench = graph_bench(2)
    bench.step([3], [0], [10], ForwardMode.EXTEND)
    page = bench.requests.req_to_token[3, :1].long() // PAGE_SIZE
    summaries = bench.backend.summaries
    for length in range(11, 34):
        out = bench.replay([3], [length], 2)
        for layer in range(LAYERS):
            truth = bench.truth(3, length - 1, layer)
            assert (out[layer][0].double() - truth).abs().max() <= TOLERANCE[torch.float32] * truth.abs().max()
        assert summaries.valid[:, page].all() == (length > 16)
        assert summaries.centred == (length > 16)
    pages = bench.complete_pages(3, 33)
    assert summaries.verify(pages) == []
    assert summaries.builds[pages].tolist() == [1, 1]
    counts = bench.backend.counters.snapshot()
    assert counts["invalid_pages"] == 0
    assert counts["summaries_built"] == {str(layer): 2 for layer in range(LAYERS)}


def test_late_page_of_a_finished_request() -> None:
    """Its page is another request's by the time it would be built: the new owner's first write still clears it."""
    bench = Bench()
    bench.step([3], [0], [15], ForwardMode.EXTEND)
    bench.step([3], [15], [16], ForwardMode.DECODE)
    bench.requests.req_to_token[5, :PAGE_SIZE] = bench.requests.req_to_token[3, :PAGE_SIZE]
    bench.step([5], [0], [12], ForwardMode.EXTEND)
    page = int(bench.requests.req_to_token[5, 0]) // PAGE_SIZE
    assert not bench.backend.summaries.valid[:, page].any()
    assert bench.backend.summaries.builds[page] == 0


def test_few_rows_and_large_steps_are_left_to_triton() -> None:
    """Rows are requests x KV heads; FlashInfer has buffers for so many requests."""
    backend = Bench().backend
    heads = backend._keys.shape[1]
    assert attends_with(backend, 8) == "reference"
    backend.attend_path = AttendPath("flashinfer", "asked for by the test")
    backend._flashinfer = SimpleNamespace(batch=64)  # type: ignore[assignment]
    least = -(-FLASHINFER_ROWS // heads)
    found = {size: attends_with(backend, size) for size in (least - 1, least, 64, 65)}
    assert found == {least - 1: "triton", least: "flashinfer", 64: "flashinfer", 65: "triton"}
    assert backend._planned_flashinfer([40], least - 1) is None


def test_graphs_are_refused_without_kernels() -> None:
    with pytest.raises(ValueError, match="--cuda-graph-backend-decode disabled"):
        Bench().backend.init_cuda_graph_state(4, 4)


def test_graphs_are_refused_in_evaluation() -> None:
    with pytest.raises(ValueError, match=r"--locks-evaluation on.*--cuda-graph-backend-decode disabled"):
        graph_bench(4, evaluation="on")


def test_dense_graphs_are_refused_without_an_inner_backend() -> None:
    with pytest.raises(ValueError, match="--locks-dense-backend flashinfer, fa3 or triton"):
        graph_bench(4, min_context_tokens=100)


def test_replays_go_from_dense_to_sparse() -> None:
    """Requests that grow past `min_context_tokens` over page borders: all is as in eager steps, the short ones dense."""
    settings: dict[str, Any] = {"min_context_tokens": 52, "dense": GraphNative}
    graph, eager = graph_bench(8, **settings), Bench(budget_tokens=64, **settings)
    rows, lengths = [1, 4, 6], [30, 41, 47]
    for bench in (graph, eager):
        bench.step(rows, [0, 0, 0], lengths, ForwardMode.EXTEND)
    for _ in range(20):
        lengths = [n + 1 for n in lengths]
        # Only its graph's plan gives the inner backend a table of its own.
        eager.backend.dense.init_forward_metadata_out_graph(None)  # type: ignore[arg-type]
        expected = eager.step(rows, [n - 1 for n in lengths], lengths, ForwardMode.DECODE)
        for a, b in zip(graph.replay(rows, lengths, 5), expected, strict=True):
            # Other shapes of the same sums.
            assert (a[:3] - b).abs().max() <= 1e-5
        if max(lengths) < 52:
            for i, row in enumerate(rows):
                truth = graph.truth(row, lengths[i] - 1, LAYERS - 1)
                assert (a[i].double() - truth).abs().max() <= TOLERANCE[torch.float32] * truth.abs().max()
    for a, b in zip(*(vars(x.backend.summaries.flags).values() for x in (graph, eager)), strict=True):
        assert torch.equal(a, b)
    for name in ("record", "values"):
        assert torch.equal(getattr(graph.backend.summaries, name), getattr(eager.backend.summaries, name))
    counts = graph.backend.counters.snapshot()
    assert counts == eager.backend.counters.snapshot()
    assert (counts["dense_rows"], counts["sparse_rows"]) == ({"short": 3 * 4}, 3 * 16)
    inner = graph.backend.dense
    assert isinstance(inner, GraphNative)
    assert inner.asked == ["state", *["replay", "in graph"] * 4]
    pages = torch.cat([graph.complete_pages(row, length) for row, length in zip(rows, lengths, strict=True)])
    assert graph.backend.summaries.verify(pages) == []
    assert graph.backend.summaries.valid[:, pages].all()


@pytest.mark.parametrize("minimum", [0, 100])
def test_graphs_that_sglang_captures_and_replays(minimum: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own capture loop and its choice of a graph, hooked as its framework hooks them: two graphs a size, or one."""
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as module
    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

    from locks_sglang.patches.graph_capture import DENSE, SPARSE, capture_both, choose

    bench = graph_bench(4, min_context_tokens=minimum, dense=GraphNative)
    captured: list[Any] = []

    def capture(self: Any, size: int, forward: Any, stream_idx: Any = None, variant_label: Any = None, *args: Any) -> None:
        captured.append(self._make_graph_key(size, stream_idx, variant_label, *args))
        bench.replay([], [], size, in_capture=True)
        plan = bench.backend._decode
        assert plan is not None
        assert plan.dense == (variant_label == DENSE)

    class Runner(module.DecodeCudaGraphRunner):  # type: ignore[misc]
        capture_one_shape = _wrap_fn(capture, capture_both, HookType.AROUND)
        _resolve_lora_variant = _wrap_fn(module.DecodeCudaGraphRunner._resolve_lora_variant, choose, HookType.AFTER)

    runner = Runner.__new__(Runner)
    runner.attn_backend, runner.capture_bs, runner.compile_bs, runner.captured_req_width = bench.backend, [1, 4], [], 1
    runner.record_nolora_graph, runner.attention_graph_variants, runner.disable_padding = False, None, True
    runner.ragged_verify_mode = runner.require_mlp_tp_gather = runner.require_mlp_sync = runner.enable_pdmux = False
    runner.is_encoder_decoder = runner.enable_two_batch_overlap = False
    runner.model_runner = SimpleNamespace(
        device="cpu", gpu_id=0, tp_group=None, model=torch.nn.Identity(), spec_algorithm=SimpleNamespace(is_ngram=lambda: False)
    )
    asked: list[Any] = []
    runner.backend = SimpleNamespace(can_run=lambda batch, key: asked.append(key) or key in captured)
    monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(tp_rank=1, tp_group=None))
    monkeypatch.setattr(module, "get_available_gpu_memory", lambda *args, **kwargs: 0.0)
    runner._capture_one_stream()
    labels = [SPARSE, DENSE] if minimum else [None]
    assert [(key.size, key.variant_label) for key in captured] == [(size, label) for size in (4, 1) for label in labels]
    assert len(set(captured)) == len(captured)

    def batch(lengths: list[int]) -> Any:
        return SimpleNamespace(
            replace_embeds=None, spec_info=None, lora_ids=None, batch_size=len(lengths), seq_lens_cpu=torch.tensor(lengths)
        )

    for lengths, label in (([99], DENSE), ([100], SPARSE), ([3, 99, 1, 99], DENSE), ([3, 100, 1, 99], SPARSE)):
        assert runner.can_run_graph(batch(lengths))
        assert asked[-1] in captured
        assert (asked[-1].size, asked[-1].variant_label) == (len(lengths), label if minimum else None)
