"""`locks-sglang bench KERNEL`: time of every kernel a layer, on the GPU of this machine.

Each operation is captured in a CUDA graph and replayed with a cold L2 cache; CUDA events stand around the replay alone. Results
are appended to a file of JSON lines. Letters as in `locks_sglang.ops`.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..support import HEAD_DIMS, LARGEST_GROUP

PAGE_SIZE = 16
KERNELS = ("scan", "select", "attend", "tail", "merge", "build")
SHAPES = ("4,8,128", "8,4,128")
CONTEXTS = (16384, 65536, 131072, 262144, 524288, 1048576)
MOST_TOKENS = 1 << 22
COLD_BYTES = 256 << 20
"""Written between two replays: five times the L2 cache of an H200."""
COPY_BYTES = 1 << 30
FEWEST_REPLAYS = 30


class Shape(NamedTuple):
    """KV heads, query heads a KV head, head dimension of keys and values."""

    heads: int
    group: int
    dim: int


class Timing(NamedTuple):
    """Microseconds of one replay: median, tenth and ninetieth percentile."""

    median: float
    p10: float
    p90: float


class Operation(NamedTuple):
    """One call to be timed, and the bytes that it must at least read and write."""

    name: str
    call: Callable[[], Any]
    bytes_moved: int


def main(argv: Sequence[str] | None = None) -> int:
    """Time what the arguments name; 2 where there is no GPU to do it on."""
    parser = _parser()
    arguments = sys.argv[1:] if argv is None else list(argv)
    given = parser.parse_args(arguments)
    refusal = gpu_refusal()
    if refusal:
        print(refusal, file=sys.stderr)
        return 2
    try:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        with given.out.open("a") as out:
            for row in measure(given, shlex.join(["locks-sglang", "bench", *arguments])):
                out.write(json.dumps(row) + "\n")
                out.flush()
    except OSError as error:
        parser.error(f"--out {given.out} cannot be written: {error.strerror}")
    return 0


def gpu_refusal() -> str:
    """Why nothing can be measured on this machine, "" where it can."""
    try:
        import torch
    except ImportError as error:
        return f"locks-sglang bench needs torch, which cannot be imported: {error}"
    from ..kernels.common.capability import COMPUTE_CAPABILITY

    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "locks-sglang bench needs an NVIDIA GPU, and torch finds none; nothing was measured"
    if torch.cuda.get_device_capability() < COMPUTE_CAPABILITY:
        wanted = ".".join(map(str, COMPUTE_CAPABILITY))
        return f"locks-sglang bench needs a GPU of compute capability {wanted} or more, {torch.cuda.get_device_name()} is older"
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="locks-sglang bench",
        description="Time the kernels on this machine's GPU.",
        epilog="`locks-sglang bench decode --help`: time per token of whole models; `bench serve --help`: the real server.",
    )
    parser.add_argument("kernel", choices=(*KERNELS, "all"), metavar="KERNEL", help=", ".join((*KERNELS, "all")))
    parser.add_argument("--shapes", nargs="+", type=_shape, default=[_shape(x) for x in SHAPES], metavar="H,G,D")
    parser.add_argument("--contexts", nargs="+", type=context_tokens, default=list(CONTEXTS), metavar="TOKENS")
    parser.add_argument("--batches", nargs="+", type=whole(1, 256), default=[1, 8], metavar="B")
    parser.add_argument("--rank", type=int, choices=(8, 4, 2), default=8)
    parser.add_argument("--budget", type=whole(3, 1 << 16), default=128, metavar="PAGES", help="pages attended (128)")
    parser.add_argument("--tail", choices=("qmu", "flat", "off"), default="qmu", help="tail correction (qmu)")
    parser.add_argument("--replays", type=whole(FEWEST_REPLAYS, 10_000), default=50, metavar="N")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kernels.jsonl"), metavar="FILE")
    return parser


def whole(least: int, most: int) -> Callable[[str], int]:
    """Type of an argument: a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, got {text!r}")
        return int(text)

    return parse


def context_tokens(text: str) -> int:
    """Type of an argument: tokens that fill pages."""
    tokens = whole(PAGE_SIZE, MOST_TOKENS)(text)
    if tokens % PAGE_SIZE:
        raise argparse.ArgumentTypeError(f"must be a multiple of {PAGE_SIZE} tokens, got {text!r}")
    return tokens


