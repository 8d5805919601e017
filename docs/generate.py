"""Write the parts of the documents that come from code and results: `python docs/generate.py`. A test fails when they drift."""

import dataclasses
import json
import re
from pathlib import Path

from locks_sglang import metrics
from locks_sglang.benchmarks.decode import DENSE_VARIANT, MODELS, Shape, models, shape_of
from locks_sglang.config import LocksConfig, flag_name, variable_name
from locks_sglang.counters import TOLD
from locks_sglang.evaluation import WIDTHS
from locks_sglang.kernels.build_page_summaries import RecordLayout
from locks_sglang.kernels.common import PAGE_SIZE
from locks_sglang.report.charts import Series, line_chart, log_axis, nice_axis, standalone
from locks_sglang.report.data import KINDS, Kind, Row, read
from locks_sglang.report.html import percent
from locks_sglang.report.views import NONE, cases
from locks_sglang.seams import all_seams
from locks_sglang.support import CPU_VERIFIED, FEATURES, GPU_VERIFIED, markdown_matrix

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
FRONTIER_BUDGET = 512
"""Budget in tokens at which the frontier is drawn."""
FRONTIER_LINES = {
    "page basis (locks)": ("locks", r"locks-r\d+"),
    "fixed sketch int4": ("dense-0", r"global-r\d+-int4"),
    "fixed sketch int8": ("dense-1", r"global-r(?!8-)\d+-int8"),
    "channels int4": ("dense-2", r"channels-\d+-int4"),
    "int4 / int2 keys": ("other-0", r"keys-int\d"),
    "int2 keys by channel": ("other-1", r"keys-int2-channel"),
    "min/max": ("other-2", "min-max"),
    "page mean": ("none", "page-mean"),
}
"""Lines of the drawing, their style, and the names of their methods."""
OUTPUTS = ("oracle", "locks-r8", "locks-r4", "locks-r2", "locks-r1", "page-mean", "min-max", "global-r60-int4")
"""Methods whose output errors are shown."""
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


def evaluations(kind: str) -> list[Row]:
    """Rows of `eval mass` or `eval output` in the results, by file name."""
    return list(read(sorted(RESULTS.glob(f"eval_{kind}_*.json"))).of(kind))


def _measured(row: Row) -> str:
    """What a file of an evaluation measured."""
    text, other, layers = row.get("text"), row.get("calibration"), len(row.get("layers"))
    return (
        f"{row.model}, {text['tokens']:,} tokens of {text['name']}, {layers} of {row.get('model.layers')} layers, last "
        f"{row.get('late_queries')} positions; fixed parts of other methods from {other['tokens']:,} tokens of {other['name']}"
    )


def _origin(row: Row) -> str:
    """Where a file of an evaluation was made, and how."""
    where = (
        f"SGLang {row.get('versions.sglang')}, torch {row.get('versions.torch')}, {row.get('device')}, {row.get('model.dtype')}"
    )
    return f"{where}, commit {row.get('commit')}, seed {row.get('seed')}; `{(RESULTS / row.file).relative_to(ROOT)}`."


def _budget_head(row: Row, *first: str) -> list[str]:
    columns = [*first, *(str(budget) for budget in row.get("budgets"))]
    return [f"| {' | '.join(columns)} |", "|---|" + "---|" * (len(columns) - 1)]


def criteria_table() -> str:
    """What rank 8 captures of the oracle's mass, in every run, and whether that is enough."""
    parts = []
    for row in evaluations("mass"):
        rows = _budget_head(row, "locks r=8 / oracle")
        rows.append(f"| mean over the layers | {' | '.join(f'{ratio:.3f}' for ratio in row.get('ratio'))} |")
        worst = (f"{entry['ratio']:.3f} (layer {entry['layer']})" for entry in row.get("worst_layer"))
        rows.append(f"| worst layer | {' | '.join(worst)} |")
        wrong = "".join(f"\n- {sentence}" for sentence in row.get("failures"))
        verdict = f"What is not as required:\n{wrong}" if wrong else "Everything that is required holds."
        parts.append(f"**{_measured(row)}.**\n\n" + "\n".join(rows) + f"\n\n{verdict}")
    return "\n\n".join(parts)


