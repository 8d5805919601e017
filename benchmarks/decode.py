"""`locks-sglang bench decode`: time per output token of SGLang's own model runner, long contexts without their prefill.

Every backend runs in a process of its own, one after the other. There SGLang builds its model runner, KV pool and decode
graphs as in a server, on a model of a published shape with random weights. The KV pool is filled with synthetic keys and
values, summaries are built from it by the build kernel, and requests take their slots from SGLang's allocators as a prefill
does, but without a forward pass. Then decode steps run as in SGLang's one-batch benchmark, every one checked to have replayed
a graph.

Each size is timed twice: `step_ms` and `wall_ms` wait for the device before and after every step (events around it, and the
clock); `token_ms` is the time between the ends of two steps where the host prepares a step while the one before it runs, as
SGLang's overlapping scheduler does. Results are appended to a file of JSON lines.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
import traceback
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ..support import DENSE_BACKENDS
from .kernels import PAGE_SIZE, brief, commit, context_tokens, gpu_refusal, whole

MODELS = Path(__file__).resolve().parent / "models"
LOCKS = "locks"
NONE = "none"
NONE_NAME = "locks_bench_none"
"""What `none` is called within SGLang: a name that no release of it uses."""
DENSE_VARIANT = "dense variant"
"""What attends where `locks` decodes in the dense graph of short contexts."""
GPU_BACKENDS = ("flashinfer", "fa3", "triton")
CONTEXTS = (4096, 16384, 65536, 131072, 262144, 524288, 1048576)
LARGEST_PAGE = 256
"""Tokens of the largest page that SGLang is started with here."""
FEWEST_STEPS = 200
WARM_UP = 10
MEMORY_SHARE = 0.92
"""Of the GPU's memory, for weights, cache and summaries; the rest is for graphs, workspaces and the filling."""
FILL_ELEMENTS = 1 << 25
"""Keys that are made at a time."""
CENTRE_PAGES = 512
"""Pages that fix the centre of the summaries: a prefill chunk of 8,192 tokens."""

OUTLIER_CHANNELS = 4
OUTLIER = 12.0
WAVES = 8
DECAY = 0.85
"""Ratio of the energies of two consecutive components of a page's keys."""


@dataclass(frozen=True)
class Run:
    """What one process measures.

    Attributes:
        model: folder of the model's configuration. backend: name as on the command line.
        contexts, batches: sizes, all combinations. steps: timed steps a size. budget: tokens. rank: of the summaries.
        min_context: tokens below which `locks` decodes dense.
        page_size: SGLang's, for backends other than `locks`; None leaves it to SGLang.
        out: file of results. command: the command that asked. device, dtype: as SGLang takes them.
    """

    model: str
    backend: str
    contexts: list[int]
    batches: list[int]
    steps: int
    budget: int
    rank: int
    out: str
    command: str
    min_context: int = 0
    page_size: int | None = None
    device: str = "cuda"
    dtype: str = "bfloat16"

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(context, batch), small ones first."""
        return [(context, batch) for batch in sorted(set(self.batches)) for context in sorted(set(self.contexts))]


class Shape(NamedTuple):
    """What the cache of a model is made of: layers, KV heads, query heads a KV head, head dimension."""

    layers: int
    heads: int
    group: int
    dim: int

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of keys and values in bf16."""
        return 2 * 2 * self.layers * self.heads * self.dim * tokens


def main(argv: Sequence[str]) -> int:
    """Measure every backend in a process of its own; 1 where something failed, 2 where there is no GPU."""
    parser = _parser()
    given = parser.parse_args(argv)
    if given.steps < FEWEST_STEPS:
        parser.error(f"--steps must be {FEWEST_STEPS} or more, got {given.steps}")
    if given.budget % PAGE_SIZE:
        parser.error(f"--budget must be a multiple of {PAGE_SIZE} tokens, got {given.budget}")
    if len(set(given.backends)) < len(given.backends):
        parser.error("--backends names one twice")
    refusal = gpu_refusal()
    if refusal:
        print(refusal, file=sys.stderr)
        return 2
    begin = end_of_results(parser, given.out)
    command = shlex.join(["locks-sglang", "bench", "decode", *argv])
    failed = []
    for backend in given.backends:
        run = Run(
            str(MODELS / given.model),
            backend,
            given.contexts,
            given.batches,
            given.steps,
            given.budget,
            given.rank,
            str(given.out),
            command,
            given.min_context,
            given.dense_page_size,
        )
        if not _in_child(run, given.timeout):
            failed.append(backend)
    return report(given.out, begin, summary, failed)


