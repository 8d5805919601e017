"""Scenarios that run on a real scheduler inside a worker process (`worker.py`). Each asserts and returns plain data."""

import dataclasses
import logging
import pydoc_data.topics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from locks_sglang import radix
from locks_sglang.audit import audit, table_row
from locks_sglang.idle_audit import SETTLED_S
from locks_sglang.inprocess import InProcessServer, Request

PAGE = 16


def text_tokens(server: InProcessServer, count: int, skip: int = 0) -> list[int]:
    """`count` tokens of real text, after leaving out `skip`."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))[: 8 * (count + skip)]
    ids = server.scheduler.tokenizer(text)["input_ids"][skip : skip + count]
    assert len(ids) == count
    return list(ids)


def counters(server: InProcessServer) -> dict[str, Any]:
    """Plain copy of the counters."""
    return dict(server.backend.counters.snapshot())


def built(server: InProcessServer) -> list[int]:
    """Summaries built so far, by layer."""
    counts = server.backend.counters.built
    return [counts[layer] for layer in server.backend.summaries.layer_ids]


@contextmanager
def eager_builds(server: InProcessServer) -> Iterator[list[int]]:
    """Summaries that each layer really builds in the meantime, step by step: what a replayed graph builds is not seen."""
    summaries, counts = server.backend.summaries, [0] * server.backend.summaries.num_layers
    build, build_all = summaries.build, summaries.build_all

    def counted(layer_id: int, pages: torch.Tensor) -> None:
        counts[layer_id - summaries.first_layer] += int((pages >= 0).sum())
        build(layer_id, pages)

    def all_counted(pages: torch.Tensor) -> None:
        before = list(counts)
        build_all(pages)
        if counts == before:  # in one launch, not layer by layer
            counts[:] = [count + int((pages >= 0).sum()) for count in counts]

    summaries.build, summaries.build_all = counted, all_counted  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        del summaries.build, summaries.build_all  # type: ignore[method-assign]


def verified(server: InProcessServer, pages: torch.Tensor) -> list[tuple[int, int]]:
    """Pages whose summary is not that of their keys and values: bit for bit where a rebuild adds in a fixed order."""
    return server.backend.summaries.verify(pages, **({"slack": 0.0} if server.runner.device == "cpu" else {}))


def assert_summaries_are_fresh(server: InProcessServer) -> int:
    """Every page that the tree owns has a valid summary equal to a rebuild; returns how many pages there are."""
    pages = radix.owned_pages(server.tree)
    assert verified(server, pages) == []
    assert counters(server)["invalid_pages"] == 0
    return len(pages)


def greedy(server: InProcessServer, lengths: list[int], new_tokens: int, together: bool) -> list[list[int]]:
    """Greedy tokens after real prompts of these lengths, served one by one or in one batch, from an empty cache."""
    server.flush_cache()
    prompts = [text_tokens(server, length, skip=37 * i) for i, length in enumerate(lengths)]
    groups = [prompts] if together else [[prompt] for prompt in prompts]
    requests: list[Request] = []
    for group in groups:
        requests += server.generate(group, new_tokens)
    return [request.output_ids for request in requests]


def greedy_with_gaps(server: InProcessServer, lengths: list[int], new_tokens: int) -> list[tuple[list[int], list[float]]]:
    """`greedy`, one by one, and for each token the distance of the two best logits."""
    sample = server.runner.sample
    found: list[tuple[list[int], list[float]]] = []
    for i, length in enumerate(lengths):
        gaps: list[float] = []

        def keep_gap(logits: Any, batch: Any, gaps: list[float] = gaps) -> Any:
            best = logits.next_token_logits.float().topk(2).values[0]
            gaps.append(float(best[0] - best[1]))
            return sample(logits, batch)

        server.runner.sample = keep_gap
        (request,) = server.generate([text_tokens(server, length, skip=37 * i)], new_tokens)
        # Every chunk of a prefill is sampled; only the last one's token counts.
        found.append((request.output_ids, gaps[-(-length // server.scheduler.chunked_prefill_size) - 1 :]))
    server.runner.sample = sample
    return found


def twin(server: InProcessServer, lengths: list[int], new_tokens: int, together: bool) -> list[list[int]]:
    """`greedy`, and every decode row was sparse and had all its pages."""
    assert server.scheduler.enable_overlap
    before = counters(server)
    tokens = greedy(server, lengths, new_tokens, together)
    after = counters(server)
    assert after["sparse_rows"] > before["sparse_rows"]
    assert after["dense_rows"] == before["dense_rows"]
    assert after["pages_read"] - before["pages_read"] == after["pages_held"] - before["pages_held"]
    steps = after["decode_steps"] - before["decode_steps"]
    assert after["sparse_rows"] - before["sparse_rows"] > (len(lengths) - 1 if together else 0) * steps
    assert_summaries_are_fresh(server)
    return tokens


def sparse_reads_only_selected(server: InProcessServer) -> dict[str, float]:
    """Poison every slot outside the selected pages of each KV head with NaN: the output of every layer is unchanged."""
    import locks_sglang.backend as module

    original = module.locks_decode_step
    calls = read = 0

    def poisoned(q: Any, k: Any, v: Any, s: Any, table: Any, lengths: Any, scale: float, config: Any, **kw: Any) -> Any:
        nonlocal calls, read
        step = original(q, k, v, s, table, lengths, scale, config, **kw)
        keys, values = torch.full_like(k, float("nan")), torch.full_like(v, float("nan"))
        for row in range(q.shape[0]):
            for head in range(k.shape[1]):
                chosen = step.pages[row, head][: int(step.counts[row])].long()
                slots = (table[row, chosen].long()[:, None] * PAGE + torch.arange(PAGE, device=k.device)).flatten()
                keys[slots, head], values[slots, head] = k[slots, head], v[slots, head]
        again = original(q, keys, values, s, table, lengths, scale, config, **kw)
        assert torch.equal(again.out, step.out)
        calls += 1
        read += int((step.pages >= 0).sum())
        return again

    before = counters(server)
    module.locks_decode_step = poisoned
    try:
        server.generate([text_tokens(server, 4000)], 4)
    finally:
        module.locks_decode_step = original
    after = counters(server)
    assert calls >= 3 * len(server.backend.summaries.layer_ids)
    held, counted = (after[name] - before[name] for name in ("pages_held", "pages_read"))
    # Every layer and KV head reads as many pages as the counter says, and the poison shows that it reads no other.
    assert read == counted * len(server.backend.summaries.layer_ids) * server.backend.summaries.record.shape[2]
    assert after["dense_rows"] == before["dense_rows"]
    return {"share": counted / held, "held": held, "read": counted}


def reuse_is_exact(server: InProcessServer) -> None:
    """A second turn and a second conversation build exactly the pages that the cached prefix does not cover."""
    server.flush_cache()
    document = text_tokens(server, 1100, skip=5000)
    page = server.tree.page_size

    def serve(prompt: list[int], new_tokens: int) -> Request:
        before, reused, steps = built(server), server.backend.counters.reused, server.backend.counters.decode_steps
        with eager_builds(server) as really:
            (request,) = server.generate([prompt], new_tokens)
        cached = request.cached_tokens
        assert cached % page == 0
        # Every decode step stores one token, the surplus one of overlap scheduling too.
        stored = len(prompt) + server.backend.counters.decode_steps - steps
        expected = stored // PAGE - cached // PAGE
        assert [now - then for now, then in zip(built(server), before, strict=True)] == [expected] * len(before)
        if server.runner.device == "cpu":
            assert really == [expected] * len(before)
        assert server.backend.counters.reused - reused == cached // PAGE
        return request

    first = serve(document, 40)
    assert first.cached_tokens == 0
    second = serve(document + first.output_ids + text_tokens(server, 50, skip=900), 40)
    assert second.cached_tokens == (len(document) + 39) // page * page
    other = serve(document + text_tokens(server, 70, skip=3000), 20)
    assert other.cached_tokens == len(document) // page * page
    for node in radix.path(server.tree, document):
        assert node.stale == 0
        assert (node.builds == 1).all()
        assert (node.reuses == 2).all()
    assert_summaries_are_fresh(server)


def page_size_keeps_reuse(server: InProcessServer) -> None:
    """SGLang's pages of several summary pages: a second prompt reuses whole ones, everything is built once and right."""
    page = server.tree.page_size
    stem = text_tokens(server, 900, skip=5000)
    (first,) = server.generate([stem + text_tokens(server, 40)], 24)
    before, steps = built(server), server.backend.counters.decode_steps
    prompt = stem + text_tokens(server, 60, skip=3000)
    with eager_builds(server) as really:
        (second,) = server.generate([prompt], 24)
    assert second.cached_tokens == len(stem) // page * page > 0
    stored = len(prompt) + server.backend.counters.decode_steps - steps
    expected = stored // PAGE - second.cached_tokens // PAGE
    assert [now - then for now, then in zip(built(server), before, strict=True)] == [expected] * len(before)
    if server.runner.device == "cpu":
        assert really == [expected] * len(before)
    assert all((node.builds == 1).all() for node in radix.walk(server.tree))
    assert_summaries_are_fresh(server)
    assert first.finished


