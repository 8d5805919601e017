"""Write the parts of the documents that come from code and results: `python docs/generate.py`. A test fails when they drift."""

import dataclasses
import json
from pathlib import Path

from locks_sglang import metrics
from locks_sglang.benchmarks.decode import DENSE_VARIANT, MODELS, Shape, models, shape_of
from locks_sglang.config import LocksConfig, flag_name, variable_name
from locks_sglang.counters import TOLD
from locks_sglang.kernels.build_page_summaries import RecordLayout
from locks_sglang.kernels.common import PAGE_SIZE
from locks_sglang.report.data import KINDS, Kind, Row, read
from locks_sglang.report.views import NONE, cases
from locks_sglang.seams import all_seams
from locks_sglang.support import CPU_VERIFIED, FEATURES, GPU_VERIFIED, markdown_matrix

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
MASS = RESULTS / "eval_mass_smollm2_prose.json"
DECODE = RESULTS / "decode.jsonl"
KERNELS = RESULTS / "kernels.jsonl"

RANKS = (8, 4, 2)
"""Ranks that `locks-sglang bench` times."""
CACHE_GIB = 40
"""Memory for which the table of models says how many tokens fit."""
LONG = 131072
"""Context for which it says what one decode step reads."""


def settings_table() -> str:
    """Every setting with flag, variable, default and range."""
    rows = ["| flag | variable | default | allowed | |", "|---|---|---|---|---|"]
    for spec in dataclasses.fields(LocksConfig):
        name, meta = spec.name, spec.metadata
        names = f"| `{flag_name(name)}` | `{variable_name(name)}` "
        rows.append(f"{names}| `{spec.default}` | {meta['allowed']} | {meta['help']} |")
    return "\n".join(rows)


def gpu_line() -> str:
    """Which SGLang versions were run on a GPU."""
    if GPU_VERIFIED:
        return f"Verified on a GPU with SGLang {', '.join(GPU_VERIFIED)}; other versions log one warning there."
    return "No SGLang version has been verified on a GPU with this release; a GPU start logs one warning."


def version_line() -> str:
    """How far which SGLang versions were tested."""
    return f"The tests run with SGLang {' and '.join(CPU_VERIFIED)} on CPU. {gpu_line()}"


def short_matrix() -> str:
    """The support matrix without reasons and tests: one paragraph a status."""
    heads = {"works": "**Works**", "dense": "**Runs dense, counted**", "refused": "**Refused at start**"}
    # What is named by "this" says in its reason which ones are tested.
    names = {f.name: f"{f.name} ({f.reason})" if f.name.startswith("this ") else f.name for f in FEATURES}
    return "\n\n".join(
        f"{head}: {'; '.join(names[feature.name] for feature in FEATURES if feature.status == status)}."
        for status, head in heads.items()
    )


def summary_bytes(shape: Shape, rank: int, value_mean: bool = True) -> int:
    """Bytes of the summaries of one page, all layers and KV heads."""
    return shape.layers * shape.heads * RecordLayout(shape.dim, shape.dim, rank, value_mean).summary_bytes


