"""The life of pages as hypothesis makes it up, on one real SGLang scheduler inside a worker process (`worker.py`).

Scheduler, batches, allocator, radix tree, KV pool, HiCache's controller and everything of `locks` up to the scan are real and
hooked as in a server. The model is not: it stores random keys and values through the attention layers and samples random
tokens. In place of the scan of a decode step stands a check of every page that it would score.
"""

import itertools
import random
import threading
from array import array
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from mutations import MUTATIONS
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers import cache_controller, schedule_batch, scheduler
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

import locks_sglang.backend as backend_module
from locks_sglang import radix
from locks_sglang.audit import audit, table_row
from locks_sglang.inprocess import InProcessServer, Request
from locks_sglang.kernels.build_page_summaries import pack, page_factors
from locks_sglang.summary_pool import SummaryPool

PAGE = 16
VOCABULARY = 64
MODEL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
}
"""Fields of the model's configuration file: the smallest that `locks` serves; its weights are never used."""
STEPS = 100
"""Steps of an example."""
CROWD = 6
"""Most requests under way."""
STOP = 3
"""Token that ends an answer where a request says so: with overlap scheduling, after a surplus step."""
HOST_TOKENS, HOST_COPIES, HOST_LOADS = 256, 3, 4
"""Tokens of a prefix that are copied to host memory, copies that are kept, and loads that are queued, at most."""

_words = random.Random(0)
STEMS, TAILS = ([_words.choices(range(STOP + 1, VOCABULARY), k=n) for _ in range(3)] for n in (160, 40))


class MismatchError(AssertionError):
    """A summary that is missing, stale or not of this page, or a page table that is not the request's."""


class Prompt(NamedTuple):
    """A prompt that shares its first tokens with others: of few stems and tails, so that whole prompts come again too.

    Attributes:
        stem, shared: its first tokens. tail, own: the rest. new_tokens: most of the answer. stops: whether a token ends it.
        twice: whether two clients send it at once.
    """

    stem: int
    shared: int
    tail: int
    own: int
    new_tokens: int
    stops: bool
    twice: bool

    def tokens(self) -> list[int]:
        return STEMS[self.stem][: self.shared] + TAILS[self.tail][: self.own]


