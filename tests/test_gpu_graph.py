"""Decode in a CUDA graph, and FlashInfer as what attends in it, on a CUDA GPU: the backend over a pool of its own, without a
server (`pytest -m gpu tests/test_gpu_graph.py`). FlashInfer compiles its kernel at first use, once a head dimension."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from truth import generator

from locks_sglang import LocksConfig
from locks_sglang.backend import LocksAttnBackend
from locks_sglang.kernels.common import PAGE_SIZE
from locks_sglang.kernels.sparse_decode import FlashInferDecode, merge_parts
from locks_sglang.support import AttendPath

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SIZES = (1, 2, 3, 5, 8, 16)
LAYERS, HEADS, GROUP, DIM = 2, 2, 7, 64
CONTEXT = 8192
LENGTHS = {
    "short": [3, 1, 16, 17, 40, 33, 2, 15, 31, 32, 64, 5, 9, 20, 48, 1],
    "long": [8191, 8192, 8001, 7777, 8000, 8177, 7001, 7500, 8100, 8191, 7999, 8033, 8049, 8064, 8065, 6000],
    "mixed": [1, 8192, 17, 4096, 16, 2049, 100, 8161, 3, 3000, 1000, 33, 2048, 5, 7000, 15],
}
ATTEND = ("flashinfer", "triton")


class Pool:
    """A KV pool like SGLang's, all of whose tokens are there from the start."""

    def __init__(self, pages: int, gen: torch.Generator) -> None:
        self.start_layer, self.layer_num = 0, LAYERS
        shape = (LAYERS, pages * PAGE_SIZE, HEADS, DIM)
        offset = torch.randn(LAYERS, 1, HEADS, DIM, generator=gen)
        self.keys, self.values = (
            (torch.randn(shape, generator=gen) + move).to(DEVICE, torch.bfloat16) for move in (2 * offset, 0 * offset)
        )

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values[layer_id]

    def set_kv_buffer(self, layer: Any, slots: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        """`slots` as SGLang's pool takes them: a tensor or, from SGLang's own backends, a `KVWriteLoc`."""
        slots = slots.loc if isinstance(slots, KVWriteLoc) else slots
        self.keys[layer.layer_id].index_copy_(0, slots, k)
        self.values[layer.layer_id].index_copy_(0, slots, v)


class Rig:
    """The backend over sixteen requests of up to 8,192 tokens in shuffled pages, and graphs of every size."""

    def __init__(self, attend: str, patch: pytest.MonkeyPatch, budget_tokens: int = 512) -> None:
        gen = generator(21)
        held = CONTEXT // PAGE_SIZE
        pages = torch.randperm(16 * held, generator=gen) + 1
        slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).view(16, CONTEXT)
        self.table = torch.cat((torch.zeros(1, CONTEXT), slots)).to(DEVICE, torch.int32)
        self.pool = Pool(16 * held + 1, gen)
        self.layers = [RadixAttention(HEADS * GROUP, DIM, DIM**-0.5, HEADS, layer_id=i) for i in range(LAYERS)]
        runner = SimpleNamespace(
            token_to_kv_pool=self.pool,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            device="cuda",
            dtype=torch.bfloat16,
            model=torch.nn.ModuleList(self.layers),
        )
        if attend == "flashinfer":
            patch.setattr("locks_sglang.backend.FLASHINFER_ROWS", 0)
        self.backend = LocksAttnBackend(runner, LocksConfig(budget_tokens=budget_tokens), TorchNativeAttnBackend(runner))
        assert self.backend.attend_path.name == "flashinfer"
        if attend == "triton":
            self.backend.attend_path, self.backend._flashinfer = AttendPath("triton", "asked for by the test"), None
        summaries = self.backend.summaries
        for layer in range(LAYERS):
            summaries.build_centred(layer, pages.to(DEVICE))
        self.q = torch.randn(LAYERS, 16, HEADS * GROUP * DIM, generator=gen).to(DEVICE, torch.bfloat16)
        self.k, self.v = torch.zeros(2, LAYERS, 16, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
        self.slots = torch.zeros(16, dtype=torch.int64, device=DEVICE)
        self.requests = torch.zeros(16, dtype=torch.int64, device=DEVICE)
        self.lens = torch.ones(16, dtype=torch.int64, device=DEVICE)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.outputs: dict[int, list[torch.Tensor]] = {}

    def batch(self, rows: int, lengths: list[int], size: int) -> Any:
        """A decode batch of the first `rows` requests in the static buffers, padded to `size` as SGLang pads."""
        lengths = lengths[:rows]
        self.requests.zero_()[:rows] = torch.arange(1, rows + 1)
        self.lens.fill_(1)[:rows] = torch.tensor(lengths)
        self.slots.zero_()[:rows] = self.table[self.requests[:rows], self.lens[:rows] - 1].long()
        # The token that a step stores is the one that is there: steps do not change what later ones see.
        for layer in range(LAYERS):
            self.k[layer], self.v[layer] = self.pool.keys[layer][self.slots], self.pool.values[layer][self.slots]
        self.backend.summaries.valid[:, 1:] = True
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            num_padding=size - rows,
            req_pool_indices=self.requests[:size],
            seq_lens=self.lens[:size],
            seq_lens_cpu=torch.tensor(lengths + [1] * (size - rows)),
            out_cache_loc=self.slots[:size],
            rids=[str(i) for i in range(rows)],
        )

    def forward(self, batch: Any, size: int) -> list[torch.Tensor]:
        return [
            self.backend.forward(self.q[i, :size], self.k[i, :size], self.v[i, :size], layer, batch)
            for i, layer in enumerate(self.layers)
        ]

    def prefill(self, request: int, prefix: int, total: int, gen: torch.Generator) -> torch.Tensor:
        """Compute tokens [prefix, total) of a request, with new random keys and values; the physical pages int64 [n] that it
        fills."""
        tokens = total - prefix
        q = torch.randn(LAYERS, tokens, HEADS * GROUP * DIM, generator=gen).to(DEVICE, torch.bfloat16)
        k, v = torch.randn(2, LAYERS, tokens, HEADS, DIM, generator=gen).to(DEVICE, torch.bfloat16)
        batch = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            req_pool_indices=torch.tensor([request], device=DEVICE),
            seq_lens=torch.tensor([total], device=DEVICE),
            seq_lens_cpu=torch.tensor([total]),
            out_cache_loc=self.table[request, prefix:total].long(),
            extend_prefix_lens=torch.tensor([prefix], device=DEVICE),
            extend_seq_lens=torch.tensor([tokens], device=DEVICE),
            extend_prefix_lens_cpu=[prefix],
            extend_seq_lens_cpu=[tokens],
            encoder_lens=None,
            rids=[f"prefill {request}"],
        )
        self.backend.init_forward_metadata(batch)
        for i, layer in enumerate(self.layers):
            out = self.backend.forward(q[i], k[i], v[i], layer, batch)
            assert torch.isfinite(out).all()
        return self.page(request, torch.arange(prefix // PAGE_SIZE, total // PAGE_SIZE))

    def page(self, request: int, logical: torch.Tensor) -> torch.Tensor:
        """Physical pages of logical ones int64 [n] of a request."""
        return self.table[request, (logical * PAGE_SIZE).to(DEVICE)].long() // PAGE_SIZE

    def capture(self) -> None:
        """As SGLang captures: largest first, two warm-ups each, one memory pool."""
        self.backend.init_cuda_graph_state(max(SIZES), max(SIZES))
        memory = torch.cuda.graph_pool_handle()
        for size in reversed(SIZES):
            batch = self.batch(0, [], size)
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
            for _ in range(2):
                self.forward(batch, size)
            torch.cuda.synchronize()
            self.graphs[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[size], pool=memory):
                self.backend.init_forward_metadata_in_graph(batch)
                self.outputs[size] = self.forward(batch, size)

    def replay(self, batch: Any) -> list[torch.Tensor]:
        """Plan and replay; nothing in it may wait for the device."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.backend.init_forward_metadata_out_graph(batch)
            self.graphs[batch.batch_size].replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return [x.clone() for x in self.outputs[batch.batch_size]]


@pytest.fixture(scope="module", params=ATTEND)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """FlashInfer attends for steps of any size here, however few its rows."""
    with pytest.MonkeyPatch.context() as patch:
        made = Rig(request.param, patch)
        made.capture()
        assert (made.backend._flashinfer is not None) == (request.param == "flashinfer")
        yield made


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest error of a row relative to the row's own length."""
    a, b = a.double(), b.double()
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max())


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("size", SIZES)
def test_replay_equals_eager(rig: Rig, size: int, kind: str) -> None:
    """Captured over one-token rows of padding, replayed with other lengths, with and without padding."""
    for rows in {size, max(1, size - 2)}:
        for shift in (0, 5):
            lengths = (LENGTHS[kind][shift:] + LENGTHS[kind][:shift])[:rows]
            replayed = rig.replay(rig.batch(rows, lengths, size))
            batch = rig.batch(rows, lengths, size)
            rig.backend.init_forward_metadata_out_graph(batch)
            padded = rig.forward(batch, size)
            batch = rig.batch(rows, lengths, rows)
            rig.backend.init_forward_metadata(batch)
            unpadded = rig.forward(batch, rows)
            for a, b, c in zip(replayed, padded, unpadded, strict=True):
                assert torch.isfinite(a[:rows]).all()
                assert torch.equal(a, b)
                assert relative(a[:rows].view(rows, -1, DIM), c.view(rows, -1, DIM)) < 5e-3
    assert rig.backend.counters.snapshot()["invalid_pages"] == 0


def test_table_may_change_after_the_plan(rig: Rig) -> None:
    """Another stream overwrites SGLang's table as soon as the step is planned: the replay does not read it."""
    lengths = LENGTHS["long"]
    expected = rig.replay(rig.batch(16, lengths, 16))
    batch, kept, other = rig.batch(16, lengths, 16), rig.table.clone(), torch.cuda.Stream()
    for _ in range(20):
        rig.backend.init_forward_metadata_out_graph(batch)
        planned = torch.cuda.current_stream().record_event()
        with torch.cuda.stream(other):
            other.wait_event(planned)
            rig.table.random_(0, 8192)
        rig.graphs[16].replay()
        torch.cuda.current_stream().wait_stream(other)
        for a, b in zip(rig.outputs[16], expected, strict=True):
            assert torch.equal(a, b)
        rig.table.copy_(kept)
        rig.backend.summaries.valid[:, 1:] = True


def test_thousand_replays(rig: Rig) -> None:
    """Mixed with prefills, eager steps and `empty_cache`: the same addresses and bits, and a step allocates nothing."""
    gen, summaries, built = generator(22), rig.backend.summaries, rig.backend.counters.built
    buffers, flash = rig.backend._graph_buffers, rig.backend._flashinfer
    assert buffers is not None
    tensors = [*vars(buffers).values(), *([flash.indices, flash.last_page_lens] if flash is not None else [])]
    pointers = [x.data_ptr() for x in tensors]
    expected = {kind: rig.replay(rig.batch(14, LENGTHS[kind], 16)) for kind in LENGTHS}
    for i in range(1000):
        kind = list(LENGTHS)[i % 3]
        batch = rig.batch(14, LENGTHS[kind], 16)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        rig.backend.init_forward_metadata_out_graph(batch)
        rig.graphs[16].replay()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        if i % 50 == 0:
            for a, b in zip(rig.outputs[16], expected[kind], strict=True):
                assert torch.equal(a, b)
            eager = rig.batch(3, LENGTHS["mixed"], 3)
            rig.backend.init_forward_metadata(eager)
            rig.forward(eager, 3)
            del eager
            torch.cuda.empty_cache()
        if i % 50 == 25:
            # Another prompt in two chunks, into the pages of a request that no step here decodes: whole ones and one begun.
            for prefix, total in ((0, 700), (700, 1300 + i)):
                before_it = built[0]
                filled = rig.prefill(15, prefix, total, gen)
                assert built[0] - before_it == len(filled) == total // PAGE_SIZE - prefix // PAGE_SIZE
                assert summaries.verify(filled) == []
                begun = rig.page(15, torch.tensor([total // PAGE_SIZE]))
                assert not summaries.valid[:, begun].any()
    assert [x.data_ptr() for x in tensors] == pointers


def test_few_rows_leave_flashinfer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rule that serves: 16 rows, here 8 requests."""
    backend = Rig("triton", monkeypatch).backend
    backend.attend_path = AttendPath("flashinfer", "asked for by the test")
    backend._flashinfer = FlashInferDecode(16, HEADS, GROUP, DIM, backend.config.budget_pages, torch.bfloat16, DEVICE)
    assert backend._planned_flashinfer([40] * 7, 7) is None
    assert backend._planned_flashinfer([40] * 7, 8) is backend._flashinfer
    assert backend._planned_flashinfer([40] * 7, 17) is None


def test_both_ways_to_attend_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole step with FlashInfer against the Triton kernel's, eagerly: both are held to 5e-3 of the truth elsewhere."""
    outs = []
    for attend in ATTEND:
        made = Rig(attend, monkeypatch, budget_tokens=2048)
        batch = made.batch(16, LENGTHS["mixed"], 16)
        made.backend.init_forward_metadata(batch)
        outs.append(made.forward(batch, 16))
    for a, b in zip(*outs, strict=True):
        assert relative(a.view(16, -1, DIM), b.view(16, -1, DIM)) < 1e-2


def test_padding_touches_only_page_0(rig: Rig) -> None:
    """Padded rows whose request happens to be a real one: no other page, flag or counter changes."""
    summaries = rig.backend.summaries
    batch = rig.batch(0, [], 8)
    rig.requests.fill_(3)
    rig.lens.fill_(17)
    state = [summaries.record, rig.pool.keys, rig.pool.values, summaries.values, *vars(summaries.flags).values()]
    before = [x.clone() for x in state]
    counts = rig.backend.counters.snapshot()
    rig.replay(batch)
    assert rig.backend.counters.snapshot() == {**counts, "decode_steps": counts["decode_steps"] + 1}
    before[1][:, :PAGE_SIZE], before[2][:, :PAGE_SIZE] = rig.pool.keys[:, :PAGE_SIZE], rig.pool.values[:, :PAGE_SIZE]
    for a, b in zip(state, before, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("heads", "group", "dtype"),
    [
        *((heads, group, torch.bfloat16) for heads, group in ((1, 1), (8, 2), (2, 3), (8, 4), (4, 6), (2, 7), (4, 8), (2, 16))),
        (2, 4, torch.float16),
    ],
)
def test_flashinfer_attends_to_pseudo_pages(dim: int, heads: int, group: int, dtype: torch.dtype) -> None:
    """Against fp64, eagerly and in a graph whose page lists, counts and last pages change after capture."""
    gen = generator(dim + heads * 17 + group)
    total, budget, batch = 600, 128, 5
    k, v = torch.randn(2, total * PAGE_SIZE, heads, dim, generator=gen).to(DEVICE, dtype)
    q = torch.randn(batch, heads * group, dim, generator=gen).to(DEVICE, dtype)
    attend = FlashInferDecode(batch, heads, group, dim, budget, dtype, DEVICE)
    scale = dim**-0.5

    def lists(counts: list[int], lens: list[int]) -> list[list[list[int]]]:
        """Write page lists for one step; returns the physical pages of every row and head."""
        attend.plan(tuple(counts))
        chosen = [[torch.randperm(total, generator=gen)[:count].tolist() for _ in range(heads)] for count in counts]
        ids = [page * PAGE_SIZE * heads + h for row in chosen for h, pages in enumerate(row) for page in pages]
        attend.indices[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        attend.last_page_lens[:] = torch.tensor(lens, dtype=torch.int32)[:, None]
        return chosen

    def check(out: torch.Tensor, lse: torch.Tensor, chosen: list[list[list[int]]], lens: list[int]) -> None:
        for b, row in enumerate(chosen):
            for h, pages in enumerate(row):
                slots = (torch.tensor(pages)[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()
                slots = slots[: len(slots) - PAGE_SIZE + lens[b]].to(DEVICE)
                query = q[b, h * group : (h + 1) * group].double()
                logits = query @ k[slots, h].double().T * scale
                want = logits.softmax(-1) @ v[slots, h].double()
                assert relative(out[b, h * group : (h + 1) * group], want) < 5e-3
                assert (lse[b, h * group : (h + 1) * group].double() - logits.logsumexp(-1)).abs().max() < 2e-3

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=DEVICE)
        merge_parts(attend.run(q, k, v, scale), out, 1.0, lse=lse)
        return out, lse

    first = [1, 1, 1, 1, 1], [1] * 5
    chosen = lists(*first)
    for _ in range(2):
        check(*run(), chosen, first[1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    for counts, lens in (([128] * 5, [16] * 5), ([1, 128, 7, 64, 2], [3, 16, 1, 9, 15]), first):
        chosen = lists(counts, lens)
        graph.replay()
        check(*made, chosen, lens)
        check(*run(), chosen, lens)
