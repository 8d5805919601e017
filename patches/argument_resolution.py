"""While SGLang resolves its arguments: page size and early refusals.

`_page_size_default` runs once in the resolution of all supported releases, in the process that parsed the arguments,
after the attention backend is settled and before any process is spawned: bad settings stop the start there, before a
model is loaded. Before that SGLang refuses backends that it does not list for deterministic inference, without a reason.
"""

import logging
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from ..config import load_config
from ..seams import Seam, named
from ..support import check_arguments, check_version

logger = logging.getLogger(__name__)

DEFAULT_PAGE_SIZE = 16


def resolve(original: Callable[[Any], dict[str, Any]], view: Any) -> dict[str, Any]:
    """Around the default of --page-size.

    Raises:
        ConfigError: a bad `locks` setting.
        UnsupportedError: a version of SGLang or a flag that `locks` refuses.
    """
    if not named(view):
        return original(view)
    check_version(version("sglang"))
    load_config()
    check_arguments(view)
    if view.page_size is None:
        logger.info("locks: --page-size is %d (the size of a summary page)", DEFAULT_PAGE_SIZE)
        return {"page_size": DEFAULT_PAGE_SIZE}
    return original(view)


def refuse_deterministic(original: Callable[[Any], dict[str, Any]], view: Any) -> dict[str, Any]:
    """Around the choice of an attention backend for deterministic inference.

    Raises:
        UnsupportedError: it is asked for, or another flag that `locks` refuses.
    """
    if named(view) and view.enable_deterministic_inference:
        check_arguments(view)
    return original(view)


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.arg_groups.overrides._page_size_default",
        "around",
        resolve,
        "defaults --page-size to 16 and refuses unsupported flags and bad settings",
    ),
    Seam(
        "sglang.srt.arg_groups.overrides._deterministic_attention_backend",
        "around",
        refuse_deterministic,
        "refuses deterministic inference with the reason",
    ),
)