def split_keeps_summaries(server: InProcessServer) -> None:
    """A node is split by a prompt that leaves it in the middle: both halves keep their pages and summaries."""
    server.flush_cache()
    stem = text_tokens(server, 640, skip=8000)
    server.generate([stem], 2)
    whole = radix.path(server.tree, stem)
    summaries = server.backend.summaries
    stored = summaries.record.clone(), summaries.values.clone()
    server.generate([stem[:320] + text_tokens(server, 200, skip=100)], 2)
    parts = radix.path(server.tree, stem)
    assert len(parts) == len(whole) + 1
    assert torch.equal(torch.cat([n.pages for n in parts]), torch.cat([n.pages for n in whole]))
    kept = torch.cat([n.pages for n in whole])
    for now, before in zip((summaries.record, summaries.values), stored, strict=True):
        assert torch.equal(now[:, kept], before[:, kept])
    assert all(n.stale == 0 and (n.builds == 1).all() for n in parts)

    def by_page(nodes: list[radix.NodeSummaries]) -> dict[int, tuple[bool, int, int]]:
        told = ((n.pages.tolist(), n.valid.tolist(), n.builds.tolist(), n.reuses.tolist()) for n in nodes)
        return {page: entry for pages, *entries in told for page, *entry in zip(pages, *entries, strict=True)}

    # The walk says the same of these pages as the path, whatever nodes it finds them in.
    walked = by_page(list(radix.walk(server.tree)))
    assert {page: walked[page] for page in kept.tolist()} == by_page(parts)
    assert_summaries_are_fresh(server)


