"""Summaries are part of what a token costs, so that SGLang's memory plan stays true."""

from typing import Any

from ..config import load_config
from ..kernels.common import PAGE_SIZE
from ..seams import Seam, selected


def summary_bytes_per_page(model_config: Any, num_layers: int, tp_size: int) -> int:
    """Summary bytes of one 16-token page over `num_layers` layers and this rank's KV heads."""
    # Kernels need triton; where it does not import, SGLang must still come as far as the message that says so.
    from ..kernels.build_page_summaries import RecordLayout

    config = load_config().config
    layout = RecordLayout(model_config.head_dim, model_config.v_head_dim, config.rank, config.value_mean)
    return num_layers * model_config.get_num_kv_heads(tp_size) * layout.summary_bytes


def add_summaries(cell_size: int, configurator: Any, kvc: Any, num_layers: int) -> int | None:
    """After SGLang computed the bytes of one token: add the share of one page's summaries, rounded up."""
    if kvc.is_draft_worker or not selected(kvc.server_args):
        return None
    from sglang.srt.runtime_context import get_parallel

    return cell_size + -(-summary_bytes_per_page(kvc.model_config, num_layers, get_parallel().attn_tp_size) // PAGE_SIZE)


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        "after",
        add_summaries,
        "counts summary bytes in the memory of a token",
    ),
)
