"""The operations of the method: checked, on Triton kernels where device and shapes allow, in fp32 torch elsewhere. See
`docs/method.md` for the mathematics.

Letters: B requests, Hq query heads, H KV heads, G = Hq / H, D head dim, Dv value head dim, P = 16 tokens a page, N pages,
R rank, S selected pages. Logarithms are natural.
"""

from .kernels.build_page_summaries import PageSummaries, build_page_summaries
from .kernels.common import PAGE_SIZE, ArgumentError
from .kernels.locks_decode import locks_decode
from .kernels.page_lse import exact_page_lse, page_lse
from .kernels.select_pages import select_pages
from .kernels.sparse_decode import dense_decode, sparse_decode

__all__ = [
    "PAGE_SIZE",
    "ArgumentError",
    "PageSummaries",
    "build_page_summaries",
    "dense_decode",
    "exact_page_lse",
    "locks_decode",
    "page_lse",
    "select_pages",
    "sparse_decode",
]