def end_of_results(parser: argparse.ArgumentParser, path: Path) -> int:
    """Bytes that a file of results has so far; it is made where it is not there, and the parser told where it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as out:
            return out.tell()
    except OSError as error:
        parser.error(f"--out {path} cannot be written: {error.strerror}")


def report(path: Path, begin: int, summary: Callable[[list[dict[str, Any]]], Iterable[str]], failed: list[str]) -> int:
    """Print what this run added to a file of results from byte `begin` on, and what failed; the exit status."""
    with path.open() as results:
        results.seek(begin)
        rows = [json.loads(line) for line in results]
    for line in summary(rows):
        print(line)
    if failed:
        print(f"failed, or not available here: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="locks-sglang bench decode",
        description="Time per output token of SGLang's model runner with its decode graph, without paying for the prefill.",
    )
    parser.add_argument(
        "--model", choices=models(), default="glm4-9b-1m", help=f"shape: {', '.join(models())}", metavar="MODEL"
    )
    parser.add_argument("--contexts", nargs="+", type=context_tokens, default=list(CONTEXTS), metavar="TOKENS")
    parser.add_argument("--batches", nargs="+", type=whole(1, 256), default=[1], metavar="B")
    names = (LOCKS, *GPU_BACKENDS, NONE)
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=names,
        default=list(names),
        metavar="NAME",
        help=f"{', '.join(names)} (all); {NONE} has no attention at all",
    )
    parser.add_argument("--steps", type=whole(1, 100_000), default=FEWEST_STEPS, metavar="N")
    parser.add_argument("--budget", type=whole(3 * PAGE_SIZE, 1 << 20), default=2048, metavar="TOKENS")
    parser.add_argument("--rank", type=int, choices=(8, 4, 2), default=8)
    parser.add_argument(
        "--min-context", type=whole(0, 1 << 22), default=0, metavar="TOKENS", help=f"below it {LOCKS} decodes dense (0: never)"
    )
    parser.add_argument(
        "--dense-page-size", type=whole(1, LARGEST_PAGE), metavar="TOKENS", help="of the others (SGLang's choice)"
    )
    parser.add_argument("--timeout", type=whole(1, 86_400), default=900, metavar="SECONDS", help="most for a backend (900)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/decode.jsonl"), metavar="FILE")
    return parser


def models() -> list[str]:
    """Names of the shapes in the repository."""
    return sorted(file.parent.name for file in MODELS.glob("*/config.json"))


def shape_of(model: str | Path) -> Shape:
    """Shape of the model whose configuration lies in this folder."""
    config = json.loads((Path(model) / "config.json").read_text())
    heads, queries = config["num_key_value_heads"], config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // queries
    return Shape(config["num_hidden_layers"], heads, queries // heads, dim)


def tokens_needed(context: int, batch: int, steps: int) -> int:
    """Slots of one size: its requests with all that they decode, each in pages of its own, whatever page size SGLang has."""
    return batch * -(-(context + WARM_UP + steps) // LARGEST_PAGE) * LARGEST_PAGE


def largest_context(tokens: int, batch: int, steps: int) -> int:
    """Most tokens of context that a pool of so many slots has room for; 0 if none."""
    slots = tokens // batch // LARGEST_PAGE * LARGEST_PAGE
    return max((slots - WARM_UP - steps) // PAGE_SIZE * PAGE_SIZE, 0)


def percentiles(milliseconds: Sequence[float]) -> dict[str, float]:
    """Median, tenth, ninetieth and ninety-ninth percentile, and the largest."""
    ordered = sorted(milliseconds)
    picks = {"p50": 0.5, "p10": 0.1, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[round(part * (len(ordered) - 1))], 4) for name, part in picks.items()}


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line a size: the fastest dense backend, `locks`, and the step without attention, in milliseconds a token."""
    lines = []
    for context, batch in sorted({(row["context"], row["batch"]) for row in rows}, key=lambda size: (size[1], size[0])):
        found = {row["backend"]: row["token_ms"]["p50"] for row in rows if (row["context"], row["batch"]) == (context, batch)}
        dense = min((name for name in found if name in DENSE_BACKENDS), key=found.__getitem__, default=None)
        parts = [f"context {context} batch {batch}:"]
        if dense is not None:
            parts.append(f"dense {found[dense]:.3f} ({dense})")
        parts += [f"{name} {found[name]:.3f}" for name in (LOCKS, NONE) if name in found]
        if dense is not None and LOCKS in found:
            parts.append(f"ratio {found[dense] / found[LOCKS]:.3f}")
            if NONE in found and found[dense] > found[NONE]:
                parts.append(f"of attention saved {(found[dense] - found[LOCKS]) / (found[dense] - found[NONE]):.1%}")
        lines.append(" ".join(parts))
    return lines