def memory_table() -> str:
    """What summaries cost and save, for the models of `benchmarks/models`."""
    budget = LocksConfig().budget_tokens
    bytes_rows = [
        f"| model | layers, KV heads, D | KV cache | {' | '.join(f'summaries, r = {rank}' for rank in RANKS)} |",
        "|---|---|---|" + "---|" * len(RANKS),
    ]
    saved_rows = [
        f"| model | tokens in {CACHE_GIB} GiB, dense | with summaries "
        f"| a step at {tokens_short(LONG)} reads, dense | with locks |",
        "|---|---|---|---|---|",
    ]
    for name in models():
        shape = shape_of(MODELS / name)
        token = shape.cache_bytes(1)
        summaries = [-(-summary_bytes(shape, rank) // PAGE_SIZE) for rank in RANKS]
        each = " | ".join(f"{value:,} ({value / token:.1%})" for value in summaries)
        bytes_rows.append(f"| {name} | {shape.layers}, {shape.heads}, {shape.dim} | {token:,} | {each} |")
        fit = " | ".join(f"{CACHE_GIB * 2**30 // cost:,}" for cost in (token, token + summaries[0]))
        reads = " | ".join(f"{read / 2**30:.2f} GiB" for read in (LONG * token, LONG * summaries[0] + budget * token))
        saved_rows.append(f"| {name} | {fit} | {reads} |")
    return "\n".join(
        [
            "Bytes a token, all layers, bf16 cache, value means included; in brackets the share of the KV cache:\n",
            *bytes_rows,
            f"\nWith rank {RANKS[0]} and a budget of {budget} tokens, one request:\n",
            *saved_rows,
        ]
    )


def tokens_short(tokens: int) -> str:
    """16K, 128K, 1M."""
    return f"{tokens // 2**20}M" if tokens >= 2**20 else f"{tokens // 2**10}K"


def _time(row: Row) -> str:
    """Median (p99) of a row, and whether `locks` decoded dense."""
    told = f"{row.get('token_ms.p50'):.2f} ({row.get('token_ms.p99'):.2f})"
    return told + " dense" * (row.get("attend") == DENSE_VARIANT)


def decode_tables() -> str:
    """Time a token by context and backend, from the results file: one table for what can be compared."""
    parts = []
    for case in cases(read([DECODE])):
        columns = [name for name in case.series if name not in case.locks and name not in case.dense]
        columns = [*sorted(case.dense), *case.locks, *columns]
        headings = ("no attention" if name == NONE else name for name in columns)
        ratios = [{point.context.value: point.ratio.value for point in case.speedups(name)} for name in case.locks]
        contexts = sorted({row.get("context") for rows in case.series.values() for row in rows})
        lines = [
            f"| context | {' | '.join(headings)} |" + " fastest dense / locks |" * len(ratios),
            "|---|" + "---|" * (len(columns) + len(ratios)),
        ]
        for context in contexts:
            found = {name: row for name, rows in case.series.items() for row in rows if row.get("context") == context}
            times = [_time(found[name]) if name in found else "" for name in columns]
            faster = [f"{ratio[context]:.2f}" if context in ratio else "" for ratio in ratios]
            lines.append(f"| {tokens_short(context)} | {' | '.join([*times, *faster])} |")
        versions = case.series[columns[0]][-1].versions
        parts.append(
            f"Shape of {case.model}, batch {case.batch.value}, {case.gpu}, {versions}. Milliseconds a token, median (p99).\n\n"
            + "\n".join(lines)
        )
    return "\n\n".join([*parts, f"From `{DECODE.relative_to(ROOT)}`, whose rows name the command and the commit."])


def kernel_table() -> str:
    """Time of every kernel by shape and context, from the results file."""
    cells: dict[tuple[str, ...], dict[str, float]] = {}
    machines = set()
    for line in KERNELS.read_text().splitlines():
        row = json.loads(line)
        machines.add(f"{row['gpu']}, torch {row['torch']}, Triton {row['triton']}")
        shape = row["heads"], row["group"], row["dim"], row["rank"], row["batch"], row["budget_pages"]
        size = (*shape, row["context"], row["commit"])
        cells.setdefault(size, {})[row["kernel"]] = row["us"]
    names = list(dict.fromkeys(name for found in cells.values() for name in found))
    rows = [
        f"| H, G, D | rank | batch | pages read | context | commit | {' | '.join(names)} |",
        "|---|---|---|---|---|---|" + "---|" * len(names),
    ]
    for (heads, group, dim, rank, batch, pages, context, commit), found in cells.items():
        times = " | ".join(f"{found[name]:,.1f}" if name in found else "" for name in names)
        rows.append(
            f"| {heads}, {group}, {dim} | {rank} | {batch} | {pages} | {tokens_short(context)} | {str(commit)[:7]} | {times} |"
        )
    return (
        f"Microseconds a layer, median, launch included, cold L2 cache: {'; '.join(sorted(machines))}. "
        f"From `{KERNELS.relative_to(ROOT)}`.\n\n" + "\n".join(rows)
    )


def kinds_table() -> str:
    """What the report draws, and which command makes it."""
    return "\n".join(["| results | made by |", "|---|---|", *(f"| {kind.what} | {made_by(kind)} |" for kind in KINDS.values())])


def made_by(kind: Kind) -> str:
    """A command as code, words as they are."""
    return f"`{kind.made_by}`" if kind.made_by.startswith("locks-sglang ") else kind.made_by


def counter_table() -> str:
    """What a running server counts."""
    return "\n".join(["| counter | |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in TOLD.items())])


def seam_table() -> str:
    """Where SGLang is entered."""
    rows = ["| target, under `sglang.srt` | how | SGLang | device | what it changes |", "|---|---|---|---|---|"]
    for seam in all_seams():
        first, end = seam.versions
        versions = " ".join(filter(None, [first and f"from {first}", end and f"below {end}"])) or "all"
        rows.append(f"| `{seam.target.removeprefix('sglang.srt.')}` | {seam.kind} | {versions} | {seam.device} | {seam.why} |")
    return "\n".join(rows)


def mass_table() -> str:
    """Attention mass captured by each selector, from the results file."""
    result = json.loads(MASS.read_text())
    versions, text, model = result["versions"], result["text"], result["model"]
    budgets = result["budgets"]
    rows = [
        f"| selector | bytes a page and head | {' | '.join(str(budget) for budget in budgets)} |",
        "|---|---|" + "---|" * len(budgets),
    ]
    for method in result["methods"]:
        mass = " | ".join(f"{value:.3f}" for value in method["mass"])
        rows.append(f"| {method['label']} | {method['bytes_per_page']} | {mass} |")
    worst = "; ".join(
        f"layer {entry['layer']} {entry['ratio']:.3f} at {budget}"
        for budget, entry in zip(budgets, result["worst_layer"], strict=True)
    )
    what = (
        f"{model['name']}, {text['tokens']} tokens of {text['description']}, mean over all {model['layers']} layers, "
        f"all query heads and the last {result['late_queries']} positions"
    )
    where = f"SGLang {versions['sglang']}, torch {versions['torch']}, {result['device']}, {model['dtype']}"
    how = f"`locks-sglang eval mass --tokens {text['tokens']} --text {text['name']} --json FILE`"
    return (
        f"Share of the attention mass that the chosen pages hold, by budget in tokens: {what}. {where}; made by {how}, kept in "
        f"`{MASS.relative_to(ROOT)}`.\n\n" + "\n".join(rows) + f"\n\nWorst layers of r = 8 against the oracle: {worst}."
    )


SECTIONS = {
    ROOT / "README.md": {
        "settings": settings_table,
        "matrix": short_matrix,
        "gpu-line": gpu_line,
        "speed": decode_tables,
    },
    DOCS / "configuration.md": {"settings": settings_table},
    DOCS / "support.md": {"versions": version_line, "matrix": markdown_matrix},
    DOCS / "serving.md": {"gpu-line": gpu_line, "counters": counter_table, "memory": memory_table},
    DOCS / "quality.md": {"measured": mass_table},
    DOCS / "speed.md": {"decode": decode_tables, "kernels": kernel_table},
    DOCS / "report.md": {"kinds": kinds_table},
    DOCS / "metrics.md": {"metrics": metrics.markdown_table},
    DOCS / "architecture.md": {"seams": seam_table},
}


def render(page: Path) -> str:
    """A document with its generated sections filled in.

    Raises:
        ValueError: a section's marks are not in it.
    """
    text = page.read_text()
    for name, make in SECTIONS[page].items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        at = text.index(begin) + len(begin)
        text = f"{text[:at]}\n{make()}\n{text[text.index(end, at) :]}"
    return text


if __name__ == "__main__":
    for page in SECTIONS:
        page.write_text(render(page))
