"""Every Triton kernel compiled for an H200 without one, as its launcher asks for it: a table of registers and spills is
printed, spills fail."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from locks_sglang.kernels.build_page_summaries import PageSummaries, RecordLayout
from locks_sglang.kernels.build_page_summaries import kernel as build
from locks_sglang.kernels.decode_plan import DecodeBuffers, PageFlags
from locks_sglang.kernels.decode_plan import kernel as plan
from locks_sglang.kernels.page_lse import kernel as scan
from locks_sglang.kernels.select_pages import kernel as select
from locks_sglang.kernels.sparse_decode import kernel as attend
from locks_sglang.kernels.sparse_decode import merge
from locks_sglang.kernels.sparse_decode import tail as tail_sum

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.uint32: "*u32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
GLOBAL = re.compile(r"\b(?:ld|st|atom|red)\.\S*global|\bcp\.async")
ON_LANES = re.compile(
    r"#ttg\.blocked<\{sizePerThread = \[1\], threadsPerWarp = \[32\], warpsPerCTA = \[(\d+)\], order = \[0\]\}>"
    r"|#ttg\.slice<\{dim = 1, parent = #ttg\.blocked<\{sizePerThread = \[1, \d+\], threadsPerWarp = \[32, 1\], "
    r"warpsPerCTA = \[(\d+), 1\], order = \[1, 0\]\}>\}>"
)
"""Encodings that place element i of a tensor on thread i."""


class Recorder:
    """Stands where a kernel would be launched and keeps the arguments."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self.calls.append((args, kwargs))


