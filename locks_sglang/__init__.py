"""LOCKS for SGLang: page-local compact key summaries for long-context decoding.

`pip install locks-sglang`, then `--attention-backend locks`. Operations: `locks_sglang.ops`.
"""

from .config import ConfigError, LocksConfig, configure

__version__ = "0.1.0"

__all__ = ["ConfigError", "LocksConfig", "__version__", "configure"]