def _in_child(run: Run, timeout: int) -> bool:
    """Measure one backend in a new process; whether all of it went well."""
    command = [sys.executable, "-m", "locks_sglang.benchmarks.decode", json.dumps(asdict(run))]
    print(f"{run.backend}: starting", flush=True)
    began = time.monotonic()
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=timeout).returncode
    except subprocess.TimeoutExpired:
        print(f"{run.backend}: stopped after {timeout} s", flush=True)
        return False
    print(f"{run.backend}: {time.monotonic() - began:.0f} s, {'done' if code == 0 else f'ended with code {code}'}", flush=True)
    return code == 0


# --- synthetic keys ---------------------------------------------------------------------------------------------------------


def synthetic_keys(pages: Any, heads: int, dim: int, layer: int, generator: Any) -> Any:
    """Keys as a cache holds them: channels with a constant outlier, a mean that drifts slowly from page to page, and a page's
    own spread, whose energy falls from component to component.

    Spread and drift have variance 1 an element, so that queries of unit variance give logits of about that spread. The channels
    and the drift are those of the layer, in every process; the spread comes from `generator`.

    Args:
        pages: int64 [n], page numbers, on the generator's device.

    Returns:
        fp32 [n, PAGE_SIZE, heads, dim].
    """
    import torch

    device = pages.device
    of_layer = torch.Generator().manual_seed(layer)
    outlier = torch.zeros(heads, dim)
    channels = torch.rand(heads, dim, generator=of_layer).topk(OUTLIER_CHANNELS, dim=1).indices
    size = torch.rand(heads, OUTLIER_CHANNELS, generator=of_layer) + 0.5
    sign = torch.randint(2, size.shape, generator=of_layer) * 2 - 1
    outlier.scatter_(1, channels, OUTLIER * size * sign)
    waves = torch.randn(WAVES, heads * dim, generator=of_layer) * (2 / WAVES) ** 0.5
    phase = torch.rand(WAVES, generator=of_layer) * 6.28
    speed = 6.28 / torch.logspace(1.5, 4.5, WAVES)
    angle = pages[:, None].float() * speed.to(device) + phase.to(device)
    mean = (angle.sin() @ waves.to(device)).view(-1, 1, heads, dim) + outlier.to(device)
    energy = DECAY ** torch.arange(PAGE_SIZE, dtype=torch.float32, device=device)
    weight = (energy / energy.sum()).sqrt()
    coefficients = torch.randn(len(pages), heads, PAGE_SIZE, PAGE_SIZE, device=device, generator=generator) * weight
    components = torch.randn(len(pages), heads, PAGE_SIZE, dim, device=device, generator=generator)
    return (coefficients @ components).transpose(1, 2) + mean


