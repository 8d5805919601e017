"""Which pages each KV head reads while one real request is answered: `locks-sglang eval map`.

The request runs on SGLang's scheduler in this process, with decode graphs off: in a graph every layer's choice of pages lies in
a buffer that the next layer overwrites. What is chosen does not depend on that, and a server's hot path stays as it is.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..benchmarks.kernels import commit
from ..config import load_config
from ..inprocess import InProcessServer
from ..kernels.common import PAGE_SIZE
from . import ATTENTION_MAP
from .capture import SPARE_TOKENS, TIMEOUT_S, CaptureError, cpu_arguments
from .serving import ServedText, read_text


class ReadCounts:
    """How often every page was read, counted on the device without waiting for it.

    Args:
        layer_ids: layers of the model. heads: H. pages: N, most pages that the request will have.

    Attributes:
        reads: int64 [L, H, N + 1], decode steps that read the page; the last column takes the padding of the choices.
        steps: decode steps seen.
    """

    def __init__(self, layer_ids: Sequence[int], heads: int, pages: int, device: torch.device) -> None:
        self._first = layer_ids[0]
        self.reads = torch.zeros(len(layer_ids), heads, pages + 1, dtype=torch.int64, device=device)
        self.steps = 0

    def add(self, layer_id: int, pages: torch.Tensor) -> None:
        """One layer of a step of one request: pages int32 [1, H, S] as `select_pages` returns them."""
        padding = self.reads.shape[2] - 1
        chosen = torch.where(pages[0] < 0, padding, pages[0]).long()
        self.reads[layer_id - self._first].scatter_add_(1, chosen, torch.ones_like(chosen))
        self.steps += layer_id == self._first


@dataclass(frozen=True)
class AttentionMap:
    """Reads of one request.

    Args:
        prompt_ids, answer_ids: tokens. steps: decode steps; the last token of an answer is not stored, so there is one step
            less than there are tokens.
        reads: int64 [L, H, N], steps in which the KV head read the page.
    """

    prompt_ids: list[int]
    answer_ids: list[int]
    steps: int
    reads: torch.Tensor

    @property
    def held(self) -> list[int]:
        """Steps in which the request had page n, for each of the N pages: fewer than `steps` where the answer made the page."""
        lengths = range(len(self.prompt_ids) + 1, len(self.prompt_ids) + self.steps + 1)
        return [sum(length > page * PAGE_SIZE for length in lengths) for page in range(self.reads.shape[2])]

    def texts(self, tokenizer: Any) -> list[str]:
        """Text of every page."""
        stored = [*self.prompt_ids, *self.answer_ids][: len(self.prompt_ids) + self.steps]
        return [tokenizer.decode(stored[at : at + PAGE_SIZE]) for at in range(0, len(stored), PAGE_SIZE)]


def prompt_of(text: ServedText, question: str) -> list[int]:
    """Token ids of the request: the text, to be continued, or the text and a question about it in the model's chat format."""
    if not question:
        return text.ids
    content = text.tokenizer.decode(text.ids, skip_special_tokens=True) + "\n\n" + question
    if text.tokenizer.chat_template is None:
        return list(text.tokenizer.encode(content))
    messages = [{"role": "user", "content": content}]
    chat = text.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(text.tokenizer.encode(chat, add_special_tokens=False))


def start(text: ServedText, prompt_tokens: int, new_tokens: int, budget: int | None) -> InProcessServer:
    """A server for one request, which decodes sparse, eagerly and without overlap, so that steps and tokens agree.

    Raises:
        CaptureError: the request does not fit the model's context.
    """
    server = InProcessServer(
        text.model,
        device=text.device,
        attention_backend="locks",
        max_running_requests=1,
        max_total_tokens=prompt_tokens + new_tokens + SPARE_TOKENS,
        disable_overlap_schedule=True,
        cuda_graph_backend_decode="disabled",
        locks_min_context_tokens=0,
        log_level="warning",
        **({} if budget is None else {"locks_budget_tokens": budget}),
        **(cpu_arguments(prompt_tokens) if text.device == "cpu" else {}),
    )
    context = server.scheduler.model_config.context_len
    if prompt_tokens + new_tokens > context:
        raise CaptureError(
            f"{prompt_tokens} tokens and {new_tokens} new ones do not fit the model's context of {context}; lower --tokens"
        )
    return server


@contextmanager
def counted(backend: Any, counts: ReadCounts) -> Iterator[None]:
    """Count what every layer of every decode step chooses."""
    step = backend._step

    def count(q: torch.Tensor, layer: Any, plan: Any) -> Any:
        done = step(q, layer, plan)
        counts.add(layer.layer_id, done.pages)
        return done

    backend._step = count
    try:
        yield
    finally:
        del backend._step


def record(server: InProcessServer, prompt_ids: list[int], new_tokens: int) -> AttentionMap:
    """Answer one request greedily, to its end or up to `new_tokens`, and count the pages that each KV head reads.

    Raises:
        CaptureError: the answer had no decode step, or steps and tokens do not agree.
    """
    summaries = server.backend.summaries
    pages = -(-(len(prompt_ids) + new_tokens) // PAGE_SIZE)
    counts = ReadCounts(summaries.layer_ids, summaries.center.shape[1], pages, summaries.valid.device)
    with counted(server.backend, counts):
        request = server.submit(prompt_ids, max_new_tokens=new_tokens, ignore_eos=False)
        server.run(timeout_s=TIMEOUT_S)
    answer = request.output_ids
    if counts.steps == 0 or counts.steps != len(answer) - 1:
        raise CaptureError(f"{counts.steps} decode steps were seen for an answer of {len(answer)} tokens; one less is needed")
    held = -(-(len(prompt_ids) + counts.steps) // PAGE_SIZE)
    return AttentionMap(prompt_ids, answer, counts.steps, counts.reads[..., :held].cpu())


def run(given: argparse.Namespace) -> int:
    """`locks-sglang eval map`: answer, count, write the file. Options as `cli` parses them; nothing of the text is printed.

    Raises:
        ConfigError: a budget that the product would refuse. TextError, ModelError: see `read_text`. CaptureError: see `record`.
    """
    if given.budget is not None:
        dataclasses.replace(load_config().config, budget_tokens=given.budget)
    text = read_text(given)
    prompt_ids = prompt_of(text, given.question)
    began = time.monotonic()
    server = start(text, len(prompt_ids), given.new_tokens, given.budget)
    made = record(server, prompt_ids, given.new_tokens)
    layers, heads, pages = made.reads.shape
    chosen = min(server.backend.config.budget_pages, pages)
    never = int((made.reads.sum((0, 1)) == 0).sum())
    print(
        f"{len(prompt_ids)} prompt tokens, {len(made.answer_ids)} of the answer: {layers} layers x {heads} KV heads chose "
        f"{chosen} of {pages} pages in each of {made.steps} steps; {never} pages were never read"
    )
    result = {
        "kind": ATTENTION_MAP,
        **text.identity(server),
        "commit": commit(),
        "command": given.command,
        "seconds": round(time.monotonic() - began, 1),
        "settings": dataclasses.asdict(server.backend.config),
        "page_tokens": PAGE_SIZE,
        "prompt_tokens": len(prompt_ids),
        "question": given.question,
        "answer": text.tokenizer.decode(made.answer_ids, skip_special_tokens=True),
        "steps": made.steps,
        "layers": list(server.backend.summaries.layer_ids),
        "kv_heads": heads,
        "held": made.held,
        "pages": made.texts(text.tokenizer),
        "reads": made.reads.tolist(),
    }
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(result, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    return 0