def _shape(text: str) -> Shape:
    try:
        shape = Shape(*map(int, text.split(",")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"must be KV heads,group,head dimension such as 8,4,128, got {text!r}") from None
    if not (1 <= shape.heads <= 128 and 1 <= shape.group <= LARGEST_GROUP and shape.dim in HEAD_DIMS):
        raise argparse.ArgumentTypeError(
            f"takes 1 to 128 KV heads, groups of 1 to {LARGEST_GROUP} and head dimensions {', '.join(map(str, HEAD_DIMS))}, "
            f"got {text!r}"
        )
    return shape


def measure(given: argparse.Namespace, command: str) -> Iterator[dict[str, Any]]:
    """Time every operation at every size that fits into memory: one result a step, printed too."""
    import torch
    import triton

    from .. import __version__

    cold = torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda")
    bandwidth = copy_bandwidth(cold, given.replays)
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "version": __version__,
        "commit": commit(),
        "command": command,
    }
    print(f"{machine['gpu']}: copies {bandwidth / 1e6:.2f} TB/s")
    for shape in given.shapes:
        for context in given.contexts:
            for batch in given.batches:
                needed, free = _bytes_needed(shape, context, batch, given.rank), torch.cuda.mem_get_info()[0]
                size = f"H {shape.heads} G {shape.group} D {shape.dim} rank {given.rank} context {context} batch {batch}"
                if needed > 0.9 * free:
                    print(f"{size}: skipped, needs {needed / 2**30:.0f} GiB of {free / 2**30:.0f} GiB free")
                    continue
                for operation in operations(given.kernel, shape, context, batch, given.rank, given.budget, given.tail):
                    try:
                        time = replayed(operation.call, cold, given.replays)
                    except RuntimeError as error:
                        if not operation.name.endswith("top_k"):
                            raise
                        # A yardstick of another package, which may not be made for capture.
                        print(f"{size}: {operation.name} cannot be timed: {brief(error)}")
                        continue
                    share = operation.bytes_moved / time.median / bandwidth
                    print(
                        f"{size}: {operation.name} {time.median:.1f} us ({time.p10:.1f} to {time.p90:.1f}), "
                        f"{operation.bytes_moved / 2**20:.2f} MiB, {share:.1%} of copy bandwidth",
                        flush=True,
                    )
                    yield {
                        "kernel": operation.name,
                        **shape._asdict(),
                        "rank": given.rank,
                        "context": context,
                        "batch": batch,
                        "budget_pages": given.budget,
                        "tail": given.tail,
                        "us": round(time.median, 2),
                        "us_p10": round(time.p10, 2),
                        "us_p90": round(time.p90, 2),
                        "replays": given.replays,
                        "bytes": operation.bytes_moved,
                        "copy_share": round(share, 4),
                        "copy_bytes_per_us": round(bandwidth),
                        **machine,
                    }
                torch.cuda.empty_cache()


def replayed(call: Callable[[], Any], cold: Any, replays: int) -> Timing:
    """Capture `call` in a CUDA graph and time its replays, `cold` being written before each."""
    import torch

    # What is compiled or allocated at the first call must not be captured.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for begin, end in events:
        cold.zero_()
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(1e3 * begin.elapsed_time(end) for begin, end in events)
    return Timing(*(times[round(part * (replays - 1))] for part in (0.5, 0.1, 0.9)))