def frontier_tables() -> str:
    """Quality against stored bytes: a drawing, the methods on the frontier, and where the page basis is behind."""
    parts = []
    for row in evaluations("mass"):
        stored = [method for method in row.get("methods") if method["beaten_by"] is not None]
        kept = [m for m in stored if None in m["beaten_by"]]
        rows = _budget_head(row, "on the frontier (bold)", "bytes a token and head")
        for method in sorted(kept, key=lambda method: method["bytes_per_page"]):
            cells = zip(method["mass"], method["beaten_by"], strict=True)
            mass = " | ".join(f"{value:.3f}" if name else f"**{value:.3f}**" for value, name in cells)
            rows.append(f"| {method['label']} | {method['bytes_per_token']:g} | {mass} |")
        behind = "".join(f"\n- {sentence}" for sentence in row.get("behind"))
        told = f"Where the page basis is behind:\n{behind}" if behind else "Nowhere is the page basis behind."
        parts.append(f"**{_measured(row)}.**\n\n![{_drawn(row)}]({_picture(row)})\n\n" + "\n".join(rows) + f"\n\n{told}")
    return "\n\n".join(parts)


def _picture(row: Row) -> str:
    return row.file.replace("eval_mass", "frontier").replace(".json", ".svg")


def _drawn(row: Row) -> str:
    return (
        f"Attention mass at {FRONTIER_BUDGET} tokens against stored bytes a token and head: {row.model}, {row.get('text.name')}"
    )


def frontier_drawings() -> dict[Path, str]:
    """Mass against stored bytes, one drawing a results file."""
    drawn = {}
    for row in evaluations("mass"):
        at = row.get("budgets").index(FRONTIER_BUDGET)
        lines = []
        for label, (style, pattern) in FRONTIER_LINES.items():
            found = [n for n, method in enumerate(row.get("methods")) if re.fullmatch(pattern, method["name"])]
            points = [(row.figure(f"methods.{n}.bytes_per_token"), row.figure(f"methods.{n}.mass.{at}")) for n in found]
            lines.append(Series(label, style, sorted(points, key=lambda point: point[0].value)))
        sizes = [size for line in lines for size, _ in line.points]
        chart = line_chart(
            lines,
            log_axis(sizes, lambda value: f"{value:g}"),
            nice_axis([mass.value for line in lines for _, mass in line.points], lambda value: f"{100 * value:.0f} %", None),
            title=_drawn(row),
            x_title="stored bytes a token and KV head",
            text=percent,
        )
        drawn[DOCS / _picture(row)] = standalone(chart)
    return drawn


def output_tables() -> str:
    """Relative error of the attention output, from the results files."""
    parts = []
    for row in evaluations("output"):
        rows = _budget_head(row, "pages chosen by, and correction", "bytes a token and head")
        for method in row.get("methods"):
            if method["selector"] not in OUTPUTS:
                continue
            errors = " | ".join(f"{value:.3f}" for value in method["error"])
            rows.append(f"| {method['label']} | {method['bytes_per_token']:g} | {errors} |")
        harm = "".join(f"\n- {sentence}" for sentence in row.get("harm") if " locks " in sentence)
        told = f"Where a correction of the page basis raises the error beyond the spread:\n{harm}\n\n" if harm else ""
        parts.append(f"**{_measured(row)}.**\n\n" + "\n".join(rows) + f"\n\n{told}{_origin(row)}")
    return "\n\n".join(parts)


def mass_table() -> str:
    """Attention mass captured by each method, from the results files; other widths of the records are left to the frontier."""
    parts = []
    for row in evaluations("mass"):
        rows = _budget_head(row, "method", "bytes a token and head")
        for method in row.get("methods"):
            if method["family"] != WIDTHS:
                mass = " | ".join(f"{value:.3f}" for value in method["mass"])
                rows.append(f"| {method['label']} | {method['bytes_per_token']:g} | {mass} |")
        parts.append(f"**{_measured(row)}.**\n\n" + "\n".join(rows) + f"\n\n{_origin(row)}")
    return "\n\n".join(parts)


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
    DOCS / "quality.md": {
        "criteria": criteria_table,
        "measured": mass_table,
        "frontier": frontier_tables,
        "output": output_tables,
    },
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
    for picture, text in frontier_drawings().items():
        picture.write_text(text)