class EventLoop:
    """SGLang's own event loop, one step at a time: its thread stands still between two calls of `step`."""

    def __init__(self, server: InProcessServer) -> None:
        self._turn, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._closing = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(server,), daemon=True)
        self._thread.start()
        self._done.acquire()

    def step(self) -> None:
        """One step of the scheduler; raises what it raised."""
        assert self._thread.is_alive()
        self._turn.release()
        self._done.acquire()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Let the loop run to its end, which it reaches when there is nothing left to do."""
        self._closing = True
        self._turn.release()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self, server: InProcessServer) -> None:
        try:
            server.run(self._script())
        except BaseException as error:
            self.failure = error
        self._done.release()

    def _script(self) -> Iterator[None]:
        while not self._closing:
            self._done.release()
            self._turn.acquire()
            yield


class FreshSummaries:
    """Summaries as rebuilds from the KV pool give them; a page is rebuilt again when its keys, values or the centre changed."""

    def __init__(self, summaries: SummaryPool) -> None:
        self.summaries = summaries
        pool = summaries.kv_pool
        buffers = zip(pool.k_buffer, pool.v_buffer, strict=True)  # type: ignore[attr-defined]
        self._pages = [tuple(x.unflatten(0, (-1, PAGE)) for x in layer) for layer in buffers]
        self._seen = [tuple(torch.full_like(x, torch.nan) for x in layer) for layer in self._pages]
        self._center = torch.full_like(summaries.center, torch.nan)
        self._bytes = _bytes(summaries.record, summaries.values)

    def of(self, index: int, pages: torch.Tensor) -> torch.Tensor:
        """Fresh summaries uint8 [n, H, bytes] of physical pages [n] in the layer with this index."""
        center, layout = self.summaries.center[index], self.summaries.layout
        if not torch.equal(center, self._center[index]):
            self._center[index] = center
            self._seen[index][0].fill_(torch.nan)
        (keys, values), (seen_keys, seen_values) = self._pages[index], self._seen[index]
        changed = (keys[pages] != seen_keys[pages]).flatten(1).any(1) | (values[pages] != seen_values[pages]).flatten(1).any(1)
        stale = pages[changed]
        if len(stale):
            seen_keys[stale], seen_values[stale] = keys[stale], values[stale]
            self._bytes[index, stale] = _bytes(*pack(page_factors(keys[stale], values[stale], layout.rank, center), layout))
        return self._bytes[index, pages]

    def differ(self, index: int, pages: torch.Tensor) -> torch.Tensor:
        """Which of these pages have another summary in the pool, bool [n]."""
        assert self.summaries.values is not None
        stored = _bytes(self.summaries.record[index, pages], self.summaries.values[index, pages])
        return (stored != self.of(index, pages)).flatten(1).any(1)


def _bytes(record: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor:
    """Records and value means as one tensor uint8 [..., bytes]."""
    assert values is not None
    return torch.cat((record, values.view(torch.uint8)), -1)


class HostMemory(cache_controller.HiCacheController):  # type: ignore[misc]
    """HiCache's controller over prefixes in host memory; `load` and `start_loading` are SGLang's, the copy is plain torch.

    It stands beside the scheduler and not in its tree: HiCache itself wants a GPU, and `locks` refuses it.
    """

    def __init__(self, allocator: Any) -> None:
        self.mem_pool_device_allocator, self.mem_pool_device = allocator, allocator.get_kvcache()
        self.mem_pool_host = self
        self.layer_num = self.transfer_layer_id_max = self.mem_pool_device.layer_num
        self.layer_done_counter = cache_controller.LayerDoneCounter(self.layer_num)
        self.load_queue, self.ack_load_queue = [], []
        self.io_backend, self.layout, self.has_draft, self.size_per_token = "direct", "layer_first", False, 1
        self.load_stream = self.load_fence_stream = None
        if hasattr(cache_controller, "L2TransferEngine"):
            self.l2_transfer_engine = cache_controller.L2TransferEngine(self.io_backend)
        self._host = [[x.new_zeros(HOST_LOADS * HOST_TOKENS, *x.shape[1:]) for x in layer] for layer in self._layers()]

    def _layers(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(self.mem_pool_device.k_buffer, self.mem_pool_device.v_buffer, strict=True)

    def place(self, copy: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
        """Put keys and values, by layer, where the next load in the queue may take them from: host slots int64 [n]."""
        first, count = len(self.load_queue) * HOST_TOKENS, len(copy[0][0])
        for layer, given in zip(self._host, copy, strict=True):
            for x, rows in zip(layer, given, strict=True):
                x[first : first + count] = rows
        return torch.arange(first, first + count)

    def load_to_device_per_layer(
        self, pool: Any, host: torch.Tensor, device: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> None:
        for x, kept in zip((pool.k_buffer[layer], pool.v_buffer[layer]), self._host[layer], strict=True):
            x[device] = kept[host]

    load_to_device_per_layer_physical = load_to_device_per_layer

    def prepare_transfer_indices(self, host: torch.Tensor, device: torch.Tensor, io_backend: str) -> tuple[torch.Tensor, ...]:
        return host, device


class World:
    """A scheduler whose model is replaced, what the checks know of it, and how often what happened.

    Args:
        graphs: plan decode steps as replays of a CUDA graph are planned, in buffers that stay, with rows of padding.
    """

    def __init__(self, server: InProcessServer, graphs: bool) -> None:
        self.server, self.backend, self.scheduler, self.tree = server, server.backend, server.scheduler, server.tree
        self.summaries: SummaryPool = server.backend.summaries
        self.allocator, self.table = self.scheduler.token_to_kv_pool_allocator, server.backend.req_to_token
        self.layers = [m for m in server.runner.model.modules() if type(m).__name__ == "RadixAttention"]
        self.happened: Counter[str] = Counter()
        # Rules done, steps of the scheduler that were checked, and the one of these in which the first mismatch was found.
        self.rules = self.checked = self.found = 0
        self._patches = ExitStack()
        self._plan = self.backend.init_forward_metadata
        self._graphs = graphs
        self.loop: Any = None

    def __enter__(self) -> "World":
        prepare = schedule_batch.ScheduleBatch.prepare_for_extend

        def load_then_prepare(batch: Any) -> Any:
            # Where SGLang starts the loads that were queued: for a new prefill batch, and for no other step.
            self.start_loading()
            return prepare(batch)

        self._patches.enter_context(patch.object(schedule_batch.ScheduleBatch, "prepare_for_extend", load_then_prepare))
        self._patches.enter_context(patch.object(self.server.runner.model, "forward", self._forward))
        self._patches.enter_context(patch.object(backend_module, "locks_decode_step", self._scan))
        # Attention reads; what it would give is nobody's concern here.
        for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
            self._patches.enter_context(patch.object(self.backend.dense, name, lambda *_, **__: None))
        # Retraction is asked for step by step.
        self._patches.enter_context(patch.object(scheduler, "TEST_RETRACT_INTERVAL", 1))
        if self._graphs:
            self.backend._kernels = True
            self.backend.init_cuda_graph_state(CROWD + 2, CROWD + 2)
            self._patches.enter_context(patch.object(self.backend, "init_forward_metadata", self._plan_as_replayed))
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()

    def begin(self) -> None:
        """Start as a fresh server: no page was ever written, no layer has a centre."""
        if self.loop is not None and self.loop.failure is not None:
            raise self.loop.failure  # a scheduler that broke serves no further example
        self.server.flush_cache()
        self.summaries.__init__(self.summaries.kv_pool, self.summaries.config)  # type: ignore[misc]
        self.backend.counters, self.backend._extending = self.summaries.counters, {}
        for index in range(self.summaries.num_layers):
            for buffer in (self.server.kv_pool.k_buffer[index], self.server.kv_pool.v_buffer[index]):
                buffer.zero_()
        self.fresh = FreshSummaries(self.summaries)
        self.host = HostMemory(self.allocator)
        self.copies: deque[tuple[list[int], list[tuple[torch.Tensor, ...]]]] = deque(maxlen=HOST_COPIES)
        self._random = torch.Generator().manual_seed(0)
        self._failures: list[str] = []
        self._locks: list[tuple[Any, Any]] = []
        # Pages whose KV arrived, or will, since the last plan; tokens in the cache by request; pages written so far.
        self._arrived: set[int] = set()
        self._stored: dict[str, int] = {}
        self._written: set[int] = set()
        self._nodes: list[list[int]] = []
        self._rows: dict[str, list[int]] = {}
        self.requests: list[Request] = []
        self.loop = EventLoop(self.server)

    def end(self) -> None:
        """Let everybody go, and the loop reach its end, with SGLang's own checks at idle."""
        for request in self.under_way():
            self.server.abort(request)
        self.loop.close()
        for request in self.requests:
            if request.req is not None:
                self.happened["retractions"] += request.req.retraction_count
        for name, count in self.summaries.counters.dense_rows.items():
            self.happened[f"{name} rows"] += count
        self.happened["prefix pages reused"] += self.summaries.counters.reused
        self.happened["pages rebuilt"] += self.summaries.counters.rebuilt

    def step(self) -> None:
        """One step of the scheduler, and the canary."""
        self.loop.step()
        self.checked += 1
        self.check()

    def under_way(self) -> list[Request]:
        """Requests that are neither finished nor lost."""
        return [request for request in self.requests if not request.finished]

    # --- what replaces the model ----------------------------------------------------------------------------------------

    def _forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Random keys and values through every layer, with SGLang's table overwritten where nothing may read it any more."""
        decoding, lengths = batch.forward_mode.is_decode(), batch.seq_lens_cpu.tolist()
        self._note(batch, decoding, lengths)
        self._arrived.clear()
        kept = self.table.clone()
        sparse = decoding and not self.backend._decode.dense
        if sparse:
            self._expected = kept[batch.req_pool_indices.long(), : -(-max(lengths) // PAGE) * PAGE : PAGE] // PAGE
            self.table.fill_(PAGE)
        for layer in self.layers:
            q, k, v = (
                torch.randn(len(input_ids), heads * layer.qk_head_dim, generator=self._random)
                for heads in (layer.tp_q_head_num, layer.tp_k_head_num, layer.tp_v_head_num)
            )
            layer(q, k, v, batch)
        if sparse:
            self.table.copy_(kept)
        return LogitsProcessorOutput(torch.randn(len(lengths), VOCABULARY, generator=self._random))

    def _scan(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, s: Any, table: Any, lengths: Any, *args: Any, **kw: Any
    ) -> Any:
        """Every page that a layer would score is the request's, has a summary, and it is the one of its keys and values."""
        index = [x.data_ptr() for x in self.server.kv_pool.k_buffer].index(keys.data_ptr())
        rows = len(self._expected)
        lengths = lengths[:rows]
        column = torch.arange(self._expected.shape[1])
        held = column < ((lengths + PAGE - 1) // PAGE)[:, None]
        if not torch.equal(table[:rows, : len(column)][held], self._expected[held]):
            self._failures.append(f"layer {index}: a page of the table is not the request's")
        # The page that the step itself fills is read, not scored.
        pages = self._expected[column < ((lengths - 1) // PAGE)[:, None]].long()
        for page in pages[~s.valid[pages]].tolist():
            self._failures.append(f"layer {index}, page {page}: scored without a summary")
        for page in pages[self.fresh.differ(index, pages)].tolist():
            self._failures.append(f"layer {index}, page {page}: scored with a summary that is not its own")
        return SimpleNamespace(out=torch.zeros(len(q), q.shape[1], values.shape[2]))

    def _plan_as_replayed(self, batch: Any) -> None:
        if not batch.forward_mode.is_decode() or batch.rids is None:
            self._plan(batch)
            return
        padding = CROWD + 2 - batch.batch_size
        more = torch.zeros(padding, dtype=torch.int64)
        padded = SimpleNamespace(
            forward_mode=batch.forward_mode,
            batch_size=batch.batch_size + padding,
            num_padding=padding,
            req_pool_indices=torch.cat([batch.req_pool_indices, more.to(batch.req_pool_indices.dtype)]),
            seq_lens=torch.cat([batch.seq_lens, more.to(batch.seq_lens.dtype) + 1]),
            seq_lens_cpu=torch.cat([batch.seq_lens_cpu, more.to(batch.seq_lens_cpu.dtype) + 1]),
        )
        self.backend.init_forward_metadata_out_graph(padded)
        self.backend.init_forward_metadata_in_graph(padded)

    def _note(self, batch: Any, decoding: bool, lengths: list[int]) -> None:
        """What this step stores, and what kind of step it is."""
        self._stored.update(zip(batch.rids, lengths, strict=True))
        begun = {slot // PAGE for slot in batch.out_cache_loc.tolist() if slot % PAGE == 0}
        self.happened["pages written again"] += len(begun & self._written)
        self._written |= begun
        if decoding:
            fills = sum(length % PAGE == 0 for length in lengths)
            self.happened["decode steps that fill pages of some rows"] += 0 < fills < len(lengths)
        else:
            fed = {request.rid: len(request.prompt_ids) for request in self.requests}
            for rid, total, new in zip(batch.rids, lengths, batch.extend_seq_lens_cpu, strict=True):
                border = (total - new) % PAGE
                self.happened["chunks that begin inside a page"] += border > 0 and total - new < fed[rid]
        self.happened["steps with pages left to the next plan"] += bool(self.summaries._late)
        self.happened["steps before a queued load"] += bool(self.host.load_queue)

    # --- the canary -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every complete page that the tree or a running request owns has a valid summary, bit for bit that of its keys and
        values, but for those that the next plan builds; a page that is not complete has none.

        Raises:
            MismatchError: where that is not so, now or in a scan since the last check.
        """
        nodes = [node.pages.tolist() for node in radix.walk(self.tree)]
        owned = {page for pages in nodes for page in pages}
        rows, partial = self._of_requests()
        owned.update(page for pages in rows.values() for page in pages)
        self._compare(nodes, rows)

        pending = self.summaries.pending()
        if not pending <= self._arrived and self.summaries.centred:
            self._failures.append(f"pages {sorted(pending - self._arrived)}: called dirty for no reason")
        pages = torch.tensor(sorted(owned - pending), dtype=torch.int64)
        for index in range(self.summaries.num_layers):
            valid = self.summaries.valid[index]
            lacking = ~valid[pages]
            differs = self.fresh.differ(index, pages)
            for bad, what in (
                (pages[lacking], "no summary"),
                (pages[differs & ~lacking], "not the summary of its keys and values"),
                (partial[valid[partial]], "a summary before it is complete"),
            ):
                self._failures += [f"layer {index}, page {page}: {what}" for page in bad.tolist()]
        if int(self.summaries.flags.invalid):
            self._failures.append("the counter of invalid pages is not 0")
        if self._failures:
            self.found = self.found or self.checked
            raise MismatchError("; ".join(self._failures[:5]))

    def _of_requests(self) -> tuple[dict[str, list[int]], torch.Tensor]:
        """Complete pages by running request, and the begun pages of all of them."""
        complete, begun = {}, []
        waiting = {id(request) for request in self.scheduler.waiting_queue}
        for request in self.under_way():
            row = None if request.req is None or id(request.req) in waiting else table_row(request.req)
            if row is None or request.rid not in self._stored:
                continue
            stored = self._stored[request.rid]
            pages = (self.table[row, :stored:PAGE] // PAGE).tolist()
            complete[request.rid] = pages[: stored // PAGE]
            begun += pages[stored // PAGE :]
        return complete, torch.tensor(begun, dtype=torch.int64)

    def _compare(self, nodes: list[list[int]], rows: dict[str, list[int]]) -> None:
        """What became of nodes and rows since the last check."""
        firsts, inside = {pages[0] for pages in nodes}, {page for pages in self._nodes for page in pages[1:]}
        self.happened["nodes split"] += bool(firsts & inside)
        gone = {page for pages in self._nodes for page in pages} - {page for pages in nodes for page in pages}
        self.happened["pages evicted"] += len(gone)
        for rid, pages in rows.items():
            before = self._rows.get(rid, [])
            self.happened["duplicates freed"] += any(a != b for a, b in zip(before, pages, strict=False))
        self._nodes, self._rows = nodes, rows

    # --- KV that arrives without a forward pass -------------------------------------------------------------------------

    def cached(self, tokens: list[int]) -> tuple[torch.Tensor, Any]:
        """Slots of the prefix that the tree holds, and its last node."""
        slots = [(node.pages[:, None] * PAGE + torch.arange(PAGE)).flatten() for node in radix.path(self.tree, tokens)]
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
        return torch.cat([torch.empty(0, dtype=torch.int64), *slots]), match.last_device_node

    def copy_out(self, request: Request) -> None:
        """Copy what the tree holds of a request to host memory; the oldest copy goes when there are too many."""
        tokens = (request.prompt_ids + request.output_ids)[:HOST_TOKENS]
        slots, _ = self.cached(tokens)
        if len(slots):
            chunks = self.server.kv_pool.get_cpu_copy(slots)
            self.copies.append((tokens[: len(slots)], [tuple(map(torch.cat, zip(*layer, strict=True))) for layer in chunks]))

    def load_back(self, which: int, queued: bool) -> list[int]:
        """Bring back what the tree lost of a copy, through HiCache's queue or at once.

        Returns:
            Tokens of the copy; none where the tree holds all of them, or has no room.
        """

        def lost() -> list[int]:
            return [i for i, (tokens, _) in enumerate(self.copies) if len(self.cached(tokens)[0]) < len(tokens)]

        choice = lost()
        if self.copies and not choice:
            self.tree.evict(EvictParams(num_tokens=self.allocator.size))
            choice = lost()
        if not choice:
            return []
        tokens, copy = self.copies[choice[which % len(choice)]]
        held, node = self.cached(tokens)
        missing = len(tokens) - len(held)
        copy = [(keys[len(held) :], values[len(held) :]) for keys, values in copy]
        lock = self._lock(node)
        self.tree.evict(EvictParams(num_tokens=max(0, missing - self.allocator.available_size())))
        if queued:
            slots = self.host.load(self.host.place(copy))
        else:
            slots = self.allocator.alloc(missing)
            if slots is not None:
                self.server.kv_pool.load_cpu_copy([[layer] for layer in copy], slots)
        self._unlock(lock)
        if slots is None:
            return []
        self._arrived.update((slots // PAGE).tolist())
        value = torch.cat([held, slots])
        # What lies between `prev_prefix_len` and the tree's own prefix would be freed as duplicates.
        self.tree.insert(InsertParams(key=RadixKey(array("q", tokens)), value=value, prev_prefix_len=len(held)))
        if queued:
            # As SGLang's tree does, until the transfer is over.
            self._locks.append(self._lock(self.cached(tokens)[1]))
        return tokens

    def start_loading(self) -> None:
        """Start the transfers that are queued."""
        for operation in self.host.load_queue:
            self._arrived.update((operation.device_indices // PAGE).tolist())
        self.host.start_loading()
        while self._locks:
            self._unlock(self._locks.pop())

    def _lock(self, node: Any) -> tuple[Any, Any]:
        return node, self.tree.inc_lock_ref(node).to_dec_params()

    def _unlock(self, lock: tuple[Any, Any]) -> None:
        self.tree.dec_lock_ref(*lock)


PROMPTS = [
    Prompt(*fields)
    for fields in itertools.product(
        range(3), (0, 20, 48, 77, 160), range(3), (1, 9, 16, 30), (1, 7, 20, 40), (False, True), (False, True)
    )
]
ARRIVAL = st.none() | st.sampled_from(PROMPTS)
CHOICE = st.integers(0, 100)
"""Which of so many; the rest of the division counts."""


class Lifecycle(RuleBasedStateMachine):
    """Each rule: prompts arrive, one thing happens, the scheduler does one step, and the canary is checked."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.flushing = False
        world.begin()

    def teardown(self) -> None:
        self.world.end()

    @initialize(own=st.sampled_from([0, 1, 9, 15]))
    def first(self, own: int) -> None:
        """Nobody, or a prompt that is shorter than a page, alone until its answer filled the first page of the server."""
        if own:
            self._submit(TAILS[0][:own], 20, False)
        for _ in range(18 if own else 0):
            self.world.step()

    @rule(arrival=ARRIVAL)
    def step(self, arrival: Prompt | None) -> None:
        self._advance(arrival)

    @rule(arrival=ARRIVAL, which=CHOICE, more=st.integers(1, 40))
    def next_turn(self, arrival: Prompt | None, which: int, more: int) -> None:
        """A conversation goes on where its answer ended."""
        over = [request for request in self.world.requests if request.finished and request.output_ids]
        if over:
            before = over[which % len(over)]
            self._submit((before.prompt_ids + before.output_ids)[:200] + TAILS[which % 3][:more], 10, False)
        self._advance(arrival)

    @rule(arrival=ARRIVAL, which=CHOICE)
    def abort(self, arrival: Prompt | None, which: int) -> None:
        """A client goes away: while it waits, between two chunks, or in its answer."""
        running = self.world.under_way()
        if running:
            request = running[which % len(running)]
            done = self.world._stored.get(request.rid, 0)
            self.world.happened["aborts between chunks"] += 0 < done < len(request.prompt_ids)
            self.world.server.abort(request)
        self._advance(arrival)

    @rule(arrival=ARRIVAL)
    def retract(self, arrival: Prompt | None) -> None:
        """Memory is called short: a decoding request loses its pages and is served again."""
        with patch.object(scheduler, "TEST_RETRACT", True):
            self._advance(arrival)

    @rule(arrival=ARRIVAL, tokens=st.integers(1, 400))
    def evict(self, arrival: Prompt | None, tokens: int) -> None:
        """The tree gives up prefixes that nobody uses."""
        self.world.tree.evict(EvictParams(num_tokens=tokens))
        self._advance(arrival)

    @rule(arrival=ARRIVAL)
    def flush(self, arrival: Prompt | None) -> None:
        """Nobody is let in any more until the cache was flushed, which SGLang does at idle."""
        self.flushing = True
        self._advance(arrival)

    @rule(arrival=ARRIVAL, which=CHOICE, through=st.sampled_from(["HiCache", "load_cpu_copy"]), wanted=st.booleans())
    def load_back(self, arrival: Prompt | None, which: int, through: str, wanted: bool) -> None:
        """A prefix comes back from host memory, for a request that is let in, or for one that is not."""
        world = self.world
        if not self.flushing and len(world.host.load_queue) < HOST_LOADS:
            loaded = world.load_back(which, through == "HiCache")
            world.happened[f"loads through {through}, {'wanted' if wanted else 'unwanted'}"] += bool(loaded)
            if loaded and wanted:
                self._submit(loaded + TAILS[0][:5], 5, False)
        self._advance(arrival)

    @rule(arrival=ARRIVAL)
    def audit(self, arrival: Prompt | None) -> None:
        """The audit that operators run agrees."""
        told = audit(self.world.scheduler)
        if told.mismatched or told.unsummarised:
            self.world._failures.append(f"audit: {told}")
        self.world.happened["audits"] += 1
        self._advance(arrival)

    def _submit(self, tokens: list[int], new_tokens: int, stops: bool) -> None:
        world = self.world
        if len(world.under_way()) < CROWD and not self.flushing:
            stop = {"ignore_eos": False, "stop_token_ids": [STOP]} if stops else {}
            world.requests.append(world.server.submit(tokens, new_tokens, **stop))

    def _advance(self, arrival: Prompt | None) -> None:
        world = self.world
        for _ in range(0 if arrival is None else 1 + arrival.twice):
            self._submit(arrival.tokens(), arrival.new_tokens, arrival.stops)
        unfinished = world.under_way()
        world.step()
        world.rules += 1
        for request in [request for request in unfinished if request.finished]:
            world.copy_out(request)
            stored = len(request.prompt_ids) + len(request.output_ids)
            world.happened["surplus steps"] += world._stored.get(request.rid, 0) >= stored
        if self.flushing and not world.host.load_queue and world.scheduler.is_fully_idle():
            assert world.scheduler.flush_cache()
            world._nodes = []
            self.flushing = False
            world.happened["flushes"] += 1
            world.check()


def live(server: InProcessServer, steps: int, graphs: bool) -> dict[str, int]:
    """At least so many rules, each with a step, without a mismatch; how many there were, and what happened in them."""
    with World(server, graphs) as world:
        _run(world, steps, tuple(Phase))
        return {"rules": world.rules, **world.happened}


def hunt(server: InProcessServer, mutation: str, most_steps: int) -> int:
    """Steps until a mutation of what serves is found out, 0 where it is not in so many."""
    with World(server, False) as world, MUTATIONS[mutation]():
        try:
            _run(world, most_steps, (Phase.generate,))
        except Exception:
            if not world.found:
                raise
        return world.found


def _run(world: World, steps: int, phases: tuple[Phase, ...]) -> None:
    """Examples of `STEPS` steps each. Hypothesis ends some of them early; how many depends on the constants in our sources."""
    run_state_machine_as_test(
        lambda: Lifecycle(world),
        settings=settings(
            derandomize=True,
            database=None,
            deadline=None,
            max_examples=steps * 7 // (5 * STEPS),
            stateful_step_count=STEPS,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=phases,
        ),
    )
