"""What every operation shares: argument checks and the page geometry.

Letters used throughout: B requests, Hq query heads, H KV heads, G = Hq / H, D head dim, Dv value head dim, P = 16 tokens
a page, N pages, R rank, S selected pages a request.
"""

from .checks import (
    CACHE_DTYPES,
    FLOAT_DTYPES,
    ArgumentError,
    check_attention_args,
    check_one_device,
    check_page_table,
    require,
)
from .gather import gather_pages, gqa_queries, soft_cap, token_slots

PAGE_SIZE = 16
"""Tokens of one summary page (P). SGLang's own page size is any multiple of it."""

__all__ = [
    "CACHE_DTYPES",
    "FLOAT_DTYPES",
    "PAGE_SIZE",
    "ArgumentError",
    "check_attention_args",
    "check_one_device",
    "check_page_table",
    "gather_pages",
    "gqa_queries",
    "require",
    "soft_cap",
    "token_slots",
]