def compiled(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compile one launch for sm_90."""
    signature, constants, attributes = {}, {}, {}
    for name, value in (dict(zip(kernel.arg_names, args, strict=False)) | kwargs).items():
        if name in OPTIONS:
            continue
        at = kernel.arg_names.index(name)
        if kernel.params[at].is_constexpr:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(at,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if not isinstance(value, float) and value % 16 == 0 and not kernel.params[at].do_not_specialize:
                attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=HOPPER, options={name: kwargs[name] for name in OPTIONS if name in kwargs})


def resources(ptx: str, folder: Path) -> tuple[int, int]:
    """Registers of a kernel, and bytes that it spills, as the assembler that Triton brings tells them."""
    file = folder / "kernel.ptx"
    file.write_text(ptx)
    command = [PTXAS, "-v", "--gpu-name", "sm_90a", file, "-o", folder / "kernel.cubin"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    registers = re.search(r"Used (\d+) registers", text)
    assert spilled, text
    assert registers, text
    return int(registers[1]), int(spilled[1]) + int(spilled[2])


def off_lanes(ttgir: str) -> set[str]:
    """Types of inline assembly's operands and results in which element i may lie elsewhere than on thread i.

    `kernels.common.lanes` counts on it, and nothing in Triton promises it.
    """
    names = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.MULTILINE))
    calls = [line for line in ttgir.splitlines() if "tt.elementwise_inline_asm" in line]
    types = [found for line in calls for found in re.findall(r"tensor<(\d+)x\w+, (#ttg\.slice<\{[^}]*\}>|#\w+)>", line)]
    assert calls
    assert len(types) == sum(line.count("tensor<") for line in calls)
    bad = set()
    for length, encoding in set(types):
        whole = re.sub(r"#(?!ttg\.)\w+", lambda match: names[match[0]], encoding)
        found = ON_LANES.fullmatch(whole)
        if found is None or int(length) != 32 * int(found[1] or found[2]):
            bad.add(f"{length}: {whole}")
    return bad


def launch_build(dim: int, rank: int, dtype: torch.dtype, layers: tuple[int, ...] = ()) -> None:
    cache, layout = torch.zeros(32, 8, dim, dtype=dtype), RecordLayout(dim, dim, rank)
    packed = layout.empty(*layers, 2, 8, device="cpu")
    valid = torch.zeros(*layers, 2, dtype=torch.bool)
    offsets = build.layer_offsets([(cache, cache)] * layers[0]) if layers else None
    build.build(cache, cache, torch.arange(2), torch.zeros(*layers, 8, dim), *packed, valid, layout, offsets)


def launch_step(
    dim: int,
    rank: int,
    group: int,
    dtype: torch.dtype,
    tail: str,
    combine: str,
    cap: float,
    batch: int = 8,
    heads: int = 8,
    cache_dtype: torch.dtype | None = None,
) -> None:
    """Scan, select, attend and merge; the cache is of the queries' dtype unless another is given."""
    layout = RecordLayout(dim, dim, rank)
    packed = layout.empty(2, heads, device="cpu")
    s = PageSummaries(layout, torch.ones(2, dtype=torch.bool), torch.zeros(heads, dim), *packed)
    q = torch.zeros(batch, heads * group, dim, dtype=dtype)
    cache = torch.zeros(32, heads, dim, dtype=cache_dtype or dtype)
    table, held = torch.zeros(batch, 160, dtype=torch.int32), torch.ones(batch, dtype=torch.int32)
    scores = scan.scan(q, s, table, held, 0.1, seq_lens=held.long(), logit_cap=cap, tail=tail)
    ranked, tailed = select.page_keys(scores.lse, scores, held, 1, 1, heads, combine), tail != "off"
    pages, counts = select.top_pages(ranked, 128, weight=scores.weight if tailed else None)
    attended = attend.attend_parts(q, cache, cache, table, pages, counts, held.long(), 0.1, logit_cap=cap)
    estimate = tail_sum.sum_tail(scores.weight, scores.value_scale, s, table, held) if tailed else None
    merge.merge_parts(attended, torch.zeros_like(q), 1.0, estimate)


def launch_select(group: int, budget: int, combine: str) -> None:
    """Selection by itself, which also writes FlashInfer's indices."""
    lse, held = torch.zeros(8, 8 * group, 1000), torch.ones(8, dtype=torch.int32)
    table, indices = torch.zeros(8, 1000, dtype=torch.int32), torch.zeros(8 * 8 * budget, dtype=torch.int32)
    select.top_pages(select.page_keys(lse, None, held, 1, 1, 8, combine), budget, page_table=table, indices=indices)


def launch_plan(batch: int, layers: int, heads: int) -> None:
    table, lens = torch.zeros(batch, 4096, dtype=torch.int32), torch.ones(batch, dtype=torch.int64)
    flags = PageFlags(
        torch.zeros(layers, 64, dtype=torch.bool), *torch.zeros(2, 64, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    )
    plan.plan_on_kernels(table, lens, lens, batch, DecodeBuffers.allocate(batch, 256, heads, "cpu"), flags)


def launch_merge(dim: int, group: int, tail: str) -> None:
    """What FlashInfer leaves, merged with the tail."""
    heads = 4
    layout = RecordLayout(dim, dim, 8)
    packed = layout.empty(2, heads, device="cpu")
    s = PageSummaries(layout, torch.ones(2, dtype=torch.bool), torch.zeros(heads, dim), *packed)
    q = torch.zeros(8, heads * group, dim, dtype=torch.bfloat16)
    table, held = torch.zeros(8, 160, dtype=torch.int32), torch.ones(8, dtype=torch.int32)
    scores = scan.scan(q, s, table, held, 0.1, seq_lens=held.long(), logit_cap=0.0, tail=tail)
    parts = attend.Parts(torch.zeros(8, heads, 1, group), None, q.view(8, heads, 1, group, dim), 1)
    estimate = tail_sum.sum_tail(scores.weight, scores.value_scale, s, table, held)
    merge.merge_parts(parts, torch.zeros_like(q), 1.0, estimate)


VARIANTS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    **{
        f"build D={dim} R={rank}": (launch_build, (dim, rank, torch.bfloat16))
        for dim, rank in ((64, 8), (96, 8), (128, 8), (256, 15))
    },
    "build D=128 R=8, fp32": (launch_build, (128, 8, torch.float32)),
    "build of 40 layers": (launch_build, (128, 8, torch.bfloat16, (40,))),
    "step D=64 G=1, fp32": (launch_step, (64, 8, 1, torch.float32, "qmu", "mass", 0.0)),
    "step D=64 G=2, fp8 cache (e5m2)": (
        launch_step,
        (64, 8, 2, torch.float16, "qmu", "mass", 0.0, 8, 8, torch.float8_e5m2),
    ),
    "step D=128 G=6": (launch_step, (128, 8, 6, torch.bfloat16, "qmu", "mass", 0.0)),
    "step D=128 G=4, fp8 cache (e4m3)": (
        launch_step,
        (128, 8, 4, torch.bfloat16, "qmu", "mass", 0.0, 8, 8, torch.float8_e4m3fn),
    ),
    "step D=64 G=3": (launch_step, (64, 8, 3, torch.bfloat16, "qmu", "mass", 0.0)),
    "step D=96 G=7": (launch_step, (96, 4, 7, torch.float16, "off", "peak", 0.0)),
    "step D=128 G=4": (launch_step, (128, 8, 4, torch.bfloat16, "qmu", "mass", 0.0)),
    "step D=128 G=16 capped": (launch_step, (128, 15, 16, torch.bfloat16, "flat", "max", 30.0)),
    "step D=128 G=8, one request, one head": (launch_step, (128, 8, 8, torch.bfloat16, "qmu", "mass", 0.0, 1, 1)),
    "step D=128 G=4, 512 requests": (launch_step, (128, 8, 4, torch.bfloat16, "qmu", "mass", 0.0, 512)),
    "step D=128 G=8, 200 requests": (launch_step, (128, 8, 8, torch.bfloat16, "qmu", "mass", 0.0, 200)),
    "select with indices": (launch_select, (4, 128, "mass")),
    "select with indices, large budget": (launch_select, (16, 4096, "peak")),
    "plan of one row, 80 layers": (launch_plan, (1, 80, 8)),
    "plan of 256 rows": (launch_plan, (256, 24, 2)),
    "merge after FlashInfer": (launch_merge, (128, 8, "qmu")),
    "step D=256 R=15 G=4": (launch_step, (256, 15, 4, torch.bfloat16, "off", "mass", 0.0)),
    "step D=256 G=8": (launch_step, (256, 8, 8, torch.bfloat16, "qmu", "mass", 0.0)),
}
KERNELS = {
    "_plan_rows": plan,
    "_build_pages": build,
    "_scan_pages": scan,
    "_page_keys": select,
    "_top_pages": select,
    "_attend_pages": attend,
    "_sum_tail": tail_sum,
    "_merge_parts": merge,
}


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[dict[str, dict[str, tuple[int, int]]]]:
    """Registers and spilled bytes by variant and kernel, printed at the end."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    yield found
    wide = max(map(len, VARIANTS))
    lines = [f"Triton {triton.__version__}, sm_90: registers a thread / bytes spilled"]
    lines.append(f"{'':{wide}}" + "".join(f"{name.strip('_'):>14}" for name in KERNELS))
    for variant, kernels in found.items():
        cells = ("{}/{}".format(*kernels[name]) if name in kernels else "" for name in KERNELS)
        lines.append(f"{variant:{wide}}" + "".join(f"{cell:>14}" for cell in cells))
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *lines, sep="\n", file=sys.stderr)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_register_spills(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: dict[str, dict[str, tuple[int, int]]]
) -> None:
    recorders = {name: Recorder(getattr(module, name)) for name, module in KERNELS.items()}
    for name, module in KERNELS.items():
        monkeypatch.setattr(module, name, recorders[name])
    launch, arguments = VARIANTS[variant]
    launch(*arguments)
    found = table[variant] = {}
    for name, recorder in recorders.items():
        for args, kwargs in recorder.calls:
            made = compiled(recorder.kernel, args, kwargs)
            found[name] = resources(made.asm["ptx"], tmp_path)
            if kwargs.get("launch_pdl"):
                # In the order of the text: nothing is read or written before the kernels before have ended.
                touched = GLOBAL.search(made.asm["ptx"])
                assert touched
                assert made.asm["ptx"].index("griddepcontrol.wait") < touched.start()
            if name in ("_scan_pages", "_sum_tail"):
                assert off_lanes(made.asm["ttgir"]) == set()
            if name == "_scan_pages" and variant == "step D=128 G=4":
                # Four for the means of eight pages, then for each of four pairs two times four and two. One more or less and
                # the compiler has put some behind a condition.
                assert made.asm["ptx"].count("mma.sync") == 44
    tailed = "off" not in arguments
    assert len(found) == {launch_build: 1, launch_select: 2, launch_plan: 1, launch_merge: 3, launch_step: 5 + tailed}[launch]
    assert {name: spilled for name, (_, spilled) in found.items() if spilled} == {}
