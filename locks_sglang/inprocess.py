"""One real SGLang scheduler in this process: the same model runner, KV pool, radix cache and event loop as the server's,
without its HTTP, tokenizer and detokenizer processes.

Evaluation reads keys, queries and values of a served run through it, and tests look at pages and trees while requests
run. One a process: SGLang keeps process-wide state.
"""

import logging
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from .seams import version_key

logger = logging.getLogger(__name__)


@dataclass
class Request:
    """A request under way.

    Attributes:
        output_ids: tokens generated so far. cached_tokens: prompt tokens found in the radix cache.
        finished: whether it ended, of itself or by abort.
    """

    rid: str
    prompt_ids: list[int]
    max_new_tokens: int
    req: Any = field(default=None, repr=False)

    @property
    def output_ids(self) -> list[int]:
        return [] if self.req is None else list(self.req.output_ids)

    @property
    def cached_tokens(self) -> int:
        return 0 if self.req is None else int(self.req.cached_tokens)

    @property
    def finished(self) -> bool:
        return self.req is not None and bool(self.req.finished())


class InProcessServer:
    """Run requests through SGLang's scheduler in this process.

    Args:
        model_path: folder of the model.
        arguments: further fields of SGLang's `ServerArgs`, e.g. page_size=64; a list for several values.

    Use `generate` for whole requests; `run` with a script to look inside between steps.
    """

    def __init__(self, model_path: str, **arguments: Any) -> None:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import PortArgs, prepare_server_args

        command = ["--model-path", model_path, "--skip-server-warmup"]
        for name, value in arguments.items():
            flag = "--" + name.replace("_", "-")
            command += [flag] if value is True else [flag, *map(str, value if isinstance(value, list) else [value])]
        server_args = prepare_server_args(command)
        os.environ.setdefault("SGLANG_BLOCK_NONZERO_RANK_CHILDREN", "0")
        port_args = PortArgs.init_new(server_args)
        if version_key(version("sglang")) < (0, 5, 20):
            publish(server_args, role="scheduler")
            self.scheduler = Scheduler(server_args, port_args, 0, 0, 0, 0, 0, 0, None)
        else:
            from sglang.srt.runtime_context import SpawnRanks

            publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
            self.scheduler = Scheduler(server_args, port_args)
        self.scheduler.ipc_channels.send_to_detokenizer.send_output = lambda *args, **kwargs: None
        self._receiver = _Receiver(self)
        self.scheduler.request_receiver = self._receiver
        self._count = 0
        self.live: list[Request] = []

    @property
    def runner(self) -> Any:
        """SGLang's `ModelRunner`."""
        return self.scheduler.tp_worker.model_runner

    @property
    def backend(self) -> Any:
        """The attention backend."""
        return self.runner.attn_backend

    @property
    def kv_pool(self) -> Any:
        """SGLang's KV pool."""
        return self.scheduler.token_to_kv_pool_allocator.get_kvcache()

    @property
    def tree(self) -> Any:
        """The radix cache."""
        return self.scheduler.tree_cache

    def submit(self, prompt_ids: Sequence[int], max_new_tokens: int = 16, **sampling: Any) -> Request:
        """Queue a greedy request; it runs in the next `run`."""
        request = Request(f"inprocess-{self._count}", list(prompt_ids), max_new_tokens)
        self._count += 1
        self._receiver.queue.append(self._message(request, sampling))
        self.live.append(request)
        return request

    def abort(self, request: Request) -> None:
        """Queue an abort, as a client's disconnect does."""
        from sglang.srt.managers.io_struct import AbortReq

        self._receiver.queue.append(AbortReq(rid=request.rid))

    def run(self, script: Iterator[None] = iter(()), *, timeout_s: float = 1200.0) -> None:  # noqa: B008
        """Run SGLang's own event loop until the script and every request have ended.

        Args:
            script: advanced once before every step of the scheduler; may submit, abort and look at anything.
            timeout_s: most seconds for the whole run.

        Raises:
            TimeoutError: not done in time. Whatever the script raises.
        """
        self._receiver.begin(script, timeout_s)
        self.scheduler.gracefully_exit = False
        self.scheduler.run_event_loop()
        self.live.clear()
        if self._receiver.failure is not None:
            raise self._receiver.failure

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 16, **sampling: Any) -> list[Request]:
        """Serve prompts (token ids) together, greedily, to their end."""
        requests = [self.submit(prompt, max_new_tokens, **sampling) for prompt in prompts]
        self.run()
        return requests

    def flush_cache(self) -> None:
        """Empty the radix cache, as the server's endpoint does at idle.

        Raises:
            RuntimeError: SGLang refused, because requests are under way.
        """

        def flush() -> Iterator[None]:
            if not self.scheduler.flush_cache():
                raise RuntimeError("SGLang did not flush its cache; requests are under way")
            yield

        self.run(flush())

    def _message(self, request: Request, sampling: dict[str, Any]) -> Any:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        settings = {"temperature": 0.0, "ignore_eos": True, **sampling}
        parameters = SamplingParams(max_new_tokens=request.max_new_tokens, **settings)
        parameters.normalize(None)
        return TokenizedGenerateReqInput(
            rid=request.rid,
            input_text="",
            input_ids=array("q", request.prompt_ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=parameters,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )

    def collect(self) -> None:
        """Tie SGLang's request objects to ours."""
        scheduler = self.scheduler
        found = list(scheduler.waiting_queue)
        for batch in (scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch_for_debug):
            found += batch.reqs if batch is not None else []
        if getattr(scheduler, "chunked_req", None) is not None:
            found.append(scheduler.chunked_req)
        by_id = {req.rid: req for req in found}
        for request in self.live:
            request.req = request.req or by_id.get(request.rid)


class _Receiver:
    """Stands where the scheduler would read its socket."""

    IDLE_STEPS = 3
    """Steps without work before the loop is left, so that the scheduler's own checks at idle run."""

    def __init__(self, server: InProcessServer) -> None:
        self.server = server
        self.queue: list[Any] = []
        self.failure: Exception | None = None

    def begin(self, script: Iterator[None], timeout_s: float) -> None:
        """Prepare for one run of the event loop."""
        self.script: Iterator[None] | None = script
        self.deadline = time.monotonic() + timeout_s
        self.idle = 0
        self.failure = None

    def recv_requests(self, local_reqs: list[Any] | None = None) -> list[Any]:
        """Messages for this step; ends the loop once there is nothing left to do."""
        scheduler = self.server.scheduler
        self.server.collect()
        if self.script is not None:
            try:
                next(self.script)
            except StopIteration:
                self.script = None
            except Exception as error:
                self.script, self.failure = None, error
        if time.monotonic() > self.deadline:
            self.failure = TimeoutError("the scheduler was not done in time")
            scheduler.gracefully_exit = True
        # The loop may only be left when no batch is under way: the overlap scheduler holds its result back by one step.
        working = self.queue or scheduler.last_batch is not None or scheduler.waiting_queue
        self.idle = 0 if working or self.script is not None else self.idle + 1
        if self.idle >= self.IDLE_STEPS:
            scheduler.gracefully_exit = True
        messages, self.queue = list(local_reqs or []) + self.queue, []
        return messages
