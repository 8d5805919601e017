"""A child process in which SGLang starts as far as deciding how many tokens its KV cache holds."""

import multiprocessing
import os
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from worker import end_with_parent


class PoolProbe:
    """Load SGLang in a child, which several probes may do at the same time; `tokens` then goes on, alone on the device."""

    def __init__(self, model_path: str, environment: dict[str, str], **arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_probe, args=(child, model_path, environment, arguments))
        self._process.start()
        child.close()

    def tokens(self, timeout_s: float = 180.0) -> int:
        """`max_total_num_tokens` of this server; its memory is free again on return.

        Raises:
            AssertionError: it did not get there; with the child's traceback where there is one.
        """
        try:
            self._pipe.send(None)
            assert self._pipe.poll(timeout_s), f"no answer in {timeout_s:.0f} s"
            value = self._pipe.recv()
        except (EOFError, BrokenPipeError):
            value = "the child ended"
        finally:
            self.close()
        assert isinstance(value, int), value
        return value

    def close(self) -> None:
        """End the child."""
        self._process.kill()
        self._process.join()


def _probe(pipe: Connection, model_path: str, environment: dict[str, str], arguments: dict[str, Any]) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.update(environment, HF_HUB_OFFLINE="1")
    try:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.managers import scheduler  # noqa: F401
        from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

        from locks_sglang.inprocess import InProcessServer

        resolve = KVCacheConfigurator._resolve_memory_pool_config

        def report(configurator: Any, pre_model_load_memory: Any) -> Any:
            pipe.send(int(resolve(configurator, pre_model_load_memory).max_total_num_tokens))
            os._exit(0)

        KVCacheConfigurator._resolve_memory_pool_config = report
        pipe.recv()
        InProcessServer(model_path, **arguments)
    except BaseException:
        pipe.send(traceback.format_exc())