def copy_bandwidth(cold: Any, replays: int) -> float:
    """Bytes read and written a microsecond by the faster of two ways to go over one GiB.

    In a graph a plain copy is left to a copy engine, which is slower than a kernel that reads and writes as much.
    """
    import torch

    source = torch.zeros(COPY_BYTES // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source)), (lambda: torch.neg(source, out=target))
    return 2 * COPY_BYTES / min(replayed(way, cold, replays).median for way in ways)


def operations(kernel: str, shape: Shape, context: int, batch: int, rank: int, budget: int, tail: str) -> Iterator[Operation]:
    """Each named operation on random keys; every one reads what the one before it in a decode step leaves."""
    import torch

    from ..kernels.build_page_summaries import PageSummaries, RecordLayout, build
    from ..kernels.page_lse import scan
    from ..kernels.select_pages import page_keys, top_pages
    from ..kernels.sparse_decode import attend_parts, merge_parts, sum_tail

    heads, group, dim = shape
    each = context // PAGE_SIZE
    total, scale = each * batch + 1, dim**-0.5
    torch.manual_seed(0)
    layout = RecordLayout(dim, dim, rank)
    k, v = (torch.empty(total * PAGE_SIZE, heads, dim, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(2))
    record, values = layout.empty(total, heads, device="cuda")
    valid = torch.zeros(total, dtype=torch.bool, device="cuda")
    s = PageSummaries(layout, valid, torch.zeros(heads, dim, device="cuda"), record, values)
    # Page 0 is the one that padding writes to.
    table = (torch.randperm(total - 1, device="cuda") + 1).view(batch, each).int()
    lens = torch.full((batch,), context, device="cuda")
    held = torch.full((batch,), each, device="cuda", dtype=torch.int32)
    q = torch.randn(batch, heads * group, dim, device="cuda").bfloat16()
    pages = table.flatten()
    build(k, v, pages, s.center, record, values, valid, layout)

    def wanted(name: str) -> bool:
        return kernel in (name, "all")

    kept = min(budget, each)
    rows, summaries = batch * heads, batch * each * heads
    if wanted("build"):
        moved = summaries * (2 * PAGE_SIZE * 2 * dim + layout.summary_bytes)
        yield Operation("build", lambda: build(k, v, pages, s.center, record, values, valid, layout), moved)
    scores = scan(q, s, table, held, scale, seq_lens=lens, logit_cap=0.0, tail=tail)
    if wanted("scan"):
        written = 4 * summaries * (group if tail == "off" else 2 * group + 1)
        yield Operation(
            "scan",
            lambda: scan(q, s, table, held, scale, seq_lens=lens, logit_cap=0.0, tail=tail),
            summaries * (layout.record_bytes + 4) + written,
        )
    settings = (scores.lse, scores, held, 1, 1, heads, "mass")
    indices = torch.empty(rows * kept + budget, dtype=torch.int32, device="cuda")
    tailed = tail != "off"
    weight = scores.weight if tailed else None
    chosen, counts = top_pages(page_keys(*settings), budget, weight=weight)
    if wanted("select"):
        moved = 4 * summaries * group + 8 * rows * kept
        into = {"page_table": table, "indices": indices, "weight": weight}
        yield Operation("select", lambda: top_pages(page_keys(*settings), budget, **into), moved)
        yield from _yardsticks(scores.lse.view(rows, group, each).sum(1), kept)
    parts = attend_parts(q, k, v, table, chosen, counts, lens, scale, logit_cap=0.0)
    if wanted("attend"):
        moved = rows * kept * 2 * PAGE_SIZE * 2 * dim
        yield Operation("attend", lambda: attend_parts(q, k, v, table, chosen, counts, lens, scale, logit_cap=0.0), moved)
    estimate = sum_tail(scores.weight, scores.value_scale, s, table, held) if tailed else None
    if wanted("tail") and estimate is not None:
        moved = summaries * (dim + 4 + 4 + 4 * group) + 4 * estimate.value.numel()
        yield Operation("tail", lambda: sum_tail(scores.weight, scores.value_scale, s, table, held), moved)
    if wanted("merge"):
        out = torch.empty_like(q)
        moved = parts.out.numel() * 4 + out.numel() * 2 + (0 if estimate is None else 4 * estimate.value.numel())
        yield Operation("merge", lambda: merge_parts(parts, out, 1.0, estimate), moved)


def _yardsticks(scores: Any, kept: int) -> Iterator[Operation]:
    """Top-k of other packages on fp32 [rows, pages] scores: the choice alone, in no order, without what is always kept."""
    try:
        import flashinfer
    except ImportError as error:
        print(f"flashinfer cannot be imported, so select has no yardstick: {error}")
        return
    if hasattr(flashinfer, "top_k") and kept < scores.shape[1]:
        yield Operation("select flashinfer.top_k", lambda: flashinfer.top_k(scores, kept), 4 * scores.numel())


def _bytes_needed(shape: Shape, context: int, batch: int, rank: int) -> int:
    """GPU memory of one size: caches, summaries, and per-page results of scan and selection, kept twice by a graph."""
    from ..kernels.build_page_summaries import RecordLayout

    tokens, pages = context * batch, context * batch // PAGE_SIZE
    caches = 2 * 2 * tokens * shape.heads * shape.dim
    summaries = pages * shape.heads * RecordLayout(shape.dim, shape.dim, rank).summary_bytes
    results = pages * shape.heads * 4 * (2 * shape.group + 4)
    return caches + summaries + 3 * results


def brief(error: BaseException) -> str:
    """First line of what an error says."""
    return (str(error).splitlines() or [""])[0]


def commit() -> str | None:
    """Commit of the sources, "+" where they differ from it; None where they are no git checkout."""
    command = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        head = subprocess.run([*command, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*command, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout else "")