def fill(kv_pool: Any, layers: Sequence[int], pages: Any, seed: int) -> None:
    """Write synthetic keys and normal values into these 16-token pages, int64 [n], of every layer."""
    import torch

    for layer in layers:
        keys, values = kv_pool.get_key_buffer(layer), kv_pool.get_value_buffer(layer)
        slots, heads, dim = keys.shape
        generator = torch.Generator(device=keys.device).manual_seed(seed * len(layers) + layer)
        for part in pages.split(max(1, FILL_ELEMENTS // (PAGE_SIZE * heads * dim))):
            made = synthetic_keys(part, heads, dim, layer, generator).flatten(0, 1).to(keys.dtype)
            at = (part[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=part.device)).flatten()
            # SGLang's pool need not end with a whole page of ours.
            inside = int((at < slots).sum()) if int(part[-1] + 1) * PAGE_SIZE > slots else len(at)
            keys[at[:inside]] = made[:inside]
            shape = (inside, heads, values.shape[2])
            values[at[:inside]] = torch.randn(shape, device=keys.device, generator=generator).to(values.dtype)


def scale_weights(model: Any) -> None:
    """Random weights as a trained model has them in size: SGLang's dummies are so small that all queries are nearly zero.

    Norms become 1, matrices keep the variance of what they multiply. So queries have unit variance, and neither page scores nor
    attention weights are all alike, which would make some kernels faster and others slower than they are.
    """
    import torch

    for name, weight in model.named_parameters():
        if not torch.is_floating_point(weight):
            continue
        if weight.dim() == 1:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            weight.normal_(0.0, weight.shape[-1] ** -0.5)


# --- a child process --------------------------------------------------------------------------------------------------------


class Clock:
    """Marks in time on a device's stream; on CPU the host's clock."""

    def __init__(self, device: str) -> None:
        import torch

        self._cuda = torch.cuda if device != "cpu" else None

    def mark(self) -> Any:
        """The present point of the stream."""
        if self._cuda is None:
            return time.perf_counter()
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Any = None) -> None:
        """Until the device has come to `mark`, or to the end of its work."""
        if self._cuda is not None:
            self._cuda.synchronize() if mark is None else mark.synchronize()

    def between(self, begin: Any, end: Any) -> float:
        """Milliseconds from one mark that the device has passed to another."""
        return 1e3 * (end - begin) if self._cuda is None else float(begin.elapsed_time(end))


class CheckError(RuntimeError):
    """A step did not do what it is timed for."""


class Decoder:
    """SGLang's scheduler of one backend in this process, its pool filled, and decode steps on it.

    Args:
        run: what to measure.
    """

    def __init__(self, run: Run) -> None:
        import torch

        from ..inprocess import InProcessServer

        self.run = run
        self.began = time.monotonic()
        self.clock = Clock(run.device)
        if run.backend == NONE:
            register_none()
        self.server = InProcessServer(run.model, **server_arguments(run))
        self.runner = self.server.runner
        self.pool = self.server.kv_pool
        self.allocator = self.server.scheduler.token_to_kv_pool_allocator
        self.tokens = int(self.runner.max_total_num_tokens)
        self.layers = list(range(self.pool.start_layer, self.pool.start_layer + self.pool.layer_num))
        self.summaries = self.server.backend.summaries if run.backend == LOCKS else None
        self._fills = 0
        self.say(f"SGLang is up, cache of {self.tokens} tokens")
        with torch.inference_mode():
            self._prepare()

    def _prepare(self) -> None:
        """Fill weights and cache."""
        import torch

        scale_weights(self.runner.model)
        keys = self.pool.get_key_buffer(self.layers[0])
        # Where SGLang's pages are as large as ours, the first one is its padding.
        first = 1 if self.allocator.page_size >= PAGE_SIZE else 0
        self.refill(torch.arange(first, -(-keys.shape[0] // PAGE_SIZE), device=keys.device))
        self.clock.wait()
        self.say("cache filled" + (" and summarised" if self.summaries else ""))

    def say(self, text: str) -> None:
        """A line of progress with the seconds since the start."""
        print(f"{self.run.backend}: {time.monotonic() - self.began:.1f} s: {text}", flush=True)

    def refill(self, pages: Any) -> None:
        """Make synthetic keys and values of these 16-token pages int64 [n], and their summaries as a prefill builds them."""
        self._fills += 1
        fill(self.pool, self.layers, pages, self._fills)
        if self.summaries is None:
            return
        pages = pages[pages < self.summaries.num_pages]
        self.summaries.first_write(pages)
        self.summaries.count_builds(pages)
        for layer in self.layers:
            for part in (pages[:CENTRE_PAGES], pages[CENTRE_PAGES:]):
                self.summaries.build_centred(layer, part)

    def measure(self, context: int, batch: int) -> dict[str, Any]:
        """Time one size: what a row of results says of it.

        Raises:
            CheckError: a step ran outside a graph, or read other pages than it should.
        """
        before = self._counted()
        each_step = self._steps(context, batch, overlapped=False)
        overlapped = self._steps(context, batch, overlapped=True)
        row = {
            "page_size": self.allocator.page_size,
            "steps": self.run.steps,
            "token_ms": percentiles(overlapped["token_ms"]),
            "step_ms": percentiles(each_step["step_ms"]),
            "wall_ms": percentiles(each_step["wall_ms"]),
            "memory": self._memory(),
        }
        if self.summaries is not None:
            row |= self._checked(before, self._counted(), context, batch)
        return row

    def _steps(self, context: int, batch: int, *, overlapped: bool) -> dict[str, list[float]]:
        """Decode `run.steps` tokens of new requests, after some to warm up: milliseconds of every step."""
        import torch
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        clock = self.clock
        times: list[tuple[float, Any, Any, float]] = []
        requests = self._requests(context, batch)
        tokens = torch.ones(batch, dtype=torch.int64, device=self.runner.device)
        try:
            clock.wait()
            for number in range(WARM_UP + self.run.steps):
                if not overlapped:
                    clock.wait()
                elif number > 1:
                    # SGLang's scheduler looks at a step's result before it prepares the next but one.
                    clock.wait(times[-2][2])
                wall = time.perf_counter()
                begin = clock.mark()
                requests.input_ids = tokens
                requests.prepare_for_decode()
                forward = ForwardBatch.init_new(requests, self.runner, return_hidden_states_before_norm=False)
                output = self.runner.forward(forward)
                self.runner.sample(output.logits_output, forward)
                end = clock.mark()
                if not overlapped:
                    clock.wait()
                times.append((wall, begin, end, time.perf_counter()))
                if self.run.device != "cpu" and not output.can_run_graph:
                    raise CheckError(f"step {number} ran without a decode graph")
            clock.wait()
        finally:
            self._release(requests, context)
        timed = times[WARM_UP:]
        if overlapped:
            ends = [end for _, _, end, _ in times[WARM_UP - 1 :]]
            return {"token_ms": [clock.between(first, second) for first, second in pairwise(ends)]}
        return {
            "step_ms": [clock.between(begin, end) for _, begin, end, _ in timed],
            "wall_ms": [1e3 * (after - wall) for wall, _, _, after in timed],
        }

    def _requests(self, context: int, batch: int) -> Any:
        """A `ScheduleBatch` of requests that have their slots as after the prefill of `context` tokens."""
        from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
        from sglang.srt.sampling.sampling_params import SamplingParams
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        sampling = SamplingParams(temperature=0.0, max_new_tokens=WARM_UP + self.run.steps)
        sampling.normalize(None)
        made = []
        for number in range(batch):
            prompt = array("q", [1]) * context
            request = Req(rid=f"bench-{number}", origin_input_text="", origin_input_ids=prompt, sampling_params=sampling)
            request.full_untruncated_fill_ids = request.origin_input_ids
            request.logprob_start_len = -1
            if hasattr(request, "set_extend_range"):
                request.set_extend_range(0, context)
            else:
                request.extend_end = context
            made.append(request)
        requests = ScheduleBatch.init_new(
            reqs=made,
            req_to_token_pool=self.runner.req_to_token_pool,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.server.tree,
            model_config=self.runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        requests.prepare_for_extend()
        return requests

    def _release(self, requests: Any, context: int) -> None:
        """Free the slots of all requests, and make the pages that they decoded into synthetic ones again."""
        table = self.runner.req_to_token_pool.req_to_token
        slots = table[requests.req_pool_indices, context : int(requests.seq_lens_cpu[0])]
        self.refill((slots.long().flatten() // PAGE_SIZE).unique())
        self.runner.req_to_token_pool.clear()
        self.allocator.clear()

    def _counted(self) -> dict[str, Any]:
        return {} if self.summaries is None else self.summaries.counters.snapshot()

    def _checked(self, before: dict[str, Any], after: dict[str, Any], context: int, batch: int) -> dict[str, Any]:
        """Counts of the steps of one size, which must be exactly these.

        Raises:
            CheckError: they are not.
        """
        from ..backend import attends_with

        passes, budget, backend = 2, self.run.budget // PAGE_SIZE, self.server.backend
        lengths = range(context + 1, context + WARM_UP + self.run.steps + 1)
        held = [-(-length // PAGE_SIZE) for length in lengths if not backend.config.runs_dense([length])]
        short = len(lengths) - len(held)
        wanted = {
            "sparse_rows": passes * batch * len(held),
            "pages_held": passes * batch * sum(held),
            "pages_read": passes * batch * sum(min(pages, budget) for pages in held),
        }
        counted = {name: after[name] - before[name] for name in wanted}
        if counted != wanted:
            raise CheckError(f"counted {counted}, must be {wanted}")
        dense = Counter(after["dense_rows"])
        dense.subtract(before["dense_rows"])
        if +dense != +Counter(short=passes * batch * short):
            raise CheckError(f"rows ran dense: {dict(+dense)}, must be {passes * batch * short} short ones")
        if after["invalid_pages"]:
            raise CheckError(f"{after['invalid_pages']} pages met without a summary")
        return {
            "counted": counted | {"dense_rows": dict(+dense), "invalid_pages": after["invalid_pages"]},
            "settings": asdict(backend.config),
            "attend": ", then ".join([DENSE_VARIANT] * (short > 0) + [attends_with(backend, batch)] * (len(held) > 0)),
        }

    def _memory(self) -> dict[str, int]:
        """Bytes: cache, summaries, weights, and all that is in use on the device."""
        import torch

        buffers = [get(layer) for layer in self.layers for get in (self.pool.get_key_buffer, self.pool.get_value_buffer)]
        sizes = {
            "cache": sum(buffer.numel() * buffer.element_size() for buffer in buffers),
            "summaries": self.summaries.nbytes if self.summaries is not None else 0,
            "weights": sum(weight.numel() * weight.element_size() for weight in self.runner.model.parameters()),
        }
        if self.run.device != "cpu":
            free, total = torch.cuda.mem_get_info()
            sizes["device"] = total - free
        return sizes


def server_arguments(run: Run) -> dict[str, Any]:
    """SGLang's arguments for one process."""
    longest = max(run.contexts) + WARM_UP + run.steps + PAGE_SIZE
    config = json.loads((Path(run.model) / "config.json").read_text())
    arguments: dict[str, Any] = {
        "attention_backend": NONE_NAME if run.backend == NONE else run.backend,
        "device": run.device,
        "dtype": run.dtype,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "context_length": longest,
        # Rotary tables reach as far as the steps do, also where the model was published for less.
        "json_model_override_args": json.dumps({"max_position_embeddings": max(longest, config["max_position_embeddings"])}),
        "max_total_tokens": max(tokens_needed(context, batch, run.steps) for context, batch in run.sizes),
        "max_running_requests": max(run.batches),
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        "cuda_graph_backend_prefill": "disabled",
        "log_level": "warning",
    }
    if run.backend == LOCKS:
        arguments |= {"locks_budget_tokens": run.budget, "locks_rank": run.rank, "locks_min_context_tokens": run.min_context}
    elif run.page_size is not None:
        arguments["page_size"] = run.page_size
    if run.device != "cpu":
        arguments |= {"mem_fraction_static": MEMORY_SHARE, "cuda_graph_bs_decode": sorted(set(run.batches))}
    return arguments


def register_none() -> None:
    """Make `none` known to SGLang in this process: a backend that stores keys and values and attends to nothing."""
    import torch
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.server_args import add_attention_backend_choices

    class NoAttention(AttentionBackend):
        """Its output is zeros that were made before, so that nothing is launched for it, in graphs or outside."""

        def __init__(self, runner: Any) -> None:
            super().__init__()
            self.kv_pool = runner.token_to_kv_pool
            self.zeros = torch.empty(0)

        def init_forward_metadata(self, forward_batch: Any) -> None:
            """Nothing to plan."""

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
            """Nothing to plan."""

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            """Nothing to allocate: the runs before a capture have made the zeros."""

        def get_cuda_graph_seq_len_fill_value(self) -> int:
            """Length of padded rows."""
            return 1

        def forward_decode(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
        ) -> Any:
            """Zeros [B, Hq * Dv]."""
            if save_kv_cache and k is not None:
                self.kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
            rows, width = q.shape[0], layer.tp_q_head_num * layer.v_head_dim
            if self.zeros.shape[0] < rows:
                self.zeros = torch.zeros(rows, width, dtype=q.dtype, device=q.device)
            return self.zeros[:rows]

        forward_extend = forward_decode

    register_attention_backend(NONE_NAME)(NoAttention)
    add_attention_backend_choices([NONE_NAME])


def measure(run: Run) -> bool:
    """Measure one backend in this process, appending a row for every size; whether none failed."""
    import torch

    facts = machine(run.model, run.backend, run.device, run.command)
    good = True
    decoder = Decoder(run)
    with torch.inference_mode():
        for context, batch in run.sizes:
            size = f"context {context} batch {batch}"
            if tokens_needed(context, batch, run.steps) > decoder.tokens:
                needed = shape_of(run.model).cache_bytes(tokens_needed(context, batch, run.steps)) / 2**30
                largest = largest_context(decoder.tokens, batch, run.steps)
                decoder.say(f"{size}: skipped, its cache needs {needed:.1f} GiB; the largest context that fits is {largest}")
                continue
            try:
                row = decoder.measure(context, batch)
            except Exception as error:
                traceback.print_exc()
                decoder.say(f"{size}: failed: {type(error).__name__}: {brief(error)}")
                good = False
                continue
            decoder.say(
                f"{size}: {row['token_ms']['p50']:.3f} ms a token (p99 {row['token_ms']['p99']:.3f}), "
                f"step alone {row['step_ms']['p50']:.3f} (p99 {row['step_ms']['p99']:.3f}), "
                f"by the clock {row['wall_ms']['p50']:.3f}"
            )
            with Path(run.out).open("a") as out:
                out.write(json.dumps({**facts, "context": context, "batch": batch, **row}) + "\n")
    return good


def machine(model: str, backend: str, device: str, command: str) -> dict[str, Any]:
    """What every row of one process says: the model, the backend, and where it was measured with what.

    Args:
        model: folder of the configuration. backend: name as on the command line. device: as SGLang takes it.
        command: the command that asked.
    """
    import torch

    from .. import __version__

    versions = {}
    for name in ("sglang", "torch", "triton", "flashinfer-python"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "model": Path(model).name,
        "shape": shape_of(model)._asdict(),
        "backend": backend,
        "gpu": torch.cuda.get_device_name() if device != "cpu" else "none",
        "versions": versions,
        "version": __version__,
        "commit": commit(),
        "command": command,
    }


def child(text: str) -> int:
    """Entry of a child process: a `Run` as JSON."""
    try:
        return 0 if measure(Run(**json.loads(text))) else 1
    except Exception as error:
        traceback.print_exc()
        print(f"failed: {type(error).__name__}: {brief(error)}", flush=True)
        return 1


if __name__ == "__main__":
    ended = child(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    # SGLang's threads and sockets would hold the process, and with it the GPU's memory.
    os._exit(ended)
