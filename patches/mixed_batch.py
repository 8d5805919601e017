"""Which rows of a mixed batch are decoding: they run dense there, and are counted."""

from typing import Any

from ..seams import Seam


def note_decoding(result: None, batch: Any, running_batch: Any, *args: Any, **kwargs: Any) -> None:
    """After SGLang appended the running requests to a prefill batch."""
    from ..summary_pool import SummaryPool

    summaries = SummaryPool.attached(batch.token_to_kv_pool_allocator.get_kvcache())
    if summaries is not None:
        summaries.counters.mixed_decode_requests = frozenset(request.rid for request in running_batch.reqs)


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.mix_with_running",
        "after",
        note_decoding,
        "counts decode rows that mixed batches run dense",
    ),
)