def eviction_keeps_summaries(server: InProcessServer) -> int:
    """Prompts that together exceed the pool: pages are evicted and written again, live summaries stay right."""
    server.flush_cache()
    seen: set[int] = set()
    reused_pages = 0
    for i in range(3):
        prompt = text_tokens(server, 2200, skip=1500 * i)
        server.generate([prompt], 4)
        pages = set(torch.cat([node.pages for node in radix.path(server.tree, prompt)]).tolist())
        reused_pages += len(pages & seen)
        seen |= pages
        assert_summaries_are_fresh(server)
    assert reused_pages > 50
    return reused_pages


def abort_keeps_summaries(server: InProcessServer) -> None:
    """A request is aborted after each of its first chunks and sent again: same answer as undisturbed, all summaries right."""
    server.flush_cache()
    prompt = text_tokens(server, 1900, skip=2000)
    (undisturbed,) = server.generate([prompt], 8)
    for chunks in (1, 2):
        server.flush_cache()

        aborts: list[Request] = []

        def abort_after(chunks: int = chunks, aborts: list[Request] = aborts) -> Iterator[None]:
            request = server.submit(prompt, 8)
            aborts.append(request)
            for _ in range(chunks + 1):
                yield
            assert request.req is not None
            assert request.output_ids == []
            server.abort(request)

        server.run(abort_after())
        (aborted,) = aborts
        assert aborted.finished
        assert aborted.output_ids == []
        # In the middle: some chunks are in the tree, the rest of the prompt never was.
        assert 0 < assert_summaries_are_fresh(server) < len(prompt) // PAGE
        (again,) = server.generate([prompt], 8)
        assert again.output_ids == undisturbed.output_ids
        assert_summaries_are_fresh(server)


def audit_finds_what_does_not_fit(server: InProcessServer) -> None:
    """The record of another page in one layer: the audit names it; the next request gets a rebuilt one and the same answer."""
    server.flush_cache()
    prompt = text_tokens(server, 600, skip=500)
    (undisturbed,) = server.generate([prompt], 40)
    summaries, owned = server.backend.summaries, radix.owned_pages(server.tree).tolist()
    clean = audit(server.scheduler)
    assert (clean.pages, clean.looked_at, clean.mismatched, clean.unsummarised) == (len(owned), len(owned), 0, 0)
    assert audit(server.scheduler, 7).looked_at == 7

    page, other = owned[5], owned[9]
    summaries.record[3, page] = summaries.record[3, other]
    broken = audit(server.scheduler)
    (mismatch,) = broken.mismatches
    assert (broken.mismatched, mismatch.rank, mismatch.layer, mismatch.page) == (1, 0, summaries.first_layer + 3, page)
    nodes = {f"node {number}": node for number, node in enumerate(radix.walk(server.tree))}
    node = nodes[mismatch.owner]
    assert node.pages.tolist()[(mismatch.position - node.start) // PAGE] == page
    assert server.backend.summaries.last_audit == broken

    before = counters(server)
    (again,) = server.generate([prompt], 40)
    after = counters(server)
    assert again.output_ids == undisturbed.output_ids
    assert after["summaries_rebuilt"] - before["summaries_rebuilt"] == 1
    assert after["summaries_mismatched"] == before["summaries_mismatched"] >= 1
    assert audit(server.scheduler).mismatched == 0
    assert_summaries_are_fresh(server)


def audit_covers_running_requests(server: InProcessServer) -> None:
    """Between any two steps all summaries fit; a page that only a decoding request owns is looked at too."""
    server.flush_cache()
    prompt = text_tokens(server, 1100, skip=900)
    summaries, audits = server.backend.summaries, []

    def audited() -> Iterator[None]:
        request = server.submit(prompt, 60)
        broken = False
        while not request.finished:
            yield
            audits.append(audit(server.scheduler))
            if broken or len(request.output_ids) < 40:
                assert audits[-1].mismatched == 0
                assert audits[-1].unsummarised == 0
                continue
            # The first page that decoding filled belongs to nobody else yet.
            index = len(prompt) // PAGE + 1
            slot = int(server.scheduler.req_to_token_pool.req_to_token[table_row(request.req), index * PAGE])
            summaries.record[0, slot // PAGE] ^= 255
            (mismatch,) = audit(server.scheduler).mismatches
            assert mismatch.page == slot // PAGE
            assert (mismatch.owner, mismatch.position) == (f"request {request.rid}", index * PAGE)
            broken = True
        assert broken

    server.run(audited())
    assert max(found.pages for found in audits) == (len(prompt) + 59) // PAGE
    assert_summaries_are_fresh(server)


def idle_audit_finds_what_does_not_fit(server: InProcessServer) -> None:
    """Once nothing has happened for a while, every page of the radix tree is compared, a slice at a time, once; what does not
    fit is told and rebuilt before the next step."""
    server.flush_cache()
    prompt = text_tokens(server, 800, skip=2100)
    server.generate([prompt], 2)
    summaries, counters = server.backend.summaries, server.backend.summaries.counters
    before = dataclasses.replace(counters)
    page = int(radix.path(server.tree, prompt)[-1].pages[-1])
    summaries.record[summaries.num_layers - 1, page] ^= 255
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("locks_sglang.idle_audit")
    logger.addHandler(handler)
    turns: list[float] = []

    def idle() -> Iterator[None]:
        until = time.monotonic() + 120.0
        while counters.idle_audits == before.idle_audits and time.monotonic() < until:
            turns.append(time.monotonic())
            yield
        settled = time.monotonic()
        while time.monotonic() < settled + 2.0 * SETTLED_S:
            yield

    try:
        server.run(idle())
    finally:
        logger.removeHandler(handler)
    # The first turns wait; the sweep takes several; and then it is done until there is another step.
    assert turns[-1] - turns[0] >= SETTLED_S
    assert counters.idle_audits == before.idle_audits + 1
    assert counters.mismatched == before.mismatched + 1
    assert len(told) == 1
    assert f"layer {summaries.layer_ids[-1]}, page {page} (node " in told[0]
    assert summaries.pending() == {page}
    server.generate([prompt], 2)
    assert counters.rebuilt == before.rebuilt + 1
    assert_summaries_are_fresh(server)


def retraction_keeps_summaries(server: InProcessServer) -> None:
    """SGLang takes a decoding request's pages away and serves it again, in chunks, its cached prefix being gone too: same
    answers as undisturbed, all summaries right, and no audit in between misses one."""
    import sglang.srt.managers.scheduler as scheduling
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    server.flush_cache()
    prompts = [text_tokens(server, 300, skip=700), text_tokens(server, 1300, skip=4100)]
    undisturbed = [server.generate([prompt], 16)[0].output_ids for prompt in prompts]
    server.flush_cache()
    requests: list[Request] = []

    def retract_once() -> Iterator[None]:
        requests.extend(server.submit(prompt, 16) for prompt in prompts)
        while min(len(request.output_ids) for request in requests) < 4:
            yield
        scheduling.TEST_RETRACT = True
        while not any(request.req.retraction_count for request in requests):
            yield
        scheduling.TEST_RETRACT = False
        server.tree.evict(EvictParams(num_tokens=len(prompts[1])))
        answered = len(requests[1].output_ids)
        while len(requests[1].output_ids) == answered:
            yield
            found = audit(server.scheduler)
            assert (found.mismatched, found.unsummarised) == (0, 0)

    try:
        server.run(retract_once())
    finally:
        scheduling.TEST_RETRACT = False
    assert [request.req.retraction_count for request in requests] == [0, 1]
    assert [request.output_ids for request in requests] == undisturbed
    assert_summaries_are_fresh(server)


def flush_forgets(server: InProcessServer) -> None:
    """After a flush the same prompt finds nothing, and its summaries are built once more, in whatever pages it gets."""
    server.flush_cache()
    prompt = text_tokens(server, 700, skip=6000)
    (first,) = server.generate([prompt], 8)
    server.flush_cache()
    assert len(radix.owned_pages(server.tree)) == 0
    before, steps = built(server), server.backend.counters.decode_steps
    (again,) = server.generate([prompt], 8)
    assert again.cached_tokens == 0
    assert again.output_ids == first.output_ids
    stored = len(prompt) + server.backend.counters.decode_steps - steps
    assert [now - then for now, then in zip(built(server), before, strict=True)] == [stored // PAGE] * len(before)
    for node in radix.path(server.tree, prompt):
        assert node.stale == 0
        assert (node.builds == 1).all()
        assert (node.reuses == 0).all()
    assert_summaries_are_fresh(server)


def weight_update_keeps_summaries(server: InProcessServer, changed: str, original: str) -> None:
    """New weights from disk change every key: summaries are of the new keys, and the old weights bring the old answer back."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    def load(folder: str) -> None:
        answer = server.scheduler.weight_updater.update_weights_from_disk(
            UpdateWeightFromDiskReqInput(model_path=folder, load_format="auto")
        )
        assert answer.success, answer.message

    server.flush_cache()
    prompt = text_tokens(server, 400, skip=200)
    (first,) = server.generate([prompt], 12)
    load(changed)
    assert len(radix.owned_pages(server.tree)) == 0
    (other,) = server.generate([prompt], 12)
    assert other.cached_tokens == 0
    assert other.output_ids != first.output_ids
    assert_summaries_are_fresh(server)
    load(original)
    (again,) = server.generate([prompt], 12)
    assert again.output_ids == first.output_ids
    assert_summaries_are_fresh(server)


def no_radix_cache(server: InProcessServer) -> None:
    """Without a radix cache nothing is reused, every page is built, and the view of the tree says why there is none."""
    prompt = text_tokens(server, 1100, skip=5000)
    answers = []
    for _ in range(2):
        before, steps = built(server), server.backend.counters.decode_steps
        seen = 0

        def look() -> Iterator[None]:
            nonlocal seen
            request = server.submit(prompt, 8)
            while not request.finished:
                if len(request.output_ids) == 4:
                    (row,) = server.scheduler.running_batch.req_pool_indices.tolist()
                    slots = server.backend.req_to_token[row, : len(prompt) // PAGE * PAGE : PAGE]
                    assert verified(server, slots.long() // PAGE) == []
                    seen += 1
                yield
            answers.append((request.output_ids, request.cached_tokens))

        server.run(look())
        assert seen
        stored = len(prompt) + server.backend.counters.decode_steps - steps
        assert [now - then for now, then in zip(built(server), before, strict=True)] == [stored // PAGE] * len(before)
    assert answers[0] == answers[1]
    assert answers[0][1] == 0
    assert server.backend.counters.reused == 0
    assert counters(server)["invalid_pages"] == 0
    try:
        radix.path(server.tree, prompt)
    except radix.RadixViewError as error:
        assert "start the server without --disable-radix-cache" in str(error)  # noqa: PT017
    else:
        raise AssertionError("a tree without nodes was read")


def mixed_rows_are_counted(server: InProcessServer) -> None:
    """Requests that arrive while others decode: decode rows of mixed batches run dense and are counted, all summaries right."""
    server.flush_cache()
    before = counters(server)
    steps = 0

    def second_arrives_late() -> Iterator[None]:
        nonlocal steps
        first = server.submit(text_tokens(server, 200), 40)
        while len(first.output_ids) < 10:
            yield
        second = server.submit(text_tokens(server, 1700, skip=300), 10)
        while not second.output_ids:
            steps += 1
            yield

    server.run(second_arrives_late())
    assert_summaries_are_fresh(server)
    after = counters(server)
    mixed = after["dense_rows"]["mixed"] - before["dense_rows"].get("mixed", 0)
    # 1,700 tokens in chunks of 512, less the one token a step that the decoding request takes.
    assert mixed == 4
    assert mixed <= steps
    assert after["sparse_rows"] - before["sparse_rows"] >= 40 + 10 - 2 - mixed


def memory_is_counted(server: InProcessServer) -> None:
    """Cell size = dense cell size + ceil(summary bytes per page over all layers / 16), and the pool holds just that."""
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    from locks_sglang.patches import memory_sizing

    kvc = server.runner.kv_cache_configurator
    hooked = create_memory_pool_configurator(kvc)._cell_size
    chosen = memory_sizing.selected
    memory_sizing.selected = lambda args: False
    try:
        dense = create_memory_pool_configurator(kvc)._cell_size
    finally:
        memory_sizing.selected = chosen
    summaries = server.backend.summaries
    config = server.runner.model_config
    heads, layers = config.get_num_kv_heads(1), config.num_hidden_layers
    assert dense == layers * heads * 2 * config.head_dim * server.kv_pool.dtype.itemsize
    # D = 64, rank 8: 256 + 16 + 128 + 32 + 66 + 2 = 500 bytes, 512 with padding, and 64: DESIGN section 1, 14.1 % of bf16 KV.
    assert summaries.bytes_per_page == layers * heads * 576
    assert hooked - dense == -(-summaries.bytes_per_page // PAGE)
    assert (
        summaries.record.numel() + summaries.values.numel()
        == summaries.nbytes
        == summaries.bytes_per_page * summaries.num_pages
    )
    assert summaries.num_pages * PAGE == server.kv_pool.get_key_buffer(0).shape[0]


def short_batches_run_dense(server: InProcessServer) -> None:
    """While every row is shorter than min_context_tokens, decode runs on the inner backend; one long row ends that."""
    import dataclasses

    backend = server.backend
    server.flush_cache()
    configured = backend.config
    backend.config = dataclasses.replace(configured, min_context_tokens=256)
    try:
        before = counters(server)
        server.generate([text_tokens(server, 100)], 8)
        short = counters(server)
        assert short["dense_rows"]["short"] - before["dense_rows"].get("short", 0) >= 7
        assert short["sparse_rows"] == before["sparse_rows"]
        server.generate([text_tokens(server, 100, skip=500), text_tokens(server, 400, skip=900)], 8)
        long = counters(server)
        assert long["dense_rows"]["short"] == short["dense_rows"]["short"]
        assert long["sparse_rows"] - short["sparse_rows"] >= 14
    finally:
        backend.config = configured
    assert_summaries_are_fresh(server)


@contextmanager
def replayed_graphs(server: InProcessServer) -> Iterator[list[str]]:
    """Labels of the decode graphs that are replayed in the meantime."""
    graphs = server.runner.decode_cuda_graph_runner.backend
    labels: list[str] = []
    replay = graphs.replay

    def noted(key: Any, *args: Any, **kwargs: Any) -> Any:
        labels.append(key.variant_label)
        return replay(key, *args, **kwargs)

    graphs.replay = noted
    try:
        yield labels
    finally:
        graphs.replay = replay


def graph_against_eager(server: InProcessServer, rows: int, new_tokens: int) -> list[tuple[int, float]]:
    """Every decode step of so many requests of 90 tokens and up runs twice, eagerly and in SGLang's graph.

    Returns:
        For each step its rows, and the largest difference of the logits of one of them, relative to their length.
    """
    runner = server.runner
    graphs, forward = runner.decode_cuda_graph_runner, runner.forward
    steps: list[tuple[int, float]] = []

    def twice(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not batch.forward_mode.is_decode():
            return forward(batch, *args, **kwargs)
        # First: the replayed step ends SGLang's promise that the batch's tables stay as they are.
        graphs.can_run_graph = lambda batch: False
        try:
            eager = forward(batch, *args, **kwargs)
            assert not eager.can_run_graph
            expected = eager.logits_output.next_token_logits.float().clone()
        finally:
            del graphs.can_run_graph
        output = forward(batch, *args, **kwargs)
        assert output.can_run_graph
        found = output.logits_output.next_token_logits.float()
        assert len(found) == len(expected)
        steps.append((len(found), float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())))
        return output

    server.flush_cache()
    runner.forward = twice
    try:
        server.generate([text_tokens(server, 90 + 13 * i, skip=37 * i) for i in range(rows)], new_tokens)
    finally:
        del runner.forward
    assert max(steps)[0] == rows
    assert len(steps) >= new_tokens - 1
    return steps


def dense_graph_against_eager(server: InProcessServer, rows: int, new_tokens: int) -> list[tuple[int, float]]:
    """`graph_against_eager` of requests shorter than `min_context_tokens`: all on the inner backend, in its dense graph."""
    from locks_sglang.patches.graph_capture import DENSE

    before = counters(server)
    with replayed_graphs(server) as labels:
        steps = graph_against_eager(server, rows, new_tokens)
    after = counters(server)
    assert labels == [DENSE] * len(steps)
    assert after["dense_rows"]["short"] - before["dense_rows"].get("short", 0) == 2 * sum(size for size, _ in steps)
    assert after["sparse_rows"] == before["sparse_rows"]
    assert_summaries_are_fresh(server)
    return steps


def grows_out_of_the_dense_graph(server: InProcessServer) -> None:
    """A request decodes in the dense graph until it has `min_context_tokens` and in the sparse one from then on."""
    from locks_sglang.patches.graph_capture import DENSE, SPARSE

    limit, new_tokens = server.backend.config.min_context_tokens, 80
    prompt = limit - 40
    server.flush_cache()
    before = counters(server)
    with replayed_graphs(server) as labels:
        server.generate([text_tokens(server, prompt)], new_tokens)
    after = counters(server)
    # A step of n decoded tokens, its own included, has prompt + n tokens.
    short = limit - 1 - prompt
    long = after["decode_steps"] - before["decode_steps"] - short
    assert long >= new_tokens - 1 - short
    assert labels == [DENSE] * short + [SPARSE] * long
    assert after["dense_rows"]["short"] - before["dense_rows"].get("short", 0) == short
    assert after["sparse_rows"] - before["sparse_rows"] == long
    assert assert_summaries_are_fresh(server) >= (prompt + new_tokens - 1) // PAGE


def untouched(server: InProcessServer) -> None:
    """Before the first request nothing was built, counted or centred."""
    summaries = server.backend.summaries
    assert not summaries.valid.any()
    assert not summaries.center.any()
    assert built(server) == [0] * summaries.num_layers
    assert counters(server)["decode_steps"] == 0
